"""The planner's process: confined, one at a time, ended in time, and its faults told."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import Unavailable
from router.controller import planner_process
from router.controller.pays import asked_of
from router.controller.planner_process import MEMORY_BYTES, PlannerProcess, is_installed
from router.controller.what_if import Answer, Question
from tests.controller import odd_planner
from tests.controller.live_rig import fleet, measured, window
from tests.router.router_rig import until

BUDGET_S = 0.5


def asked(behaviour: int) -> Question:
    whole = asked_of(measured(fleet(), window("interactive", 10.0)), 0, BUDGET_S).question
    return replace(whole, seeds=(behaviour,))


@pytest.fixture
def planner() -> PlannerProcess:
    return PlannerProcess("tests.controller.odd_planner")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_it_has_the_lowest_priority_and_limits_of_memory_and_cpu_time(planner: PlannerProcess) -> None:
    told = {run.scenario: run.seed for run in (await planner.ask(asked(odd_planner.TELLS))).runs}
    assert told["memory"] == MEMORY_BYTES
    assert told["nice"] == 19
    assert BUDGET_S < told["cpu"] < 60


async def test_one_that_takes_more_memory_than_it_may_fails_alone(planner: PlannerProcess) -> None:
    with pytest.raises(Unavailable, match="the planner failed"):
        await planner.ask(asked(odd_planner.HUNGRY))
    assert (await planner.ask(asked(odd_planner.FINE))).runs


async def test_one_that_does_not_answer_in_time_is_killed(
    planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_process, "START_S", 0.5)
    with pytest.raises(Unavailable, match="did not answer within 1 s"):
        await planner.ask(asked(odd_planner.HANGS))
    assert planner.pid is None


async def test_faults_are_told_without_what_the_process_said(planner: PlannerProcess) -> None:
    with pytest.raises(Unavailable, match="exit status 1") as failed:
        await planner.ask(asked(odd_planner.FAILS))
    assert "no such model" not in failed.value.message
    with pytest.raises(Unavailable, match="cannot be read"):
        await planner.ask(asked(odd_planner.BABBLES))
    with pytest.raises(Unavailable, match="the planner failed"):
        await PlannerProcess("tests.controller.no_planner").ask(asked(odd_planner.FINE))


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
async def test_a_machine_that_has_no_process_left_is_unavailable_and_the_next_question_is_asked(
    planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def refuse(*_: object, **__: object) -> asyncio.subprocess.Process:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", refuse)
        with pytest.raises(Unavailable, match=f"cannot be run now: {os.strerror(number)}"):
            await planner.ask(asked(odd_planner.FINE))
    assert (await planner.ask(asked(odd_planner.FINE))).runs


async def test_one_that_cannot_be_confined_is_killed_and_unavailable(
    planner: PlannerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    def refuse(pid: int, *_: object) -> None:
        pids.append(pid)
        raise PermissionError(errno.EPERM, "not permitted")

    monkeypatch.setattr(resource, "prlimit", refuse)
    with pytest.raises(Unavailable, match="cannot be run now: not permitted"):
        await planner.ask(asked(odd_planner.HANGS))
    assert planner.pid is None
    assert not is_alive(pids[0])


async def test_questions_are_answered_one_at_a_time(planner: PlannerProcess) -> None:
    first = asyncio.create_task(planner.ask(asked(odd_planner.HANGS)))
    pid = await pid_of(planner)
    second = asyncio.create_task(planner.ask(asked(odd_planner.FINE)))
    await asyncio.sleep(0)
    assert (planner.pid, second.done()) == (pid, False)
    first.cancel()
    answer: Answer = await second
    assert answer.runs[0].seed != pid
    assert first.cancelled()
    assert not is_alive(pid)


async def test_closing_ends_what_runs_and_starts_nothing_more(planner: PlannerProcess) -> None:
    running, waiting = (asyncio.create_task(planner.ask(asked(odd_planner.HANGS))) for _ in range(2))
    pid = await pid_of(planner)
    planner.close()
    for task in (running, waiting):
        with pytest.raises(Unavailable):
            await task
    assert not is_alive(pid)


def test_what_is_not_installed_is_known_without_loading_it() -> None:
    assert is_installed("bench.what_if")
    assert not is_installed("benches.what_if")
    assert not is_installed("")


async def pid_of(planner: PlannerProcess) -> int:
    """Once it has started."""
    await until(lambda: planner.pid is not None, "the planner's process has started")
    assert planner.pid is not None
    return planner.pid
