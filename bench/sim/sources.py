"""Where the calls of a simulation come from: a named trace, a file, or drawn ones; faster or slower, and as often as wanted.

Rows are never held: a trace that is played several times is read as often. What has content (block ids) comes back as other
conversations each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from bench.agentic import stream_agentic
from bench.sim import arrivals
from bench.traces import TraceError, TraceRow, find_trace, stream_trace

MOONCAKE = "mooncake/conversation_trace.jsonl"
AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"
AGENTIC = "agentic/agentic_coding.jsonl.gz"
SERVEGEN = ("servegen/deepseek-r1_total_rate.csv", "servegen/deepseek-r1_length_pdf.json.gz")
NAMES = ("azure", "mooncake", "agentic", "servegen", "synthetic")
_MAX_ID = 1 << 31  # of a block: ids become tokens, which are hashed as u32 (bench/sim/call.py)

Stream = Callable[[int], Iterator[TraceRow]]  # by seed


@dataclass(frozen=True, slots=True)
class Span:
    """Of one pass over a trace."""

    num_rows: int
    length_s: float
    num_ids: int
    has_content: bool

    @property
    def rate(self) -> float:
        return self.num_rows / self.length_s


@dataclass(frozen=True, slots=True)
class Source:
    """Calls by seed, and how many there will be."""

    stream: Stream
    num_calls: int
    has_content: bool


def file_stream(trace: str) -> Stream:
    """Raises: TraceError: it is not there."""
    path = Path(trace)
    if trace in ("azure", "mooncake", "agentic"):
        path = find_trace({"azure": AZURE, "mooncake": MOONCAKE, "agentic": AGENTIC}[trace])
    if path.suffix == ".gz":
        return lambda _seed: stream_agentic(path)
    return lambda seed: stream_trace(path, seed=seed)


def trace_source(trace: str, *, rate: float | None, speed: float, num_calls: int | None) -> Source:
    """Play a trace; `rate`: calls per second on average, in place of `speed` times the recorded rate.

    Raises:
        TraceError: it is not there, or a row is not as it should be (it is named).
    """
    stream = file_stream(trace)
    span = _span(stream(0), num_calls)
    if rate is not None:
        speed = rate / span.rate
    num_calls = num_calls or span.num_rows
    if -(-num_calls // span.num_rows) * span.num_ids >= _MAX_ID:
        most = _MAX_ID // span.num_ids * span.num_rows
        raise TraceError(f"trace {trace}: {num_calls} calls are more than it can be repeated for; the limit is {most}")
    return Source(partial(_played, stream, span, speed, num_calls), num_calls, span.has_content)


def servegen_source(*, rate: float | None, speed: float, num_calls: int) -> Source:
    """Raises: TraceError: it is not there, or a row is not as it should be (it is named)."""
    rates, pdf = map(find_trace, SERVEGEN)
    table, lengths = arrivals.read_rates(rates), arrivals.read_lengths(pdf)  # before anything runs
    if rate is not None:
        speed = rate / arrivals.mean_rate(table)

    def stream(seed: int) -> Iterator[TraceRow]:
        return islice(arrivals.servegen(table, lengths, scale=speed, seed=seed), num_calls)

    return Source(stream, num_calls, has_content=False)


def _span(rows: Iterator[TraceRow], num_calls: int | None) -> Span:
    """Look at all of it, so that a bad row is named before anything runs; its mean rate is that of what will be played."""
    num_rows, last_s, num_ids, has_content = 0, 0.0, 0, False
    for row in rows:
        num_rows += 1
        last_s = row.at_s
        has_content = has_content or bool(row.block_ids)
        num_ids = max(num_ids, 1 + max(row.block_ids, default=0))
        if num_rows == num_calls:
            break
    if num_rows < 2 or last_s <= 0:
        raise TraceError("the trace has no two rows at different times")
    return Span(num_rows, last_s * num_rows / (num_rows - 1), num_ids, has_content)


def _played(stream: Stream, span: Span, speed: float, num_calls: int, seed: int) -> Iterator[TraceRow]:
    played = 0
    while played < num_calls:
        turn = played // span.num_rows
        for row in islice(stream(seed), min(span.num_rows, num_calls - played)):
            ids = tuple(block_id + turn * span.num_ids for block_id in row.block_ids) if turn else row.block_ids
            at_s = (row.at_s + turn * span.length_s) / speed
            yield TraceRow(at_s, row.input_tokens, row.output_tokens, ids, row.block_tokens)
            played += 1
