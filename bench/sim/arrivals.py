"""When synthetic calls come, and how long they are. Deterministic: the same seed gives the same calls.

A varying rate is a Poisson process whose candidates come at the highest rate and are kept with probability rate / highest
(thinning: Lewis and Shedler 1979).
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

from bench.traces import Fields, TraceError, TraceRow
from bench.workload import Lengths


class Rate(Protocol):
    """Calls per second over time."""

    @property
    def highest(self) -> float: ...

    def at(self, at_s: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Constant:
    rate: float

    @property
    def highest(self) -> float:
        return self.rate

    def at(self, at_s: float) -> float:
        return self.rate


@dataclass(frozen=True, slots=True)
class Sinusoid:
    """Swings around the mean, from it upwards."""

    mean: float
    swing: float  # share of the mean, in [0, 1]
    period_s: float

    @property
    def highest(self) -> float:
        return self.mean * (1 + self.swing)

    def at(self, at_s: float) -> float:
        return self.mean * (1 + self.swing * math.sin(2 * math.pi * at_s / self.period_s))


@dataclass(frozen=True, slots=True)
class Bursts:
    """`factor` times the usual rate in the last `burst_s` of each period; the mean over a period is `mean`."""

    mean: float
    factor: float
    burst_s: float
    period_s: float

    @property
    def usual(self) -> float:
        return self.mean * self.period_s / (self.period_s + (self.factor - 1) * self.burst_s)

    @property
    def highest(self) -> float:
        return self.usual * max(1.0, self.factor)

    def at(self, at_s: float) -> float:
        return self.usual * (self.factor if at_s % self.period_s >= self.period_s - self.burst_s else 1.0)


@dataclass(frozen=True, slots=True)
class Table:
    """Constant between instants that are `step_s` apart; over and over again."""

    rates: Sequence[float]
    step_s: float

    @property
    def highest(self) -> float:
        return max(self.rates)

    def at(self, at_s: float) -> float:
        return self.rates[int(at_s / self.step_s) % len(self.rates)]


@dataclass(frozen=True, slots=True)
class Shares:
    """A recorded distribution of lengths."""

    lengths: Sequence[int]
    sums: Sequence[float]  # of shares, up to each length

    def sample(self, rng: random.Random) -> int:
        return self.lengths[bisect_left(self.sums, rng.random() * self.sums[-1])]


def instants(rate: Rate, seed: int) -> Iterator[float]:
    rng = random.Random(f"{seed}/arrivals")
    at_s, highest = 0.0, rate.highest
    while True:
        at_s += rng.expovariate(highest)
        if rng.random() * highest < rate.at(at_s):
            yield at_s


def evenly(rate: float) -> Iterator[float]:
    number = 0
    while True:
        yield number / rate
        number += 1


def synthetic(
    times_s: Iterator[float], inputs: Lengths | Shares, outputs: Lengths | Shares, seed: int
) -> Iterator[TraceRow]:
    """Calls without end."""
    rng = random.Random(f"{seed}/lengths")
    for at_s in times_s:
        yield TraceRow(at_s, inputs.sample(rng), outputs.sample(rng))


# -- servegen ----------------------------------------------------------------------------------------------------------


def servegen(rates: Path, lengths: Path, *, scale: float, seed: int) -> Iterator[TraceRow]:
    """Calls at `scale` times the recorded rate, of the recorded lengths, prompts and answers drawn apart; without end.

    Raises:
        TraceError: a row that is not as it should be (it is named).
    """
    table = read_rates(rates)
    return synthetic(instants(_scaled(table, scale), seed), *read_lengths(lengths), seed)


def mean_rate(table: Table) -> float:
    return sum(table.rates) / len(table.rates)


def _scaled(table: Table, scale: float) -> Table:
    return Table([scale * rate for rate in table.rates], table.step_s)


def read_rates(path: Path) -> Table:
    """t_s, rate_rps."""
    times: list[float] = []
    rates: list[float] = []
    with path.open(encoding="utf-8") as lines:
        for number, found in enumerate(csv.DictReader(lines), 2):
            row = Fields(number, found)
            times.append(row.instant("t_s", times[-1] if times else 0.0))
            rates.append(row.instant("rate_rps", 0.0))
    if len(times) < 2 or not any(rates):
        raise TraceError(f"{path} has no two rows with a rate")
    step_s = times[1] - times[0]
    for number, (before, after) in enumerate(pairwise(times), 3):
        if not math.isclose(after - before, step_s):
            raise TraceError(f"line {number}: t_s is {after:g}; rows must be {step_s:g} s apart")
    return Table(rates, step_s)


def read_lengths(path: Path) -> tuple[Shares, Shares]:
    """Of prompts and of answers."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        return _shares(found["input_tokens"]), _shares(found["output_tokens"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} holds no lengths: {error!r}") from error


def _shares(found: dict[str, float]) -> Shares:
    pairs = sorted((int(length), float(share)) for length, share in found.items() if int(length) > 0)
    if not pairs or any(share < 0 for _, share in pairs):
        raise ValueError("no lengths, or a negative share")
    return Shares([length for length, _ in pairs], list(accumulate(share for _, share in pairs)))
