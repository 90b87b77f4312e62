"""When synthetic calls come, and how long they are. Deterministic: the same seed gives the same calls.

A varying rate is a Poisson process whose candidates come at the highest rate and are kept with probability rate / highest
(thinning: Lewis and Shedler 1979).
"""

from __future__ import annotations

import gzip
import json
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

from bench.traces import MAX_TOKENS, TraceError, TraceRow, csv_rows, reading
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


def servegen(table: Table, lengths: tuple[Shares, Shares], *, scale: float, seed: int) -> Iterator[TraceRow]:
    """Calls at `scale` times the recorded rate, of the recorded lengths, prompts and answers drawn apart; without end."""
    return synthetic(instants(_scaled(table, scale), seed), *lengths, seed)


def mean_rate(table: Table) -> float:
    return sum(table.rates) / len(table.rates)


def _scaled(table: Table, scale: float) -> Table:
    return Table([scale * rate for rate in table.rates], table.step_s)


def read_rates(path: Path) -> Table:
    """t_s, rate_rps.

    Raises:
        TraceError: a row that is not as it should be (it is named).
    """
    times: list[float] = []
    rates: list[float] = []
    with reading(path), path.open(encoding="utf-8") as lines:
        for row in csv_rows(lines):
            times.append(row.instant("t_s", times[-1] if times else None))
            rates.append(row.rate("rate_rps"))
    if len(times) < 2 or not any(rates):
        raise TraceError(f"{path} has no two rows with a rate")
    step_s = times[1] - times[0]
    if not step_s:
        raise TraceError(f"line 3: t_s is {times[1]:g}, as in the row ahead; rows must be some seconds apart")
    for number, (before, after) in enumerate(pairwise(times), 3):
        if not math.isclose(after - before, step_s):
            raise TraceError(f"line {number}: t_s is {after:g}; rows must be {step_s:g} s apart")
    return Table(rates, step_s)


def read_lengths(path: Path) -> tuple[Shares, Shares]:
    """Of prompts and of answers. Raises: TraceError: what is not as it should be (field and length are named)."""
    try:
        with reading(path), gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except ValueError as error:
        raise TraceError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise TraceError(f"{path} holds no lengths: it is not an object")
    return _shares(path, found, "input_tokens"), _shares(path, found, "output_tokens")


def _shares(path: Path, whole: Mapping[str, object], name: str) -> Shares:
    """Lengths below 1 are left out: nobody asks for them."""
    found = whole.get(name)
    if not isinstance(found, dict):
        raise TraceError(f"{path}: {name} is missing")
    pairs = sorted((_length(path, name, text), _share(path, name, text, share)) for text, share in found.items())
    kept = [(length, share) for length, share in pairs if length > 0]
    if not any(share for _, share in kept):
        raise TraceError(f"{path}: {name} has no length with a share")
    return Shares([length for length, _ in kept], list(accumulate(share for _, share in kept)))


def _length(path: Path, name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MAX_TOKENS)) or int(text) > MAX_TOKENS:
        raise TraceError(f"{path}: {name} has the length {text!r:.80}; it must be a whole number up to {MAX_TOKENS:,}")
    return int(text)


def _share(path: Path, name: str, length: str, share: object) -> float:
    if not isinstance(share, int | float) or not 0 <= share < math.inf:
        raise TraceError(f"{path}: {name} of length {length} has the share {share!r:.80}; it must be at least 0")
    return float(share)
