"""The label by which the Service finds the controller that leads: on its own pod, and on nobody else's.

    keep        each LOOK_S, while the Lease is held: off every other controller's pod, then on this one's
    withdraw    off this one's: another one leads

So a replica that waits is Ready like any other, and yet nobody is sent to it. What a leader left that died is taken off by its
successor; until then nobody leads, and the Service finds nobody who could answer. Each write is a compare-and-swap on one life
of one pod, and is made only after a look at the Lease, on the thread that writes. Event loop only; what blocks is on KubeCalls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton.errors import BatonError
from baton.log import get_log
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import CONTROLLER_LABEL, LEADS_LABEL, Pod
from router.controller.lease import LEASE_S, Leadership

log = get_log("controller.kube.leader")

LOOK_S = LEASE_S / 4  # as often as the Lease is renewed


class LeaderLabel:
    """As one controller sees it. `pod_name`: its own pod's."""

    def __init__(self, api: KubeApi, calls: KubeCalls, fullname: str, pod_name: str, lease: Leadership) -> None:
        self._api = api
        self._calls = calls
        self._selector = f"{CONTROLLER_LABEL}={fullname}"
        self._pod_name = pod_name
        self._lease = lease

    async def keep(self) -> None:
        """For ever."""
        while True:
            if self._lease.is_held:
                await self._try(self.put)
            await asyncio.sleep(LOOK_S)

    async def withdraw(self) -> None:
        """Once at most: whoever leads does it too."""
        await self._try(self.take_off)

    def put(self) -> None:
        """Blocks. Raises: Unavailable: the Lease ran out, or the API server is away."""
        mine, others = self._pods()
        for pod, is_leader in (*((pod, False) for pod in others), *((pod, True) for pod in mine)):
            self._lease.check()
            self._write(pod, is_leader=is_leader)

    def take_off(self) -> None:
        """Blocks. Raises: Unavailable."""
        mine, _ = self._pods()
        for pod in mine:
            self._write(pod, is_leader=False)

    def _pods(self) -> tuple[list[Pod], list[Pod]]:
        pods, _ = self._api.pods(self._selector)
        return [p for p in pods if p.name == self._pod_name], [p for p in pods if p.name != self._pod_name]

    def _write(self, pod: Pod, *, is_leader: bool) -> None:
        if (LEADS_LABEL in pod.labels) is is_leader:
            return
        try:
            self._api.label(pod, {LEADS_LABEL: "true" if is_leader else None})
        except Conflict:
            return  # its status changed meanwhile: the next look writes

    async def _try(self, call: Callable[[], None]) -> None:
        try:
            await self._calls.run(call)
        except BatonError as error:
            log.warning("leader_label_unknown", reason=error.message)
