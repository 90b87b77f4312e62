"""What runs for ever beside the controller's doors."""

from __future__ import annotations

import asyncio

import pytest

from router.controller import main


async def test_a_task_that_ends_by_a_defect_is_logged_and_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main, "_AGAIN_S", 0.01)
    num_runs, goes_on = 0, asyncio.Event()

    async def dies_twice() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs < 3:
            raise ZeroDivisionError(f"defect {num_runs}")
        goes_on.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(main._keep_running("planner", dies_twice))
    async with asyncio.timeout(10):
        await goes_on.wait()
    told = [record for record in caplog.records if record.message == "background_task_failed"]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["defect 1", "defect 2"]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert num_runs == 3


async def test_a_task_that_has_nothing_to_do_is_not_begun_again() -> None:
    num_runs = 0

    async def returns() -> None:
        nonlocal num_runs
        num_runs += 1

    await main._keep_running("planner", returns)
    assert num_runs == 1
