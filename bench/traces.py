"""Real arrival traces, read row by row and scaled to the context of the model under test. Pure but for reading the files.

Formats: mooncake JSONL (timestamp ms, input_length, output_length, hash_ids of 512-token blocks), Azure's CSV (TIMESTAMP,
ContextTokens, GeneratedTokens), and what bench/agentic.py and bench/servegen.py read. Mooncake's stamps sit on a grid of about
3,000 ms; each group is spread over its 3 s by seeded uniform draws, which is what Poisson arrivals look like inside a window of
known count. Lengths are scaled by ONE factor for the whole trace, so the mix of long and short calls stays as recorded.

Readers hold one row (mooncake: one group) at a time, and refuse a row with a field that is missing, negative or out of order.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512  # tokens per hash id; Mooncake, FAST25-release/traces
MOONCAKE_GRID_MS = 3_000  # spacing of its timestamps
FOLDER_VARIABLE = "BATON_TRACES"
_REPOSITORY = Path(__file__).parents[1]


class TraceError(Exception):
    """The trace cannot be read; the message says what to do."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    at_s: float  # from the first row
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()  # chained prefix blocks; equal ids = equal content
    block_tokens: int = MOONCAKE_BLOCK_TOKENS  # of each


def find_trace(name: str) -> Path:
    """A file of the folder of public traces.

    Raises:
        TraceError: it is not there.
    """
    folders = (os.environ.get(FOLDER_VARIABLE, ""), _REPOSITORY / "shared/traces", _REPOSITORY.parent / "shared/traces")
    for folder in folders:
        if folder and (path := Path(folder) / name).is_file():
            return path
    raise TraceError(f"the public trace {name} is not here; point {FOLDER_VARIABLE} at a folder that holds it")


# -- rows --------------------------------------------------------------------------------------------------------------


def load_trace(path: Path, *, seed: int) -> list[TraceRow]:
    """Read a whole trace, in order of arrival.

    Raises:
        TraceError: no such file, an unknown format, no rows, or a row that is not as it should be (it is named).
    """
    rows = list(stream_trace(path, seed=seed))
    if not rows:
        raise TraceError(f"trace {path} has no rows")
    return rows


def stream_trace(path: Path, *, seed: int) -> Iterator[TraceRow]:
    """`load_trace`, a row at a time."""
    if not path.is_file():
        raise TraceError(f"trace {path} is not there; get it from its public source (Mooncake or AzurePublicDataset)")
    readers = {".jsonl": read_mooncake, ".csv": read_azure}
    if path.suffix not in readers:
        raise TraceError(f"trace {path} is neither .jsonl (mooncake) nor .csv (azure)")
    with path.open(encoding="utf-8") as lines:
        yield from readers[path.suffix](lines, seed)


def parse_mooncake(lines: Iterable[str], seed: int) -> list[TraceRow]:
    return list(read_mooncake(lines, seed))


def parse_azure(lines: Iterable[str], seed: int) -> list[TraceRow]:
    return list(read_azure(lines, seed))


def read_mooncake(lines: Iterable[str], seed: int) -> Iterator[TraceRow]:
    """Each group is spread over its 3 s, or up to the next one where that comes sooner."""
    rng = random.Random(f"{seed}/trace")
    groups = (list(group) for _, group in groupby(_mooncake_rows(lines), key=lambda row: row.at_s))
    first_s, group = None, next(groups, None)
    while group is not None:
        later = next(groups, None)
        stamp_ms = group[0].at_s
        width_ms = min(MOONCAKE_GRID_MS, later[0].at_s - stamp_ms) if later else MOONCAKE_GRID_MS
        times_s = sorted((stamp_ms + rng.uniform(0, width_ms)) / 1e3 for _ in group)
        first_s = times_s[0] if first_s is None else first_s
        for row, at_s in zip(group, times_s, strict=True):
            yield replace(row, at_s=at_s - first_s)
        group = later


def _mooncake_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    """`at_s` is the stamp as it stands, ms."""
    last_ms = 0.0
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number} is no mooncake row: {error}") from error
        if not isinstance(found, dict):
            raise TraceError(f"line {number} is no mooncake row: it is not an object")
        row = Fields(number, found)
        last_ms = row.instant("timestamp", last_ms)
        yield TraceRow(last_ms, row.count("input_length"), row.count("output_length"), row.ids("hash_ids"))


def read_azure(lines: Iterable[str], _seed: int) -> Iterator[TraceRow]:
    first_s = last_s = None
    for number, found in enumerate(csv.DictReader(lines), 2):
        row = Fields(number, found)
        stamp = str(row.get("TIMESTAMP"))
        try:
            at_s = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC).timestamp()  # 7 decimals; datetime takes 6
        except ValueError as error:
            raise TraceError(f"line {number}: TIMESTAMP is {stamp!r}; it must be a date and a time") from error
        if last_s is not None and at_s < last_s:
            raise TraceError(
                f"line {number}: TIMESTAMP is {stamp}, before that of the row ahead; rows must be in order"
            )
        last_s, first_s = at_s, at_s if first_s is None else first_s
        yield TraceRow(at_s - first_s, row.count("ContextTokens"), row.count("GeneratedTokens"))


class Fields:
    """One row's fields, checked as they are asked for; errors name row and field."""

    def __init__(self, number: int, found: Mapping[str, object]) -> None:
        self._number = number
        self._found = found

    def get(self, name: str) -> object:
        value = self._found.get(name)
        if value is None or value == "":
            raise TraceError(f"line {self._number}: {name} is missing")
        return value

    def count(self, name: str, *, least: int = 1) -> int:
        value = self._number_of(name)
        if value != int(value) or value < least:
            raise TraceError(f"line {self._number}: {name} is {value:g}; it must be a whole number of at least {least}")
        return int(value)

    def instant(self, name: str, last: float) -> float:
        value = self._number_of(name)
        if value < 0:
            raise TraceError(f"line {self._number}: {name} is {value:g}; it must be at least 0")
        if value < last:
            raise TraceError(f"line {self._number}: {name} is {value:g}, before {last:g}; rows must be in order")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise TraceError(f"line {self._number}: {name} must be a list of whole numbers of at least 0")
        return tuple(value)

    def _number_of(self, name: str) -> float:
        value = self.get(name)
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise TraceError(f"line {self._number}: {name} is {value!r}; it must be a number")
        return number


# -- scale -------------------------------------------------------------------------------------------------------------


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
