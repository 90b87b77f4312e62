"""Real arrival traces, read into rows and scaled to the context of the model under test. Pure but for reading the file.

Formats: mooncake JSONL (timestamp ms, input_length, output_length, hash_ids of 512-token blocks) and Azure's CSV
(TIMESTAMP, ContextTokens, GeneratedTokens). Mooncake's stamps sit on a grid of about 3,000 ms; each group is spread over its
3 s by seeded uniform draws, which is what Poisson arrivals look like inside a window of known count.
Lengths are scaled by ONE factor for the whole trace, so the mix of long and short calls stays as recorded.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512  # tokens per hash id; Mooncake, FAST25-release/traces
MOONCAKE_GRID_MS = 3_000  # spacing of its timestamps


class TraceError(Exception):
    """The trace cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float  # from the first row
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # chained prefix blocks; equal ids = equal content
    block_tokens: int = MOONCAKE_BLOCK_TOKENS  # of each


def load_trace(path: Path, *, seed: int) -> list[TraceRow]:
    """Read a trace, in order of arrival.

    Raises:
        TraceError: no such file, an unknown format, or a row that does not parse (it is named).
    """
    if not path.is_file():
        raise TraceError(f"trace {path} is not there; get it from its public source (Mooncake or AzurePublicDataset)")
    readers = {".jsonl": parse_mooncake, ".csv": parse_azure}
    if path.suffix not in readers:
        raise TraceError(f"trace {path} is neither .jsonl (mooncake) nor .csv (azure)")
    with path.open(encoding="utf-8") as lines:
        rows = readers[path.suffix](lines, seed)
    if not rows:
        raise TraceError(f"trace {path} has no rows")
    return rows


def parse_mooncake(lines: Iterable[str], seed: int) -> list[TraceRow]:
    rng = random.Random(f"{seed}/trace")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            at_s = (row["timestamp"] + rng.uniform(0, MOONCAKE_GRID_MS)) / 1e3
            ids = tuple(row["hash_ids"])
            rows.append(TraceRow(at_s, row["input_length"], row["output_length"], ids))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"line {number} is no mooncake row: {error!r}") from error
    return from_zero(rows)


def parse_azure(lines: Iterable[str], _seed: int) -> list[TraceRow]:
    rows = []
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # 7 decimals; datetime takes 6
            at_s = stamp.replace(tzinfo=UTC).timestamp()
            rows.append(TraceRow(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(f"line {number} is no azure row: {error!r}") from error
    return from_zero(rows)


def from_zero(rows: Sequence[TraceRow]) -> list[TraceRow]:
    ordered = sorted(rows, key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - ordered[0].at_s) for row in ordered]


@dataclass(frozen=True, slots=True)
class ScaledTrace:
    rows: list[TraceRow]
    factor: float  # what every length was multiplied by
    block_tokens: int  # tokens per block id after scaling


def scale(rows: Sequence[TraceRow], *, max_context_tokens: int, speed: float = 1.0) -> ScaledTrace:
    """Shrink lengths so that the longest row fits `max_context_tokens` (0 = as recorded), and play `speed` times as fast."""
    longest = max(row.input_tokens + row.output_tokens for row in rows)
    room = max_context_tokens - 2  # rounding up may add one token to each of the two lengths
    factor = min(1.0, room / longest) if max_context_tokens else 1.0
    scaled = [
        TraceRow(
            at_s=row.at_s / speed,
            input_tokens=max(1, round(row.input_tokens * factor)),
            output_tokens=max(1, round(row.output_tokens * factor)),
            block_ids=row.block_ids,
        )
        for row in rows
    ]
    return ScaledTrace(scaled, factor, max(1, math.ceil(MOONCAKE_BLOCK_TOKENS * factor)))
