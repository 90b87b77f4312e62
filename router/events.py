"""What can happen to one sequence, and the inbox in which its owner reads it.

Worker sessions, timers and nobody else put events; `router/handoff.py` takes them out in order. Everything runs on the
router's event loop, so putting never blocks and never fails, also after the reader has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from baton.errors import BatonError
from baton.request import FinishReason, SampledToken
from baton.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class TokenArrived:
    worker: str
    token: SampledToken


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A worker holds nothing of the sequence any more."""

    worker: str
    outcome: worker_pb2.Outcome.ValueType
    finish: FinishReason
    error: BatonError | None
    stats: worker_pb2.SeqStats


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


SequenceEvent = (
    TokenArrived | SequenceEnded | SequenceRefused | WorkerGone | TimeIsUp | HoleIsOld | StatsAreLate | AdoptionIsLate
)


class Inbox:
    """An unbounded queue with one reader; its length is bounded by the sequence's max_tokens."""

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
