"""The clock of a cluster's processes: real, or slow where GPUs are emulated. Then ten seconds of this machine may be one here.

Whatever a router, controller or worker measures or waits for goes by it: heartbeats, leases, deadlines, windows, backoffs, ticks
of forecasts, steps of an engine. So few CPUs keep up with many emulated GPUs, nothing that is only slow is taken for lost, and
what is measured is what the GPUs would show. No configured time and no constant needs to know of it.

    threads       now_s, sleep
    event loops   whatever waits on a loop that `run` or `new_event_loop` made: asyncio.sleep, asyncio.timeout, call_later
    others        real_s and here_s translate, for what counts by itself: clients, Ray, gRPC, dates, other processes

A process sets its scale once, before it reads the clock. Nobody else in a cluster reads another one (tests/baton/test_clock.py).
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_MAX_SELECT_S = 24 * 3_600.0  # the system counts in milliseconds that fit 32 bits; asyncio looks once a day, too

_scale = 1.0  # seconds of this machine in one here


def slow_down(scale: float) -> None:
    """Let a second last `scale` seconds of this machine, in this process, from its start to its end."""
    global _scale
    _scale = scale


def now_s() -> float:
    """Never goes back; alike in all processes of a cluster on this machine."""
    return time.monotonic() / _scale


def unix_s() -> float:
    """For ages of what outlives a process or is shared with another machine; not a date."""
    return time.time() / _scale


def sleep(seconds: float) -> None:
    """On a thread."""
    time.sleep(real_s(seconds))


def real_s(seconds: float) -> float:
    """What that many seconds here are for everybody else."""
    return seconds * _scale


def here_s(seconds: float) -> float:
    """What that many seconds of everybody else's are here."""
    return seconds / _scale


def new_event_loop(fast: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop) -> asyncio.AbstractEventLoop:
    """A loop that waits by this clock. `fast` makes it where the clock is real."""
    return fast() if _scale == 1.0 else _SlowLoop(_SlowSelector())


def run(
    main: Coroutine[Any, Any, T], fast: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
) -> T:  # fmt: skip
    """As asyncio.run, on such a loop."""
    with asyncio.Runner(loop_factory=lambda: new_event_loop(fast)) as runner:
        return runner.run(main)


class _SlowSelector(selectors.EpollSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return super().select(None if timeout is None else min(real_s(timeout), _MAX_SELECT_S))


class _SlowLoop(asyncio.SelectorEventLoop):
    """All of asyncio's waiting comes down to `time` and the selector's timeout."""

    def time(self) -> float:
        return here_s(super().time())
