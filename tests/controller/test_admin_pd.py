"""GET /admin/v1/pd, and what `baton pd` makes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import pytest

from baton.config import ClusterConfig
from cli.pd import lines
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.autoscaler.disaggregation import FRESH_PERIODS, PERIOD_S
from router.controller.pays import APART, COLOCATED, LOCAL, Pays
from router.windows import ClassWindow
from tests.controller.conftest import ControlPlane
from tests.controller.live_rig import ScriptedSimulator, by_scenario, fleet, measured, window


def pays_of(met: Mapping[str, int], seen: ClassWindow) -> Pays:
    return Pays(ScriptedSimulator(by_scenario(met)), lambda: measured(fleet(2, 2), seen), 0, 5.0)


@asynccontextmanager
async def viewer(
    plane: ControlPlane, pays: Pays | None, secret: str = "view-secret"
) -> AsyncIterator[httpx.AsyncClient]:
    tokens = [Token.of("dash", "viewer", "view-secret")]
    app = make_app(plane.controller, ClusterConfig(), lambda: tokens, pays=pays)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin", headers={"authorization": f"Bearer {secret}"}
    ) as client:
        yield client


async def test_the_newest_verdict_is_told_with_layouts_intervals_and_assumptions(plane: ControlPlane) -> None:
    pays = pays_of({APART: 900, LOCAL: 950, COLOCATED: 850}, window("interactive", 10.0))
    async with viewer(plane, pays) as client:
        told = (await client.get("/admin/v1/pd")).json()
        again = (await client.get("/admin/v1/pd")).json()
    assert (told["available"], told["verdict"], told["present"]) == (True, "does_not_pay", APART)
    assert told["layouts"][COLOCATED]["workers"] == {"both": 4}
    assert told["less_apart"][LOCAL]["low"] <= told["less_apart"][LOCAL]["mean"] == pytest.approx(0.05)
    assert told["assumptions"]
    assert again["num_calls"] == told["num_calls"] == 4_000
    shown = "\n".join(lines(told))
    assert "disaggregation does not pay on this traffic" in shown
    assert "apart: 9.01 calls/s in their targets (8.99 to 9.02), 90.1 %; 2 prefill + 2 decode" in shown
    assert "assumed: " in shown


async def test_without_a_planner_without_traffic_and_with_an_old_verdict_the_answer_says_why(
    plane: ControlPlane,
) -> None:
    async with viewer(plane, None) as client:
        told = (await client.get("/admin/v1/pd")).json()
    assert told == {"available": False, "reason": "no prediction is available: this controller has no planner"}
    assert lines(told) == ["no prediction is available: this controller has no planner"]
    async with viewer(plane, pays_of({}, window("interactive", 0.1))) as client:
        assert "too little traffic" in (await client.get("/admin/v1/pd")).json()["reason"]
    now_s = 7.0
    old = Pays(
        ScriptedSimulator(by_scenario({APART: 900, LOCAL: 950, COLOCATED: 850})),
        lambda: measured(fleet(), window("interactive", 10.0)),
        0,
        5.0,
        now_s=lambda: now_s,
    )
    await old.look()
    now_s += FRESH_PERIODS * PERIOD_S + 1.0
    old.reason = "too little traffic to say"
    async with viewer(plane, old) as client:
        assert (await client.get("/admin/v1/pd")).json() == {"available": False, "reason": "too little traffic to say"}


async def test_strangers_are_told_nothing(plane: ControlPlane) -> None:
    async with viewer(plane, None, secret="wrong") as client:
        assert (await client.get("/admin/v1/pd")).status_code == 401
