"""What a call tells its client, who may hear it as it happens, and the outbox in which it waits for those who cannot.

The sequences put, one writer takes. A writer that keeps up gets one token at a time. One that is more than HIGH_WATER events
behind gets them merged, all of a choice at once, so that catching up costs few writes; one that leaves more than `limit_bytes`
waiting is too slow, which `put` says. Text, tokens and their order within a choice are the same however they are taken.
Event loop only; putting never blocks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError
from baton.request import FinishReason, Logprobs, SampledToken
from baton.timings import Timings
from router.detokenizer import TextStream

HIGH_WATER = 16  # events; writing that many takes 0.3 ms (DESIGN section 8), less than one decode step
MAX_MERGED = 1_024  # events per take: with 20 logprobs each, 0.7 MB on the wire, below gRPC's limit for one message
PIECE_BYTES = 300  # of a Piece with its token and text; measured with tracemalloc on CPython 3.11: 294
TOP_LOGPROB_BYTES = 80  # more per top entry; measured likewise


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text it made certain; `token` is None for text released at the end."""

    choice: int
    text: str
    token: SampledToken | None


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of one choice, in order, to be sent together: one, or more to a client that is behind."""

    choice: int
    parts: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.parts)

    @property
    def tokens(self) -> list[SampledToken]:
        return [piece.token for piece in self.parts if piece.token is not None]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    choice: int
    finish: FinishReason
    stop_match: str  # "" = no stop string


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. The prompt counts once whatever n is; cached ones come from the prefill worker's prefix lookup
    for choice 0: that the other choices find the prompt there is no saving of the caller's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CallDone:
    usage: Usage
    timings: Timings


CallEvent = Pieces | ChoiceFinished | CallDone
Queued = Piece | ChoiceFinished | CallDone | BatonError
Taken = Pieces | ChoiceFinished | CallDone | BatonError


class ChoiceSink(Protocol):
    """Hears one choice, from within the worker's message: never blocks, never awaits."""

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        """Take the next token; returns True when the answer is complete for the router's reasons (a stop string)."""
        ...

    def end(self, finish: FinishReason) -> None:
        """The sequence has ended well, and so has its text, as far as the sink has not said so itself."""
        ...


class Audience(Protocol):
    """Hears a call while it happens."""

    def choice(self, choice: int, text: TextStream) -> ChoiceSink:
        """Called once for each choice, before its first token; `text` is the sink's to push."""
        ...


class PieceSink:
    """Turns one choice's tokens into Pieces, for whoever has no faster way."""

    def __init__(self, choice: int, text: TextStream, put: Callable[[Piece | ChoiceFinished], None]) -> None:
        self._choice = choice
        self._text = text
        self._put = put

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        text = self._text.push(token_id, finish)
        self._put(Piece(self._choice, text, SampledToken(0, index, token_id, finish, logprobs)))
        return self._text.stop_match is not None

    def end(self, finish: FinishReason) -> None:
        if tail := self._text.finish(cut=finish is FinishReason.LENGTH):
            self._put(Piece(self._choice, tail, None))
        self._put(ChoiceFinished(self._choice, finish, self._text.stop_match or ""))


class Outbox:
    """One call's events between its sequences and its writer."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._events: deque[Queued] = deque()
        self._num_bytes = 0
        self._arrived = asyncio.Event()

    def put(self, event: Queued) -> bool:
        """Returns False when more waits than may."""
        self._events.append(event)
        self._num_bytes += memory_bytes(event)
        self._arrived.set()
        return self._num_bytes <= self._limit_bytes

    async def take(self) -> list[Taken]:
        """The next event, or, for a writer that is behind, the next many, merged."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        num_taken = 1 if len(self._events) <= HIGH_WATER else min(len(self._events), MAX_MERGED)
        return merged(self._pop() for _ in range(num_taken))

    def _pop(self) -> Queued:
        event = self._events.popleft()
        self._num_bytes -= memory_bytes(event)
        return event


def merged(events: Iterable[Queued]) -> list[Taken]:
    """All of a choice's Pieces together, between other events. Pure."""
    result: list[Taken] = []
    waiting: dict[int, list[Piece]] = {}
    for event in events:
        if isinstance(event, Piece):
            waiting.setdefault(event.choice, []).append(event)
        else:
            result += _flushed(waiting)
            result.append(event)
    return result + _flushed(waiting)


def _flushed(waiting: dict[int, list[Piece]]) -> list[Taken]:
    flushed: list[Taken] = [Pieces(choice, tuple(parts)) for choice, parts in waiting.items()]
    waiting.clear()
    return flushed


def memory_bytes(event: Queued) -> int:
    """Bytes of memory, about."""
    if not isinstance(event, Piece) or event.token is None or event.token.logprobs is None:
        return PIECE_BYTES
    return PIECE_BYTES + TOP_LOGPROB_BYTES * len(event.token.logprobs.top_ids)
