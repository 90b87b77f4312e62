"""The engine thread: the only one that touches the engine and, but for transfers' own blocks, its tensors.

Commands from the event loop are carried out in order before the next step; every step's result goes back in one
`call_soon_threadsafe`. The thread sleeps when the engine has no work. At most MAX_UNDELIVERED results wait for the loop:
a stalled loop stops the engine instead of growing a queue. A defect of the engine ends the thread and is reported once.

The event loop comes first: it needs milliseconds, and callers wait for them, while the engine always has more to do. So the
thread runs at a lower priority than the rest of its process and `favour_the_loop` shortens its hold on the interpreter.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable

from baton import clock
from baton.log import get_log
from engine.ports import Engine, EngineLoad, StepResult

Command = Callable[[Engine, float], None]

log = get_log("worker.engine")

MAX_UNDELIVERED = 8  # steps; at 20 ms and more a step the loop is then 0.2 s behind, and waiting is right

# gRPC ping p99 of a worker decoding at batch 32 on 2 cores: 5.4-5.7 ms without these two, 3.8-4.6 ms with them, at the same
# step time; the limit is 5 ms (DESIGN section 7). measured: docs/adr/0005-the-loop-comes-first.md
ENGINE_NICENESS = 5
SWITCH_INTERVAL_S = 0.001  # Python's default is 5 ms


def favour_the_loop() -> None:
    """Let other threads have the interpreter within a millisecond; once per worker process, from its entry."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class EngineThread:
    """Runs one engine until stopped.

    Args:
        on_result: called on `loop` for every step that did something.
        on_fatal: called on `loop` once, when the engine itself failed (not one request of it).
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_result: Callable[[StepResult, EngineLoad], None],
        on_fatal: Callable[[BaseException], None],
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._on_result = on_result
        self._on_fatal = on_fatal
        self._now_s = now_s
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._since_s: float | None = None  # when what it is at began: commands and a step; None = it has nothing to do
        self._undelivered = threading.Semaphore(MAX_UNDELIVERED)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the step under way and join. Call it off the loop, or after the loop has stopped caring."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._undelivered.release()
        self._thread.join()

    @property
    def silent_s(self) -> float:
        """How long it has been at one step, so its last word may be that old. 0 where it has nothing to do."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._now_s() - since_s

    def post(self, command: Command) -> None:
        with self._wake:
            if self._since_s is None:
                self._since_s = self._now_s()
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENGINE_NICENESS)  # on Linux, of this thread alone
        try:
            while self._wait_for_work():
                result = self._engine.step(self._now_s())
                self._undelivered.acquire()
                self._loop.call_soon_threadsafe(self._deliver, result, self._engine.load())
        except Exception as error:
            log.exception("engine_failed")
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._on_fatal, error)

    def _wait_for_work(self) -> bool:
        """Carry out commands, then return True when there is a step to run, False to end."""
        while True:
            with self._wake:
                while not (self._inbox or self._stopping or self._engine.has_work()):
                    self._since_s = None
                    self._wake.wait()
                self._since_s = self._now_s()
                commands = list(self._inbox)
                self._inbox.clear()
                if self._stopping:
                    return False
            now_s = self._now_s()
            for command in commands:
                command(self._engine, now_s)
            if self._engine.has_work():
                return True
            if commands:  # gauges changed without a step
                self._loop.call_soon_threadsafe(self._on_result, StepResult(step=-1), self._engine.load())

    def _deliver(self, result: StepResult, load: EngineLoad) -> None:
        self._undelivered.release()
        self._on_result(result, load)
