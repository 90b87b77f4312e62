"""Questions that only one of the routers can answer, asked of all: why did this request go where it went?

A question goes out with the next ControlState, which is sent at once; each router answers with its next report, which it
sends at once, knowing the request or not. A question ends with its first answer, when every router that lives has answered,
or after ANSWER_S. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.v1 import control_pb2

# A router answers within a turn of its loop; twice its reporting interval finds one that missed the question
ANSWER_S = 2.0


@dataclass(frozen=True, slots=True)
class Answer:
    router_id: str
    json: str


@dataclass(slots=True)
class Question:
    """One that is open."""

    request_id: str
    waiting_for: set[str]  # routers
    answers: list[Answer] = field(default_factory=list)
    _settled: asyncio.Event = field(default_factory=asyncio.Event)

    def answer(self, router_id: str, text: str) -> None:
        self.waiting_for.discard(router_id)
        if text:
            self.answers.append(Answer(router_id, text))
        if self.answers or not self.waiting_for:
            self._settled.set()

    async def wait(self) -> None:
        """Until it is answered, or long enough."""
        if self.waiting_for:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._settled.wait()


class Questions:
    """All that are open."""

    def __init__(self) -> None:
        self._open: list[Question] = []

    @property
    def open_ids(self) -> list[str]:
        return sorted({question.request_id for question in self._open})

    @contextmanager
    def asked(self, request_id: str, routers: set[str]) -> Iterator[Question]:
        """Open until the block is left."""
        question = Question(request_id, set(routers))
        self._open.append(question)
        try:
            yield question
        finally:
            self._open.remove(question)

    def answer(self, router_id: str, explained: Iterable[control_pb2.Explained]) -> None:
        """Take what a router reports."""
        for told in explained:
            for question in self._open:
                if question.request_id == told.request_id:
                    question.answer(router_id, told.json)
