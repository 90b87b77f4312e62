"""A release through what happens to one: sizes, upgrades, and every kind of trouble, of which each is one condition."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from baton.errors import BatonError
from baton.request import Role
from router.controller.admin_tokens import Token, digest_of
from router.controller.autoscaler.acts import Drain
from router.controller.fleet_state import FAILED
from router.controller.kube import care, conditions, fleet, pods, status, upgrade
from router.controller.kube import platform as kube_platform
from router.controller.kube.lease import KubeLease
from router.controller.pool_orders import Order
from router.controller.settings import PoolBounds
from tests.kube.fake_api_faults import Fault
from tests.kube.fake_api_resources import QUOTAS
from tests.kube.fake_kubelet import Node
from tests.kube.kube_release_rig import Release, release_of
from tests.kube.kube_rig import NAMESPACE

ANN = Order("ann", "a test")
ALL = {"demo-prefill-0", "demo-decode-0", "demo-decode-1"}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (fleet, "LOOK_S", 0.03),
        (fleet, "SIZES_S", 0.05),
        (fleet, "ANNOUNCE_S", 0.2),
        (fleet, "REVIVE_S", 0.2),
        (pods, "MIN_PAUSE_S", 0.02),
        (kube_platform, "_CARE_S", 0.03),
        (conditions, "RECENT_S", 3.0),
        (care, "HEAD_S", 0.05),
        (care, "EVENTS_S", 0.05),
        (care, "SHORT_S", 0.1),
        (status, "HOLD_S", 0.1),
        (upgrade, "SETS_S", 0.05),
        (upgrade, "STUCK_S", 0.3),
        (upgrade, "AGAIN_S", 0.5),
    ):
        monkeypatch.setattr(module, name, value)


# -- sizes -----------------------------------------------------------------------------------------------------------


async def test_a_pool_is_brought_to_a_size_and_back_the_last_pods_first_and_drained(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        done = await rig.orders.scale(Role.DECODE, 4, ANN)
        assert done == ["create demo-decode-2", "create demo-decode-3"]
        await rig.until(lambda: {"demo-decode-2", "demo-decode-3"} <= rig.serving())
        await rig.orders.scale(Role.DECODE, 2, ANN)
        await rig.until(lambda: rig.size("decode") == 2 and rig.pods().keys() == ALL)
        await rig.until(
            lambda: ended(rig) == ["end demo-decode-3", "end demo-decode-2"]
        )  # written down once it is done


def ended(rig: Release) -> list[str]:
    return [decision.action for decision in rig.decisions if decision.lever == "end"]


async def test_a_busy_worker_s_pod_stays_until_it_has_drained(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=1) as rig:
        rig.workers.behaviour = "working"
        await rig.orders.scale(Role.DECODE, 2, ANN)
        await rig.until(lambda: "demo-decode-1" in rig.serving())
        await rig.orders.scale(Role.DECODE, 1, ANN)
        await rig.until(lambda: rig.workers.servers["demo-decode-1"].draining)
        assert rig.size("decode") == 2
        rig.workers.servers["demo-decode-1"].finish()
        await rig.until(lambda: rig.size("decode") == 1)


async def test_what_no_node_can_hold_is_said_and_given_back(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=1, gpus=2, pending_s=0.5) as rig:
        await rig.orders.scale(Role.DECODE, 2, ANN)
        await rig.until(lambda: conditions.UNSCHEDULABLE in rig.conditions())
        await rig.until(lambda: rig.size("decode") == 1)
        await rig.until(lambda: not rig.conditions())
        assert rig.serving() == {"demo-prefill-0", "demo-decode-0"}


async def test_a_set_ends_its_last_pod_where_the_autoscaler_named_another(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=3) as rig:
        done = await rig.orders.carry_out(Drain("demo-decode-0"), ANN)
        assert done == "drain demo-decode-2, then end it, since demo-decode-0 cannot be ended before it"
        with pytest.raises(BatonError, match="demo-decode-0 cannot be ended before demo-prefill-0, demo-decode-2"):
            await rig.orders.carry_out(Drain("demo-decode-0", or_another=False), ANN)
        await rig.until(lambda: rig.size("decode") == 2)


# -- upgrades --------------------------------------------------------------------------------------------------------


async def test_an_upgrade_replaces_every_pod_within_the_budget_and_nobody_is_missed(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.allow(max_gpus=5)
        rig.upgrade("baton-worker:2")
        most = 0

        def is_over() -> bool:
            nonlocal most
            most = max(most, rig.size("prefill") + rig.size("decode"))
            return rig.images() == dict.fromkeys(ALL, "baton-worker:2") and rig.serving() == ALL

        await rig.until(is_over, patience_s=40.0)
        assert (most, rig.lowest) == (5, 3)


async def test_without_room_one_pod_at_a_time_is_missing_and_a_pool_of_one_waits_for_room(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.allow(max_gpus=3)
        rig.upgrade("baton-worker:2")
        await rig.until(lambda: conditions.UPGRADE_PAUSED in rig.conditions())
        assert "raise it by one worker" in rig.conditions()[conditions.UPGRADE_PAUSED]
        assert rig.images()["demo-prefill-0"] == "baton-worker:1"
        assert rig.lowest == 2
        await rig.allow(max_gpus=4)
        await rig.until(lambda: rig.images() == dict.fromkeys(ALL, "baton-worker:2") and rig.serving() == ALL)


async def test_an_image_that_cannot_be_had_stops_the_upgrade_at_its_first_pod_and_the_way_back_is_one(
    tmp_path: Path,
) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.allow(max_gpus=3)
        rig.nodes.bad_images.add("baton-worker:2")
        rig.upgrade("baton-worker:2")
        await rig.until(lambda: conditions.IMAGE in rig.conditions() and conditions.UPGRADE_PAUSED in rig.conditions())
        assert sorted(rig.images().values()) == ["baton-worker:1", "baton-worker:1", "baton-worker:2"]
        assert len(rig.serving()) == 2
        rig.upgrade("baton-worker:1")
        await rig.until(lambda: rig.images() == dict.fromkeys(ALL, "baton-worker:1") and rig.serving() == ALL)
        await rig.until(lambda: not rig.conditions())


async def test_a_surge_that_no_node_can_hold_costs_no_pool_a_pod_and_the_pause_says_what_is_missing(
    tmp_path: Path,
) -> None:
    async with release_of(tmp_path, prefill=1, decode=2, gpus=3, pending_s=0.5) as rig:
        rig.upgrade("baton-worker:2")
        smallest = 2

        def is_paused() -> bool:
            nonlocal smallest
            smallest = min(smallest, rig.size("decode"))
            return conditions.UPGRADE_PAUSED in rig.conditions()

        await rig.until(is_paused)
        said = rig.conditions()[conditions.UPGRADE_PAUSED]
        assert "one more pod of prefill" in said
        assert "given back: " in said
        assert "Insufficient nvidia.com/gpu" in said
        assert (smallest, rig.size("prefill"), rig.size("decode")) == (2, 1, 2)
        rig.nodes.add_node(Node("node-2", {"nvidia.com/gpu": 1}))  # it asks again by itself
        await rig.until(lambda: rig.images() == dict.fromkeys(ALL, "baton-worker:2") and rig.serving() == ALL)
        await rig.until(lambda: (rig.size("prefill"), rig.size("decode")) == (1, 2))


@pytest.mark.parametrize("trouble", [{"code": 503}, {"drop_answer": True}], ids=["refused", "answer lost"])
async def test_one_error_of_the_server_at_a_surge_neither_stops_an_upgrade_nor_leaves_a_pod_behind(
    tmp_path: Path, trouble: dict[str, Any]
) -> None:
    async with release_of(tmp_path, prefill=1, decode=1) as rig:
        fault = rig.fake.faults.add(Fault(verb="update", resource="statefulsets/scale", times=1, **trouble))
        rig.upgrade("baton-worker:2")
        pods = {"demo-prefill-0", "demo-decode-0"}
        await rig.until(lambda: rig.images() == dict.fromkeys(pods, "baton-worker:2") and rig.serving() == pods)
        assert fault.hits == 1
        await rig.until(lambda: (rig.size("prefill"), rig.size("decode")) == (1, 1))
        assert rig.lowest == 2  # the surges came all the same


@pytest.mark.parametrize("scaler", ["none", "hpa"])
async def test_where_sizes_are_somebody_else_s_an_upgrade_writes_none_and_says_what_it_lacks(
    tmp_path: Path, scaler: str
) -> None:
    async with release_of(tmp_path, prefill=1, decode=2, scaler=scaler) as rig:
        written = rig.fake.faults.add(Fault(resource="statefulsets/scale", verb="update"))  # it only counts
        rig.upgrade("baton-worker:2")
        await rig.until(lambda: conditions.UPGRADE_PAUSED in rig.conditions())
        assert f"not the controller's (scaler.type = {scaler})" in rig.conditions()[conditions.UPGRADE_PAUSED]
        assert rig.images() == dict.fromkeys(ALL, "baton-worker:2") | {"demo-prefill-0": "baton-worker:1"}
        assert written.hits == 0
        rig.scale("prefill", 2)  # as its owner does
        both = {*ALL, "demo-prefill-1"}
        await rig.until(lambda: rig.images() == dict.fromkeys(both, "baton-worker:2") and rig.serving() == both)


async def test_a_surge_is_written_down_before_it_is_asked_for_and_a_successor_takes_it_back(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.controller.surge_from("decode", 1)  # as a leader that died then left it
        saved = await asyncio.to_thread(rig.platform.api.config_map, "demo-fleet")
        assert json.loads(saved.data["fleet.json"])["surged_from"] == {"decode": 1}
        await rig.until(lambda: rig.size("decode") == 1 and rig.serving() == {"demo-prefill-0", "demo-decode-0"})


# -- trouble ---------------------------------------------------------------------------------------------------------


async def test_a_quota_that_is_used_up_is_one_condition_an_event_and_a_metric_and_the_rest_serves(
    tmp_path: Path,
) -> None:
    async with release_of(tmp_path, prefill=1, decode=2, pending_s=1.0) as rig:
        quota = {"metadata": {"name": "gpus"}, "spec": {"hard": {"requests.nvidia.com/gpu": "3"}}}
        rig.fake.verbs.create(QUOTAS, NAMESPACE, quota)
        await rig.orders.scale(Role.DECODE, 3, ANN)
        await rig.until(lambda: conditions.QUOTA in rig.conditions())
        assert "exceeded quota" in rig.conditions()[conditions.QUOTA]
        await rig.until(lambda: rig.events() == [conditions.QUOTA])
        rig.platform.show_metrics(rig.registry)
        assert 'baton_kube_condition{kind="PodsRefused"} 1' in rig.metrics()
        assert rig.serving() == ALL
        await rig.until(lambda: rig.size("decode") == 2)


async def test_a_worker_killed_for_memory_comes_back_and_is_said(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        rig.nodes.pod("demo-decode-1").kill(out_of_memory=True)
        await rig.until(lambda: conditions.OUT_OF_MEMORY in rig.conditions())
        assert {"demo-prefill-0", "demo-decode-0"} <= rig.serving()
        await rig.until(lambda: rig.serving() == ALL)
        await rig.until(lambda: not rig.conditions())


async def test_a_node_that_is_lost_is_said_and_its_workers_come_back_with_it(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=1, gpus=2) as rig:
        rig.nodes.add_node(Node("node-2", {"nvidia.com/gpu": 1}))
        await rig.orders.scale(Role.DECODE, 2, ANN)
        await rig.until(lambda: "demo-decode-1" in rig.serving())
        rig.nodes.lose_node("node-2", kill=True)
        rig.workers.stop("demo-decode-1")
        await rig.until(lambda: conditions.NODE_LOST in rig.conditions())
        await rig.until(lambda: rig.serving() == {"demo-prefill-0", "demo-decode-0"})


async def test_a_sick_worker_s_pod_is_evicted_by_name_and_comes_back_under_it(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2, sick_s=0.5) as rig:
        uid = rig.workers.uids["demo-decode-0"]
        rig.workers.sick.add(uid)  # not the last one
        rig.workers.stop("demo-decode-0")
        await rig.until(lambda: rig.controller.fleet.get("demo-decode-0").state == FAILED)
        await rig.until(lambda: "illegal memory access" in rig.conditions().get(conditions.SICK, ""))
        await rig.until(lambda: rig.workers.uids["demo-decode-0"] != uid and rig.serving() == ALL)
        assert rig.size("decode") == 2


async def test_a_pod_that_cannot_end_on_a_lost_node_keeps_no_sick_one_from_its_eviction(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2, gpus=3, sick_s=0.5) as rig:
        rig.nodes.add_node(Node("node-2", {"nvidia.com/gpu": 1}))
        await rig.orders.scale(Role.DECODE, 3, ANN)
        await rig.until(lambda: "demo-decode-2" in rig.serving())
        rig.nodes.lose_node("node-2", kill=True)
        rig.workers.stop("demo-decode-2")
        await rig.until(lambda: "deletionTimestamp" in rig.pods()["demo-decode-2"]["metadata"])
        uid = rig.workers.uids["demo-decode-0"]
        rig.workers.sick.add(uid)
        rig.workers.stop("demo-decode-0")
        await rig.until(lambda: rig.workers.uids["demo-decode-0"] != uid)


async def test_ray_s_head_that_is_away_is_said_and_everybody_serves_on(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        rig.workers.is_away = True
        await rig.until(lambda: conditions.HEAD_AWAY in rig.conditions())
        assert rig.serving() == ALL
        rig.workers.is_away = False
        await rig.until(lambda: not rig.conditions())


async def test_a_pool_scaled_by_hand_beyond_the_budget_is_said(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.orders.scale(Role.DECODE, 4, ANN)
        await rig.allow(max_gpus=4, decode=PoolBounds(1))
        await rig.until(lambda: conditions.OVER_BUDGET in rig.conditions())
        assert rig.conditions()[conditions.OVER_BUDGET] == "max_gpus = 4: 1 prefill + 4 decode pods make 5"


# -- what is shown ---------------------------------------------------------------------------------------------------


async def test_operators_see_sizes_drift_and_conditions_and_probes_who_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = tmp_path / "slo.json"
    seed.write_text(json.dumps([{"name": "interactive", "ttft_ms": 500.0, "tpot_ms": 20.0}]))
    async with release_of(tmp_path, prefill=1, decode=1, slo_seed=str(seed)) as rig:
        rig.workers.is_away = True
        await rig.until(lambda: conditions.HEAD_AWAY in rig.conditions())
        app = FastAPI()
        token = Token("ann", "viewer", digest_of("secret"))
        rig.platform.show(app, lambda: [token], rig.registry)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://controller") as client:
            told = await client.get("/admin/v1/kubernetes", headers={"authorization": "Bearer secret"})
            assert (await client.get("/leaderz")).status_code == 200
            with monkeypatch.context() as run_out:
                run_out.setattr(KubeLease, "is_held", property(lambda _: False))
                assert (await client.get("/leaderz")).status_code == 503
        body = told.json()
        assert [(one["home"], one["desired"]) for one in body["sizes"]] == [("prefill", 1), ("decode", 1)]
        assert body["conditions"][0]["condition"]["remedy"]
        assert {"class_name": "interactive", "field": "ttft_ms", "old": 500.0, "new": 2_000.0} in body["slo_drift"]
        assert f"baton_slo_drift_fields {len(body['slo_drift'])}.0" in rig.metrics()


async def test_who_learns_of_another_leader_ends(tmp_path: Path) -> None:
    async with release_of(tmp_path, prefill=1, decode=1) as rig:
        stop = asyncio.Event()
        ending = asyncio.create_task(rig.platform.until_lost(stop))
        await asyncio.sleep(0)
        assert not stop.is_set()
        rig.platform.lease.is_lost = True
        async with asyncio.timeout(20):
            await ending
        assert stop.is_set()
