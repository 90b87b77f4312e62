"""What can happen to one sequence, and how its owner hears of it.

Tokens, of which there are tens of thousands a second, are handed over in a plain call (`Listener.on_token`), from the Session's
reader down to the client's socket, without an object or a task switch of their own. All else is rare: it is an event in the
`Inbox`, which `router/handoff.py` reads in order, in straight-line code. Everything runs on the router's event loop, so
neither ever blocks or fails, also after the reader has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError
from baton.request import FinishReason, Logprobs
from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class AnswerIsWhole:
    """The last token has come, or the sink wants no more."""


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A worker holds nothing of the sequence any more."""

    worker: str
    outcome: worker_pb2.Outcome.ValueType
    finish: FinishReason
    error: BatonError | None
    stats: worker_pb2.SeqStats
    reroute: int = 0  # of prefill: serial of the last Reroute it obeyed


@dataclass(frozen=True, slots=True)
class SequenceRefused:
    """A worker never took the sequence."""

    worker: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The Session to a worker is lost, and with it everything the worker held for this router."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimeIsUp:
    """The call's deadline passed."""


@dataclass(frozen=True, slots=True)
class HoleIsOld:
    """Output `index` was missing when the timer was set."""

    index: int


@dataclass(frozen=True, slots=True)
class StatsAreLate:
    """The answer is whole, but its last `Ended` has not come."""


@dataclass(frozen=True, slots=True)
class AdoptionIsLate:
    """The prefill worker failed after the first token, and decode has said nothing since."""


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A worker flagged a token as the last of a cancelled sequence, or said one that there is not."""

    worker: str
    error: BatonError


@dataclass(frozen=True, slots=True)
class SinkBroke:
    """Our own side of the answer failed on a token."""


@dataclass(frozen=True, slots=True)
class HandoffLost:
    """Prefill cannot hand over to the decode worker it was given, but has what it computed."""

    error: BatonError
    reroute: int  # serial of the Reroute that named the worker, 0 = Submit did


SequenceEvent = (
    AnswerIsWhole
    | SequenceEnded
    | SequenceRefused
    | WorkerGone
    | TimeIsUp
    | HoleIsOld
    | StatsAreLate
    | AdoptionIsLate
    | GaveUp
    | SinkBroke
    | HandoffLost
)


class Listener(Protocol):
    """Hears all that one worker says of one sequence."""

    def on_token(
        self, worker: str, index: int, token_id: int, finish: int, logprobs: Logprobs | None, now_s: float
    ) -> None:
        """Take output `index`. `finish` is a FinishReason, 0 while the sequence goes on; `now_s` monotonic, of the Step."""
        ...

    def put(self, event: SequenceEvent) -> None: ...


class Inbox:
    """A queue with one reader; a sequence has a handful of events in its life."""

    def __init__(self) -> None:
        self._events: deque[SequenceEvent] = deque()
        self._arrived = asyncio.Event()

    def put(self, event: SequenceEvent) -> None:
        self._events.append(event)
        self._arrived.set()

    async def get(self) -> SequenceEvent:
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.popleft()
