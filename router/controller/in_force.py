"""What is in force in this process: the newest revision of the SLO classes and of the settings.

A write through this object holds at once; one by somebody else (another controller, or an operator with the database) within a
control tick, at which the store is read again. While the database is away the last revisions stay in force. Every change calls
`on_change`. Event loop only; the database's calls run in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.errors import BatonError
from baton.log import get_log
from router.controller.control_store import ControlStore
from router.controller.settings import ControlSettings
from router.controller.slo_store import SLOSet
from router.controller.versioned import MAX_VERSION, Revision, StaleVersion, Versions

log = get_log("controller.in_force")

T = TypeVar("T")
CONTROL_TICK_S = 1.0  # routers report each second: deciding more often would be deciding on nothing new


class Live(Generic[T]):
    """One document: the revision in force, and its store."""

    def __init__(self, store: Versions[T], on_change: Callable[[], None]) -> None:
        self.revision: Revision[T] = store.current()
        self._store = store
        self._on_change = on_change

    async def put(self, expected_version: int, value: T, who: str, reason: str) -> Revision[T]:
        """Raises: StaleVersion: another version is in force, also here from now on; Unavailable."""
        try:
            revision = await asyncio.to_thread(self._store.replace, expected_version, value, who, reason)
        except StaleVersion:
            await self.refresh()
            raise
        if revision.version > self.revision.version:
            self._take(revision)
        return revision

    async def refresh(self) -> None:
        """Read again, also where the store went back to an older version, as one restored from a copy. Raises: Unavailable."""
        known = self.revision
        found = await asyncio.to_thread(self._store.current)
        if self.revision is known and found != known:  # else a write overtook this read
            self._take(found)

    async def history(self, limit: int, before: int = MAX_VERSION) -> list[Revision[T]]:
        return await asyncio.to_thread(self._store.history, limit, before)

    async def at(self, version: int) -> Revision[T]:
        """Raises: NotFound."""
        return await asyncio.to_thread(self._store.revision, version)

    def _take(self, revision: Revision[T]) -> None:
        self.revision = revision
        self._on_change()


class InForce:
    def __init__(self, store: ControlStore, on_change: Callable[[], None]) -> None:
        self.slo: Live[SLOSet] = Live(store.slo, on_change)
        self.settings: Live[ControlSettings] = Live(store.settings, on_change)
        self._away = False  # one log line per outage

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(CONTROL_TICK_S)
            await self.tick()

    async def tick(self) -> None:
        """Look for what others wrote."""
        try:
            await self.slo.refresh()
            await self.settings.refresh()
        except (BatonError, ValueError, TypeError, KeyError) as error:  # the latter three: what cannot be read
            if not self._away:
                log.error("store_away", reason=str(error))
            self._away = True
            return
        if self._away:
            log.info("store_back")
        self._away = False
