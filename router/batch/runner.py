"""Takes batches that nobody works on and runs them, a few at a time; sweeps what is past its time. Event loop only."""

from __future__ import annotations

import asyncio
import contextlib

from baton import clock
from baton.errors import Unavailable
from baton.log import get_log
from router.batch.batch_run import BatchRun
from router.batch.line_server import Tools
from router.batch.records import Batch
from router.batch.store import Lease, LeaseLost

log = get_log("router.batch")

CLAIM_S = 0.5  # between looks for work of others' making: a heartbeat; one's own is told by `hurry`
SWEEP_S = 600.0  # files live for days
RETRY_S = 5.0  # behind a run that the disk ended; a lease (DESIGN section 5)


class Runner:
    """One router's. Runs from `start` to `stop`."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._runs: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._hurry = asyncio.Event()

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._claim()), asyncio.create_task(self._sweep())]

    def hurry(self) -> None:
        """A batch has come."""
        self._hurry.set()

    async def stop(self) -> None:
        """Lines that run are given up, to be run again; another router may go on at once."""
        tasks = [*self._tasks, *self._runs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tools.slots.close()

    async def _claim(self) -> None:
        while True:
            try:
                await self._take_what_is_free()
            except Exception:  # the loop of a task that nobody awaits: a full disk must not end it
                log.exception("batch_claim_failed")
                await asyncio.sleep(RETRY_S)
            try:
                async with asyncio.timeout(CLAIM_S):
                    await self._hurry.wait()
            except TimeoutError:
                continue
            self._hurry.clear()

    async def _take_what_is_free(self) -> None:
        while len(self._runs) < self._tools.config.max_running_batches:
            now_s = self._tools.now_unix_s()
            found = await asyncio.to_thread(
                self._tools.store.claim, now_s, now_s + clock.real_s(self._tools.config.lease_s)
            )
            if found is None:
                return
            run = asyncio.create_task(self._run(*found), name=found[0].batch_id)
            self._runs.add(run)
            run.add_done_callback(self._runs.discard)

    async def _run(self, lease: Lease, batch: Batch) -> None:
        try:
            await BatchRun(self._tools, lease, batch).run()
        except* LeaseLost:
            log.warning("batch_lost", batch_id=lease.batch_id, generation=lease.generation)
        except* (OSError, Unavailable) as group:
            log.exception("batch_interrupted", group.exceptions[0], batch_id=lease.batch_id)
            await asyncio.sleep(RETRY_S)
        finally:
            with contextlib.suppress(Unavailable):  # the lease ends by itself
                await asyncio.to_thread(self._tools.store.release, lease)

    async def _sweep(self) -> None:
        while True:
            try:
                await asyncio.to_thread(self._sweep_now)
            except (OSError, Unavailable):
                log.exception("batch_sweep_failed")
            await asyncio.sleep(SWEEP_S)

    def _sweep_now(self) -> None:
        store, now_s = self._tools.store, self._tools.now_unix_s()
        store.expire(now_s, now_s - self._tools.config.keep_s)
        self._tools.contents.sweep(store.all_file_ids(), store.open_batch_ids())
