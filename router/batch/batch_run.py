"""One batch, from the lease to its end: states 1 to 4 of records.py.

    1 the lines are counted and their endpoint compared; what former owners finished is read from their journals
    2 each other line takes a slot, is a call of the class `batch`, and leaves an Outcome in this owner's journal;
      one that is preempted, or fails for want of a worker or of room, takes its turn again
    3 the journals become an output and an error file, and with the files' rows the batch's last state is written at once

Nothing is decided from memory alone: whoever takes over finds in the store and the journals all that was done. A lost lease
ends the run at once, without a word. Event loop only; the disk is a thread's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from baton import clock
from baton.log import get_log
from router.batch.journal import Journal, counted
from router.batch.line_server import LineServer, Tools
from router.batch.lines import BadLine, Line, not_run, parse_line
from router.batch.records import OUTPUT, Batch, Counts, FileInfo, LineFault, Status, new_id
from router.batch.store import Lease

log = get_log("router.batch")


class BatchRun:
    """This router's work on one batch."""

    def __init__(self, tools: Tools, lease: Lease, batch: Batch) -> None:
        self._tools = tools
        self._lease = lease
        self._batch = batch
        self._done: set[int] = set()  # numbers of finished lines
        self._counts = batch.counts
        self._journal: Journal | None = None
        self._ends_as = Status.COMPLETED

    async def run(self) -> None:
        """Raises: LeaseLost; OSError, Unavailable: disk or database fail, and somebody may try again later."""
        log.info("batch_taken", batch_id=self._batch.id, status=self._batch.status, generation=self._lease.generation)
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(self._keep_lease())
            await self._work()
            renewing.cancel()

    async def _work(self) -> None:
        if self._batch.status is Status.VALIDATING and (faults := await asyncio.to_thread(self._validate)):
            await self._end_failed(faults)
            return
        await asyncio.to_thread(self._recall)
        if self._batch.status in (Status.VALIDATING, Status.IN_PROGRESS):
            await self._change(lambda batch: _enter(batch, Status.IN_PROGRESS, self._now_s(), self._counts))
            await self._serve_lines()
        await self._finish()

    # -- 1 -----------------------------------------------------------------------------------------------------------

    def _validate(self) -> list[LineFault]:
        """Count the lines; an empty list: they fit."""
        total = 0
        for number, text in self._tools.contents.lines(self._batch.input_file_id):
            try:
                line = parse_line(number, text)
                if line.url != self._batch.endpoint:
                    raise BadLine(number, "url", f"url is {line.url}; the limit is the batch's endpoint")
            except BadLine as error:
                return [LineFault(error.number, error.message, error.param)]
            total += 1
        self._counts = Counts(total)
        return []

    def _recall(self) -> None:
        """What former owners finished."""
        counts = Counts(self._counts.total)
        for outcome in self._tools.contents.outcomes(self._batch.id):
            self._done.add(outcome.line)
            counts = counted(counts, outcome)
        self._counts = counts

    async def _end_failed(self, faults: Sequence[LineFault]) -> None:
        def fail(batch: Batch) -> Batch:
            return replace(batch.enter(Status.FAILED, self._now_s()), faults=tuple(faults))

        self._batch = await asyncio.to_thread(self._tools.store.finish, self._lease, (), fail)
        log.info("batch_failed", batch_id=self._batch.id, line=faults[0].line, param=faults[0].param)

    # -- 2 -----------------------------------------------------------------------------------------------------------

    async def _serve_lines(self) -> None:
        contents, lease = self._tools.contents, self._lease
        self._journal = await Journal.open(contents, lease.batch_id, lease.generation, self._counts)
        try:
            await LineServer(self._tools, self._batch, self._journal, self._must_stop).serve(self._lines())
        finally:
            await self._journal.close()
            self._counts = self._journal.counts

    def _must_stop(self) -> bool:
        """Cancelled, or its time is over."""
        return self._batch.status is Status.CANCELLING or self._is_late()

    def _is_late(self) -> bool:
        return self._now_s() >= self._batch.expires_unix_s

    def _lines(self) -> Iterator[Line]:
        """Those that nobody finished."""
        for number, text in self._tools.contents.lines(self._batch.input_file_id):
            if number not in self._done:
                yield parse_line(number, text)

    # -- 3 -----------------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self._batch = await self._change(self._enter_last)
        output, errors = new_id("file"), new_id("file")
        outputs, counts = await asyncio.to_thread(self._write_files, output, errors)

        def end(batch: Batch) -> Batch:
            ids = {info.id for info in outputs}
            ended = batch.enter(self._ends_as, self._now_s())
            return replace(
                ended,
                counts=counts,
                output_file_id=output if output in ids else None,
                error_file_id=errors if errors in ids else None,
            )

        self._batch = await asyncio.to_thread(self._tools.store.finish, self._lease, outputs, end)
        await asyncio.to_thread(self._tools.contents.drop_journals, self._batch.id)
        log.info(
            "batch_ended",
            batch_id=self._batch.id,
            status=self._batch.status,
            completed=counts.completed,
            failed=counts.failed,
        )

    def _enter_last(self, batch: Batch) -> Batch:
        """Finalizing, unless it was cancelled or is late: what it ends as depends on it."""
        if batch.status is Status.CANCELLING:
            self._ends_as = Status.CANCELLED
            return replace(batch, counts=self._counts)
        complete = self._counts.completed + self._counts.failed >= self._counts.total
        self._ends_as = Status.COMPLETED if complete else Status.EXPIRED
        return _enter(batch, Status.FINALIZING, self._now_s(), self._counts)

    def _write_files(self, output_id: str, error_id: str) -> tuple[list[FileInfo], Counts]:
        """Returns those that are not empty, and what they hold."""
        contents, counts, seen = self._tools.contents, Counts(), set[int]()
        with contents.new(output_id) as output, contents.new(error_id) as errors:
            for outcome in contents.outcomes(self._batch.id):
                (output if outcome.succeeded else errors).write(outcome.text + b"\n")
                counts = counted(counts, outcome)
                seen.add(outcome.line)
            for number, text in contents.lines(self._batch.input_file_id):
                counts = replace(counts, total=counts.total + 1)
                if number not in seen:
                    errors.write(self._not_run(parse_line(number, text)) + b"\n")
                    counts = replace(counts, failed=counts.failed + 1)
        infos = [self._info(output_id, "output"), self._info(error_id, "errors")]
        for info in infos:
            if not info.num_bytes:
                contents.drop(info.id)
        return [info for info in infos if info.num_bytes], counts

    def _not_run(self, line: Line) -> bytes:
        if self._ends_as is Status.CANCELLED:
            return not_run(line.custom_id, "batch_cancelled", "the batch was cancelled before this line was run")
        return not_run(line.custom_id, "batch_expired", "the completion window was over before this line was run")

    def _info(self, file_id: str, what: str) -> FileInfo:
        now_s = self._now_s()
        return FileInfo(
            id=file_id,
            tenant=self._batch.tenant,
            purpose=OUTPUT,
            filename=f"{self._batch.id}_{what}.jsonl",
            num_bytes=self._tools.contents.path(file_id).stat().st_size,
            created_unix_s=now_s,
            expires_unix_s=now_s + self._tools.config.keep_s,
        )

    # -- the lease ---------------------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        """Raises: LeaseLost, also where the store could not be asked for so long that somebody else may have it."""
        while True:
            await asyncio.sleep(self._tools.look_s)
            counts = self._journal.counts if self._journal is not None else self._counts
            await self._change(partial(_with_counts, counts))

    async def _change(self, step: Callable[[Batch], Batch]) -> Batch:
        until_s = self._now_s() + clock.real_s(self._tools.config.lease_s)
        self._batch = await asyncio.to_thread(self._tools.store.change, self._lease, until_s, step)
        return self._batch

    def _now_s(self) -> float:
        return self._tools.now_unix_s()


def _with_counts(counts: Counts, batch: Batch) -> Batch:
    """A renewal that the database does behind the batch's end leaves the last counts alone."""
    return replace(batch, counts=counts) if batch.is_open else batch


def _enter(batch: Batch, status: Status, now_unix_s: float, counts: Counts) -> Batch:
    """Unless it is to be cancelled."""
    if batch.status is not Status.CANCELLING:
        batch = batch.enter(status, now_unix_s)
    return replace(batch, counts=counts)
