"""Simulations in processes of their own: the same figures however many there are, and none that outlives the bench."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from baton.errors import InvalidRequest
from bench.child import ChildError
from bench.control.jobs import Jobs
from bench.traces import TraceError, find_trace
from engine.tuning import Tuning
from tests.bench.control.test_control_command import measured, short


async def test_what_is_measured_does_not_depend_on_the_number_of_processes() -> None:
    load = short("mix swings", 60.0)
    jobs = Jobs(2)
    try:
        assert repr(await measured(load, [0, 1], jobs.do)) == repr(await measured(load, [0, 1]))
    finally:
        jobs.close()


def test_ctrl_c_ends_every_process_though_they_are_busy() -> None:
    jobs = Jobs(2)
    pids: list[int] = []

    async def work() -> None:
        pids.extend(await asyncio.gather(jobs.do(os.getpid), jobs.do(os.getpid)))
        busy = asyncio.gather(jobs.do(time.sleep, 600.0), jobs.do(time.sleep, 600.0))
        os.kill(os.getpid(), signal.SIGINT)
        await busy

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert all(is_there(pid) for pid in pids)
    jobs.close()
    assert pids
    assert not any(is_there(pid) for pid in pids)


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_what_a_function_raises_is_raised_where_it_was_asked_for() -> None:
    jobs = Jobs(1)
    try:
        with pytest.raises(TraceError, match="no_such_trace"):
            await jobs.do(find_trace, "azure2023/no_such_trace.csv")
        with pytest.raises(InvalidRequest, match="max_num_seqs") as refused:
            await jobs.do(Tuning.check, Tuning(0, 1, 1), Tuning(8, 8, 8))
        assert refused.value.field == "max_num_seqs"
        assert await jobs.do(abs, -3) == 3
    finally:
        jobs.close()


async def test_a_process_that_is_killed_fails_its_call_instead_of_keeping_it_waiting() -> None:
    jobs = Jobs(1)
    try:
        pid = await jobs.do(os.getpid)
        call = asyncio.ensure_future(jobs.do(time.sleep, 600.0))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ChildError):
            await call
    finally:
        jobs.close()
