"""Functions carried out in processes of their own, so many at a time. Owns the processes; `close` ends them, whatever they do.

    do ─ a place free ─▶ Job ─▶ job.py, in an idle process or a new one ─▶ Answer: what it returned, or raised

What a function is told and returns travels by pickle, so functions stand in modules; nothing is shared between them, so what
comes of them does not depend on how many run at a time. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, TypeVarTuple

from bench.child import Child

ANSWER_S = 60.0  # from the first byte of an answer to its last: megabytes between processes of one machine

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Do(Protocol):
    """Carries a function out somewhere."""

    def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class Job:
    function: Callable[..., object]
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """One of both."""

    value: Any = None
    error: Exception | None = None


class Jobs:
    def __init__(self, num: int) -> None:
        self._places = asyncio.Semaphore(num)
        self._children: list[Child] = []
        self._idle: list[Child] = []

    async def do(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Raises: ChildError: its process was killed; and what the function raises."""
        async with self._places:
            child = self._idle.pop() if self._idle else self._start()
            child.tell(Job(function, args))
            await _readable(child)
            answer = child.hear(Answer, ANSWER_S)
            self._idle.append(child)
        if answer.error is not None:
            raise answer.error
        value: T = answer.value
        return value

    def _start(self) -> Child:
        child = Child(f"simulation {len(self._children)}", "bench.control.job")
        self._children.append(child)
        return child

    def close(self) -> None:
        """Idempotent."""
        for child in self._children:
            child.close()


async def _readable(child: Child) -> None:
    """Until it has said something, or is gone."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.fileno(), event.set)
    try:
        await event.wait()
    finally:
        loop.remove_reader(child.fileno())
