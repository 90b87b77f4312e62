"""What the autoscaler is told of this very fleet."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.request import Role
from router.controller.autoscaler.facts import State, WorkerFacts
from router.controller.autoscaler.sound import FRESH_LOAD_S, pressure, sound
from router.controller.fleet_state import FAILED, AfterDrain
from tests.controller.control_rig import SHAPE, Machines, Rig, life


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    machines = Machines()
    async with life(tmp_path, machines) as one:
        yield one
    await machines.stop_all()


def told(rig: Rig) -> dict[str, WorkerFacts]:
    return {worker.worker_id: worker for worker in rig.facts.facts(10.0).workers}


async def test_a_load_is_dated_when_it_came_and_left_out_once_it_is_old(rig: Rig) -> None:
    """One of four says nothing more, though its Session stands: the pool is what the other three say."""
    for number in range(4):
        rig.controller.expect(f"decode-{number}", Role.DECODE, SHAPE)
        await rig.machines.start(f"decode-{number}", behaviour="working")
    await rig.until(lambda: all(rig.controller.view(f"decode-{number}") is not None for number in range(4)))
    began_s = time.monotonic()
    await rig.until(lambda: all(w.load is not None and w.load.at_s > began_s for w in told(rig).values()))
    silent = rig.controller.view("decode-0")
    assert silent is not None
    silent.load_s = began_s - FRESH_LOAD_S - 1.0
    now = sound(rig.facts.facts(time.monotonic()))
    assert [worker.load is not None for worker in now.workers] == [False, True, True, True]
    assert pressure(now.workers) == pressure(now.workers[1:])


def what(worker: WorkerFacts) -> tuple[State, bool, bool, bool]:
    return worker.state, worker.serves, worker.leaves, worker.stands_by


@pytest.mark.parametrize(
    ("after", "serves", "leaves", "stands_by"),
    [
        (AfterDrain.STAY, False, False, False),
        (AfterDrain.END, False, True, False),
        (AfterDrain.STANDBY, False, True, True),
    ],
)
async def test_a_drain_says_what_follows_it_also_of_a_worker_that_is_away(
    rig: Rig, after: AfterDrain, serves: bool, leaves: bool, stands_by: bool
) -> None:
    rig.controller.expect("decode-0", Role.DECODE, SHAPE)
    server = await rig.machines.start("decode-0", behaviour="working")
    await rig.until(lambda: rig.controller.view("decode-0") is not None)
    assert what(told(rig)["decode-0"]) == (State.READY, True, True, False)
    await rig.controller.drain("decode-0", True, after)
    assert what(told(rig)["decode-0"]) == (State.DRAINING, serves, leaves, stands_by)
    if after is AfterDrain.END:
        return  # once away it is ended
    server.finish()
    await rig.machines.stop("decode-0")
    await rig.until(lambda: rig.state("decode-0") == FAILED)
    assert what(told(rig)["decode-0"]) == (State.FAILED, serves, leaves, stands_by)
