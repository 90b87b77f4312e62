"""One transfer in several parts: a part per pair of ranks, one terminal event for all. For unequal tensor-parallel degrees.

A decode rank may get its heads from several prefill ranks, and a prefill rank give its heads to several decode ranks. Each pair
moves its share under the same seq and generation through a Sender and a Receiver of its own (head_plan.py says which heads,
head_slices.py makes them look like whole blocks); this file joins the ends of these parts. Life of what is joined:

    1 open      no part failed                      -> 2 a part failed, or close
                                                    -> 3 every part ended well
    2 closing   the parts that have not ended were told to close, each once; what they do now changes no outcome
                                                    -> 3 every part ended, either way
    3 ended     exactly one event: from 1 Committed (or OutgoingClosed ""), from 2 closed with the first reason

Every part ends exactly once, in bounded time, as core.py promises of a transfer; so does the whole. While any part may still
write or read the blocks they are not reported closed. Commit is all or nothing: Ack the peers after the joined Committed, not
after a part's, or a sender frees what another part's failure makes it send again. A seq is joined again only after its end.

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
class _Joint:
    generation: int
    open_peers: set[str]  # whose part has not ended
    nbytes: int = 0  # of the parts that are committed
    reason: str | None = None  # why it closes; None: it does not


class _Joined(ABC, Generic[Event]):
    """The life cycle above. `emit` gets the terminal event, `close_part(peer, seq)` is told which part to end."""

    def __init__(self, emit: Callable[[Event], None], close_part: Callable[[str, int], None]) -> None:
        self._emit = emit
        self._close_part = close_part
        self._joints: dict[int, _Joint] = {}  # by seq

    @property
    def num_open(self) -> int:
        return len(self._joints)

    def open(self, seq: int, generation: int, peers: Collection[str]) -> None:
        """Join the parts of `seq` that were opened, or are about to be, towards `peers`."""
        assert seq not in self._joints, "the seq is still joined"
        assert peers, "nothing to join"
        self._joints[seq] = _Joint(generation, set(peers))

    def close(self, seq: int) -> None:
        """End every part; nothing happens where the seq is not open."""
        if seq in self._joints:
            self._fail(seq, self._joints[seq], "")

    def _end_part(self, peer: str, seq: int, nbytes: int, failure: str | None) -> None:
        """Note that a part ended, well where `failure` is None. A part that is not open says nothing."""
        joint = self._joints.get(seq)
        if joint is None or peer not in joint.open_peers:
            return
        joint.open_peers.discard(peer)
        joint.nbytes += nbytes
        if failure is not None:
            self._fail(seq, joint, failure)
        if not joint.open_peers and self._joints.get(seq) is joint:
            del self._joints[seq]
            self._emit(self._terminal_event(seq, joint))

    def _fail(self, seq: int, joint: _Joint, reason: str) -> None:
        if joint.reason is not None:
            return
        joint.reason = reason
        for peer in sorted(joint.open_peers):
            self._close_part(peer, seq)

    @abstractmethod
    def _terminal_event(self, seq: int, joint: _Joint) -> Event: ...


class JoinedTickets(_Joined[Committed | IncomingClosed]):
    """A receiver rank's tickets: committed once the share of every sender rank is."""

    def on_event(self, peer: str, event: Committed | IncomingClosed) -> None:
        """Take what `peer`'s part ended in."""
        match event:
            case Committed(seq, _, nbytes):
                self._end_part(peer, seq, nbytes, None)
            case IncomingClosed(seq, reason):
                self._end_part(peer, seq, 0, reason)

    def _terminal_event(self, seq: int, joint: _Joint) -> Committed | IncomingClosed:
        if joint.reason is None:
            return Committed(seq, joint.generation, joint.nbytes)
        return IncomingClosed(seq, joint.reason)


class JoinedLeases(_Joined[OutgoingClosed]):
    """A sender rank's holds: its blocks may be dropped once no receiver rank's share is read from them any more."""

    def on_event(self, peer: str, event: OutgoingClosed) -> None:
        """Take what `peer`'s part ended in."""
        self._end_part(peer, event.seq, 0, event.reason or None)

    def _terminal_event(self, seq: int, joint: _Joint) -> OutgoingClosed:
        return OutgoingClosed(seq, joint.reason or "")
