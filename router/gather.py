"""Tokens of one call or many, gathered between two writes of one gRPC stream.

A sink appends to its own small lists from within the worker's message, without a task switch; the writer takes all that came
since its last write, one Group per choice. So a writer that waits a while, by its own will or because the client reads slowly,
has fewer and larger messages to write, and no token costs more for it. What waits is bounded: beyond `max_bytes` the gatherer
says once that its client is stuck. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from baton.request import FinishReason, Logprobs
from router.call_events import PIECE_BYTES, TOP_LOGPROB_BYTES, ChoiceFinished
from router.detokenizer import TextStream


class Group(NamedTuple):  # of the cheap kind: one per token where each comes alone
    """A run of one choice's tokens, and the text that they made certain; text alone at the end of some answers."""

    call: int
    choice: int
    first_index: int  # output index of the first token; of no tokens, of the one that would come next
    token_ids: list[int]
    text: str
    logprobs: list[Logprobs]  # empty, or one per token


class Gatherer:
    """What waits for one writer."""

    def __init__(self, max_bytes: int, on_stuck: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._on_stuck = on_stuck
        self._dirty: list[_Sink] = []
        self._num_bytes = 0
        self._arrived = asyncio.Event()
        self._closed = asyncio.Event()

    def audience(self, call: int = 0) -> Listening:
        """Whoever is to hear a call; its tokens come out under this number."""
        return Listening(self, call)

    def close(self) -> None:
        """Nothing more will come: the writer need not wait for it."""
        self._closed.set()
        self._arrived.set()

    @property
    def closed(self) -> bool:
        """What is taken from now on is the rest."""
        return self._closed.is_set()

    def wake(self) -> None:
        """There is something to write besides tokens."""
        self._arrived.set()

    async def wait(self, max_flush_s: float) -> None:
        """Return `max_flush_s` after something has come, or when nothing more will."""
        await self._arrived.wait()
        if max_flush_s and not self._closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max_flush_s):
                    await self._closed.wait()
        self._arrived.clear()

    def take(self) -> list[Group]:
        dirty, self._dirty, self._num_bytes = self._dirty, [], 0
        return [sink.take() for sink in dirty]

    def add(self, sink: _Sink) -> None:
        """`sink` has something, for the first time since it was taken from."""
        self._dirty.append(sink)
        self._arrived.set()

    def grow(self, nbytes: int) -> None:
        before, self._num_bytes = self._num_bytes, self._num_bytes + nbytes
        if before <= self._max_bytes < self._num_bytes:
            self._on_stuck()


class Listening:
    """The Audience of one call; `ends` is complete when the call is."""

    def __init__(self, gatherer: Gatherer, call: int) -> None:
        self.ends: list[ChoiceFinished] = []
        self._gatherer = gatherer
        self._call = call

    def choice(self, choice: int, text: TextStream) -> _Sink:
        return _Sink(self._gatherer, self, self._call, choice, text)


class _Sink:
    """One choice; a ChoiceSink."""

    __slots__ = (
        "_call",
        "_choice",
        "_gatherer",
        "_index",
        "_listening",
        "_logprobs",
        "_next",
        "_text",
        "_texts",
        "_token_ids",
    )

    def __init__(self, gatherer: Gatherer, listening: Listening, call: int, choice: int, text: TextStream) -> None:
        self._gatherer = gatherer
        self._listening = listening
        self._call = call
        self._choice = choice
        self._text = text
        self._index = self._next = 0  # of the first token that waits; of the next one to come
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        if not self._token_ids:
            self._index = index
            self._gatherer.add(self)
        self._next = index + 1
        self._token_ids.append(token_id)
        self._texts.append(self._text.push(token_id, finish))
        if logprobs is None:
            self._gatherer.grow(PIECE_BYTES)
        else:
            self._logprobs.append(logprobs)
            self._gatherer.grow(PIECE_BYTES + TOP_LOGPROB_BYTES * len(logprobs.top_ids))
        return self._text.stop_match is not None

    def end(self, finish: FinishReason) -> None:
        if tail := self._text.finish(cut=finish is FinishReason.LENGTH):
            if not self._token_ids:
                self._index = self._next
                self._gatherer.add(self)
            self._texts.append(tail)
        self._listening.ends.append(ChoiceFinished(self._choice, finish, self._text.stop_match or ""))

    def take(self) -> Group:
        group = Group(self._call, self._choice, self._index, self._token_ids, "".join(self._texts), self._logprobs)
        self._token_ids, self._texts = [], []
        if self._logprobs:
            self._logprobs = []
        return group
