"""The worker pods of one release, as the API server last told: a table kept by a watch, and listed anew often.

    1. list      the whole table is what it says: also what a lost event would have said
    2. watch     each event changes one pod, within milliseconds; for RESYNC_S, then 1 again
    410, a dropped watch, a server that is away: 1 again, after a pause that grows; until then the table stays as it was

Pods are told apart by uid: a pod of the same name, or of the same address, with another uid is another pod. A thread of its own
listens, the table is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Expired
from router.controller.kube.objects import FLEET_LABEL, Pod
from router.series import header, labelled, sample

log = get_log("controller.kube.pods")

RESYNC_S = 20  # what a lost event costs at most; a list of a thousand pods is 10 MB, and takes the server some 50 ms
MIN_PAUSE_S = 0.5
MAX_PAUSE_S = 8.0  # a server that comes back is noticed within a lease


class PodTable:
    """Changed on the event loop only; `by_name` from any thread, since what it reads is replaced, never changed."""

    def __init__(self, on_change: Callable[[], None], now_s: Callable[[], float] = clock.now_s) -> None:
        self._on_change = on_change
        self._now_s = now_s
        self._by_uid: dict[str, Pod] = {}
        self._listed_s: float | None = None
        self._relists: dict[str, int] = {}

    @property
    def is_known(self) -> bool:
        """It was listed at least once."""
        return self._listed_s is not None

    @property
    def age_s(self) -> float:
        """Since it was last listed; infinite before."""
        return float("inf") if self._listed_s is None else self._now_s() - self._listed_s

    def by_name(self) -> Mapping[str, Pod]:
        """Of two of one name, of which one's end was not told yet, the one that does not end."""
        pods = sorted(self._by_uid.values(), key=lambda pod: not pod.is_terminating)
        return {pod.name: pod for pod in pods}

    def list(self, pods: Iterable[Pod]) -> None:
        found = {pod.uid: pod for pod in pods}
        self._listed_s = self._now_s()
        if found != self._by_uid:
            self._by_uid = found
            self._on_change()

    def tell(self, kind: str, pod: Pod) -> None:
        """One event of a watch."""
        found = {uid: known for uid, known in self._by_uid.items() if uid != pod.uid}
        if kind != "DELETED":
            found[pod.uid] = pod
        if found != self._by_uid:
            self._by_uid = found
            self._on_change()

    def relisted(self, why: str) -> None:
        self._relists[why] = self._relists.get(why, 0) + 1

    def lines(self) -> Iterator[str]:
        name = "baton_kube_watch_restarts_total"
        yield header(name, "Watches of pods that ended before their time, by reason.", "counter")
        for why in sorted(self._relists):
            yield sample(name, labelled(("reason",), (why,)), self._relists[why])
        name = "baton_kube_pods"
        yield header(name, "Worker pods by phase.", "gauge")
        phases = [pod.phase or "Unknown" for pod in self._by_uid.values()]
        for phase in ("Pending", "Running", "Succeeded", "Failed", "Unknown"):
            yield sample(name, labelled(("phase",), (phase,)), phases.count(phase))


class PodWatch:
    """Create it inside the event loop."""

    def __init__(self, api: KubeApi, fullname: str, table: PodTable) -> None:
        self._api = api
        self._selector = f"{FLEET_LABEL}={fullname}"
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kube-pods", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """It ends by itself, after the watch that is open."""
        self._stopped.set()

    def _run(self) -> None:
        pause_s = MIN_PAUSE_S
        while not self._stopped.is_set():
            try:
                self._follow()
                pause_s = MIN_PAUSE_S
                continue
            except Expired:
                self._post(lambda: self._table.relisted("expired"))
                continue
            except (BatonError, KeyError, TypeError, ValueError) as error:  # an answer may be no list of pods
                log.warning("pods_unknown", reason=str(error))
                self._post(lambda: self._table.relisted("broken"))
            self._stopped.wait(random.uniform(pause_s / 2, pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _follow(self) -> None:
        """List, then watch until that ends as it should."""
        pods, version = self._api.pods(self._selector)
        self._post(lambda: self._table.list(pods))
        for kind, pod in self._api.pod_events(self._selector, version, RESYNC_S):
            if self._stopped.is_set():
                return
            self._post(partial(self._table.tell, kind, pod))

    def _post(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the process with it
            self._loop.call_soon_threadsafe(call)
