"""`python -m bench.dry_run_figures`: how often what a dry run says of a change comes true.

Fleets under a virtual clock take the place of real ones: each serves its load for a while; then, again and again, one class gets
other targets at random. What is predicted is the product's own (router/controller/live_forecast.py), from what its own windows
and step models measured of that fleet, and told before the change is made. What comes true is the attainment of the calls that
arrive in the WINDOW_S after SETTLE_S. Predictor and fleet differ: other seeds, lengths from histograms, arrivals taken for
Poisson where the fleet's come in bursts, blocks of another size, and step times that the predictor knows as far as its step
models learned them: each pool of the fleet is slower or quicker than the roofline where they begin.

The predictor gets CPU seconds here, in place of the wall's: other work on this machine changes no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from baton.config import EngineConfig
from baton.request import Role
from baton.slo import SLO, Verdict
from bench.sim.arrivals import Bursts, Constant, Rate, Sinusoid, instants, synthetic
from bench.sim.call import Call
from bench.sim.clock import Event
from bench.sim.deployment import MAX_NUM_SEQS, Deployment, Layout
from bench.sim.simulation import Mix, Simulation
from bench.sim.telemetry import REPORT_S, Telemetry
from bench.traces import TraceRow
from bench.what_if import answer
from bench.workload import Lengths
from engine.timing.batch import Batch, StepTime
from router.controller.autoscaler.facts import FleetFacts
from router.controller.feasibility import NoForecast, Outlook
from router.controller.live_forecast import LiveForecast
from router.controller.measured_fleet import WINDOW_S, Measured
from router.controller.settings import Budget
from router.controller.what_if import Answer, Question

FIRST_S = 420.0  # until the first change: a window, and what workers and step models need to warm up
SETTLE_S = 60.0  # after a change, for calls that came before it to end
STEPS_OFF = 0.1  # of each pool's steps from the roofline, one standard deviation
STEPS_LOOK_S = 2.0  # between two samples of what steps took
# Of a class's first targets: from a third to 1.4 times, and what a step allows around a TPOT
TTFT_DOUBLINGS, TPOT_DOUBLINGS = (-1.5, 0.5), (-0.6, 0.4)
_START_UP_S = 60.0  # of nobody here


@dataclass(frozen=True, slots=True)
class World:
    """A fleet and its load."""

    name: str
    deployment: Deployment
    rate: Rate
    prompts: Lengths
    outputs: Lengths
    mix: Mix

    def fleet(self, slowness: Mapping[Role, float]) -> Deployment:
        """As it is, which nobody tells the controller; by role."""
        fields = {field.name: getattr(self.deployment, field.name) for field in dataclasses.fields(self.deployment)}
        return _Slowed(**fields, slowness=slowness)


@dataclass(frozen=True, slots=True)
class _Slowed(Deployment):
    """Of GPUs that are slower, or quicker, than their model says."""

    slowness: Mapping[Role, float] = dataclasses.field(default_factory=dict)

    def step_time(self, role: Role = Role.BOTH) -> StepTime:
        return _SlowSteps(Deployment.step_time(self, role), self.slowness[role])


@dataclass(frozen=True, slots=True)
class _SlowSteps:
    """Implements StepTime."""

    times: StepTime
    slowness: float

    def step_s(self, batch: Batch) -> float:
        return self.slowness * self.times.step_s(batch)

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        return self.slowness * self.times.decode_steps_s(num_decodes, context_tokens, num_steps)


@dataclass(frozen=True, slots=True)
class Row:
    """One class in one change."""

    world: str
    change: str
    class_name: str
    before: float | None  # measured, under the targets before it
    predicted: float
    low: float
    high: float
    realised: float
    num_calls: int

    @property
    def is_inside(self) -> bool:
        return self.low <= self.realised <= self.high


class CpuSimulator:
    """In this process, by its own CPU time."""

    async def ask(self, question: Question) -> Answer:
        return answer(question, time.process_time)


def worlds() -> list[World]:
    """Of a 70B on two or four H100 a worker; targets near what each fleet can do, so that changes matter."""
    engine = EngineConfig(max_num_seqs=MAX_NUM_SEQS, prefix_cache=False, max_queued_seqs=sys.maxsize)
    chat, bulk = Lengths(700, 3_000, lognormal=True), Lengths(120, 500, lognormal=True)
    code, short = Lengths(2_000, 7_000, lognormal=True), Lengths(40, 200, lognormal=True)
    loose, tight = SLO("interactive", 800.0, 25.0), SLO("gold", 500.0, 20.0, priority=5)
    two = (replace(loose, ttft_ms=500.0, tpot_ms=18.0), replace(tight, ttft_ms=350.0, tpot_ms=15.0))

    def fleet(layout: Layout, tp: int) -> Deployment:
        return Deployment(layout, model="llama-3.1-70b", tp=tp, engine=engine)

    def mix(*classes: SLO) -> Mix:
        return Mix(classes, (0.7, 0.3)[: len(classes)])

    return [
        World("1 + 1, chat", fleet(Layout(1, 1), 2), Constant(2.6), chat, bulk, mix(loose, tight)),
        World("2 + 1, bursts of code", fleet(Layout(2, 1), 2), Bursts(2.8, 2.0, 20.0, 100.0), code, short, mix(loose)),
        World("2 colocated, chat", fleet(Layout(num_both=2), 2), Constant(4.2), chat, bulk, mix(loose, tight)),
        World("1 + 1 of x 4, swings", fleet(Layout(1, 1), 4), Sinusoid(5.0, 0.3, 200.0), chat, bulk, mix(*two)),
    ]


PERIOD_S = SETTLE_S + WINDOW_S


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one change, before it was made."""

    change: str
    outlook: Outlook
    before: Mapping[str, float | None]


class Trial:
    """One world and its changes."""

    def __init__(self, world: World, num_changes: int, budget_s: float, seed: int) -> None:
        self.unpredicted: list[str] = []
        self._world = world
        self._num_changes = num_changes
        self._seed = seed
        self._rng = random.Random(f"{seed}/{world.name}")
        off = {role: self._rng.lognormvariate(0.0, STEPS_OFF) for role in Role}
        self._telemetry = Telemetry(world.deployment)
        self._simulation = Simulation(
            world.fleet(off), world.mix, seed=seed, on_call=self._on_call, watcher=self._telemetry
        )
        self._forecast = LiveForecast(CpuSimulator(), self._measured, budget_s)
        self._told: dict[int, _Told] = {}  # by change
        self._met: dict[tuple[int, str], list[bool]] = {}  # by change and class

    def run(self) -> list[Row]:
        simulation = self._simulation
        simulation.at(REPORT_S, self._report)
        simulation.at(STEPS_LOOK_S, self._look)
        for number in range(self._num_changes):
            simulation.at(FIRST_S + number * PERIOD_S, partial(self._change, number))
        end_s = FIRST_S + self._num_changes * PERIOD_S
        simulation.run(takewhile(lambda row: row.at_s < end_s, self._calls()))
        return [row for number, told in self._told.items() for row in self._rows(number, told)]

    # The fleet

    def _calls(self) -> Iterator[TraceRow]:
        world, seed = self._world, 1_000 + self._seed
        return synthetic(instants(world.rate, seed), world.prompts, world.outputs, seed)

    def _on_call(self, call: Call) -> None:
        number, since_s = divmod(call.row.at_s - FIRST_S, PERIOD_S)
        if since_s >= SETTLE_S:
            self._met.setdefault((int(number), call.slo.name), []).append(call.verdict is Verdict.MET)

    def _report(self, now_s: float) -> Iterable[Event]:
        self._telemetry.report(self._simulation.router.oldest_queued_s(now_s), now_s)
        return [Event(now_s + REPORT_S, self._report)]

    def _look(self, now_s: float) -> Iterable[Event]:
        self._facts(now_s)
        return [Event(now_s + STEPS_LOOK_S, self._look)]

    def _facts(self, now_s: float) -> FleetFacts:
        simulation = self._simulation
        return self._telemetry.facts(
            simulation.fleet, simulation.router, simulation.mix.classes, Budget(), _START_UP_S, now_s
        )

    # A change

    def _change(self, number: int, now_s: float) -> Iterable[Event]:
        base = self._rng.choice(self._world.mix.classes)
        before = self._simulation.mix.classes
        slo = replace(
            base,
            ttft_ms=base.ttft_ms * 2 ** self._rng.uniform(*TTFT_DOUBLINGS),
            tpot_ms=base.tpot_ms * 2 ** self._rng.uniform(*TPOT_DOUBLINGS),
        )
        after = tuple(slo if known.name == slo.name else known for known in before)
        change = f"{slo.name} {slo.ttft_ms:.0f} ms, {slo.tpot_ms:.1f} ms"
        try:
            outlook = asyncio.run(self._forecast.predict(before, after))
            windows = {w.class_name: w.attainment for w in self._measured().windows if w.window_s == WINDOW_S}
            self._told[number] = _Told(change, outlook, windows)
            self.unpredicted += [
                f"{self._world.name}, {change}, {name}: {why}" for name, why in outlook.unknown.items()
            ]
        except NoForecast as error:
            self.unpredicted.append(f"{self._world.name}, {change}: {error}")
        self._simulation.set_slo(slo)
        return ()

    def _measured(self) -> Measured:
        now_s, measures = self._simulation.clock.now_s, self._telemetry.measures
        models = measures.steps.items()
        return Measured(
            facts=self._facts(now_s),
            windows=measures.view(now_s).classes,
            errors={Role[name.upper()]: model.error for name, model in models if model.error is not None},
            is_settled=True,
        )

    def _rows(self, number: int, told: _Told) -> Iterator[Row]:
        for name, found in told.outlook.classes.items():
            met = self._met.get((number, name), [])
            if met:
                yield Row(
                    self._world.name, told.change, name, told.before.get(name), found.attainment, found.low, found.high,
                    sum(met) / len(met), len(met),
                )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dry_run_figures")
    parser.add_argument("--changes", type=int, default=5, help="of each of the four fleets (%(default)s)")
    parser.add_argument("--fleet", type=int, action="append", choices=range(4), help="only this one; may be repeated")
    parser.add_argument("--cpu-seconds", type=float, default=5.0, help="for each prediction (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    chosen = range(4) if args.fleet is None else args.fleet
    for world in (worlds()[number] for number in chosen):
        trial = Trial(world, args.changes, args.cpu_seconds, args.seed)
        rows += (found := trial.run())
        print("\n".join([*map(_line, found), *trial.unpredicted]), flush=True)
    if not rows:
        return 1
    num_inside = sum(row.is_inside for row in rows)
    widest = max(row.high - row.low for row in rows)
    print(
        f"{num_inside} of {len(rows)} inside ({num_inside / len(rows):.0%}); the widest interval is {100 * widest:.1f} points"
    )
    if args.json:
        args.json.write_text(json.dumps([{**asdict(row), "inside": row.is_inside} for row in rows], indent=2))
    return 0


def _line(row: Row) -> str:
    before = "   -" if row.before is None else f"{row.before:6.1%}"
    return (
        f"{row.world:22} {row.change:30} {row.class_name:12} before {before} predicted {row.predicted:6.1%}"
        f" ({row.low:6.1%} to {row.high:6.1%}) realised {row.realised:6.1%} of {row.num_calls:5}"
        f" {'' if row.is_inside else 'OUTSIDE'}"
    )


if __name__ == "__main__":
    sys.exit(main())
