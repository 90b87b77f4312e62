"""What a controller hears of a simulated deployment: the product's own windows, forecasts and step models, on the virtual clock.

    calls    router/goodput.py        each REPORT_S its windows, and the calls that arrived  ─▶ Measures (observer, forecasts)
    steps    totals of each worker    each tick                                              ─▶ Measures (step models)
    workers  what they say of themselves at a tick                                           ─▶ gather.py ─▶ FleetFacts

Reports are lost, or hold a number that is none, in the spans that Outages name: what is impossible is refused by
router/windows.py as if it had come over the wire. Workers' own figures are not worker windows, since nobody here reads those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.errors import InvalidRequest
from baton.request import Role
from baton.slo import SLO
from baton.v1 import control_pb2
from bench.sim.call import Attempt, Call
from bench.sim.deployment import Deployment
from bench.sim.engine import EngineShape, Work
from bench.sim.fleet import Fleet, Member
from bench.sim.router import SimRouter
from bench.sim.worker import SimWorker
from router.admission import Shed
from router.controller.autoscaler.facts import Blueprint, FleetFacts, State, WorkerFacts, WorkerLoad
from router.controller.autoscaler.gather import Surroundings, gather, learned
from router.controller.autoscaler.levels import Levels
from router.controller.measures import Measures
from router.controller.settings import Budget
from router.controller.step_model import Terms, terms_of
from router.controller.step_samples import StepTotals
from router.goodput import Goodput, Served
from router.windows import RouterWindows, class_pb, windows_of

REPORT_S = 1.0  # as routers do: router/control_client.py
_ROUTER = "sim"


@dataclass(frozen=True, slots=True)
class Outage:
    """A span in which the controller is told nothing, or, with `as_nan`, that everything took NaN seconds."""

    from_s: float
    to_s: float
    as_nan: bool = False

    def covers(self, now_s: float) -> bool:
        return self.from_s <= now_s < self.to_s


@dataclass(slots=True)
class _Heard:
    """Of one worker's process."""

    work: Work
    step_s: float = 0.0
    load: WorkerLoad | None = None


class Telemetry:
    """Implements bench.sim.router.Watcher."""

    def __init__(self, deployment: Deployment, *, outages: Iterable[Outage] = (), learns: bool = True) -> None:
        """`learns` off: the controller knows step times as they are."""
        self._deployment = deployment
        self._outages = tuple(outages)
        self._learns = learns
        self._shapes = {role: deployment.worker_shape(role) for role in Role}
        self._terms = {role: terms_of(shape.step_time) for role, shape in self._shapes.items()}
        self._surroundings = _surroundings(deployment, self._shapes)
        self._levels = Levels()
        self._goodput = Goodput(0.0)
        self._measures = Measures(self._terms[Role.BOTH], 0.0)
        self._heard_s = 0.0
        self._heard: dict[tuple[str, int], _Heard] = {}  # by worker_id and epoch

    @property
    def measures(self) -> Measures:
        """What the controller knows of traffic and steps."""
        return self._measures

    # -- calls ---------------------------------------------------------------------------------------------------------

    def on_arrival(self, call: Call, now_s: float) -> None:
        self._goodput.arrived(call.slo.name, now_s)

    def on_placed(self, attempt: Attempt, now_s: float) -> None:
        row = attempt.call.row
        num_cached = row.input_tokens - attempt.plan.lacking_tokens
        self._goodput.read(attempt.call.slo.name, row.input_tokens, num_cached, 1, now_s)

    def on_over(self, call: Call, shed: Shed | None, now_s: float) -> None:
        attempt, slo = call.attempt, call.slo
        if call.end_s is None or attempt is None:
            if attempt is None:
                self._goodput.read(slo.name, call.row.input_tokens, 0, 1, now_s)
            self._goodput.refused(slo.name, now_s)
            return
        ttft_s = call.ttft_s
        itl_p99_ms = math.inf if call.too_many_long_gaps else 0.0
        served = Served(
            slo_class=slo.name,
            verdict=call.verdict,
            ttft_met=1e3 * ttft_s <= slo.ttft_ms,
            pace_met=slo.meets_pace(tpot_ms=1e3 * call.tpot_s, itl_p99_ms=itl_p99_ms),
            ttft_s=ttft_s,
            split=None,
            handoff_gap_s=call.handoff_gap_s,
            output_tokens=(call.row.output_tokens,),
            prefill_worker=attempt.prefill.worker_id,
            decode_worker=attempt.decode.worker_id,
        )
        self._goodput.ended(served, now_s)

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self, oldest_queued_s: float, now_s: float) -> None:
        """A router tells the controller what it saw."""
        outage = self._outage(now_s)
        if outage is not None and not outage.as_nan:
            return
        windows = RouterWindows(
            classes=tuple(self._goodput.class_windows(now_s)),
            arrived=tuple((name, float(num)) for name, num in self._goodput.arrivals()),
            oldest_queued_s=math.nan if outage is not None else oldest_queued_s,
        )
        if outage is not None:
            try:
                windows = windows_of(_on_the_wire(windows))
            except InvalidRequest:
                return
        self._measures.heard(_ROUTER, windows, now_s)
        self._heard_s = now_s

    def _outage(self, now_s: float) -> Outage | None:
        return next((outage for outage in self._outages if outage.covers(now_s)), None)

    # -- a look --------------------------------------------------------------------------------------------------------

    def facts(
        self, fleet: Fleet, router: SimRouter, classes: Iterable[SLO], budget: Budget, start_up_s: float, now_s: float,
        spare_gpus: int | None = None,
    ) -> FleetFacts:  # fmt: skip
        workers = [self._worker_facts(member, now_s) for member in fleet.members.values()]
        self._forget_gone(fleet)
        return gather(
            now_s,
            view=self._measures.view(now_s),
            forecasts=self._measures.forecasts(now_s),
            classes=tuple(classes),
            steps=self._steps(),
            workers=workers,
            budget=budget,
            surroundings=self._surroundings,
            levels=self._levels,
            start_up_s=start_up_s,
            local_prefill_tokens=router.local_prefill_tokens,
            queued_tokens=router.queued_tokens,
            spare_gpus=spare_gpus,
            missing_s=now_s - self._heard_s,
        )

    def _steps(self) -> Mapping[Role, Terms]:
        return {**self._terms, **learned(self._measures.steps)} if self._learns else self._terms

    def _worker_facts(self, member: Member, now_s: float) -> WorkerFacts:
        worker, shape = member.worker, self._shapes[member.role]
        return WorkerFacts(
            worker_id=member.worker_id,
            role=member.role,
            state=member.state,
            since_s=member.since_s,
            shape=self._deployment.hardware(member.role).name,
            num_gpus=member.num_gpus,
            kv_tokens=shape.pool_tokens if worker is not None else 0,
            tuning=worker.tuning if worker is not None else shape.tuning,
            most=shape.most,
            load=self._load(worker, now_s) if worker is not None else None,
            stands_by=member.state is State.DRAINING and member.keep_standby,
        )

    def _load(self, worker: SimWorker, now_s: float) -> WorkerLoad | None:
        """As it last said."""
        heard = self._heard.setdefault((worker.worker_id, worker.epoch), _Heard(Work()))
        outage = self._outage(now_s)
        if worker.is_dead or (outage is not None and not outage.as_nan):
            return heard.load
        kinds = worker.engine.work_by_kind(now_s)
        work = kinds[0].plus(kinds[1])
        if (num_steps := work.num_steps - heard.work.num_steps) > 0:
            heard.step_s = (work.busy_s - heard.work.busy_s) / num_steps
        heard.work = work
        step_s = math.nan if outage is not None else heard.step_s
        totals = tuple(_totals(kind, outage) for kind in kinds)
        self._measures.sampled(worker.worker_id, worker.epoch, worker.role.name.lower(), totals, now_s)
        heard.load = WorkerLoad(
            at_s=now_s,
            num_seqs=len(worker.open),
            waiting_tokens=worker.waiting_tokens(),
            used_tokens=worker.used_tokens(now_s),
            step_s=step_s,
            num_preemptions=worker.engine.scheduler.totals.num_preemptions,
            num_waiting=worker.engine.scheduler.num_waiting,
        )
        return heard.load

    def _forget_gone(self, fleet: Fleet) -> None:
        there = {(worker.worker_id, worker.epoch) for worker in fleet.workers()}
        for key in self._heard.keys() - there:
            del self._heard[key]


def _totals(work: Work, outage: Outage | None) -> StepTotals:
    busy_s = math.nan if outage is not None else work.busy_s
    return StepTotals(work.num_steps, busy_s, work.tokens, work.context_tokens, work.prompt_pairs)


def _surroundings(deployment: Deployment, shapes: Mapping[Role, EngineShape]) -> Surroundings:
    hardware = {role: deployment.hardware(role) for role in Role}
    return Surroundings(
        deployment.token_bytes,
        deployment.nic_bytes_per_s(Role.PREFILL),
        {where.name: where.usd_per_hour / where.tp for where in hardware.values()},
        {
            role: Blueprint(hardware[role].name, hardware[role].tp, shape.pool_tokens, shape.most)
            for role, shape in shapes.items()
        },
    )


def _on_the_wire(windows: RouterWindows) -> control_pb2.RouterReport:
    return control_pb2.RouterReport(
        class_windows=[class_pb(window) for window in windows.classes], oldest_queued_s=windows.oldest_queued_s
    )
