"""The simulator in a process of its own: started by dotted name for each question, ended with it.

    1 free ─ ask ─▶ 2 asking: the process reads the question and answers ─▶ 1
                      └─ deadline, close, the asker leaves: killed ─▶ 1
One at a time; others wait for their turn within their own deadline. The process has the lowest priority, so serving comes first,
and limits of memory and CPU time that the kernel holds, so that not even one whose parent was killed lives on. Runs on the event
loop. Never imports what it runs: a router knows no bench.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import sys

from pydantic import ValidationError

from baton import clock
from baton.errors import Unavailable
from baton.log import get_log
from router.controller.what_if import ANSWER, QUESTION, Answer, Question

log = get_log("controller.planner")

MEMORY_BYTES = 2 << 30  # of address space: numpy reserves some 0.5 GiB, a simulation fills 80 MB (docs/simulator.md)
START_S = 6.0  # of the process, and for the call under way when its budget ends: 0.7 s where a core is free
_LOWEST = 19  # as `nice -n 19`
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy is used for tables of a few rows
_SAID = 300  # characters of what went wrong that are logged


def is_installed(module: str) -> bool:
    """Whether the package is there; loads nothing."""
    return bool(module) and importlib.util.find_spec(module.partition(".")[0]) is not None


class PlannerProcess:
    """Implements Simulator."""

    def __init__(self, module: str) -> None:
        """`module`: dotted name; `python -m` must read a Question and print the Answer."""
        self._module = module
        self._turn = asyncio.Lock()
        self._running: asyncio.subprocess.Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None: none does."""
        return self._running.pid if self._running is not None else None

    def close(self) -> None:
        """Kill what runs; whoever waits for it is told, and nothing is started any more."""
        self._is_closed = True
        if self._running is not None and self._running.returncode is None:
            self._running.kill()

    async def ask(self, question: Question) -> Answer:
        """Raises: Unavailable."""
        timeout_s = question.budget_s + START_S
        try:
            async with asyncio.timeout(clock.here_s(2 * timeout_s)), self._turn:  # one that runs, and one's own
                return await self._run(QUESTION.dump_json(question), timeout_s)
        except TimeoutError:
            raise Unavailable("the planner is busy with other questions", retry_after_s=timeout_s) from None

    async def _run(self, question: bytes, timeout_s: float) -> Answer:
        if self._is_closed:
            raise Unavailable("the controller stops")
        try:
            process = self._running = await self._start()
        except OSError as error:  # too many processes or files, no memory
            raise _cannot_run(error) from error
        try:
            _confine(process.pid, timeout_s)
            async with asyncio.timeout(clock.here_s(timeout_s)):
                answer, errors = await process.communicate(question)
        except TimeoutError:
            raise Unavailable(f"the planner did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise _cannot_run(error) from error
        finally:
            self._running = None
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines() or [""]
            log.error("planner_failed", module=self._module, status=process.returncode, reason=lines[-1][:_SAID])
            raise Unavailable(f"the planner failed; the controller's log says how (exit status {process.returncode})")
        try:
            return ANSWER.validate_json(answer)
        except ValidationError as error:
            log.error("planner_failed", module=self._module, status=0, reason=str(error)[:_SAID])
            raise Unavailable("the planner's answer cannot be read; the controller's log says why") from None

    async def _start(self) -> asyncio.subprocess.Process:
        """Raises: OSError."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **_THREADS},
        )


def _cannot_run(error: OSError) -> Unavailable:
    log.error("planner_not_run", reason=str(error))
    return Unavailable(f"the planner cannot be run now: {error.strerror or error}")


def _confine(pid: int, timeout_s: float) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, pid, _LOWEST)
        resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        cpu_s = 1 + round(timeout_s)
        resource.prlimit(pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
    except ProcessLookupError:
        return  # it has ended already, and its status says how
