"""What runs for ever beside the controller's doors: nobody awaits it, so nobody else would tell that it has ended.

A task that ends by a defect is logged, counted and begun again; one that returns has nothing more to do. Each must be able to
begin anew at any time. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.log import get_log
from router.series import Counter, Registry

log = get_log("controller.background")

AGAIN_S = 5.0  # a defect that stays is a line each five seconds, not a busy loop


def failures_of(registry: Registry) -> Counter:
    """baton_controller_task_failures{task}, for any number of `Background`s."""
    return Counter(
        "baton_controller_task_failures", "Times that a background task ended by a defect and was begun again.", ["task"],
        registry,
    )  # fmt: skip


class Background:
    """Tasks that end together."""

    def __init__(self, failures: Counter) -> None:
        self._failures = failures
        self._tasks: list[asyncio.Task[None]] = []

    def keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run it until `end`, or until it returns."""
        self._failures.labels(name)  # a 0 is seen before the first failure
        self._tasks.append(asyncio.create_task(self._run(name, run), name=name))

    async def end(self) -> None:
        """All of them, whatever they were at."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await run()
            except Exception:  # the boundary of what runs beside everything else
                log.exception("background_task_failed", task=name, again_in_s=AGAIN_S)
                self._failures.labels(name).inc()
                await asyncio.sleep(AGAIN_S)
