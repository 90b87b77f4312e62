"""Real arrival traces, read row by row and scaled to the context of the model under test. Pure but for reading the files.

Formats: mooncake JSONL (timestamp ms, input_length, output_length, hash_ids of 512-token blocks), Azure's CSV (TIMESTAMP,
ContextTokens, GeneratedTokens), and what bench/agentic.py and bench/servegen.py read. Mooncake's stamps sit on a grid of about
3,000 ms; each group is spread over its 3 s by seeded uniform draws, which is what Poisson arrivals look like inside a window of
known count. Lengths are scaled by ONE factor for the whole trace, so the mix of long and short calls stays as recorded.

Readers hold one row (mooncake: one group) at a time, and refuse a row with a field that is missing, no number, out of bounds or
out of order, naming line and field. Whoever must not stop halfway reads once before it begins (bench/sim/sources.py).
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512  # tokens per hash id; Mooncake, FAST25-release/traces
MOONCAKE_GRID_MS = 3_000  # spacing of its timestamps
MAX_TOKENS = 10_000_000  # of a prompt or an answer: the longest context of any public model (Llama 4 Scout)
MAX_PAUSE_S = 7 * 86_400.0  # between two rows: a clock that jumped; the longest of the public traces is 21.6 h
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
    with reading(path), path.open(encoding="utf-8") as lines:
        yield from readers[path.suffix](lines, seed)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raises: TraceError: what is inside cannot be read."""
    try:
        yield
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise TraceError(f"trace {path} cannot be read: {error}") from error


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
    last_ms = None
    for row in json_rows(lines):
        last_ms = row.instant("timestamp", last_ms, unit_s=1e-3)
        yield TraceRow(last_ms, row.tokens("input_length"), row.tokens("output_length"), row.ids("hash_ids"))


def read_azure(lines: Iterable[str], _seed: int) -> Iterator[TraceRow]:
    first_s = last_s = None
    for row in csv_rows(lines):
        last_s = row.date("TIMESTAMP", last_s)
        first_s = last_s if first_s is None else first_s
        yield TraceRow(last_s - first_s, row.tokens("ContextTokens"), row.tokens("GeneratedTokens"))


def json_rows(lines: Iterable[str]) -> Iterator[Fields]:
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise TraceError(f"line {number} is no row: it is not an object")
        yield Fields(number, found)


def csv_rows(lines: Iterable[str]) -> Iterator[Fields]:
    """Behind a line that names the columns."""
    reader = csv.DictReader(lines)
    try:
        for found in reader:
            if None in found:
                raise TraceError(f"line {reader.line_num} has more fields than there are columns")
            yield Fields(reader.line_num, found)
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num} is no CSV row: {error}") from error


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

    def tokens(self, name: str, *, least: int = 1) -> int:
        return self.count(name, least=least, most=MAX_TOKENS)

    def count(self, name: str, *, least: int, most: int) -> int:
        value = self.number(name)
        if value != int(value) or not least <= value <= most:
            raise self._refused(name, f"{value:g}; it must be a whole number from {least} to {most:,}")
        return int(value)

    def rate(self, name: str) -> float:
        value = self.number(name)
        if value < 0:
            raise self._refused(name, f"{value:g}; it must be at least 0")
        return value

    def instant(self, name: str, last: float | None, *, unit_s: float = 1.0) -> float:
        """`last`: that of the row ahead, None for the first one."""
        value = self.rate(name)
        if last is not None:
            self._check_order(name, value, unit_s * (value - last), f"{last:g}")
        return value

    def date(self, name: str, last_s: float | None) -> float:
        """Seconds since 1970."""
        stamp = str(self.get(name))
        try:
            at_s = datetime.fromisoformat(stamp[:26]).replace(tzinfo=UTC).timestamp()  # 7 decimals; datetime takes 6
        except ValueError as error:
            raise self._refused(name, f"{stamp!r}; it must be a date and a time") from error
        if last_s is not None:
            self._check_order(name, stamp, at_s - last_s, "that of the row ahead")
        return at_s

    def _check_order(self, name: str, value: object, pause_s: float, last: str) -> None:
        shown = f"{value:g}" if isinstance(value, float) else f"{value}"
        if pause_s < 0:
            raise self._refused(name, f"{shown}, before {last}; rows must be in order")
        if pause_s > MAX_PAUSE_S:
            raise self._refused(name, f"{shown}, {pause_s:g} s after {last}; the limit is {MAX_PAUSE_S:g} s")

    def ids(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise TraceError(f"line {self._number}: {name} must be a list of whole numbers of at least 0")
        return tuple(value)

    def number(self, name: str) -> float:
        value = self.get(name)
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._refused(name, f"{value!r:.80}; it must be a number")
        return number

    def _refused(self, name: str, why: str) -> TraceError:
        return TraceError(f"line {self._number}: {name} is {why}")


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
