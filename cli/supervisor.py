"""Keeps the processes of a running cluster running: one that ends is started again, in place, while the others go on.

Life of a part:
    1. starting   its process runs and is not up yet
    2. up         it serves
    3. waiting    its process ended; it is started again after a delay that grows (cli/restarts.py)
A part that ends again and again ends the cluster, with one clear line. Every change is said in one line. Single-threaded.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from cli.processes import Child
from cli.restarts import MAX_ENDS, WINDOW_S, Restarts
from cli.signals import Signals
from cli.terminal import say

_LOOK_S = 0.05  # between two looks at a starting process; start-up takes seconds


class ClusterFailed(Exception):
    """One line, with what to do; `log` may hold the last lines of the process concerned."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log

    @classmethod
    def ended(cls, child: Child) -> ClusterFailed:
        """A process ended while the cluster was starting."""
        how = child.how_it_ended()
        if child.popen.returncode > 0 and (word := child.last_word()):
            return cls(f"{child.name}: {word}")
        return cls(f"{child.name} {how}; the cluster cannot start without it: run the command again", child.log_tail())


@dataclass(slots=True)
class Part:
    """One process of a cluster."""

    name: str
    start: Callable[[], Child]
    is_up: Callable[[Child], bool]
    patience_s: float  # for a start
    meanwhile: str  # what goes on while it is away, for the line that says so
    child: Child | None = None
    restarts: Restarts = field(default_factory=Restarts)
    state: str = "starting"
    _since_s: float = 0.0  # of the state
    _ended_s: float = 0.0
    _due_s: float = 0.0  # of waiting

    def begin(self) -> Child:
        """Start the process."""
        self.child = self.start()
        self.state, self._since_s = "starting", time.monotonic()
        return self.child

    @property
    def is_running(self) -> bool:
        return self.child is not None and self.child.is_running

    def look(self, now_s: float, bury: Callable[[Child], None]) -> bool:
        """Do what is due. Returns whether the state changed. Raises: ClusterFailed: it ends again and again."""
        assert self.child is not None
        if self.state == "waiting":
            if now_s < self._due_s:
                return False
            self.begin()
        elif not self.child.is_running:
            self._end(now_s, bury)
        elif self.state == "up":
            return False
        elif self.is_up(self.child):
            self.state = "up"
            if self.restarts.num_ends:
                say(f"{self.name} is back as pid {self.child.pid}, {now_s - self._ended_s:.1f} s after it ended")
        elif now_s - self._since_s > self.patience_s:
            say(f"{self.name} is not up after {self.patience_s:g} s")
            self.child.popen.kill()
            self.child.popen.wait()
            return False
        else:
            return False
        return True

    def _end(self, now_s: float, bury: Callable[[Child], None]) -> None:
        assert self.child is not None
        how, delay_s = self.child.how_it_ended(), self.restarts.ended(now_s)
        if delay_s is None:
            raise ClusterFailed(
                f"{self.name} {how}, the {MAX_ENDS}th end within {WINDOW_S:g} s; the cluster cannot go on without it",
                self.child.log_tail(),
            )
        say(f"{self.name} {how}: {self.meanwhile}; it is started again")
        bury(self.child)
        self.state, self._since_s, self._ended_s, self._due_s = "waiting", now_s, now_s, now_s + delay_s


def supervise(
    parts: Sequence[Part], signals: Signals, bury: Callable[[Child], None], on_change: Callable[[], None]
) -> None:
    """Return when the user asks to stop. `bury` gets each process that ended, to end what it left behind.

    Raises:
        ClusterFailed: a part ends again and again.
    """
    while not _wait(parts, signals):
        now_s = time.monotonic()
        changed = [part for part in parts if part.look(now_s, bury)]
        if changed:
            on_change()


def _wait(parts: Sequence[Part], signals: Signals) -> bool:
    """Until a process ends, or the next look is due. Returns whether a signal came."""
    with ExitStack() as stack:
        pid_fds = [os.pidfd_open(part.child.pid) for part in parts if part.child is not None and part.is_running]
        for fd in pid_fds:
            stack.callback(os.close, fd)
        is_quiet = all(part.state == "up" and part.is_running for part in parts)
        readable, _, _ = select.select([signals.fd, *pid_fds], [], [], None if is_quiet else _LOOK_S)
    return signals.fd in readable
