"""The agentic trace: coding agents' sessions, whose requests repeat most of the one before (kv-cache-tester, JSON lines, gzip).

A session's requests keep their own times; sessions start `gap_s` apart, in the order of the file, where the records of one
session may stand in the middle of another's. So rows must be sorted over the whole file: it is held in memory, ids as integers of
4 bytes and each block once, 60 MB in all.
"""

from __future__ import annotations

import gzip
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.traces import MAX_TOKENS, TraceError, TraceRow, json_rows, reading

BLOCK_TOKENS = 64
SESSION_GAP_S = 300.0  # as bench/flow_back.py: some 25 sessions overlap
_SESSION_IDS = 1 << 17  # ids count from 1 in each session; 42,179 is the highest one


@dataclass(frozen=True, slots=True)
class _Turn:
    at_s: float
    session: int
    input_tokens: int
    output_tokens: int
    num_shared: int  # leading blocks of the session's last request
    rest: array[int]  # the ids behind them


def stream_agentic(path: Path, *, gap_s: float = SESSION_GAP_S) -> Iterator[TraceRow]:
    """Rows in order of arrival.

    Raises:
        TraceError: a row that is not as it should be (it is named).
    """
    with reading(path), gzip.open(path, "rt", encoding="utf-8") as lines:
        turns = sorted(_turns(lines, gap_s), key=lambda turn: turn.at_s)
    return _rows(turns)


def _turns(lines: Iterable[str], gap_s: float) -> Iterator[_Turn]:
    sessions: dict[str, int] = {}
    last_s: dict[str, float] = {}
    for number, row in enumerate(json_rows(lines), 1):
        name = str(row.get("s"))
        session = sessions.setdefault(name, len(sessions))
        last_s[name] = row.instant("t", last_s.get(name))
        ids = row.ids("h")
        if max(ids, default=0) >= _SESSION_IDS:
            raise TraceError(f"line {number}: h has the id {max(ids)}; the limit is {_SESSION_IDS - 1}")
        at_s = session * gap_s + last_s[name]
        output_tokens = max(1, row.tokens("out", least=0))  # 0: broken off before the first token
        num_shared = row.count("p", least=0, most=MAX_TOKENS // BLOCK_TOKENS)
        yield _Turn(at_s, session, row.tokens("in"), output_tokens, num_shared, array("I", ids))


def _rows(turns: Iterable[_Turn]) -> Iterator[TraceRow]:
    """Requests share what the one before really had: 37 of the trace say that it is more."""
    last_ids: dict[int, tuple[int, ...]] = {}
    for turn in turns:
        first = turn.session * _SESSION_IDS
        ids = last_ids.get(turn.session, ())[: turn.num_shared] + tuple(first + one for one in turn.rest)
        last_ids[turn.session] = ids
        yield TraceRow(turn.at_s, turn.input_tokens, turn.output_tokens, ids, BLOCK_TOKENS)
