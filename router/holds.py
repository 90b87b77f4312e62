"""How much work one worker has: what it reports, merged with what this router gave it and has not yet seen reported. Pure.

    load = max(reported + given since that report, all that this router has there)

Reports tell what every router gave the worker but lag by up to a step, or a heartbeat where the worker has nothing of this
router. What was given since the last one is added, so that calls that arrive together are not all sent to the worker that
looked idle; a report that crossed with a Submit leaves that call out for one report, where the second term holds. Event loop
only.
"""

from __future__ import annotations

from collections.abc import Callable


class Hold:
    """One sequence's share of a worker's load, until `release`. Tokens; whoever has it may lower them."""

    __slots__ = ("_is_open", "_ledger", "_serial", "_used_tokens", "_waiting_tokens")

    def __init__(self, waiting_tokens: int, used_tokens: int, ledger: Ledger) -> None:
        self._waiting_tokens = waiting_tokens
        self._used_tokens = used_tokens
        self._ledger = ledger
        self._serial = ledger.serial
        self._is_open = True

    def release(self) -> None:
        """It counts no more; may be said again."""
        if self._is_open:
            self._is_open = False
            self._ledger.released(self._serial, self._waiting_tokens, self._used_tokens)

    @property
    def waiting_tokens(self) -> int:
        return self._waiting_tokens

    @waiting_tokens.setter
    def waiting_tokens(self, num_tokens: int) -> None:
        if self._is_open and num_tokens != self._waiting_tokens:
            change, self._waiting_tokens = num_tokens - self._waiting_tokens, num_tokens
            self._ledger.change(self._serial, change, 0)

    @property
    def used_tokens(self) -> int:
        return self._used_tokens

    @used_tokens.setter
    def used_tokens(self, num_tokens: int) -> None:
        if self._is_open and num_tokens != self._used_tokens:
            change, self._used_tokens = num_tokens - self._used_tokens, num_tokens
            self._ledger.change(self._serial, 0, change)


class Ledger:
    """All Holds on one worker and its last report. `on_change` is called when any of the merged numbers may have changed."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.serial = 0  # of the last report
        self.num_held = 0  # sequences
        self._on_change = on_change
        self._reported_waiting = self._reported_used = self._reported_running = 0
        self._held_waiting = self._held_used = 0
        self._new_waiting = self._new_used = self._num_new = 0  # of Holds made since the last report

    @property
    def waiting_tokens(self) -> int:
        return max(self._reported_waiting + self._new_waiting, self._held_waiting)

    @property
    def used_tokens(self) -> int:
        return max(self._reported_used + self._new_used, self._held_used)

    @property
    def num_running(self) -> int:
        return max(self._reported_running + self._num_new, self.num_held)

    def report(self, waiting_tokens: int, used_tokens: int, num_running: int) -> None:
        """Take what the worker says."""
        self.serial += 1
        self._reported_waiting, self._reported_used, self._reported_running = waiting_tokens, used_tokens, num_running
        self._new_waiting = self._new_used = self._num_new = 0
        self._on_change()

    def hold(self, waiting_tokens: int, used_tokens: int) -> Hold:
        """Count a sequence until its Hold is released."""
        self.num_held += 1
        self._num_new += 1
        self.change(self.serial, waiting_tokens, used_tokens)
        return Hold(waiting_tokens, used_tokens, self)

    def released(self, serial: int, waiting_tokens: int, used_tokens: int) -> None:
        """A Hold made after report number `serial` is no more."""
        self.num_held -= 1
        if serial == self.serial:
            self._num_new -= 1
        self.change(serial, -waiting_tokens, -used_tokens)

    def change(self, serial: int, waiting_tokens: int, used_tokens: int) -> None:
        """A Hold made after report number `serial` has grown by so much."""
        self._held_waiting += waiting_tokens
        self._held_used += used_tokens
        if serial == self.serial:
            self._new_waiting += waiting_tokens
            self._new_used += used_tokens
        self._on_change()
