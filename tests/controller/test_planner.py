"""The planner of a controller: what it takes for measured, when targets count as settled, and where there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.config import ClusterConfig
from baton.request import Role
from router.controller.measured_fleet import WINDOW_S
from router.controller.planner import Planner, planner_of
from router.controller.step_model import MIN_SAMPLES, StepModel, StepWork
from tests.controller.conftest import ControlPlane
from tests.controller.live_rig import TERMS, fleet

SET_AT_UNIX_S = 7.0  # the plane's clock


@pytest.mark.parametrize(
    ("now_unix_s", "is_settled"),
    [
        (SET_AT_UNIX_S + WINDOW_S, True),
        (SET_AT_UNIX_S + WINDOW_S - 1.0, False),
        (SET_AT_UNIX_S - 3_600.0, False),  # the clock jumped back
    ],
)
async def test_what_was_measured_counts_once_the_targets_are_as_old_as_a_window(
    plane: ControlPlane, now_unix_s: float, is_settled: bool
) -> None:
    planner = Planner(plane.controller, ClusterConfig(), lambda _: fleet(), lambda: now_unix_s)
    assert planner.measured().is_settled is is_settled


async def test_step_models_that_have_not_said_how_good_they_are_are_left_out(plane: ControlPlane) -> None:
    planner = Planner(plane.controller, ClusterConfig(), lambda _: fleet())
    known, new = StepModel(TERMS), StepModel(TERMS)
    for _ in range(2 * MIN_SAMPLES):
        known.observe(StepWork(100.0), 1.1 * TERMS.step_s(StepWork(100.0)))
    plane.controller.measures.steps.update({"decode": known, "prefill": new})
    assert set(planner.measured().errors) == {Role.DECODE}


async def test_there_is_none_where_it_is_not_installed_or_not_wanted(plane: ControlPlane) -> None:
    for module in ("", "no_such_package.planner"):
        cluster = ClusterConfig()
        cluster = replace(cluster, controller=replace(cluster.controller, planner=module))
        assert planner_of(plane.controller, cluster, lambda _: fleet()) is None
    assert planner_of(plane.controller, ClusterConfig(), lambda _: fleet()) is not None
