"""One owner's journal of one batch, written in groups: an outcome counts once it is on the disk. Event loop, the disk in threads.

journal = await Journal.open(contents, batch_id, generation, counts)
journal.keep(outcome)       never blocks; await `room()` before more work is begun
await journal.close()       all that was kept is on the disk, or this raises what the disk said
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import IO

from router.batch.contents import Contents, Outcome
from router.batch.records import Counts

GROUP_S = 0.05  # of outcomes that go to the disk together: 20 flushes a second at most
MAX_UNWRITTEN = 256  # outcomes; with answers of 4 KB, 1 MB


class Journal:
    def __init__(self, contents: Contents, file: IO[bytes], counts: Counts) -> None:
        """`counts`: what former owners' journals hold."""
        self.counts = counts
        self._contents = contents
        self._file = file
        self._unwritten: list[Outcome] = []
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._over = asyncio.Event()
        self._writing = asyncio.create_task(self._write())

    @classmethod
    async def open(cls, contents: Contents, batch_id: str, generation: int, counts: Counts) -> Journal:
        """Raises: OSError."""
        return cls(contents, await asyncio.to_thread(contents.journal, batch_id, generation), counts)

    @property
    def has_failed(self) -> bool:
        """`close` will say why."""
        return self._writing.done()

    def keep(self, outcome: Outcome) -> None:
        self._unwritten.append(outcome)
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._has_room.clear()

    async def room(self) -> None:
        """Wait for the disk, where it is behind."""
        await self._has_room.wait()

    async def close(self) -> None:
        """Raises: OSError."""
        self._over.set()
        try:
            await self._writing
        finally:
            self._file.close()

    async def _write(self) -> None:
        try:
            while not (self._over.is_set() and not self._unwritten):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GROUP_S):
                        await self._over.wait()
                await self._write_group()
        finally:
            self._has_room.set()

    async def _write_group(self) -> None:
        group, self._unwritten = self._unwritten, []
        if group:
            await asyncio.to_thread(self._contents.append, self._file, group)
            for outcome in group:
                self.counts = counted(self.counts, outcome)
        self._has_room.set()


def counted(counts: Counts, outcome: Outcome) -> Counts:
    """One more."""
    if outcome.succeeded:
        return replace(counts, completed=counts.completed + 1)
    return replace(counts, failed=counts.failed + 1)
