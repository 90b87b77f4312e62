"""The autoscaler's facts of this very fleet: what the controller knows, put together by gather.py.

What a worker is comes from its Session, what is wanted of it from the Fleet, traffic from routers' windows. Instants are this
process's monotonic clock. On emulated GPUs step times are known before anything was measured. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.config import ClusterConfig, EngineConfig
from baton.errors import BatonError
from baton.log import get_log
from baton.request import Role
from engine.emulated_model import EmulatedModel, emulated_model
from router.controller.autoscaler.facts import Blueprint, FleetFacts, State, Tuning, WorkerFacts
from router.controller.autoscaler.gather import Surroundings, gather, learned, load_of
from router.controller.autoscaler.levels import Levels
from router.controller.controller import Controller, tuning_of
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY, STARTING, AfterDrain, Member
from router.controller.measures import roofline_of
from router.controller.pool_scaler import PoolScaler
from router.controller.step_model import Terms
from router.placement import local_limit
from router.session import WorkerView

log = get_log("controller.facts")

_STATES = {
    STARTING: State.PENDING,
    READY: State.READY,
    DRAINING: State.DRAINING,
    STANDBY: State.STANDBY,
    FAILED: State.FAILED,
}
LOOPBACK_BYTES_PER_S = 2e9  # ucxx over TCP on one machine, DESIGN section 6


class LiveFacts:
    """Of one controller's fleet."""

    def __init__(
        self,
        controller: Controller,
        cluster: ClusterConfig,
        machines: PoolScaler,
        shape_of: Callable[[Role], str],
        start_up_s: Callable[[], float],
        now_s: float,
    ) -> None:
        """`shape_of`: of a new worker; `start_up_s`: how long it takes now."""
        self._controller = controller
        self._cluster = cluster
        self._machines = machines
        self._start_up_s = start_up_s
        self._num_gpus = gpus_per_worker(cluster)
        self._known_steps = _emulated_steps(cluster)
        self._emulated = emulated_model(cluster.emulation) if cluster.emulation.gpu else None
        self._blueprints = {role: self._blueprint(role, shape_of(role)) for role in Role}
        self._since: dict[str, tuple[State, float]] = {}
        self._levels = Levels()
        self._heard_s = now_s  # when a router last lived
        self.spare_workers: int | None = None  # that fit beside those that are there; None: nobody knows

    async def ask_machines(self) -> None:
        """Find out how many more workers fit; nobody knows where the platform does not answer."""
        before = self.spare_workers
        try:
            self.spare_workers = (await self._machines.get(self._blueprints[Role.BOTH].shape)).spare
        except BatonError as error:
            self.spare_workers = None
            if before is not None:
                log.warning("spare_unknown", reason=error.message)

    def facts(self, now_s: float) -> FleetFacts:
        controller, start_up_s = self._controller, self._start_up_s()
        view = controller.measures.view(now_s)
        if view.num_routers:
            self._heard_s = now_s
        return gather(
            now_s,
            view=view,
            forecasts=controller.measures.forecasts(now_s),
            classes=controller.slo.value,
            steps={**self._known_steps, **learned(controller.measures.steps)},
            workers=self._workers(now_s),
            budget=controller.in_force.settings.revision.value.budget,
            surroundings=self._surroundings(),
            levels=self._levels,
            start_up_s=start_up_s,
            local_prefill_tokens=self._local_prefill_tokens(),
            queued_tokens=sum(report.queued_tokens for report in controller.fresh_reports()),
            spare_gpus=None if self.spare_workers is None else self.spare_workers * self._num_gpus,
            missing_s=now_s - self._heard_s,
        )

    def _workers(self, now_s: float) -> list[WorkerFacts]:
        members = self._controller.fleet.members()
        since, self._since = self._since, {}
        found = []
        for member in members:
            view = self._controller.view(member.worker_id)
            state = _state(member, view)
            before = since.get(member.worker_id)
            self._since[member.worker_id] = before if before is not None and before[0] is state else (state, now_s)
            found.append(self._worker(member, view, state))
        return found

    def _worker(self, member: Member, view: WorkerView | None, state: State) -> WorkerFacts:
        blueprint = self._blueprints[member.role]
        most = tuning_of(view.opened.most) if view and view.opened.HasField("most") else blueprint.most
        return WorkerFacts(
            worker_id=member.worker_id,
            role=member.role,
            state=state,
            since_s=self._since[member.worker_id][1],
            shape=member.shape,
            num_gpus=self._num_gpus,
            kv_tokens=view.opened.num_blocks * view.opened.block_size if view else blueprint.kv_tokens,
            tuning=tuning_of(view.load) if view and view.load.max_num_seqs else member.tuning or most,
            most=most,
            load=load_of(view.load, view.load_s, view.opened.block_size) if view else None,
            serves=not member.draining,
            leaves=not member.draining or not member.stays,
            stands_by=member.after_drain is AfterDrain.STANDBY,
        )

    def _surroundings(self) -> Surroundings:
        return Surroundings(self._kv_bytes_per_token(), self._link_bytes_per_s(), self._prices(), self._blueprints)

    def _kv_bytes_per_token(self) -> float:
        if self._emulated is not None:
            return self._emulated.kv_bytes_per_token
        views = (self._controller.view(member.worker_id) for member in self._controller.fleet.members())
        known = (view.opened for view in views if view is not None and view.opened.block_size)
        return next((opened.kv_block_bytes / opened.block_size for opened in known), 0.0)

    def _link_bytes_per_s(self) -> float:
        if self._emulated is None:
            return LOOPBACK_BYTES_PER_S
        return _network_bytes_per_s(self._emulated)

    def _prices(self) -> Mapping[str, float]:
        """By shape, per GPU."""
        if self._emulated is None:
            return {}
        return {blueprint.shape: self._emulated.gpu.usd_per_hour for blueprint in self._blueprints.values()}

    def _local_prefill_tokens(self) -> int:
        told = self._controller.fleet.local_prefill_tokens
        return local_limit(self._cluster.router.local_prefill_tokens) if told is None else told

    def _blueprint(self, role: Role, shape: str) -> Blueprint:
        engine = self._cluster.engine_of(role.name.lower())
        return Blueprint(shape, self._num_gpus, engine.num_blocks * engine.block_size, _most(engine))


def gpus_per_worker(cluster: ClusterConfig) -> int:
    """Of a machine without GPUs each rank of a worker counts as one; on Kubernetes a pod without GPUs does."""
    if cluster.kubernetes.fullname:
        return max(1, cluster.kubernetes.gpus_per_worker)
    return cluster.emulation.tp if cluster.emulation.gpu else cluster.engine.tensor_parallel_size


def _state(member: Member, view: WorkerView | None) -> State:
    if member.state == READY and view is not None and view.load.next_role:
        return State.FLIPPING
    return _STATES[member.state]


def _most(engine: EngineConfig) -> Tuning:
    return Tuning(engine.max_num_seqs, engine.max_num_batched_tokens, engine.chunk_tokens)


def _emulated_steps(cluster: ClusterConfig) -> Mapping[Role, Terms]:
    """What steps of emulated GPUs take; nothing where they are real."""
    if not cluster.emulation.gpu:
        return {}
    return dict.fromkeys(Role, roofline_of(cluster.emulation))


def _network_bytes_per_s(model: EmulatedModel) -> float:
    """Each GPU sends its own part of the KV on its own card."""
    return model.num_kv_shares * model.gpu.nic_bytes_per_s


def drains_of(cluster: ClusterConfig) -> Mapping[Role, float]:
    """What running calls get, by the role of the worker that is to leave, seconds."""
    return {role: cluster.drain_s_of(role.name.lower()) for role in Role}
