"""Carries out upgrades of worker pods: asks rollout.py for the next step, and takes it. Sets are updated OnDelete, so that nobody
else takes a pod.

    Replace    drained by order (RETURN: the next process takes work again), then evicted by name and uid, as budgets allow
    Surge      through the levers, within the GPU budget; where it is refused or does not come up, without
    Shrink     through the levers: the last pod, drained first, and only while the set has more than before its surge

Whatever was begun is found again by what members and pods show, so a successor goes on with it; the size before a surge is kept
with the fleet, before the surge is asked for. Event loop only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

from baton import clock
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.log import get_log
from baton.request import Role
from router.controller.autoscaler.acts import Act, Create, Drain
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, READY, AfterDrain, Member
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.errors import Conflict
from router.controller.kube.homes import Homes
from router.controller.kube.objects import Pod, PodSet
from router.controller.kube.pods import PodTable
from router.controller.kube.rollout import Done, Pause, Progress, Replace, Shrink, Step, Surge, Wait, Worker, step

log = get_log("controller.kube.upgrade")

SETS_S = 5.0  # between two looks at which revision sets want; an upgrade takes minutes
AGAIN_S = 60.0  # an upgrade that cannot go on without a surge asks again: nodes and bounds change within minutes
STUCK_S = 10.0  # a process that comes up again, or an image that is pulled again, needs less
Pull = Callable[[Act, str], Awaitable[object]]  # through the levers; with a reason


class Upgrade:
    """Of one release's worker pods."""

    def __init__(
        self,
        controller: Controller,
        homes: Homes,
        pods: PodTable,
        api: KubeApi,
        calls: KubeCalls,
        goodput: Callable[[], float | None],
        drain_s: Mapping[Role, float],
        scaler: str = "slo",
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        """`goodput`: the part of calls that met their targets of late. `drain_s`: of a worker that is replaced, by its role; then
        its calls go on elsewhere. `scaler`: who decides on sizes; where it is not the controller, there are no surges."""
        self._controller = controller
        self._homes = homes
        self._pods = pods
        self._api = api
        self._calls = calls
        self._goodput = goodput
        self._drain_s = drain_s
        self._scaler = scaler
        self._now_s = now_s
        self._sets: dict[str, PodSet] = {}  # by home
        self._read_s = float("-inf")
        self._surged_s = float("-inf")  # when a surge was last asked for
        self._hindered: dict[str, str] = {}  # by home: why the pod that its surge added does not serve; "" = it does
        self._refused: dict[str, tuple[float, str]] = {}  # by home: since when no surge is to be had, and why
        self._draining_since_s: dict[str, float] = {}
        self._stuck_since_s: float | None = None
        self._said = ""
        self._step: Step = Done()

    @property
    def paused(self) -> str:
        """Why; "" = it is not."""
        return self._step.why if isinstance(self._step, Pause) else ""

    def describe(self) -> str:
        """What it does; "" = none is under way."""
        match self._step:
            case Wait(why) | Pause(why, _):
                return f"{'paused' if self.paused else 'waits'}: {why}"
            case Replace(worker):
                return f"replaces {worker}"
            case Surge(home):
                return f"adds a pod to {home}"
            case Shrink(home):
                return f"takes a pod back from {home}"
            case Done():
                return ""

    async def look(self, pull: Pull) -> None:
        """Take the next step."""
        await self._read_sets()
        if not (self._sets and self._pods.is_known and self._homes.are_known):
            return
        if self._now_s() - self._homes.age_s < self._surged_s:
            return  # whether the last surge was written is yet to be read
        self._note_surges()
        self._step = step(self._progress())
        if (said := self.describe()) != self._said:
            self._said = said
            log.info("upgrade", step=said or "done")
        try:
            await self._take(self._step, pull)
        except BatonError as error:
            log.warning("upgrade_waits", step=said, reason=error.message)

    async def _read_sets(self) -> None:
        if self._now_s() - self._read_s < SETS_S:
            return
        self._read_s = self._now_s()
        for home, pool in self._homes.items().items():
            try:
                found = await self._calls.run(partial(self._api.pod_set, pool.pods.name))
            except BatonError as error:
                log.warning("revision_unknown", set=pool.pods.name, reason=error.message)
                continue
            if found.updates_on_delete and found.update_revision:
                self._sets[home] = found

    def _progress(self) -> Progress:
        pods = self._pods.by_name()
        found = [(member, pods.get(member.worker_id)) for member in self._controller.fleet.members()]
        homes = {name: home for home, known in self._homes.known().items() for name in known.names}
        workers = [
            self._worker(member, pod, homes[member.worker_id]) for member, pod in found if member.worker_id in homes
        ]
        return Progress(
            workers=workers,
            surged=self._controller.fleet.surged_from.keys() if self._scaler == "slo" else (),
            num_spare=self._homes.num_spare(),
            goodput=self._goodput(),
            stuck=self._stuck([(member, pod) for member, pod in found if pod is not None and self._is_new(pod)]),
            refused=self._no_surges(),
        )

    def _no_surges(self) -> dict[str, str]:
        """Why, by home."""
        if self._scaler == "slo":
            return {home: why for home, (_, why) in self._refused.items()}
        why = f"its size is not the controller's (scaler.type = {self._scaler}): raise it by one for the time of the upgrade"
        return dict.fromkeys(self._homes.items(), why)

    def _note_surges(self) -> None:
        """What a surge added and is gone was given back; what was asked for and never was there is asked for again."""
        for home, before in self._controller.fleet.surged_from.items():
            size = self._homes.size(home)
            assert size is not None, "all are known"
            if size.desired > before:
                self._hindered[home] = self._hindrance(size.victims[0]) or self._hindered.get(home, "")
                continue
            self._controller.surge_is_over(home)
            if (why := self._hindered.pop(home, None)) is not None:
                self._refused[home] = (self._now_s(), f"the last one was given back: {why or 'nobody said why'}")

    def _hindrance(self, name: str) -> str:
        member, pod = self._controller.fleet.find(name), self._pods.by_name().get(name)
        said = (pod.unschedulable or pod.waiting.reason) if pod else ""
        return said or (member.reason if member else "")

    def _worker(self, member: Member, pod: Pod | None, home: str) -> Worker:
        """One whose pod is yet to be made will be new."""
        view = self._controller.view(member.worker_id)  # of a process that only announced itself there is none yet
        ends = member.after_drain is AfterDrain.END  # it is not to come back, so it is none of ours
        return Worker(
            name=member.worker_id,
            home=home,
            role=member.role,
            is_old=pod is not None and not self._is_new(pod) and not ends,
            serves=member.state == READY and view is not None and not view.load.draining,
            leaves=member.draining or (pod is not None and pod.is_terminating),
            fingerprint=member.fingerprint,
        )

    def _is_new(self, pod: Pod) -> bool:
        """So is one of a set of which nobody knows what it wants."""
        wanted = self._sets.get(pod.home)
        return wanted is None or pod.revision == wanted.update_revision

    def _stuck(self, new: Iterable[tuple[Member, Pod]]) -> str:
        """Why a new worker does not come up, once that has been so for STUCK_S; "" before."""
        failed = [f"{m.worker_id}: {pod.waiting.reason or m.reason}" for m, pod in new if _fails(m, pod)]
        if not failed:
            self._stuck_since_s = None
            return ""
        if self._stuck_since_s is None:
            self._stuck_since_s = self._now_s()
        return failed[0] if self._now_s() - self._stuck_since_s >= STUCK_S else ""

    async def _take(self, wanted: Step, pull: Pull) -> None:
        match wanted:
            case Replace(worker_id):
                await self._replace(worker_id)
            case Surge(home):
                await self._surge(home, pull)
            case Shrink(home):
                size = self._homes.size(home)
                assert size is not None, "all are known"
                await pull(Drain(size.victims[0], or_another=False), "the upgrade is over")
                self._hindered.pop(home, None)
                self._controller.surge_is_over(home)
            case Pause(lacks=home) if home in self._refused:
                if self._now_s() - self._refused[home][0] >= AGAIN_S:
                    del self._refused[home]
            case Done():
                self._refused.clear()
                self._draining_since_s.clear()
            case Wait() | Pause():
                pass

    async def _surge(self, home: str, pull: Pull) -> None:
        """Raises: BatonError: nobody knows whether it was written; the next look at the set shows it."""
        pool, size = self._homes.items()[home], self._homes.size(home)
        assert size is not None, "all are known"
        await self._controller.surge_from(home, size.desired)
        try:
            await pull(Create(pool.role, pool.shape), "one more while an upgrade takes others away")
        except InvalidRequest as error:  # a pool's own maximum: then without
            self._controller.surge_is_over(home)
            self._refused[home] = (self._now_s(), error.message)
        finally:
            self._surged_s = self._now_s()

    async def _replace(self, worker_id: str) -> None:
        """Drain it; once it has drained, let its pod be made anew."""
        member, pod = self._controller.fleet.get(worker_id), self._pods.by_name()[worker_id]
        if pod.is_terminating:
            return
        if member.state == READY:
            self._draining_since_s[worker_id] = self._now_s()
            with contextlib.suppress(Unavailable):  # it is told as soon as it answers
                await self._controller.drain(worker_id, True, AfterDrain.RETURN)
            return
        since_s = self._draining_since_s.setdefault(worker_id, self._now_s())
        view = self._controller.view(worker_id)
        is_idle = not member.epoch or (view is not None and view.load.draining and view.load.idle)
        if is_idle or self._now_s() - since_s > self._drain_s[member.role]:
            await self._evict(pod)

    async def _evict(self, pod: Pod) -> None:
        log.info("pod_replaced", pod=pod.name, revision=pod.revision)
        with contextlib.suppress(Conflict):  # another pod has that name by now
            await self._calls.run(lambda: self._api.evict(pod))
        self._draining_since_s.pop(pod.name, None)


def _fails(member: Member, pod: Pod) -> bool:
    """And not only starts."""
    return member.state == FAILED or bool(pod.waiting.reason)
