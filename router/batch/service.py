"""Files and batches of one router, assembled: what they are made of, and when they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.config import BatchConfig
from baton.errors import ConfigError
from router.admission import Slack
from router.batch.api import BatchApi
from router.batch.contents import Contents
from router.batch.line_server import Answers, Tools
from router.batch.pacer import Pacer
from router.batch.runner import Runner
from router.batch.slots import Slots
from router.batch.store import BatchStore, Bounds
from router.controller.database import open_database
from router.series import Gauge, Registry
from router.tenants import Tenant

STORE_FILE = "batches.sqlite"


class BatchService:
    """One router's. `api` answers, also while nothing runs; lines run from `start` to `stop`."""

    def __init__(
        self,
        config: BatchConfig,
        answers: Answers,
        slack: Callable[[], Slack],
        tenant_of: Callable[[Mapping[str, str]], Tenant],
        registry: Registry,
        line_timeout_s: float,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`line_timeout_s`: as a call has that says nothing else.

        Raises:
            ConfigError: the folder or the store in it cannot be used.
        """
        folder = Path(config.folder)
        try:
            contents = Contents(folder)
        except OSError as error:
            raise ConfigError(
                f"cannot use the batch folder {folder}: {error.strerror}", field="router.batch.folder"
            ) from error
        bounds = Bounds(config.max_files, config.max_tenant_bytes, config.max_bytes, config.max_batches)
        self._database = open_database(config.database or f"sqlite://{(folder / STORE_FILE).absolute()}")
        store = BatchStore(self._database, bounds)
        slots = Slots(Pacer(config.max_running_lines), slack)
        tools = Tools(config, store, contents, answers, slots, line_timeout_s, now_unix_s)
        self._runner = Runner(tools)
        self.api = BatchApi(tools, tenant_of, self._runner.hurry)
        Gauge("baton_batch_lines_running", "Lines of batches that run here.", lambda: slots.num_held, registry)
        Gauge(
            "baton_batch_lines_preempted",
            "Lines given up for interactive calls.",
            lambda: slots.num_preempted,
            registry,
        )

    def start(self) -> None:
        self._runner.start()

    async def stop(self) -> None:
        """Lines that run are given up; another router, or this one's next life, runs them again."""
        await self._runner.stop()
        await asyncio.to_thread(self._database.close)
