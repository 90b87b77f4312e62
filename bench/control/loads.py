"""The loads that sizes have to follow, and what goes wrong meanwhile. Pure: the same seed gives the same calls.

Loads travel to other processes (jobs.py), so their rows are partials of functions of this module, not closures.

A load is streams of calls, each of one kind at a rate of its own, played together; or a recorded trace, thinned and stretched so
that a small fleet has work: every k-th call is kept, k times as long, which leaves the tokens that arrive per second as recorded.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, takewhile

from baton.request import Role
from bench.control.rig import CHAT
from bench.sim import arrivals
from bench.sim.control import Faults, Kill, Retarget
from bench.sim.sources import AGENTIC, AZURE, MOONCAKE, SERVEGEN, file_stream
from bench.sim.telemetry import Outage
from bench.traces import TraceRow, find_trace
from bench.workload import Lengths

Rows = Callable[[int], Iterator[TraceRow]]  # by seed, in order


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that are alike; lengths vary little, so that what a load needs is known and its swings are what is measured."""

    prompts: Lengths
    answers: Lengths


# GPU-seconds of a call (rig.Costs): a document 2.9 of prefill and 0.5 of decode, an essay 0.3 and 2.1
DOCUMENT = Kind(Lengths(28_000, 36_000), Lengths(80, 120))
ESSAY = Kind(Lengths(4_000, 6_000), Lengths(1_600, 2_400))


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    goal: str
    rows: Rows
    duration_s: float
    max_workers: int  # the GPU budget
    drifts: bool = False  # so no static layout can be best
    start: float = 1.0  # times the best static size
    faults: Faults = field(default_factory=Faults)
    retargets: tuple[Retarget, ...] = ()
    events_s: tuple[float, ...] = ()  # when the load itself changed, and attainment should come back after
    caches: bool = False  # prompts begin alike, and it is told with what
    judge_from_s: float = 60.0  # calls before that do not count: the fleet begins empty


# -- streams -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stream:
    kind: Kind
    rate: arrivals.Rate


def mixed(*streams: Stream) -> Rows:
    """Played together."""

    return partial(_merged, streams)


def _merged(streams: Sequence[Stream], seed: int) -> Iterator[TraceRow]:
    each = [_stream(stream, f"{seed}/{number}") for number, stream in enumerate(streams)]
    return heapq.merge(*each, key=lambda row: row.at_s)


def _stream(stream: Stream, seed: str) -> Iterator[TraceRow]:
    rng = random.Random(f"{seed}/lengths")
    for at_s in arrivals.instants(stream.rate, random.Random(seed).getrandbits(32)):
        yield TraceRow(at_s, stream.kind.prompts.sample(rng), stream.kind.answers.sample(rng))


def until(rows: Rows, duration_s: float) -> Rows:
    return partial(_before, rows, duration_s)


def _before(rows: Rows, end_s: float, seed: int) -> Iterator[TraceRow]:
    return takewhile(lambda row: row.at_s < end_s, rows(seed))


@dataclass(frozen=True, slots=True)
class Step:
    """Another rate from some instant on."""

    before: float
    after: float
    at_s: float

    @property
    def highest(self) -> float:
        return max(self.before, self.after)

    def at(self, at_s: float) -> float:
        return self.before if at_s < self.at_s else self.after


@dataclass(frozen=True, slots=True)
class Paused:
    """A rate with a hole: nothing comes from `from_s` to `until_s`."""

    rate: arrivals.Rate
    from_s: float
    until_s: float

    @property
    def highest(self) -> float:
        return self.rate.highest

    def at(self, at_s: float) -> float:
        return 0.0 if self.from_s <= at_s < self.until_s else self.rate.at(at_s)


# -- traces ------------------------------------------------------------------------------------------------------------


def traced(name: str) -> Rows:
    """Read only when it is played. Raises (then): TraceError."""
    return partial(_recorded_rows, name)


def _recorded_rows(name: str, seed: int) -> Iterator[TraceRow]:
    return file_stream(str(find_trace(name)))(seed)


def stretched(rows: Rows, *, every: int, speed: float) -> Rows:
    """Every so-many-th call, so many times as long, played faster; the seed says which ones are kept."""

    return partial(_stretch, rows, every, speed)


def _stretch(rows: Rows, every: int, speed: float, seed: int) -> Iterator[TraceRow]:
    for row in islice(rows(seed), seed % every, None, every):
        factor = min(every, LONGEST_TOKENS / (row.input_tokens + row.output_tokens))
        yield TraceRow(row.at_s / speed, math.ceil(row.input_tokens * factor), math.ceil(row.output_tokens * factor))


def shrunk(rows: Rows, *, by: int, speed: float) -> Rows:
    """All calls, with all lengths divided, those of what prompts have in common, too; the seed moves the beginning."""

    return partial(_shrink, rows, by, speed)


def _shrink(rows: Rows, by: int, speed: float, seed: int) -> Iterator[TraceRow]:
    first_s: float | None = None
    for row in islice(rows(seed), AGENTIC_SKIPPED * (1 + seed % AGENTIC_BEGINNINGS), None):
        first_s = row.at_s if first_s is None else first_s
        yield replace(
            row,
            at_s=(row.at_s - first_s) / speed,
            input_tokens=math.ceil(row.input_tokens / by),
            output_tokens=math.ceil(row.output_tokens / by),
            block_tokens=row.block_tokens // by,
        )


def served_day(*, mean_rate: float, duration_s: float) -> Rows:
    """ServeGen's day of deepseek-r1 within so many seconds. Raises (when played): TraceError."""
    return partial(_served_day, mean_rate, duration_s)


def _served_day(mean_rate: float, duration_s: float, seed: int) -> Iterator[TraceRow]:
    rates, lengths = map(find_trace, SERVEGEN)
    day = arrivals.read_rates(rates)
    quick = arrivals.Table(day.rates, duration_s / len(day.rates))
    return arrivals.servegen(
        quick, arrivals.read_lengths(lengths), scale=mean_rate / arrivals.mean_rate(day), seed=seed
    )


# -- what is measured --------------------------------------------------------------------------------------------------

LONGEST_TOKENS = 48_000  # of a recorded call once stretched: a prompt whose own prefill takes half the TTFT target
AGENTIC_SKIPPED = 400  # rows by which seeds differ: some 40 minutes of the record
AGENTIC_BEGINNINGS = 100  # so that 9,000 rows are left behind the last of them
MIX_PERIOD_S = 900.0
BURST_S, BURST_PERIOD_S = 60.0, 600.0
HOUR_S = 3_600.0
LEAST_S = 900.0  # of a run, however short runs are made: a start-up, and some minutes of what follows
TIGHT_TPOT_MS = 14.0  # at which a worker keeps ten essays instead of sixteen
TIGHT_GPUS = (
    16  # with which that target can be met: 3 + 9 static workers keep it for 89 % of the calls, 3 + 12 for 97 %
)

# 3 + 3 workers busy at 68 %: 2 + 3 or 3 + 2 would be over 100 %
STEADY = (0.62, 0.82)  # documents and essays a second


def catalogue(length: float = 1.0) -> tuple[Load, ...]:
    """Every load there is. `length`: of the runs, 1 = as told in docs/control.md."""

    def lasts(load: Load) -> Load:
        duration_s = max(LEAST_S, length * load.duration_s)
        return replace(load, rows=until(load.rows, duration_s), duration_s=duration_s)

    return tuple(lasts(load) for load in (*_constant(), *_drifting(), *_recorded(), _targets(), *_faulty()))


def _constant() -> Iterator[Load]:
    goal = "settles within 3 start-up times, then no reversal for 2 h; GPUs within 10 % of the oracle"
    for name, start in (("constant from half", 0.5), ("constant from double", 2.0)):
        yield Load(name, goal, _pair(*STEADY), 2 * HOUR_S + 600.0, 14, start=start)


def _drifting() -> Iterator[Load]:
    documents, essays = (1.64, 0.06), (0.085, 2.15)  # 4.7 and 0.85 GPUs of prefill, 0.85 and 4.7 of decode
    swing = mixed(
        Stream(DOCUMENT, arrivals.Table(documents, MIX_PERIOD_S)), Stream(ESSAY, arrivals.Table(essays, MIX_PERIOD_S))
    )
    yield Load("mix swings", "at least 90 % in SLO", swing, HOUR_S, 8, drifts=True)
    hourly = mixed(
        Stream(DOCUMENT, arrivals.Sinusoid(0.70, 0.6, HOUR_S)), Stream(ESSAY, arrivals.Sinusoid(0.95, 0.6, HOUR_S))
    )
    goal = "at least 90 % in SLO with fewer GPU-hours than the static peak"
    yield Load("rate swings", goal, hourly, HOUR_S, 12, drifts=True)
    bursts = mixed(
        Stream(DOCUMENT, arrivals.Bursts(0.5, 4.0, BURST_S, BURST_PERIOD_S)), Stream(ESSAY, arrivals.Constant(0.95))
    )
    yield Load("prefill bursts", "at least 90 % in SLO", bursts, 2_400.0, 12, drifts=True)


def _recorded() -> Iterator[Load]:
    goal = "beside each baseline and the oracle"
    mooncake = stretched(traced(MOONCAKE), every=2, speed=1.0)
    yield Load("mooncake conversation", goal, mooncake, 1_800.0, 14, drifts=True)
    azure = stretched(traced(AZURE), every=8, speed=2.0)
    yield Load("azure conv", goal, azure, 1_740.0, 12, drifts=True)
    agentic = shrunk(traced(AGENTIC), by=4, speed=16.0)
    yield Load("agentic", goal, agentic, 1_500.0, 14, drifts=True, caches=True)
    day = served_day(mean_rate=1.8, duration_s=HOUR_S)
    yield Load("servegen day", goal, day, HOUR_S, 14, drifts=True)


def _targets() -> Load:
    changes = (Retarget(600.0, replace(CHAT, tpot_ms=TIGHT_TPOT_MS)), Retarget(1_500.0, CHAT))
    goal = "new target met within 3 ticks and a start-up"
    return Load("SLO changes", goal, _pair(*STEADY), 2_400.0, TIGHT_GPUS, retargets=changes)


def _faulty() -> Iterator[Load]:
    goal = "no flapping, no stuck pool, back to target"
    steady = _pair(*STEADY)
    dies = Faults(kills=(Kill(300.0, Role.DECODE), Kill(600.0, Role.PREFILL)), restarts=False)
    yield Load("worker dies", goal, steady, 1_200.0, 12, faults=dies)
    # a step of half as much again, for which the first pod asked for does not come
    steps = _pair(*STEADY, then=(1.5 * STEADY[0], 1.5 * STEADY[1]), at_s=300.0)
    yield Load("pod stays pending", goal, steps, 1_200.0, 12, faults=Faults(num_stuck=1), events_s=(300.0,))
    yield Load("metrics lost", goal, steady, 1_200.0, 12, faults=Faults(outages=(Outage(300.0, 600.0),)))
    yield Load("NaN", goal, steady, 1_200.0, 12, faults=Faults(outages=(Outage(300.0, 600.0, as_nan=True),)))
    yield Load("traffic stops", goal, _pair(*STEADY, hole=(300.0, 1_200.0)), 1_800.0, 12, events_s=(1_200.0,))
    yield Load("cold start", goal, steady, 1_200.0, 12, start=0.0, events_s=(60.0,))


def _pair(
    documents: float,
    essays: float,
    *,
    then: tuple[float, float] | None = None,
    at_s: float = 0.0,
    hole: tuple[float, float] = (0.0, 0.0),
) -> Rows:
    """Documents and essays; other rates from `at_s` on, and none in the hole."""
    later = then or (documents, essays)
    return mixed(
        *(
            Stream(kind, Paused(Step(before, after, at_s), *hole))
            for kind, before, after in zip((DOCUMENT, ESSAY), (documents, essays), later, strict=True)
        )
    )
