"""What runs for ever beside the controller's doors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import ControllerConfig
from router.controller import background
from router.controller.background import Background, failures_of
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.fleet_state import SavedFleet
from router.controller.fleet_store import FleetStore
from router.controller.in_force import InForce
from router.controller.measures import Measures
from router.controller.rate_store import RateStore
from router.series import Registry


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.01)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)


def failures(registry: Registry, task: str) -> float:
    line = next(
        line for line in registry.lines() if line.startswith(f'baton_controller_task_failures_total{{task="{task}"')
    )
    return float(line.split()[-1])


async def test_a_task_that_ends_by_a_defect_is_logged_counted_and_begun_again(caplog: pytest.LogCaptureFixture) -> None:
    num_runs, ended, registry = 0, False, Registry()

    async def dies_twice() -> None:
        nonlocal num_runs, ended
        num_runs += 1
        if num_runs < 3:
            raise ZeroDivisionError(f"defect {num_runs}")
        try:
            await asyncio.Event().wait()
        finally:
            ended = True

    tasks = Background(failures_of(registry))
    tasks.keep("planner", dies_twice)
    assert failures(registry, "planner") == 0, "a 0 is told before the first one"
    await until(lambda: num_runs == 3)
    told = [record for record in caplog.records if record.message == "background_task_failed"]
    assert [str(record.exc_info[1]) for record in told if record.exc_info] == ["defect 1", "defect 2"]
    assert failures(registry, "planner") == 2
    await tasks.end()
    assert ended
    assert num_runs == 3


async def test_a_task_that_has_nothing_to_do_is_not_begun_again() -> None:
    num_runs = 0

    async def returns() -> None:
        nonlocal num_runs
        num_runs += 1

    tasks = Background(failures_of(Registry()))
    tasks.keep("planner", returns)
    await until(lambda: num_runs == 1)
    await tasks.end()
    assert num_runs == 1


async def test_the_end_ends_also_who_is_about_to_be_begun_again() -> None:
    num_runs = 0

    async def dies() -> None:
        nonlocal num_runs
        num_runs += 1
        raise ZeroDivisionError

    tasks = Background(failures_of(Registry()))
    tasks.keep("planner", dies)
    await until(lambda: num_runs > 1)
    await tasks.end()
    before = num_runs
    await asyncio.sleep(0.03)
    assert num_runs == before


PAUSES = ("TICK_S", "_MEASURE_S")


@pytest.mark.parametrize(
    ("task", "owner", "method"),
    [
        ("follow the store", InForce, "tick"),
        ("measure", Measures, "advance"),
        ("save rates", Measures, "saved"),
        ("save fleet", FleetStore, "save"),
    ],
)
async def test_each_of_the_controller_s_own_tasks_goes_on_after_a_defect_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, owner: type, method: str
) -> None:
    for pause in ("router.controller.in_force.CONTROL_TICK_S", *(f"router.controller.controller.{n}" for n in PAUSES)):
        monkeypatch.setattr(pause, 0.01)
    real, num_calls = getattr(owner, method), 0

    def once_broken(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise ZeroDivisionError("a defect")
        return real(*args)

    monkeypatch.setattr(owner, method, once_broken)
    store = ControlStore(SQLite(tmp_path / "slo.sqlite"), lambda: 7.0)
    fleets, rates = FleetStore(tmp_path / "fleet.json"), RateStore(tmp_path / "rates.json")
    controller = Controller(ControllerConfig(), store, fleets, rates=rates)
    controller.want_local_prefill(7)  # something to save
    await until(lambda: num_calls > 1)
    assert failures(controller.registry, task) == 1
    await until(lambda: fleets.load() != SavedFleet())
    await controller.close()
    assert not [each for each in asyncio.all_tasks() if each.get_name() == task]
