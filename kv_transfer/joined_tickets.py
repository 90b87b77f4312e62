"""One transfer in several parts: a part per pair of ranks, one terminal event for all. For unequal tensor-parallel degrees.

A decode rank may get its heads from several prefill ranks, and a prefill rank give its heads to several decode ranks. Each pair
moves its share as a transfer with a seq of its own (head_plan.py says which heads, head_slices.py makes them look like whole
blocks); here the ends of these parts are joined, over one rank or over all ranks that share a block table. Life of a whole:

    1 open      no part failed                      -> 2 a part failed, or close
                                                    -> 3 every part ended well
    2 closing   the parts that have not ended were told to close, each once; what they do now changes no outcome
                                                    -> 3 every part ended, either way
    3 ended     exactly one event: from 1 Committed (or OutgoingClosed ""), from 2 closed with the first reason

Every part ends exactly once, in bounded time, as core.py promises of a transfer; so does the whole, and not while any part may
still write or read the blocks. Commit is all or nothing: Ack the peers after the joined Committed, not after a part's, or a
sender frees what another part's failure makes it send again. A seq, of a whole or of a part, is used again only after its end.

Pure: no thread, clock or socket. Runs where the events of the parts arrive. `close_part` may deliver a part's end at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_transfer.events import Committed, IncomingClosed, OutgoingClosed

Event = TypeVar("Event")


@dataclass(slots=True)
class _Whole:
    seq: int
    generation: int
    open_parts: set[int]  # seqs of the parts that have not ended
    nbytes: int = 0  # of the parts that are committed
    reason: str | None = None  # why it closes; None: it does not


class _Joined(ABC, Generic[Event]):
    """The life cycle above. `emit` gets the terminal event, `close_part(seq of the part)` is told what to end."""

    def __init__(self, emit: Callable[[Event], None], close_part: Callable[[int], None]) -> None:
        self._emit = emit
        self._close_part = close_part
        self._wholes: dict[int, _Whole] = {}  # by seq
        self._by_part: dict[int, _Whole] = {}  # by seq of a part that has not ended

    @property
    def num_open(self) -> int:
        return len(self._wholes)

    def open(self, seq: int, generation: int, parts: Collection[int]) -> None:
        """Join transfers that were opened, or are about to be."""
        assert seq not in self._wholes, "the seq is still joined"
        assert parts, "nothing to join"
        assert not self._by_part.keys() & set(parts), "a part is still open"
        self._wholes[seq] = whole = _Whole(seq, generation, set(parts))
        self._by_part |= dict.fromkeys(parts, whole)

    def close(self, seq: int) -> None:
        """End every part; nothing happens where the seq is not open."""
        if seq in self._wholes:
            self._fail(self._wholes[seq], "")

    def _end_part(self, part: int, nbytes: int, failure: str | None) -> None:
        """Note that a part ended, well where `failure` is None. A part that is not open says nothing."""
        whole = self._by_part.pop(part, None)
        if whole is None:
            return
        whole.open_parts.discard(part)
        whole.nbytes += nbytes
        if failure is not None:
            self._fail(whole, failure)
        if not whole.open_parts and self._wholes.get(whole.seq) is whole:
            del self._wholes[whole.seq]
            self._emit(self._terminal_event(whole))

    def _fail(self, whole: _Whole, reason: str) -> None:
        if whole.reason is not None:
            return
        whole.reason = reason
        for part in sorted(whole.open_parts):
            self._close_part(part)

    @abstractmethod
    def _terminal_event(self, whole: _Whole) -> Event: ...


class JoinedTickets(_Joined[Committed | IncomingClosed]):
    """A receiver's tickets: committed once every share is."""

    def on_event(self, event: Committed | IncomingClosed) -> None:
        """Take what a part ended in."""
        match event:
            case Committed(part, _, nbytes):
                self._end_part(part, nbytes, None)
            case IncomingClosed(part, reason):
                self._end_part(part, 0, reason)

    def _terminal_event(self, whole: _Whole) -> Committed | IncomingClosed:
        if whole.reason is None:
            return Committed(whole.seq, whole.generation, whole.nbytes)
        return IncomingClosed(whole.seq, whole.reason)


class JoinedLeases(_Joined[OutgoingClosed]):
    """A sender's holds: its blocks may be dropped once no share is read from them any more."""

    def on_event(self, event: OutgoingClosed) -> None:
        """Take what a part ended in."""
        self._end_part(event.seq, 0, event.reason or None)

    def _terminal_event(self, whole: _Whole) -> OutgoingClosed:
        return OutgoingClosed(whole.seq, whole.reason or "")
