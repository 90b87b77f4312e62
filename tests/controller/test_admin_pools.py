"""Orders of an operator over the admin endpoint: within the budget, written down with who gave them, and no call lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.request import Role
from router.controller.admin_tokens import Token
from router.controller.autoscaler.acts import Create
from router.controller.fleet_state import DRAINING, READY, STANDBY
from router.controller.settings import Mode
from tests.controller.control_rig import SHAPE, Machines, Rig, life

TOKENS = [Token.of("ann", "operator", "op-secret"), Token.of("dash", "viewer", "view-secret")]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    machines = Machines()
    async with life(tmp_path, machines, Mode.FROZEN) as made:
        yield made
    await machines.stop_all()


@pytest.fixture
async def admin(rig: Rig) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(rig.app(TOKENS)),
        base_url="http://admin",
        headers={"authorization": "Bearer op-secret"},
    ) as client:
        yield client


async def order(admin: httpx.AsyncClient, path: str, **body: object) -> Any:
    answer = await admin.post(f"/admin/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["done"]


async def pools(admin: httpx.AsyncClient) -> dict[str, Any]:
    answer = await admin.get("/admin/v1/pools")
    return dict(answer.json())


async def test_a_pool_is_brought_to_a_size_by_the_cheapest_means(rig: Rig, admin: httpx.AsyncClient) -> None:
    await rig.worker("decode-0")
    leaving = await rig.worker("decode-1", behaviour="working")
    await rig.worker("prefill-0", "prefill")
    await order(admin, "workers/prefill-0:standby")
    await rig.until(lambda: rig.state("prefill-0") == STANDBY)
    assert await order(admin, "pools/decode:scale", workers=1) == ["drain decode-1, then end it"]
    assert (await pools(admin))["pools"]["decode"]["desired"] == 1
    assert await order(admin, "pools/decode:scale", workers=4, reason="a launch") == [
        "undrain decode-1",
        "wake prefill-0 as decode",
        "create decode-2",
    ]
    await rig.until(lambda: all(rig.state(name) == READY for name in rig.ids()))
    told = (await pools(admin))["pools"]["decode"]
    assert (told["desired"], told["num_ready"], told["num_standby"]) == (4, 4, 0)
    assert not leaving.draining
    last = (await rig.decisions())[-1]
    assert (last.action, last.reason, last.inputs["who"], last.applied) == ("create decode-2", "a launch", "ann", True)
    assert await order(admin, "pools/decode:scale", workers=4) == []


async def test_the_youngest_leave_first_and_what_is_not_up_yet_before_them(rig: Rig, admin: httpx.AsyncClient) -> None:
    await rig.worker("decode-0")
    await order(admin, "pools/decode:scale", workers=2)
    rig.machines.starts = False
    await order(admin, "pools/decode:scale", workers=3)
    assert await order(admin, "pools/decode:scale", workers=1) == ["end decode-2", "drain decode-1, then end it"]
    await rig.until(lambda: rig.ids() == ["decode-0"])


async def test_orders_beyond_the_budget_name_the_limit_and_are_written_down(rig: Rig, admin: httpx.AsyncClient) -> None:
    await rig.worker("decode-0")
    await admin.patch(
        "/admin/v1/budget",
        json={"max_gpus": 2, "decode": {"min_workers": 1}, "reason": "night"},
        headers={"if-match": "*"},
    )
    refused = await admin.post("/admin/v1/pools/decode:scale", json={"workers": 3})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "max_gpus")
    assert refused.json()["error"]["message"].endswith("(done so far: create decode-1)")
    assert rig.ids() == ["decode-0", "decode-1"], "what came before holds"
    refused = await admin.post("/admin/v1/pools/decode:scale", json={"workers": 0})
    assert refused.json()["error"]["field"] == "decode.min_workers"
    not_done = [d.inputs["not_done"] for d in await rig.decisions() if not d.applied]
    assert not_done == ["max_gpus = 2: one more worker makes 3", "decode.min_workers = 1: 1 are there"]


async def test_a_worker_flips_stands_by_wakes_is_tuned_and_ends(rig: Rig, admin: httpx.AsyncClient) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    assert await order(admin, "workers/decode-0:flip", role="prefill") == ["flip decode-0 to prefill"]
    assert (await pools(admin))["pools"]["prefill"]["num_flipping"] == 1
    worker.finish()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "chunk_tokens": 64}
    await order(admin, "workers/decode-0:tune", **limits)
    too_much = await admin.post("/admin/v1/workers/decode-0:tune", json={**limits, "max_num_seqs": 10_000})
    assert (too_much.status_code, too_much.json()["error"]["field"]) == (400, "max_num_seqs")
    await order(admin, "workers/decode-0:standby")
    await rig.until(lambda: rig.state("decode-0") == STANDBY)
    await order(admin, "workers/decode-0:wake", role="decode")
    assert (worker.role, rig.state("decode-0")) == (Role.DECODE, READY)
    await order(admin, "workers/decode-0:end")
    await rig.until(lambda: rig.ids() == [])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("pools/poets:scale", {"workers": 1}, 422),
        ("pools/decode:scale", {"workers": -1}, 422),
        ("pools/decode:scale", {"workers": 1.5}, 422),
        ("pools/decode:scale", {}, 422),
        ("workers/decode-0:flip", {"role": "poet"}, 422),
        ("workers/decode-0:wake", {"role": "decode"}, 400),  # it serves
        ("workers/nobody:flip", {"role": "decode"}, 404),
        ("workers/decode-0:tune", {"max_num_seqs": 0, "max_num_batched_tokens": 1, "chunk_tokens": 1}, 422),
        ("workers/decode-0:end", {"surprise": 1}, 422),
    ],
)
async def test_what_makes_no_sense_is_refused_and_changes_nothing(
    rig: Rig, admin: httpx.AsyncClient, path: str, body: dict[str, object], status: int
) -> None:
    await rig.worker("decode-0")
    assert (await admin.post(f"/admin/v1/{path}", json=body)).status_code == status
    assert (rig.ids(), rig.state("decode-0")) == (["decode-0"], READY)


async def test_a_viewer_sees_pools_and_orders_nothing(rig: Rig, admin: httpx.AsyncClient) -> None:
    await rig.worker("decode-0")
    viewer = {"authorization": "Bearer view-secret"}
    shown = await admin.get("/admin/v1/pools", headers=viewer)
    assert shown.json()["autoscaler"]["mode"] == "frozen"
    for path in ("pools/decode:scale", "workers/decode-0:flip", "workers/decode-0:end"):
        assert (await admin.post(f"/admin/v1/{path}", json={"workers": 3}, headers=viewer)).status_code == 403
    assert rig.state("decode-0") != DRAINING


async def test_of_two_writers_of_the_mode_at_once_one_gets_412_and_the_loop_obeys_the_other(
    rig: Rig, admin: httpx.AsyncClient
) -> None:
    version = f'"{rig.controller.in_force.settings.revision.version}"'
    answers = await asyncio.gather(
        *(
            admin.put("/admin/v1/mode", json={"mode": mode, "reason": "x"}, headers={"if-match": version})
            for mode in ("auto", "advisory")
        )
    )
    assert sorted(answer.status_code for answer in answers) == [200, 412]
    [won] = [answer.json()["mode"] for answer in answers if answer.status_code == 200]
    rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
    await rig.ticks(2)
    assert (rig.ids() != []) == (won == "auto")


async def test_metrics_are_open_and_an_empty_pool_is_a_zero(rig: Rig, admin: httpx.AsyncClient) -> None:
    await rig.worker("decode-0")
    page = (await admin.get("/metrics", headers={"authorization": ""})).text
    assert 'baton_pool_size{role="decode",state="ready"} 1.0' in page
    assert 'baton_pool_size{role="prefill",state="ready"} 0.0' in page
    assert "baton_autoscaler_last_tick_seconds " in page
    assert "baton_autoscaler_is_leader 1.0" in page


async def test_of_two_controllers_the_one_that_does_not_lead_answers_503_to_every_order_and_says_who_does(
    tmp_path: Path, rig: Rig
) -> None:
    machines = Machines()
    async with life(tmp_path, machines, Mode.FROZEN, holder="second") as second:
        await second.worker("decode-0")
        transport = httpx.ASGITransport(second.app(TOKENS))
        bearer = {"authorization": "Bearer op-secret"}
        async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=bearer) as admin:
            role: dict[str, object] = {"role": "prefill"}
            tuning: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "chunk_tokens": 64}
            orders: dict[str, dict[str, object]] = {
                "workers/decode-0:drain": {},
                "workers/decode-0:undrain": {},
                "workers/decode-0:set_role": role,
                "workers/decode-0:flip": role,
                "workers/decode-0:standby": {},
                "workers/decode-0:wake": role,
                "workers/decode-0:end": {},
                "workers/decode-0:tune": tuning,
                "pools/decode:scale": {"workers": 3},
            }
            for path, body in orders.items():
                answer = await admin.post(f"/admin/v1/{path}", json=body)
                assert answer.status_code == 503, (path, answer.text)
                assert "does not lead: first does" in answer.json()["error"]["message"]
                assert 1 <= int(answer.headers["retry-after"]) <= 14
            assert (await pools(admin))["autoscaler"]["leads"] is False
        assert second.state("decode-0") == READY
    await machines.stop_all()
