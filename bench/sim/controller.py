"""A controller under the virtual clock: each tick it looks at the fleet, asks a Scaler and carries out its acts.

Facts are made by router/controller/autoscaler/gather.py of what bench/sim/telemetry.py heard; acts are bench/sim/fleet.py's.
What router/controller/levers.py would refuse is refused here for the same reasons: another state, a pool at its least or most,
the budget, no machine free. A refused act changes nothing and is written down as not applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from baton.request import Role
from bench.sim.clock import Event
from bench.sim.fleet import Fleet, Refused
from bench.sim.simulation import Simulation
from bench.sim.telemetry import REPORT_S, Telemetry
from router.controller.autoscaler.acts import (
    Act,
    Create,
    Drain,
    Flip,
    GiveUp,
    LocalPrefill,
    Proposal,
    Tune,
    Undrain,
    Wake,
)
from router.controller.autoscaler.facts import State
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.decisions import Decision
from router.controller.levers import describe, lever_of
from router.controller.settings import Budget

NOT_DONE = "not_done"  # the input that says why; as router/controller/autoscale_loop.py
_STAYS = (State.PENDING, State.READY, State.FAILED)  # counts towards the least size of its pool


@dataclass(frozen=True, slots=True)
class Decided:
    at_s: float
    decision: Decision


@dataclass(frozen=True, slots=True)
class Sizes:
    """The fleet at one tick, after its acts: workers that serve, and those that are pending or flip."""

    at_s: float
    num_prefill: int
    num_decode: int
    num_both: int
    num_coming: int
    num_gpus: int


@dataclass(slots=True)
class Log:
    """What was decided, and what became of the fleet."""

    decisions: list[Decided] = field(default_factory=list)
    timeline: list[Sizes] = field(default_factory=list)
    num_reversals: int = 0
    _directions: dict[Role, int] = field(default_factory=dict)  # in which each pool was changed last

    def note(self, at_s: float, decision: Decision, changes: Iterable[tuple[Role, int]]) -> None:
        self.decisions.append(Decided(at_s, decision))
        if not decision.applied:
            return
        turned = False
        for role, direction in changes:
            turned |= self._directions.get(role, direction) != direction
            self._directions[role] = direction
        self.num_reversals += turned


class Controller:
    """Of one simulation; `start` once."""

    def __init__(
        self,
        simulation: Simulation,
        scaler: Scaler,
        telemetry: Telemetry,
        times: Times,
        budget: Budget,
        *,
        machine_gpus: int | None = None,
    ) -> None:
        """`machine_gpus`: that there are in all; None = without end, and nobody knows."""
        self.log = Log()
        self._simulation = simulation
        self._scaler = scaler
        self._telemetry = telemetry
        self._times = times
        self._budget = budget
        self._machine_gpus = machine_gpus

    def start(self) -> None:
        self._simulation.at(REPORT_S, self._report)
        self._simulation.at(self._times.tick_s, self._tick)

    def _report(self, now_s: float) -> Iterable[Event]:
        self._telemetry.report(self._simulation.router.oldest_queued_s(now_s), now_s)
        return [Event(now_s + REPORT_S, self._report)]

    def _tick(self, now_s: float) -> Iterable[Event]:
        simulation = self._simulation
        spare = None if self._machine_gpus is None else self._machine_gpus - simulation.fleet.num_gpus
        facts = self._telemetry.facts(
            simulation.fleet,
            simulation.router,
            simulation.mix.classes,
            self._budget,
            self._times.start_up_s,
            now_s,
            spare_gpus=spare,
        )
        events = [event for proposal in self._scaler.look(facts) for event in self._decide(proposal, now_s)]
        self.log.timeline.append(_sizes(simulation.fleet, now_s))
        return [*events, Event(now_s + self._times.tick_s, self._tick)]

    def _decide(self, proposal: Proposal, now_s: float) -> Sequence[Event]:
        act = proposal.act
        decision = Decision(lever_of(act), describe(act), proposal.reason, applied=False, inputs=proposal.inputs)
        changes = self._changes(act)
        try:
            events = self._carry_out(act, now_s)
        except Refused as refused:
            self.log.note(now_s, replace(decision, inputs={**decision.inputs, NOT_DONE: str(refused)}), ())
            return ()
        self.log.note(now_s, replace(decision, applied=True), changes)
        return events

    def _carry_out(self, act: Act, now_s: float) -> Sequence[Event]:
        """Raises: Refused."""
        fleet = self._simulation.fleet
        match act:
            case Tune(worker_id, tuning):
                return fleet.tune(worker_id, tuning, now_s)
            case LocalPrefill(max_tokens):
                self._simulation.router.local_prefill_tokens = max_tokens
                return ()
            case Flip(worker_id, role):
                self._check_may_leave(worker_id)
                return fleet.flip(worker_id, role, now_s)
            case Undrain(worker_id):
                return fleet.undrain(worker_id, now_s)
            case Wake(worker_id, role):
                return fleet.wake(worker_id, role, now_s)
            case Create(role, shape):
                self._check_fits(role, shape)
                return fleet.create(role, now_s)
            case Drain(worker_id, keep_standby):
                self._check_may_leave(worker_id)
                return fleet.drain(worker_id, now_s, keep_standby=keep_standby)
            case GiveUp(worker_id):
                return fleet.give_up(worker_id, now_s)

    def _check_may_leave(self, worker_id: str) -> None:
        members = self._simulation.fleet.members
        if worker_id not in members:
            raise Refused(f"there is no worker {worker_id}")
        role = members[worker_id].role
        least = self._budget.pools()[role.name.lower()].min_workers
        num = sum(member.role is role and member.state in _STAYS for member in members.values())
        if num - 1 < least:
            raise Refused(f"{role.name.lower()} must keep {least} workers, {num} are there")

    def _check_fits(self, role: Role, shape: str) -> None:
        fleet, name = self._simulation.fleet, role.name.lower()
        wanted = fleet.deployment.hardware(role)
        if shape != wanted.name:
            raise Refused(f"there is no {shape} for {name} workers; there is {wanted.name}")
        num_gpus = fleet.num_gpus + wanted.tp
        for limit, what in ((self._budget.max_gpus, "max_gpus"), (self._machine_gpus, "the machines' GPUs")):
            if limit is not None and num_gpus > limit:
                raise Refused(f"{what} = {limit}: one more worker makes {num_gpus}")
        most = self._budget.pools()[name].max_workers
        if most is not None and sum(member.role is role for member in fleet.members.values()) >= most:
            raise Refused(f"{name}.max_workers = {most}: so many are there")

    def _changes(self, act: Act) -> list[tuple[Role, int]]:
        """By how much which pool grows."""
        members = self._simulation.fleet.members
        match act:
            case Create(role, _) | Wake(_, role):
                return [(role, 1)]
            case Undrain(worker_id) if worker_id in members:
                return [(members[worker_id].role, 1)]
            case Drain(worker_id, _) if worker_id in members:
                return [(members[worker_id].role, -1)]
            case Flip(worker_id, role) if worker_id in members:
                return [(members[worker_id].role, -1), (role, 1)]
        return []


def _sizes(fleet: Fleet, now_s: float) -> Sizes:
    members = fleet.members.values()
    serving = [member.role for member in members if member.state is State.READY]
    prefill, decode, both = (serving.count(role) for role in Role)
    num_coming = sum(member.state in (State.PENDING, State.FLIPPING) for member in members)
    return Sizes(now_s, prefill, decode, both, num_coming, fleet.num_gpus)
