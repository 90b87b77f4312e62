"""Ctrl-C, SIGTERM and a closed terminal as one readable file descriptor: waits end at once, nothing is raised in mid-step."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from types import TracebackType
from typing import Self

INTERRUPTED = 128 + signal.SIGINT  # exit status, as shells say it
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user asked to stop."""


class Signals:
    """While the block runs, signals only make `fd` readable; each counts once until `clear`."""

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.getsignal(number) for number in _STOPS}

    def __enter__(self) -> Self:
        for number in _STOPS:
            signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in _STOPS:
            signal.signal(number, self._before[number])
        os.close(self.fd)
        os.close(self._write_fd)

    def pause(self, timeout_s: float) -> None:
        """Wait. Raises: Interrupted: a signal came, now or before."""
        readable, _, _ = select.select([self.fd], [], [], timeout_s)
        if readable:
            raise Interrupted

    def clear(self) -> None:
        """Forget the signals so far, so that the next one is news."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 64):
                pass

    def _note(self, number: int, frame: object) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable enough
            os.write(self._write_fd, b"!")
