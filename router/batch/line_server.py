"""Runs a batch's lines beside each other: each takes a slot, is a call of the class `batch`, and leaves one Outcome.

A line that is preempted, or fails for want of a worker or of room, takes its turn again; the batch pauses where there was
none. What fails for a reason of ours is tried MAX_TRIES times. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton import clock
from baton.config import BatchConfig
from baton.errors import BatonError, Internal, Overloaded, Unavailable
from baton.log import get_log
from router.asgi import error_body
from router.batch.contents import Contents, Outcome
from router.batch.journal import Journal
from router.batch.lines import Line, answered, refused
from router.batch.records import Batch
from router.batch.slots import Slots
from router.batch.store import BatchStore

log = get_log("router.batch")

MAX_TRIES = 5  # of a line that fails for a reason of ours, each with the router's own retries inside
FIRST_PAUSE_S = 0.2  # of a batch whose lines found no room or no worker
MAX_PAUSE_S = 10.0  # a killed worker answers again after 9 s (DESIGN section 10)


@dataclass(frozen=True, slots=True)
class Answered:
    request_id: str
    body: object  # as the endpoint's JSON


class Answers(Protocol):
    """The normal path of a call, as a line needs it."""

    async def answer(
        self,
        url: str,
        body: Mapping[str, object],
        tenant: str,
        request_id: str,
        timeout_s: float,
        on_first: Callable[[], None],
    ) -> Answered:
        """Tell of the first token. Raises: BatonError, as the endpoint would say it."""
        ...


@dataclass(frozen=True, slots=True)
class Tools:
    """What every run of one router shares."""

    config: BatchConfig
    store: BatchStore
    contents: Contents
    answers: Answers
    slots: Slots
    line_timeout_s: float
    now_unix_s: Callable[[], float]

    @property
    def look_s(self) -> float:
        """How often an owner asks what became of its batch, and renews its lease."""
        return self.config.lease_s / 3


class LineServer:
    """One owner's, of one batch."""

    def __init__(self, tools: Tools, batch: Batch, journal: Journal, must_stop: Callable[[], bool]) -> None:
        self._tools = tools
        self._batch = batch
        self._journal = journal
        self._must_stop = must_stop
        self._again: deque[Line] = deque()  # preempted, or to be tried again
        self._tries: dict[int, int] = {}  # by line, of those that failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_pauses = 0  # in a row
        self._resume_s = 0.0  # monotonic

    async def serve(self, lines: Iterator[Line]) -> None:
        """Returns once each line has its outcome, or `must_stop` says so, or the journal has failed."""
        try:
            while not (self._must_stop() or self._journal.has_failed):
                line = self._again.popleft() if self._again else await asyncio.to_thread(next, lines, None)
                if line is not None:
                    await self._start(line)
                elif self._tasks:  # one of them may have to be run again
                    await asyncio.wait(self._tasks, timeout=self._tools.look_s, return_when=asyncio.FIRST_COMPLETED)
                elif not self._again:
                    return
        finally:
            await self._give_up()

    async def _give_up(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)

    async def _start(self, line: Line) -> None:
        """Wait for a place, then run the line beside the others."""
        await self._journal.room()
        await asyncio.sleep(self._resume_s - clock.now_s())
        try:
            async with asyncio.timeout(self._tools.look_s):
                slot = await self._tools.slots.take()
        except TimeoutError:
            self._again.appendleft(line)
            return
        task = asyncio.create_task(self._run_line(line, slot.began), name=f"{self._batch.id} {line.number}")
        slot.hold(task)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, line))

    def _ended(self, line: Line, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # preempted
            self._again.append(line)

    async def _run_line(self, line: Line, on_first: Callable[[], None]) -> None:
        request_id = f"{self._batch.id}-{line.number}"
        left_s = clock.here_s(self._batch.expires_unix_s - self._tools.now_unix_s())
        timeout_s = min(self._tools.line_timeout_s, max(1.0, left_s))
        try:
            answer = await self._tools.answers.answer(
                line.url, line.body, self._batch.tenant, request_id, timeout_s, on_first
            )
        except BatonError as error:
            if self._may_try_again(line, error):
                self._again.append(line)
                self._pause(error)
            else:
                self._refuse(line, request_id, error)
        except Exception:  # a defect of ours must not end the other lines
            log.exception("line_failed", request_id=request_id)
            self._refuse(line, request_id, Internal("an internal error ended the call"))
        else:
            self._num_pauses = 0
            self._journal.keep(Outcome(line.number, True, answered(line.custom_id, answer.request_id, answer.body)))

    def _refuse(self, line: Line, request_id: str, error: BatonError) -> None:
        self._journal.keep(Outcome(line.number, False, refused(line.custom_id, request_id, error, error_body(error))))

    def _may_try_again(self, line: Line, error: BatonError) -> bool:
        """Want of room or of workers is no fault of the line's; a worker that was lost under it may be."""
        if type(error) in (Overloaded, Unavailable):
            return True
        tries = self._tries[line.number] = self._tries.get(line.number, 0) + 1
        return error.http_status >= 500 and tries < MAX_TRIES

    def _pause(self, error: BatonError) -> None:
        """Start no more for a while; several that fail together are one reason."""
        now_s = clock.now_s()
        if now_s >= self._resume_s:
            doubled_s = FIRST_PAUSE_S * 2 ** min(self._num_pauses, 10)
            self._num_pauses += 1
            self._resume_s = now_s + min(MAX_PAUSE_S, max(error.retry_after_s, doubled_s))
