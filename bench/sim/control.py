"""A whole run with a controller: what goes wrong, what changes, what it came to. The front door of bench/sim/controller.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.request import Role
from baton.slo import SLO
from bench.sim.call import Call
from bench.sim.clock import Event
from bench.sim.controller import Controller, Decided, Sizes
from bench.sim.delays import Delay, Delays
from bench.sim.deployment import Deployment
from bench.sim.fleet import Fleet
from bench.sim.simulation import BOUNDS, Mix, Outcome, Simulation
from bench.sim.telemetry import Outage, Telemetry
from bench.traces import TraceRow
from router.admission import Bounds
from router.controller.autoscaler.facts import State
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.settings import Budget

__all__ = ["ControlledOutcome", "ControlledRun", "Decided", "Faults", "Kill", "Retarget", "Sizes"]


@dataclass(frozen=True, slots=True)
class Kill:
    """A worker dies: the one that serves longest in this role, if there is any."""

    at_s: float
    role: Role


@dataclass(frozen=True, slots=True)
class Faults:
    kills: tuple[Kill, ...] = ()
    restarts: bool = True  # somebody brings back those that die
    num_stuck: int = 0  # so many of those that are created never come up
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True, slots=True)
class Retarget:
    """A class gets other targets."""

    at_s: float
    slo: SLO


@dataclass(frozen=True, slots=True)
class ControlledOutcome:
    """Of a run with a controller. Shares count calls that came after the warm-up; one that was shed has missed."""

    outcome: Outcome
    decisions: Sequence[Decided]
    timeline: Sequence[Sizes]
    num_reversals: int  # acts that changed a pool in the other direction than the last act on it

    @property
    def attainment(self) -> dict[str, float | None]:
        """By class; None: it had no call."""
        return {measure.slo.name: measure.attained.mean for measure in self.outcome.classes}

    @property
    def calls_in_slo(self) -> float:
        """Share of calls, of all classes."""
        return self.outcome.attainment

    @property
    def tokens_in_slo(self) -> float:
        """Share of work: prompt and output tokens of the calls that met their targets, by those asked for."""
        asked = sum(measure.asked_tokens for measure in self.outcome.classes)
        return sum(measure.met_tokens for measure in self.outcome.classes) / asked if asked else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.outcome.gpu_hours

    @property
    def reversals_per_hour(self) -> float:
        return 3_600 * self.num_reversals / self.outcome.run_s if self.outcome.run_s else 0.0


class ControlledRun:
    """One seed: `run` once; `outcome` also tells what there was until an interrupt."""

    def __init__(
        self,
        deployment: Deployment,
        mix: Mix,
        scaler: Scaler,
        times: Times,
        budget: Budget,
        seed: int = 0,
        *,
        delays: Delays | None = None,
        faults: Faults | None = None,
        retargets: Sequence[Retarget] = (),
        machine_gpus: int | None = None,
        warm_up_s: float = 0.0,
        bounds: Bounds | None = BOUNDS,
        fast: bool = True,
        learns: bool = True,
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        """`delays`: None = fixed at `times`. `machine_gpus`: that there are in all; None = without end. `learns` off: the
        controller knows step times. The rest as Simulation."""
        faults = faults or Faults()
        telemetry = Telemetry(deployment, outages=faults.outages, learns=learns)
        self.simulation = Simulation(
            deployment,
            mix,
            seed=seed,
            warm_up_s=warm_up_s,
            bounds=bounds,
            fast=fast,
            delays=delays or delays_of(times),
            on_call=on_call,
            watcher=telemetry,
        )
        fleet = self.simulation.fleet
        fleet.num_stuck, fleet.restarts = faults.num_stuck, faults.restarts
        self._controller = Controller(self.simulation, scaler, telemetry, times, budget, machine_gpus=machine_gpus)
        self._controller.start()
        for kill in faults.kills:
            self.simulation.at(kill.at_s, _killer(fleet, kill.role))
        for change in retargets:
            self.simulation.at(change.at_s, _retargeter(self.simulation, change.slo))

    def run(self, rows: Iterable[TraceRow]) -> ControlledOutcome:
        """Begin with the deployment's layout and let the Scaler go on from there."""
        self.simulation.run(rows)
        return self.outcome()

    def outcome(self) -> ControlledOutcome:
        """By now."""
        log = self._controller.log
        return ControlledOutcome(self.simulation.outcome(), log.decisions, log.timeline, log.num_reversals)


def delays_of(times: Times) -> Delays:
    """Fixed at what the controller takes them to be; who died is started anew."""
    return Delays(start_up=Delay(times.start_up_s), restart=Delay(times.start_up_s), flip=Delay(times.flip_s))


def _killer(fleet: Fleet, role: Role) -> Callable[[float], Sequence[Event]]:
    def kill(now_s: float) -> Sequence[Event]:
        serving = [m for m in fleet.members.values() if m.role is role and m.state is State.READY]
        return fleet.kill(serving[0].worker_id, now_s) if serving else ()

    return kill


def _retargeter(simulation: Simulation, slo: SLO) -> Callable[[float], Sequence[Event]]:
    def retarget(_now_s: float) -> Sequence[Event]:
        simulation.set_slo(slo)
        return ()

    return retarget
