"""The traffic that a plan is made for: calls at any mean rate, drawn or recorded, the same for the same seed. Pure.

A rate is always the mean rate of the calls that are played. Recorded calls are a window of neighbours, somewhere else for each
seed, whose gaps keep their proportions: bursts stay bursts. A trace shorter than a window is played again, as other content.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Protocol

from baton.errors import ConfigError
from bench.sim import arrivals, sources
from bench.sim.arrivals import Shares
from bench.traces import TraceError, TraceRow
from bench.workload import Lengths

MAX_ROWS = 500_000  # of a trace that are held: 100 MB, some hours of a large cluster


class Traffic(Protocol):
    @property
    def rate(self) -> float:
        """Calls per second that are wanted of a plan."""
        ...

    @property
    def has_content(self) -> bool:
        """Whether rows tell what prompts have in common."""
        ...

    def at(self, rate: float) -> Traffic:
        """The same calls, so many wanted per second."""
        ...

    def calls(self, rate: float, num_calls: int, seed: int) -> list[TraceRow]: ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """Poisson arrivals of independent lengths."""

    rate: float
    input_tokens: Lengths | Shares
    output_tokens: Lengths | Shares
    has_content: bool = False

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def at(self, rate: float) -> Drawn:
        return replace(self, rate=rate)

    def calls(self, rate: float, num_calls: int, seed: int) -> list[TraceRow]:
        instants = arrivals.instants(arrivals.Constant(rate), seed)
        return list(islice(arrivals.synthetic(instants, self.input_tokens, self.output_tokens, seed), num_calls))


@dataclass(frozen=True, slots=True)
class Seen:
    """Poisson arrivals of calls like those that were seen: (prompt, answer) pairs, drawn with replacement."""

    rate: float
    pairs: Sequence[tuple[int, int]]
    has_content: bool = False

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not self.pairs:
            raise ConfigError("traffic.pairs is empty; the limit is at least 1 call")
        for number, pair in enumerate(self.pairs):
            if min(pair) < 1:
                raise ConfigError(f"traffic.pairs[{number}] is {pair}; lengths are at least 1 token")

    def at(self, rate: float) -> Seen:
        return replace(self, rate=rate)

    def calls(self, rate: float, num_calls: int, seed: int) -> list[TraceRow]:
        rng = random.Random(f"{seed}/pairs")
        instants = islice(arrivals.instants(arrivals.Constant(rate), seed), num_calls)
        return [TraceRow(at_s, *rng.choice(self.pairs)) for at_s in instants]


@dataclass(frozen=True, slots=True)
class Recorded:
    """Rows of a trace, in order."""

    rate: float
    rows: Sequence[TraceRow]

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    @property
    def has_content(self) -> bool:
        return any(row.block_ids for row in self.rows)

    def at(self, rate: float) -> Recorded:
        return replace(self, rate=rate)

    def calls(self, rate: float, num_calls: int, seed: int) -> list[TraceRow]:
        """Raises: TraceError: all of a window's rows come at one instant."""
        num_windows = max(1, len(self.rows) - num_calls + 1)
        start = random.Random(f"{seed}/window").randrange(num_windows)
        window = list(self.rows[start : start + num_calls])
        span_s = window[-1].at_s - window[0].at_s
        if span_s <= 0:
            raise TraceError(f"rows {start + 1} to {start + len(window)} of the trace come at one instant")
        pace = span_s * rate / (len(window) - 1)  # recorded seconds per played one
        again_s, num_ids = len(window) / rate, 1 + max((max(row.block_ids, default=0) for row in window), default=0)
        calls = []
        for number in range(num_calls):
            turn, index = divmod(number, len(window))
            row = window[index]
            at_s = (row.at_s - window[0].at_s) / pace + turn * again_s
            ids = tuple(one + turn * num_ids for one in row.block_ids) if turn else row.block_ids
            calls.append(replace(row, at_s=at_s, block_ids=ids))
        return calls

    def half(self, number: int) -> Recorded:
        """The first (0) or the second half of it: to plan on one and to be judged on the other."""
        middle = len(self.rows) // 2
        return replace(self, rows=self.rows[:middle] if number == 0 else self.rows[middle:])


def recorded(trace: str, *, rate: float | None = None) -> Recorded:
    """Read a trace: azure, mooncake, agentic, or a file. Without a rate: as recorded.

    Raises:
        TraceError: it is not there, too long, or a row is not as it should be (line and field are named).
    """
    rows = list(islice(sources.file_stream(trace)(0), MAX_ROWS + 1))
    if len(rows) > MAX_ROWS:
        raise TraceError(f"trace {trace} has more than {MAX_ROWS} rows, which are too many for a plan")
    if len(rows) < 2 or rows[-1].at_s <= rows[0].at_s:
        raise TraceError(f"trace {trace} has no two rows at different times")
    return Recorded(rate or (len(rows) - 1) / (rows[-1].at_s - rows[0].at_s), rows)


def _check_rate(rate: float) -> None:
    if not 0 < rate < math.inf:
        raise ConfigError(f"traffic.rate is {rate}; it must be a number above 0")


@dataclass(frozen=True, slots=True)
class Load:
    """What screening needs of a traffic: means over a sample."""

    prompt_tokens: float
    computed_tokens: float  # of the prompt, where all that was there before is cached
    output_tokens: float
    held_tokens: float  # of a sequence at a random moment of its decoding
    prompt_cv2: float  # squared coefficient of variation of the computed tokens
    gap_cv2: float  # of the gaps between arrivals
    prompts: Sequence[int]  # some of them


SAMPLE_CALLS = 2_000  # means of lengths to some percent


def load_of(traffic: Traffic, seed: int = 0) -> Load:
    calls = traffic.calls(traffic.rate, SAMPLE_CALLS, seed)
    num, outputs = len(calls), sum(call.output_tokens for call in calls)
    held = sum(call.output_tokens * (call.input_tokens + call.output_tokens / 2) for call in calls)
    computed = _computed(calls)
    gaps = [after.at_s - before.at_s for before, after in pairwise(calls)]
    return Load(
        prompt_tokens=sum(call.input_tokens for call in calls) / num,
        computed_tokens=sum(computed) / num,
        output_tokens=outputs / num,
        held_tokens=held / outputs,
        prompt_cv2=_cv2(computed),
        gap_cv2=_cv2(gaps),
        prompts=sorted(call.input_tokens for call in calls),
    )


def _computed(calls: Sequence[TraceRow]) -> list[float]:
    """Tokens of each prompt that no earlier prompt had, in an endless cache."""
    known: set[int] = set()
    tokens = []
    for call in calls:
        hits = 0
        for block_id in call.block_ids:
            if block_id not in known:
                break
            hits += call.block_tokens
        known.update(call.block_ids)
        tokens.append(float(max(1, call.input_tokens - hits)))
    return tokens


def _cv2(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2
