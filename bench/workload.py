"""What is asked and when. Pure and deterministic: the same seed gives the same calls, whatever order they run in.

Call i draws all it needs (lengths, content, sampling seed, cancel) from a generator of its own, seeded by (seed, i). Prompts are
token ids; a target that takes only text gets one common word per id (`words_for`). Arrival times are seconds from the start of
the load; a closed loop has none.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.traces import TraceRow

Z_95 = 1.6448536269514722  # the standard normal's 95th percentile
# Ids that are ordinary tokens in most vocabularies: specials sit at the low end (SmolLM2: 0-16) or above 32,000 (Llama 2's size).
SAFE_VOCABULARY = range(256, 32_000)
NUM_SHARED_PREFIXES = 4  # as many system prompts as a small team has; more of them only lowers the hit rate
SHARED_PART = 0.5  # of a prompt, where it starts with a shared prefix


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, tokens: fixed (low == high), uniform [low, high], or lognormal by its p50 and p95."""

    low: int  # the p50 of a lognormal
    high: int  # the p95 of a lognormal
    lognormal: bool = False

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read "256", "64:512" or "lognormal:200,900".

        Raises:
            ValueError: anything else, a length below 1, or a descending pair.
        """
        lognormal = text.startswith("lognormal:")
        body = text.removeprefix("lognormal:").removeprefix("uniform:").removeprefix("fixed:")
        try:
            parts = [int(part) for part in body.split("," if lognormal else ":")]
        except ValueError:
            parts = []
        if len(parts) not in ((2,) if lognormal else (1, 2)) or parts[0] < 1 or parts[-1] < parts[0]:
            raise ValueError(f"{text!r} is not a length: give N, LOW:HIGH or lognormal:P50,P95, each at least 1")
        return cls(parts[0], parts[-1], lognormal)

    def __str__(self) -> str:
        """As `parse` reads it."""
        if self.lognormal:
            return f"lognormal:{self.low},{self.high}"
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"

    def sample(self, rng: random.Random) -> int:
        if not self.lognormal:
            return rng.randint(self.low, self.high)
        sigma = math.log(self.high / self.low) / Z_95
        return max(1, round(self.low * math.exp(sigma * rng.gauss(0, 1))))


@dataclass(frozen=True, slots=True)
class PlannedCall:
    index: int
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int  # for sampling
    at_s: float = 0.0  # when it is due, from the start of the load; no meaning in a closed loop
    cancel_after_tokens: int | None = None  # the client leaves then; 0 = before the first token


@dataclass(frozen=True, slots=True)
class Workload:
    """Synthetic calls."""

    seed: int
    input_lengths: Lengths
    output_lengths: Lengths
    shared_prefix_ratio: float = 0.0  # share of calls that start with one of NUM_SHARED_PREFIXES common prefixes
    cancel_ratio: float = 0.0
    vocabulary: range = SAFE_VOCABULARY
    max_context_tokens: int = 0  # prompt + answer; longer draws are cut to it. 0 = no limit

    def call(self, index: int, at_s: float = 0.0) -> PlannedCall:
        rng = random.Random(f"{self.seed}/{index}")
        num_input, num_output = self._fit(self.input_lengths.sample(rng), self.output_lengths.sample(rng))
        prefix: tuple[int, ...] = ()
        if rng.random() < self.shared_prefix_ratio:
            stream = random.Random(f"{self.seed}/prefix/{rng.randrange(NUM_SHARED_PREFIXES)}")
            prefix = draw_ids(stream, self.vocabulary, int(num_input * SHARED_PART))
        return PlannedCall(
            index=index,
            token_ids=prefix + draw_ids(rng, self.vocabulary, num_input - len(prefix)),
            max_tokens=num_output,
            seed=rng.getrandbits(32),
            at_s=at_s,
            cancel_after_tokens=draw_cancel(rng, self.cancel_ratio, num_output),
        )

    def calls(self, arrivals: Iterator[float] | None = None) -> Iterator[PlannedCall]:
        """Calls without end; due at `arrivals`, or for a closed loop."""
        times = itertools.repeat(0.0) if arrivals is None else arrivals
        return (self.call(index, at_s) for index, at_s in enumerate(times))

    def _fit(self, num_input: int, num_output: int) -> tuple[int, int]:
        if not self.max_context_tokens:
            return num_input, num_output
        num_output = min(num_output, self.max_context_tokens - 1)
        return min(num_input, self.max_context_tokens - num_output), num_output


def draw_ids(rng: random.Random, vocabulary: range, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(vocabulary, k=count))


def draw_cancel(rng: random.Random, ratio: float, num_output: int) -> int | None:
    return rng.randrange(num_output) if rng.random() < ratio else None


def poisson_arrivals(rate_per_s: float, seed: int) -> Iterator[float]:
    """Exponential gaps, the first arrival after one of them."""
    rng = random.Random(f"{seed}/arrivals")
    return itertools.accumulate(rng.expovariate(rate_per_s) for _ in itertools.count())


def uniform_arrivals(rate_per_s: float) -> Iterator[float]:
    return (index / rate_per_s for index in itertools.count())


def trace_calls(
    rows: Sequence[TraceRow], block_tokens: int, *, seed: int, vocabulary: range, cancel_ratio: float = 0.0
) -> Iterator[PlannedCall]:
    """Replay a trace. Equal block ids become equal tokens, so prompts share exactly the prefixes that the trace shares.

    Rows without block ids (azure) get content of their own.
    """
    for index, row in enumerate(rows):
        rng = random.Random(f"{seed}/{index}")
        if row.block_ids:
            blocks = (draw_ids(random.Random(f"{seed}/block/{i}"), vocabulary, block_tokens) for i in row.block_ids)
            token_ids = tuple(itertools.chain.from_iterable(blocks))[: row.input_tokens]
        else:
            token_ids = draw_ids(rng, vocabulary, row.input_tokens)
        yield PlannedCall(
            index=index,
            token_ids=token_ids,
            max_tokens=row.output_tokens,
            seed=rng.getrandbits(32),
            at_s=row.at_s,
            cancel_after_tokens=draw_cancel(rng, cancel_ratio, row.output_tokens),
        )


def limited(calls: Iterator[PlannedCall], num_requests: int | None, duration_s: float | None) -> Iterator[PlannedCall]:
    """Stop after `num_requests` calls or at the first one due after `duration_s`, whichever comes first."""
    if duration_s is not None:
        limit_s = duration_s
        calls = itertools.takewhile(lambda call: call.at_s <= limit_s, calls)
    return itertools.islice(calls, num_requests)


# Common English words that most byte-pair vocabularies hold whole with their leading space: one id becomes about one token.
COMMON_WORDS = """
the of and to in is was for that with as on by at from are this be have an which one you were all her she there would
their we him been has when who will no more if out so said what up its about into than them can only other new some
time could these two may then do first any my now such like our over man me even most made after also did many before
must through years where much your way well down should because each just those people how too little state good very
make world still own see men work long here get both between life being under never day same another know while last
might us great old year off come since against go came right used take three
"""
WORDS = COMMON_WORDS.split()


def words_for(token_ids: Sequence[int]) -> str:
    """Text of about len(token_ids) tokens; equal ids give equal words, so shared prefixes stay shared."""
    return " ".join(WORDS[token % len(WORDS)] for token in token_ids)
