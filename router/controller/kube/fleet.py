"""Workers on pods: the PoolScaler of a cluster. Sizes are Kubernetes' (homes.py), processes on pods are Ray's (ray_actors.py).

    scale_up      one more pod is asked for; a worker is started on it once it runs
    scale_down    the worker is stopped, then its pod's place is taken away
    look          each LOOK_S and whenever a pod changes: what reconcile.py finds

A pod that was asked for here and does not come is given back; one that somebody else asked for, or that is configured, is
waited for. A pod's place, not the pod, is a member of the fleet: a pod that is lost comes back, under the same name where a
StatefulSet makes it, and its worker is started again. Only a leader acts (`leads`); who does not, sees the same and changes
nothing. While the API server is away nothing is known to be gone, so nobody is. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import assert_never

from baton import clock
from baton.config import ClusterConfig, KubernetesConfig, WorkerConfig
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.log import get_log
from baton.request import Role
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, STARTING, AfterDrain, Member
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.errors import Conflict
from router.controller.kube.homes import Homes
from router.controller.kube.objects import Pod
from router.controller.kube.pods import PodTable
from router.controller.kube.reconcile import (
    Adopt,
    Expect,
    Forget,
    Label,
    Late,
    Leave,
    Situation,
    Start,
    Step,
    Vanish,
    labels_of,
    steps,
)
from router.controller.kube.sizes import ordinal_of
from router.controller.pool_scaler import PoolSize
from router.controller.ray_actors import REVIVE_S, RayActors
from router.controller.ray_fleet import WorkerConfigs

log = get_log("controller.kube")

LOOK_S = 1.0  # a control tick
SIZES_S = 5.0  # whoever else scales is noticed within; one small read per set
# A pod that is Ready has a worker that listens, and tells a new leader of itself once it is led there: the label within 2.5 s
# (leader_label.py), a connection that hangs after 5 s, the next try after 0.5 s (worker/announcer.py); and as long again.
ANNOUNCE_S = 16.0
STALE_S = 60.0  # three resyncs: so old a table says nothing about what a machine may do now


class KubeFleet:
    """Create it inside the event loop, before workers can announce themselves."""

    def __init__(
        self,
        cluster: ClusterConfig,
        controller: Controller,
        homes: Homes,
        pods: PodTable,
        actors: RayActors,
        api: KubeApi,
        calls: KubeCalls,
        leads: Callable[[], bool],
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        self._controller = controller
        self._cluster = cluster
        self._config = cluster.kubernetes
        self._unbegun = set(homes.items()) if controller.fleet.saved().is_new else set()  # wait for their first size
        self._begin_s = float("-inf")  # when that was last asked for
        self._homes = homes
        self._pods = pods
        self._actors = actors
        self._api = api
        self._calls = calls
        self._leads = leads
        self._now_s = now_s
        control_address = cluster.kubernetes.control_address
        self._make_config = WorkerConfigs(cluster, control_address, partial(_cores_of, cluster.kubernetes))
        self._started: dict[str, str] = {}  # worker -> uid of the pod that it was started on
        self._begun_s: dict[str, float] = {}  # when its start was last asked for
        self._waiting_since_s: dict[str, float] = {}  # workers whose pods do not run
        self._unclaimed_since_s: dict[str, float] = {}  # workers nothing is known of, on pods that were found
        self._found: frozenset[str] | None = None  # uids of pods on which somebody listened before this process led
        self._sizes_s = float("-inf")
        self._num_growing = 0  # calls of scale_up that have not returned
        self._changed = asyncio.Event()

    # -- life --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Something about pods changed: look at once."""
        self._changed.set()

    async def start_and_revive(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connect(), name="connect to Ray")
            tasks.create_task(self._look_on(), name="look at pods")

    async def _look_on(self) -> None:
        while True:
            await self.look()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    async def stop(self) -> None:
        """Leave; pods and workers stay as they are, for the next leader."""
        await self._actors.stop(())

    async def _connect(self) -> None:
        """Until it is done. A head that is away holds Ray up for minutes, and nobody else."""
        while not self._actors.is_connected:
            try:
                await self._actors.connect()
            except BatonError as error:
                log.error("ray_failed", reason=error.message)
                await asyncio.sleep(REVIVE_S)
        self.wake()

    # -- each look ---------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Make fleet and pods agree, as far as one look goes."""
        if not self._pods.is_known:
            return
        if self._now_s() - self._sizes_s >= SIZES_S or not self._homes.are_known:
            self._sizes_s = self._now_s()
            await self._homes.read({name for name, pod in self._pods.by_name().items() if pod.is_ready})
        if self._unbegun and self._now_s() - self._homes.age_s > self._begin_s and self._leads():
            await self._begin()
        self._note_times()
        for step in list(steps(self._situation())):
            await self._take(step)
        self._revive()

    async def _begin(self) -> None:
        """A new fleet's pools get their initial sizes; never smaller ones: they may be an old one's, whose records are lost."""
        for home in sorted(self._unbegun):
            pool, size = self._homes.items()[home], self._homes.size(home)
            assert size is not None, "all are known"
            try:
                if size.desired < pool.initial:
                    await self._homes.grow(home, pool.initial - size.desired)
            except InvalidRequest as error:
                log.error("initial_size_refused", set=pool.pods.name, wanted=pool.initial, reason=error.message)
            except BatonError as error:  # written or not: decided again once sizes are read anew
                log.warning("initial_size_waits", set=pool.pods.name, wanted=pool.initial, reason=error.message)
                self._begin_s = self._now_s()
                continue
            self._unbegun.remove(home)

    def _situation(self) -> Situation:
        members = self._controller.fleet.members()
        views = {m.worker_id: view for m in members if (view := self._controller.view(m.worker_id))}
        now_s = self._now_s()
        return Situation(
            homes=self._homes.known(),
            is_whole=self._homes.are_known,
            pods=self._pods.by_name(),
            members=members,
            started=self._started,
            live_roles={name: Role(view.load.role) for name, view in views.items() if view.load.role},
            late=frozenset(n for n, s in self._waiting_since_s.items() if now_s - s > self._config.pending_s),
            may_announce=frozenset(n for n, s in self._unclaimed_since_s.items() if now_s - s <= ANNOUNCE_S),
            llmd_labels=self._config.llmd_labels,
        )

    def _note_times(self) -> None:
        pods, now_s = self._pods.by_name(), self._now_s()
        members = self._controller.fleet.members()
        waiting = {m.worker_id for m in members if m.state == STARTING}
        waiting -= {name for name, pod in pods.items() if pod.runs or pod.is_preparing}
        _keep_since(self._waiting_since_s, waiting, now_s)
        unclaimed = {m.worker_id for m in members if not m.epoch} - self._started.keys()
        if self._found is None or not self._leads():
            self._found = frozenset(pod.uid for pod in pods.values() if pod.is_ready or pod.on_lost_node)
        unclaimed &= {name for name, pod in pods.items() if pod.uid in self._found}
        _keep_since(self._unclaimed_since_s, unclaimed, now_s)

    async def _take(self, step: Step) -> None:
        match step:
            case Expect(worker_id, role, shape):
                if not self._num_growing:  # else it may be the one that is being asked for
                    self._controller.expect(worker_id, role, shape)
            case Forget(worker_id):
                self._forget(worker_id)
            case Vanish(worker_id, why):
                self._started.pop(worker_id, None)
                self._controller.vanished(worker_id, why)
            case Adopt(worker_id, pod):
                self._started[worker_id] = pod.uid
            case Start(worker_id, pod):
                self._start(worker_id, pod, is_fresh=True)
            case Leave(worker_id, why):
                await self._leave(worker_id, why)
            case Late(worker_id):
                self._controller.start_failed(worker_id, 0, self._why_late(worker_id))
            case Label(pod, role):
                await self._label(pod, role)
            case _:
                assert_never(step)

    def _forget(self, worker_id: str) -> None:
        if not self._controller.is_ending(worker_id):  # else whoever ends it forgets it
            log.info("worker_scaled_away", worker=worker_id)
            self._started.pop(worker_id, None)
            self._controller.forget(worker_id)

    def _start(self, worker_id: str, pod: Pod, *, is_fresh: bool) -> None:
        if not (self._leads() and self._actors.is_connected):
            return
        self._started[worker_id] = pod.uid
        self._begun_s[worker_id] = self._now_s()
        config = partial(self._config_of, self._controller.fleet.get(worker_id), pod)
        self._actors.begin(worker_id, config, is_fresh=is_fresh)

    def _config_of(self, member: Member, pod: Pod) -> WorkerConfig:
        made = self._make_config(member.worker_id, member.role)
        fabric = pod.labels.get(self._config.fabric_label, "")
        return replace(made, host=pod.ip, port=self._config.worker_port, fabric=fabric)

    def _revive(self) -> None:
        """Workers that are lost although their pods run: Ray restarts killed actors itself, but gives up where a start raised."""
        pods, now_s = self._pods.by_name(), self._now_s()
        for member in self._controller.fleet.members():
            pod = pods.get(member.worker_id)
            never_came = member.extra and not member.epoch  # and nobody configured it: whoever asked for it gives it up
            is_lost = member.state == FAILED and not never_came and member.after_drain is not AfterDrain.END
            if is_lost and pod is not None and pod.runs:
                begun_s = self._begun_s.get(member.worker_id, float("-inf"))
                if now_s - begun_s >= REVIVE_S and not self._actors.is_starting(member.worker_id):
                    self._start(member.worker_id, pod, is_fresh=False)

    async def _leave(self, worker_id: str, why: str) -> None:
        if self._leads():
            log.info("worker_leaves", worker=worker_id, reason=why)
            with contextlib.suppress(Unavailable):  # it is told as soon as it answers
                await self._controller.drain(worker_id, True, AfterDrain.RETURN)

    async def _label(self, pod: Pod, role: Role) -> None:
        if not self._leads():
            return
        try:
            await self._calls.run(lambda: self._api.label(pod, labels_of(role, self._config.llmd_labels)))
        except Conflict:
            return  # the pod changed meanwhile: the next look finds it as it is
        except BatonError as error:
            log.warning("role_not_labelled", pod=pod.name, reason=error.message)

    def _why_late(self, worker_id: str) -> str:
        pod = self._pods.by_name().get(worker_id)
        if pod is None:
            return f"no pod was made within {self._config.pending_s:g} s: is a quota used up?"
        why = pod.unschedulable or pod.waiting.reason or pod.phase or "it is not known why"
        return f"its pod does not run after {self._config.pending_s:g} s: {why}"

    # -- PoolScaler --------------------------------------------------------------------------------------------------

    def shape_of(self, role: Role) -> str:
        return shape_of(self._cluster, role)

    async def get(self, shape: str) -> PoolSize:
        self._check_known()
        homes = [home for home, pool in self._homes.items().items() if pool.shape == shape]
        sizes = {home: size for home in homes if (size := self._homes.size(home))}
        members = [m for m in self._controller.fleet.members() if m.shape == shape]
        return PoolSize(
            desired=sum(size.desired for size in sizes.values()),
            ready=sum(m.state not in (STARTING, FAILED) for m in members),
            pending=tuple(m.worker_id for m in members if m.state == STARTING),
            victims=tuple(name for home in homes for name in self._victims(home)),
            spare=None,  # nodes may be made for pods that wait
        )

    async def scale_up(self, role: Role, shape: str) -> str:
        home = self._homes.home_of(role, shape)
        self._check_leads()
        self._num_growing += 1
        try:
            [name] = await self._homes.grow(home)
            self._controller.expect(name, role, shape, extra=True)
        finally:
            self._num_growing -= 1
        return name

    def can_end(self, worker_id: str) -> bool:
        if self._config.mode != "statefulset":
            return True
        prefix, _, _ = worker_id.rpartition("-")
        others = (m.worker_id for m in self._controller.fleet.members())
        return not any(o.rpartition("-")[0] == prefix and ordinal_of(o) > ordinal_of(worker_id) for o in others)

    async def scale_down(self, worker_id: str) -> None:
        self._check_leads()
        home = self._home_of(worker_id)
        if home is not None:
            with contextlib.suppress(Unavailable):  # without Ray, its pod's end is the worker's
                await self._actors.end(worker_id)
            await self._homes.shrink(home, {worker_id})
        self._started.pop(worker_id, None)

    def _home_of(self, worker_id: str) -> str | None:
        """None: no size has a place for it any more."""
        return next((home for home, known in self._homes.known().items() if worker_id in known.names), None)

    def _victims(self, home: str) -> list[str]:
        """Who may be drained for its end: of a StatefulSet the last one, and whoever is last once those that leave are gone."""
        size = self._homes.size(home)
        spare = size.victims[: max(0, size.desired - self._homes.minimum(home))] if size else ()
        if self._config.mode != "statefulset":
            return list(spare)
        leaving = {m.worker_id for m in self._controller.fleet.members() if m.after_drain is AfterDrain.END}
        first_stay = next((n for n, name in enumerate(spare) if name not in leaving), len(spare))
        return list(spare[: first_stay + 1])

    def _check_leads(self) -> None:
        """Raises: Unavailable."""
        if not self._leads():
            raise Unavailable("this controller does not hold the Lease: another one may act", retry_after_s=LOOK_S)

    def _check_known(self) -> None:
        """Raises: Unavailable: what is known is too old to act by."""
        age_s = max(self._pods.age_s, self._homes.age_s)
        if age_s > STALE_S:
            raise Unavailable("the API server has not said for long what there is", retry_after_s=SIZES_S)


def _keep_since(since_s: dict[str, float], names: set[str], now_s: float) -> None:
    """Let `since_s` hold these, each since it first was among them."""
    for name in since_s.keys() - names:
        del since_s[name]
    for name in names:
        since_s.setdefault(name, now_s)


def shape_of(cluster: ClusterConfig, role: Role) -> str:
    """Of a pool's pods, and how KV is kept there where that depends on the pool: a flip does not change that."""
    config = cluster.kubernetes
    shapes = {Role.PREFILL: config.prefill_shape, Role.DECODE: config.decode_shape, Role.BOTH: config.both_shape}
    dtype = cluster.engine_of(role.name.lower()).kv_dtype(cluster.model.dtype)
    return shapes[role] if cluster.decode_kv_cache_dtype == "auto" else f"{shapes[role]}-{dtype}"


def _cores_of(config: KubernetesConfig, role: Role) -> int:
    """Of a pod of the role's pool. Pods that flip are alike, so it is theirs, too."""
    return {Role.PREFILL: config.prefill_cores, Role.DECODE: config.decode_cores, Role.BOTH: config.both_cores}[role]
