"""What the autoscaler is told of this very fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.request import Role
from router.controller.autoscaler.facts import State, WorkerFacts
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
