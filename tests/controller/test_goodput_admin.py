"""What the controller says of goodput and forecasts, from reports that came over gRPC; and what of them it does not believe."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from baton.config import ClusterConfig, EmulationConfig
from baton.slo import Verdict
from baton.v1 import control_pb2, control_pb2_grpc
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.arrivals import TICK_S
from router.controller.measures import Measures, roofline_of
from router.controller.step_model import StepWork
from router.controller.step_samples import WARM_UP_S, StepTotals
from router.goodput import Goodput, Served, split_ttft
from router.windows import RouterWindows, class_pb, worker_pb
from tests.controller.conftest import ControlPlane


def report(router_id: str, num_met: int, num_missed: int = 0) -> control_pb2.RouterReport:
    goodput = Goodput(0.0)
    for number in range(num_met + num_missed):
        is_met = number < num_met
        goodput.arrived("interactive", 1.0)
        goodput.read("interactive", 1_000, 250, 1, 1.0)
        goodput.ended(
            Served(
                slo_class="interactive", verdict=Verdict.MET if is_met else Verdict.ITL, ttft_met=True, pace_met=is_met,
                ttft_s=0.4, split=split_ttft(0.4, 0.1, 0.05, 0.2), handoff_gap_s=0.01, output_tokens=(50,),
                prefill_worker="p0", decode_worker="d0",
            ),
            1.0,
        )  # fmt: skip
    return control_pb2.RouterReport(
        router_id=router_id,
        class_windows=map(class_pb, goodput.class_windows(29.0)),
        worker_windows=map(worker_pb, goodput.worker_windows(29.0)),
        oldest_queued_s=0.5,
    )


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    app = make_app(plane.controller, ClusterConfig(), lambda: [Token.of("dash", "viewer", "view-secret")])
    headers = {"authorization": "Bearer view-secret"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers
    ) as client:
        yield client


async def tell(plane: ControlPlane, *reports: control_pb2.RouterReport) -> None:
    async with grpc.aio.insecure_channel(plane.address) as channel:
        for said in reports:
            await control_pb2_grpc.ControlStub(channel).Report(said)


async def goodput_of(admin: httpx.AsyncClient) -> dict[str, Any]:
    answer = await admin.get("/admin/v1/goodput")
    assert answer.status_code == 200
    said: dict[str, Any] = answer.json()
    return said


async def test_goodput_is_told_by_class_pool_and_worker_over_all_routers(
    plane: ControlPlane, admin: httpx.AsyncClient
) -> None:
    await tell(plane, report("a", 6, 1), report("b", 2, 1))
    said = await goodput_of(admin)
    assert (said["num_routers"], said["oldest_queued_ms"]) == (2, 500.0)
    window = said["classes"]["interactive"]["30s"]
    assert (window["num_judged"], window["attainment"], window["missed"]["itl"]) == (10, 0.8, 2)
    assert window["ttft_parts_ms"] == {
        "admission": pytest.approx(100), "queue": pytest.approx(50), "prefill": pytest.approx(200),
        "network": pytest.approx(50),
    }  # fmt: skip
    assert (window["handoff_gap_ms"], window["cached_share"]) == (pytest.approx(10), 0.25)
    assert window["prompt_tokens"]["mean"] == 1_000
    assert window["met_per_s"] == pytest.approx(8 / window["span_s"])
    assert said["pools"]["prefill"]["300s"]["attainment"] == 1.0
    assert said["pools"]["decode"]["300s"]["attainment"] == said["workers"]["decode"]["d0"]["300s"]["attainment"] == 0.8


async def test_a_router_that_talks_nonsense_is_left_out_and_the_others_count(
    plane: ControlPlane, admin: httpx.AsyncClient
) -> None:
    bad = report("bad", 5)
    bad.class_windows[0].met_tokens = math.nan
    await tell(plane, report("good", 3), bad)
    said = await goodput_of(admin)
    assert (said["num_routers"], said["classes"]["interactive"]["30s"]["num_judged"]) == (1, 3)


async def test_an_idle_cluster_has_no_attainment_rather_than_a_bad_one(
    plane: ControlPlane, admin: httpx.AsyncClient
) -> None:
    assert await goodput_of(admin) == {
        "num_routers": 0, "oldest_queued_ms": 0.0, "classes": {}, "pools": {},
        "workers": {"prefill": {}, "decode": {}},
    }  # fmt: skip
    assert (await admin.get("/admin/v1/forecast")).json() == {"tick_s": TICK_S, "classes": {}, "steps": {}}
    anonymous = await admin.get("/admin/v1/forecast", headers={"authorization": ""})
    assert anonymous.status_code == 401


# -- measures, without a clock -----------------------------------------------------------------------------------------

ROOFLINE = roofline_of(EmulationConfig())


def told(total: int) -> RouterWindows:
    return RouterWindows(arrived=(("gold", float(total)),))


def test_each_tick_s_arrivals_are_one_rate_and_ticks_without_routers_are_none() -> None:
    measures = Measures(ROOFLINE, 0.0)
    for second in range(121):
        measures.heard("a", told(5 * second), float(second))
    [gold] = measures.forecasts(120.5)
    assert gold.rate == pytest.approx(5.0)
    assert [forecast.lead_s for forecast in gold.forecasts] == [60.0, 300.0]
    assert gold.forecasts[0].rate == pytest.approx(5.0, rel=0.05)
    [gold] = measures.forecasts(150.5)
    assert gold.rate is None, "no router lives, so nobody knows"
    assert gold.forecasts[0].rate == pytest.approx(5.0, rel=0.05)
    [gold] = measures.forecasts(1_500.0)
    assert gold.forecasts[0].rate < 0.1


def test_a_pause_of_the_controller_is_no_burst() -> None:
    measures = Measures(ROOFLINE, 0.0)
    for second in range(100):
        measures.heard("a", told(5 * second), float(second))
    measures.heard("a", told(5 * 4_000), 4_000.0)
    for second in range(4_001, 4_031):
        measures.heard("a", told(5 * second), float(second))
    [gold] = measures.forecasts(4_030.5)
    assert gold.rate is not None
    assert gold.rate <= 5.5


def test_routers_that_say_zero_bring_the_forecast_to_zero_and_a_silent_class_is_forgotten() -> None:
    measures = Measures(ROOFLINE, 0.0)
    for second in range(100):
        measures.heard("a", told(5 * second), float(second))
    for second in range(100, 220):
        measures.heard("a", told(5 * 99), float(second))
    [gold] = measures.forecasts(220.0)
    assert [forecast.rate for forecast in gold.forecasts] == [0.0, 0.0]
    for second in range(220, 4_000):
        measures.heard("a", told(5 * 99), float(second))
    assert measures.forecasts(4_000.0) == []


def test_steps_are_learned_per_role_from_what_workers_report() -> None:
    measures = Measures(ROOFLINE, 0.0)
    for second in range(int(WARM_UP_S) + 60):
        for worker, role, step_s in (("p0", "prefill", 0.3), ("d0", "decode", 0.02)):
            totals = StepTotals(10 * second, 10 * second * step_s, 1_000 * second, 0, 0)
            measures.sampled(worker, 1, role, (totals,), float(second))
    work = StepWork(100.0)
    assert measures.steps["prefill"].step_s(work) == pytest.approx(0.3, rel=0.05)
    assert measures.steps["decode"].step_s(work) == pytest.approx(0.02, rel=0.05)
    assert measures.steps["decode"].error == pytest.approx(0.0, abs=0.02)
