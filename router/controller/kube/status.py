"""What an operator is told: conditions, since when, and as Kubernetes Events; sizes, pods, drift. Event loop only.

A condition is told once it has held for HOLD_S, so that nothing is said of what passes by itself, and again as often as
Kubernetes forgets Events. Metrics show it from its first look on."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.conditions import KINDS, QUOTA, Condition
from router.controller.kube.objects import JsonObject
from router.controller.slo_changes import Change
from router.series import header, labelled, sample

log = get_log("controller.kube.status")

HOLD_S = 10.0  # nodes join and images come within that where all is well
AGAIN_S = 3_000.0  # the API server keeps Events for an hour


@dataclass(frozen=True, slots=True)
class Held:
    condition: Condition
    for_s: float


@dataclass(frozen=True, slots=True)
class SizeStatus:
    home: str
    desired: int
    ready: int
    pending: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Status:
    leads: bool
    holder: str  # of the Lease
    api_silence_s: float
    sizes: tuple[SizeStatus, ...]
    conditions: tuple[Held, ...]
    slo_drift: tuple[Change, ...]  # from the chart's values to what is in force
    upgrade: str  # what it does; "" = none is under way


class Conditions:
    """Since when which condition holds."""

    def __init__(
        self,
        api: KubeApi,
        calls: KubeCalls,
        about: str,
        now_s: Callable[[], float] = clock.now_s,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`about`: the object that Events are told of where a condition names none: the controller's own Lease."""
        self._api = api
        self._calls = calls
        self._about = about
        self._now_s = now_s
        self._now_unix_s = now_unix_s
        self._since_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}
        self._held: list[Condition] = []

    def held(self) -> tuple[Held, ...]:
        now_s = self._now_s()
        return tuple(Held(one, now_s - self._since_s[one.kind]) for one in self._held)

    async def see(self, found: Sequence[Condition]) -> None:
        """All that hold now."""
        now_s, kinds = self._now_s(), {one.kind for one in found}
        for kind in self._since_s.keys() - kinds:
            log.info("condition_over", kind=kind, after_s=round(now_s - self._since_s.pop(kind)))
            self._told_s.pop(kind, None)
        for kind in kinds:
            self._since_s.setdefault(kind, now_s)
        self._held = list(found)
        for one in found:
            since_s = self._since_s[one.kind]
            told_s = self._told_s.get(one.kind, float("-inf"))
            if now_s - since_s >= HOLD_S and now_s - told_s >= AGAIN_S:
                self._told_s[one.kind] = now_s
                await self._tell(one)

    async def _tell(self, one: Condition) -> None:
        log.warning("condition", kind=one.kind, about=one.about, message=one.message, remedy=one.remedy)
        try:
            await self._calls.run(lambda: self._api.write_event(self._event(one)))
        except BatonError as error:
            self._told_s.pop(one.kind)  # tried again at the next look
            log.warning("event_not_written", kind=one.kind, reason=error.message)

    def _event(self, one: Condition) -> JsonObject:
        at = datetime.datetime.fromtimestamp(self._now_unix_s(), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "name": self._about}
        kind = (
            {"apiVersion": "apps/v1", "kind": "StatefulSet"}
            if one.kind == QUOTA
            else {"apiVersion": "v1", "kind": "Pod"}
        )
        told = {**kind, "name": one.about[0]} if one.about else lease
        more = f" ({len(one.about)} objects: {', '.join(one.about[:5])})" if len(one.about) > 1 else ""
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "baton-", "namespace": self._api.client.namespace},
            "involvedObject": {**told, "namespace": self._api.client.namespace},
            "reason": one.kind,
            "message": f"{one.message}{more}. {one.remedy}"[:1_024],  # the API's own limit
            "type": "Warning",
            "count": 1,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "source": {"component": "baton-controller"},
        }

    def lines(self) -> Iterator[str]:
        name, held = "baton_kube_condition", {one.kind: len(one.about) for one in self._held}
        yield header(name, "1 while the condition holds; each has its remedy in /admin/v1/kubernetes.", "gauge")
        for kind in KINDS:
            yield sample(name, labelled(("kind",), (kind,)), float(kind in held))
