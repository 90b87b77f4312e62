"""Places for running lines, handed out in the order of asking while interactive calls leave room; taken away when they do not.

Whoever holds a Slot is a task; preempting cancels it, newest first, so that the least work is lost. Looks at the router each
LOOK_S while somebody holds or wants a slot, and not at all otherwise. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from baton import clock
from router.admission import Slack
from router.batch.pacer import LOOK_S, Allowance, Pacer

NOTHING = Allowance(0, 0)


class Slot:
    """One running line's."""

    def __init__(self, slots: Slots) -> None:
        self.is_preempted = False
        self.is_starting = True  # without a first token
        self._slots = slots
        self._task: asyncio.Task[None] | None = None

    def hold(self, task: asyncio.Task[None]) -> None:
        """`task` runs in it and is cancelled when it is taken away."""
        self._task = task
        task.add_done_callback(lambda _: self._slots.give_back(self))

    def began(self) -> None:
        """Its first token came: it keeps no prefill worker busy any more."""
        self.is_starting = False

    def preempt(self) -> bool:
        """False: it was before, or is not held yet."""
        if self.is_preempted or self._task is None:
            return False
        self.is_preempted = True
        return self._task.cancel()


class Slots:
    """All of one router's."""

    def __init__(self, pacer: Pacer, slack: Callable[[], Slack]) -> None:
        self._pacer = pacer
        self._slack = slack
        self._held: dict[Slot, None] = {}  # oldest first
        self._wanted: deque[asyncio.Future[Slot]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._allowed = NOTHING  # as of the last look
        self.num_preempted = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    async def take(self) -> Slot:
        """Wait for a place; give it to a task with `hold` before the next await, or `give_back`."""
        wanted: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._wanted.append(wanted)
        self._watch()
        try:
            return await wanted
        except asyncio.CancelledError:
            if wanted.done() and not wanted.cancelled():
                self.give_back(wanted.result())
            raise

    def give_back(self, slot: Slot) -> None:
        self._held.pop(slot, None)
        self._hand_out()  # what one leaves the next may have: short lines would wait for looks otherwise

    def look(self) -> None:
        """Do now what is due."""
        self._timer = None
        starting = [slot for slot in self._held if slot.is_starting]
        allowed = self._pacer.look(self._slack(), len(self._held), len(starting), clock.now_s())
        taken = starting[allowed.num_starting :]
        left = [slot for slot in self._held if slot not in taken]
        for slot in reversed([*taken, *left[allowed.num_running :]]):
            self.num_preempted += slot.preempt()
        self._allowed = allowed
        self._hand_out()
        self._watch()

    def _hand_out(self) -> None:
        num_starting = sum(slot.is_starting for slot in self._held)
        while (
            self._wanted and len(self._held) < self._allowed.num_running and num_starting < self._allowed.num_starting
        ):
            wanted = self._wanted.popleft()
            if not wanted.done():
                slot = Slot(self)
                self._held[slot] = None
                num_starting += 1
                wanted.set_result(slot)

    def _watch(self) -> None:
        if self._timer is None and (self._held or self._wanted):
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    def close(self) -> None:
        self._allowed = NOTHING
        if self._timer is not None:
            self._timer.cancel()
