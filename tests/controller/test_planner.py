"""The planner of a controller: what it takes for measured, when targets count as settled, and where there is none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.config import ClusterConfig, EngineConfig, RouterConfig
from baton.request import Role
from router.controller.autoscaler.disaggregation import WHOLE_PROMPTS
from router.controller.live_facts import LiveFacts
from router.controller.measured_fleet import WINDOW_S
from router.controller.planner import Planner, hand_back, planner_of
from router.controller.settings import ControlSettings, Mode
from router.controller.step_model import MIN_SAMPLES, StepModel, StepWork
from router.fleet import Fleet
from router.session import Liveness, SessionIdentity
from tests.controller.conftest import ControlPlane
from tests.controller.control_rig import Machines
from tests.controller.live_rig import TERMS, fleet
from tests.router.router_rig import until

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


@pytest.mark.parametrize("tokens", [-1, 0, 64])
async def test_what_is_apart_is_what_routers_are_configured_to_whatever_a_chunk_is(
    plane: ControlPlane, tokens: int
) -> None:
    cluster = ClusterConfig(router=RouterConfig(local_prefill_tokens=tokens), engine=EngineConfig(chunk_tokens=64))
    router = Fleet(SessionIdentity("r", 1), Liveness(1.0, 3), tokens, 10)
    planner = Planner(plane.controller, cluster, lambda _: fleet())
    assert planner.apart_tokens == router.local_prefill_tokens
    facts = LiveFacts(plane.controller, cluster, Machines(), lambda _: "cpu", lambda: 1.0, 0.0)
    assert facts.facts(1.0).local_prefill_tokens == router.local_prefill_tokens


async def test_a_limit_of_local_prefill_is_handed_back_once_nobody_wants_it_any_more(plane: ControlPlane) -> None:
    controller, settings = plane.controller, plane.controller.in_force.settings
    planner = Planner(controller, ClusterConfig(router=RouterConfig(local_prefill_tokens=64)), lambda _: fleet())

    async def mode(wanted: Mode) -> None:
        now = settings.revision
        await settings.put(now.version, ControlSettings(wanted, now.value.budget), "ann", "")

    await mode(Mode.AUTO)
    running = asyncio.create_task(hand_back(controller, planner))
    for wanted in (Mode.ADVISORY, Mode.FROZEN):
        controller.want_local_prefill(WHOLE_PROMPTS)
        await asyncio.sleep(0.05)
        assert (await anext(controller.watch())).local_prefill_tokens == WHOLE_PROMPTS, "it is in force in auto"
        await mode(wanted)
        await until(lambda: controller.fleet.local_prefill_tokens is None, "it is handed back")
        assert not (await anext(controller.watch())).HasField("local_prefill_tokens")
        await mode(Mode.AUTO)
    controller.want_local_prefill(64)  # falling back has ended
    await until(lambda: controller.fleet.local_prefill_tokens is None, "what is configured is not told")
    running.cancel()
    controller.want_local_prefill(WHOLE_PROMPTS)  # as the file of a fleet may hold
    running = asyncio.create_task(hand_back(controller, None))
    await until(lambda: controller.fleet.local_prefill_tokens is None, "there is no planner")
    running.cancel()
