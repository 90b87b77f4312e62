"""Fleet and pods agree, whatever happens to either: on the fake API server, with stand-ins for Ray and workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.errors import InvalidRequest, Unavailable
from baton.request import Role
from router.controller.fleet_state import FAILED, READY, STARTING, AfterDrain
from router.controller.kube import fleet as kube_fleet
from router.controller.kube import pods as kube_pods
from router.controller.settings import PoolBounds
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.fake_api_resources import PODS, STATEFUL_SETS
from tests.kube.kube_fleet_rig import Rig, cluster_of, rig_of, until
from tests.kube.kube_rig import NAMESPACE, kube_api, release


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_fleet, "LOOK_S", 0.02)
    monkeypatch.setattr(kube_fleet, "SIZES_S", 0.05)
    monkeypatch.setattr(kube_fleet, "ANNOUNCE_S", 0.1)
    monkeypatch.setattr(kube_pods, "MIN_PAUSE_S", 0.02)
    monkeypatch.setattr(kube_pods, "MAX_PAUSE_S", 0.05)


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        yield fake


@asynccontextmanager
async def running(fake: FakeApi, folder: Path, prefill: int = 1, decode: int = 2, **more: object) -> AsyncIterator[Rig]:
    """With that many pods, which run, and whose workers have announced themselves."""
    fake.load(release(prefill, decode), NAMESPACE)
    async with rig_of(fake, folder, cluster_of(fake, folder, prefill=prefill, decode=decode, **more)) as rig:
        names = [f"demo-prefill-{n}" for n in range(prefill)] + [f"demo-decode-{n}" for n in range(decode)]
        for number, name in enumerate(names):
            rig.make_pod(name, ip=f"10.0.0.{number}")
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: sorted(rig.ray.names()) == sorted(names))
        for number, name in enumerate(names):
            rig.announce(name, epoch=number + 1, ip=f"10.0.0.{number}")
        yield rig
        looking.cancel()


async def test_each_pod_that_runs_gets_its_worker_at_its_own_address(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        assert rig.ids() == ["demo-decode-0", "demo-decode-1", "demo-prefill-0"]
        by_name = {config.worker_id: config for config in rig.ray.started}
        assert by_name["demo-decode-1"].host == "10.0.0.2"
        assert by_name["demo-decode-1"].port == 7100
        assert by_name["demo-decode-1"].control_address == "demo-controller:7001"
        assert by_name["demo-prefill-0"].role == "prefill"
        assert [rig.controller.fleet.get(name).extra for name in rig.ids()] == [False] * 3


async def test_a_worker_computes_with_all_cores_of_its_pod(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path, decode=3, prefill_cores=8, decode_cores=4) as rig:
        threads = {config.worker_id: config.engine.num_threads for config in rig.ray.started}
        assert threads == {"demo-prefill-0": 8, **{f"demo-decode-{n}": 4 for n in range(3)}}


async def test_a_worker_s_fabric_is_what_its_pod_s_label_says(fake: FakeApi, tmp_path: Path) -> None:
    fake.load(release(prefill=1, decode=1), NAMESPACE)
    cluster = cluster_of(fake, tmp_path, fabric_label="acme/island")
    async with rig_of(fake, tmp_path, cluster) as rig:
        for name in ("demo-prefill-0", "demo-decode-0"):
            rig.make_pod(name, phase="Pending")
        body = rig.get(PODS, "demo-decode-0")
        body["metadata"]["labels"]["acme/island"] = "east"  # as an admission plugin does when the pod is bound
        fake.verbs.update(PODS, NAMESPACE, "demo-decode-0", body)
        for name in ("demo-prefill-0", "demo-decode-0"):
            rig.tell_pod(name)
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: len(rig.ray.started) == 2)
        assert {config.worker_id: config.fabric for config in rig.ray.started} == {
            "demo-prefill-0": "",
            "demo-decode-0": "east",
        }
        looking.cancel()


async def test_a_new_fleet_gets_its_initial_sizes_although_the_chart_names_none(fake: FakeApi, tmp_path: Path) -> None:
    fake.load(release(prefill=1, decode=1), NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, prefill=2, decode=3)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: (rig.desired("prefill"), rig.desired("decode")) == (2, 3))
        await until(lambda: len(rig.ids()) == 5)
        looking.cancel()


@pytest.mark.parametrize("trouble", [{"code": 503}, {"drop_answer": True}], ids=["refused", "answer lost"])
async def test_a_new_fleet_gets_its_initial_sizes_and_no_more_although_the_server_failed_once(
    fake: FakeApi, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    fake.load(release(prefill=1, decode=1), NAMESPACE)
    fault = fake.faults.add(Fault(verb="update", resource="statefulsets/scale", times=1, **trouble))
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, prefill=2, decode=3)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: (rig.desired("prefill"), rig.desired("decode")) == (2, 3))
        await until(lambda: len(rig.ids()) == 5)
        await asyncio.sleep(0.2)  # more looks
        assert (rig.desired("prefill"), rig.desired("decode"), fault.hits) == (2, 3, 1)
        looking.cancel()


async def test_an_initial_size_that_is_refused_is_not_asked_for_again(fake: FakeApi, tmp_path: Path) -> None:
    fake.load(release(prefill=1, decode=1), NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, prefill=1, decode=3)) as rig:
        await rig.allow(max_gpus=2)
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: len(rig.ids()) == 2)
        await rig.allow(max_gpus=4)  # from now on sizes are the operator's and the autoscaler's
        await asyncio.sleep(0.2)
        assert rig.desired("decode") == 1
        looking.cancel()


async def test_while_ray_s_head_hangs_pods_are_followed_and_workers_start_once_it_is_back(
    fake: FakeApi, tmp_path: Path
) -> None:
    fake.load(release(prefill=1, decode=1), NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path)) as rig:
        rig.ray.answers.clear()
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        try:
            await until(lambda: rig.ids() == ["demo-decode-0", "demo-prefill-0"])
            rig.make_pod("demo-decode-0", ip="10.0.0.1")
            rig.announce("demo-decode-0")  # it ran before
            rig.delete_pod("demo-decode-0")
            await until(lambda: is_gone(rig, "demo-decode-0"))
            rig.make_pod("demo-prefill-0", ip="10.0.0.2")
        finally:
            rig.ray.answers.set()
        await until(lambda: rig.ray.names() == ["demo-prefill-0"])
        looking.cancel()


async def test_a_fleet_that_is_not_new_keeps_its_sizes(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        await until(lambda: "fleet.json" in rig.config_map("fleet"))
        await rig.fleet.scale_up(Role.DECODE, "gpu")
        await until(lambda: "demo-decode-2" in rig.config_map("fleet")["fleet.json"])
        await asyncio.to_thread(rig.platform.lease.give_back)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, prefill=1, decode=2)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: len(rig.ids()) == 4)
        rig.make_pod("demo-decode-2", ip="10.0.0.9")
        await until(lambda: "demo-decode-2" in rig.ray.names())
        assert rig.ray.ended == ["demo-decode-2"]  # nothing is left of before; the others were adopted
        assert rig.desired("decode") == 3
        looking.cancel()


# -- sizes -----------------------------------------------------------------------------------------------------------


async def test_one_more_worker_is_one_more_pod_and_it_has_its_name_at_once(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        assert await rig.fleet.scale_up(Role.DECODE, "gpu") == "demo-decode-2"
        assert rig.desired("decode") == 3
        assert (rig.state("demo-decode-2"), rig.controller.fleet.get("demo-decode-2").extra) == (STARTING, True)
        rig.make_pod("demo-decode-2", ip="10.0.0.7")
        await until(lambda: rig.ray.names()[-1] == "demo-decode-2")


async def test_the_budget_is_that_of_both_pools_and_is_asked_before_anything_is_written(
    fake: FakeApi, tmp_path: Path
) -> None:
    async with running(fake, tmp_path) as rig:
        await rig.allow(max_gpus=4)
        await rig.fleet.scale_up(Role.PREFILL, "gpu")
        with pytest.raises(InvalidRequest, match=r"max_gpus = 4: 2 prefill \+ 3 decode pods make 5"):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        assert (rig.desired("prefill"), rig.desired("decode")) == (2, 2)


async def test_the_last_ordinal_may_go_and_those_before_it_once_it_leaves(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path, decode=4) as rig:
        await rig.allow()
        assert (await rig.fleet.get("gpu")).victims == ("demo-prefill-0", "demo-decode-3")
        rig.controller.let_go("demo-decode-3")
        assert (await rig.fleet.get("gpu")).victims[1:] == ("demo-decode-3", "demo-decode-2")
        rig.controller.let_go("demo-decode-2")
        assert (rig.fleet.can_end("demo-decode-2"), rig.fleet.can_end("demo-decode-3")) == (False, True)


async def test_below_its_minimum_a_pool_offers_and_loses_nobody(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        await rig.allow(prefill=PoolBounds(1), decode=PoolBounds(2))
        assert (await rig.fleet.get("gpu")).victims == ()
        with pytest.raises(InvalidRequest, match=r"decode\.min_workers = 2: 1 would stay"):
            await rig.fleet.scale_down("demo-decode-1")
        assert rig.desired("decode") == 2


async def test_an_ended_worker_s_place_is_taken_away_after_its_process(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        rig.controller.begin_end("demo-decode-1")
        await rig.fleet.scale_down("demo-decode-1")
        assert (rig.ray.ended[-1], rig.desired("decode")) == ("demo-decode-1", 1)
        rig.controller.forget("demo-decode-1")
        rig.delete_pod("demo-decode-1")
        await asyncio.sleep(0.1)
        assert rig.ids() == ["demo-decode-0", "demo-prefill-0"]


async def test_a_pending_pod_blocks_no_shrink_and_is_given_back_in_time(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path, pending_s=0.3) as rig:
        asked = await rig.fleet.scale_up(Role.DECODE, "gpu")
        no_gpu = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: Insufficient nvidia.com/gpu"}
        rig.make_pod(asked, ip="", phase="Pending", conditions=[no_gpu])
        await until(lambda: rig.state(asked) == FAILED)
        assert "Insufficient nvidia.com/gpu" in rig.controller.fleet.get(asked).reason
        await rig.fleet.scale_down(asked)  # as the levers do with one that never came
        rig.controller.forget(asked)
        assert rig.desired("decode") == 2


async def test_a_pod_that_fetches_its_model_is_not_late_and_one_that_fails_at_it_is(
    fake: FakeApi, tmp_path: Path
) -> None:
    def fetch(restarts: int, **state: object) -> dict[str, Any]:
        told = {"name": "fetch", "state": state, "restartCount": restarts}
        return {"ip": "10.0.0.9", "phase": "Pending", "initContainerStatuses": [told]}

    async with running(fake, tmp_path, pending_s=0.3) as rig:
        asked = await rig.fleet.scale_up(Role.DECODE, "gpu")
        rig.make_pod(asked, **fetch(0, running={"startedAt": "2026-01-01T00:00:00Z"}))
        await asyncio.sleep(0.7)
        assert rig.state(asked) == STARTING
        rig.tell_pod(asked, **fetch(1, waiting={"reason": "CrashLoopBackOff"}))
        rig.tell_pod(asked, **fetch(1, running={"startedAt": "2026-01-01T00:10:00Z"}))  # again, and again
        await until(lambda: rig.state(asked) == FAILED)


async def test_who_scales_by_hand_is_followed_both_ways(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        scale = fake.verbs.get(STATEFUL_SETS, NAMESPACE, "demo-decode", "scale")
        scale["spec"]["replicas"] = 3
        fake.verbs.update(STATEFUL_SETS, NAMESPACE, "demo-decode", scale, "scale")
        await until(lambda: "demo-decode-2" in rig.ids())
        assert not rig.controller.fleet.get("demo-decode-2").extra  # theirs to take back
        scale = fake.verbs.get(STATEFUL_SETS, NAMESPACE, "demo-decode", "scale")
        scale["spec"]["replicas"] = 1
        fake.verbs.update(STATEFUL_SETS, NAMESPACE, "demo-decode", scale, "scale")
        await until(lambda: "demo-decode-2" not in rig.ids())
        assert "demo-decode-1" in rig.ids()  # its pod is still there
        rig.delete_pod("demo-decode-1")
        await until(lambda: rig.ids() == ["demo-decode-0", "demo-prefill-0"])


async def test_without_the_lease_nothing_is_written(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        rig.platform.lease.give_back()
        for asked in (rig.fleet.scale_up(Role.DECODE, "gpu"), rig.fleet.scale_down("demo-decode-1")):
            with pytest.raises(Unavailable, match="Lease"):
                await asked
        assert rig.desired("decode") == 2


async def test_a_lease_that_runs_out_in_the_middle_stops_the_write(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading of a size and its writing."""
    async with running(fake, tmp_path) as rig:
        lease, read = rig.platform.lease, rig.platform.api.scale

        def read_late(name: str) -> object:
            lease._until_s = float("-inf")
            return read(name)

        monkeypatch.setattr(rig.platform.api, "scale", read_late)
        with pytest.raises(Unavailable, match="ran out meanwhile"):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        assert rig.desired("decode") == 2


# -- discovery -------------------------------------------------------------------------------------------------------


def is_gone(rig: Rig, worker_id: str) -> bool:
    """No router is sent there any more."""
    member = rig.controller.fleet.get(worker_id)
    return (member.state, member.address, member.epoch) == (STARTING, "", 0)


async def test_a_pod_that_loses_its_address_has_nobody_behind_it(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        rig.tell_pod("demo-decode-1", ip="", phase="Failed", reason="Evicted")
        await until(lambda: is_gone(rig, "demo-decode-1"))
        assert rig.controller.fleet.get("demo-decode-0").epoch


async def test_a_deletion_that_was_not_told_is_found_by_the_next_list(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_pods, "RESYNC_S", 1)
    async with running(fake, tmp_path) as rig:
        monkeypatch.setattr(rig.platform.pods, "tell", lambda kind, pod: None)  # events are lost
        rig.delete_pod("demo-decode-1")
        await until(lambda: is_gone(rig, "demo-decode-1"))


async def test_another_pod_of_the_same_name_and_address_is_another_worker(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        rig.delete_pod("demo-decode-1")
        rig.make_pod("demo-decode-1", ip="10.0.0.2")
        await until(lambda: rig.ray.names().count("demo-decode-1") == 2)
        assert "demo-decode-1" in rig.ray.ended  # what the old pod ran may not come back in its place
        assert is_gone(rig, "demo-decode-1")
        rig.announce("demo-decode-1", epoch=99, ip="10.0.0.2")
        assert rig.state("demo-decode-1") == READY
        with pytest.raises(Exception, match="was replaced"):
            rig.announce("demo-decode-1", epoch=3, ip="10.0.0.2")


async def test_a_pod_that_is_being_deleted_takes_no_new_calls_and_its_next_process_does(
    fake: FakeApi, tmp_path: Path
) -> None:
    async with running(fake, tmp_path) as rig:
        fake.verbs.delete(PODS, NAMESPACE, "demo-decode-1")  # gracefully: its kubelet is to end it
        await until(lambda: rig.controller.fleet.get("demo-decode-1").after_drain is AfterDrain.RETURN)
        rig.delete_pod("demo-decode-1")
        await until(lambda: is_gone(rig, "demo-decode-1"))
        rig.make_pod("demo-decode-1", ip="10.0.0.5")
        await until(lambda: rig.ray.names().count("demo-decode-1") == 2)
        rig.announce("demo-decode-1", epoch=99, ip="10.0.0.5")
        assert rig.state("demo-decode-1") == READY


async def test_role_labels_follow_flips_and_nobody_else(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path, llmd_labels=True) as rig:
        rig.controller.fleet.want_role("demo-decode-1", Role.PREFILL)
        await until(lambda: rig.labels("demo-decode-1").get("llm-d.ai/role") == "prefill")
        assert rig.labels("demo-decode-1")["baton.dev/role"] == "prefill"
        assert rig.labels("demo-decode-1")["baton.dev/home"] == "decode"
        body = rig.get(PODS, "demo-decode-0")
        body["metadata"]["labels"]["baton.dev/role"] = "prefill"
        fake.verbs.update(PODS, NAMESPACE, "demo-decode-0", body)
        await until(lambda: rig.labels("demo-decode-0")["baton.dev/role"] == "decode")
        assert rig.controller.fleet.get("demo-decode-0").role is Role.DECODE


# -- a server that fails ---------------------------------------------------------------------------------------------


async def test_while_the_server_is_away_nobody_is_lost_and_afterwards_everything_is_as_before(
    fake: FakeApi, tmp_path: Path
) -> None:
    async with running(fake, tmp_path) as rig:
        before = [(m.worker_id, m.epoch) for m in rig.controller.fleet.members()]
        with fake.away(compact=True):
            await asyncio.sleep(0.3)
            assert [(m.worker_id, m.epoch) for m in rig.controller.fleet.members()] == before
            with pytest.raises(Unavailable):
                await rig.fleet.scale_up(Role.DECODE, "gpu")
        rig.make_pod("demo-prefill-9", ip="10.0.0.99")  # of nobody
        rig.delete_pod("demo-decode-1")
        await until(lambda: is_gone(rig, "demo-decode-1"))
        assert [(m.worker_id, m.epoch) for m in rig.controller.fleet.members()][1:] != before[1:]
        assert rig.ids() == [name for name, _ in before]
        page = "".join(rig.platform.client.counts.lines())
        assert 'outcome="away"' in page


@pytest.mark.parametrize("code", [409, 429, 500, 503])
async def test_errors_of_the_server_change_nothing_and_are_counted(fake: FakeApi, tmp_path: Path, code: int) -> None:
    async with running(fake, tmp_path) as rig:
        fault = fake.faults.add(Fault(verb="update", resource="statefulsets/scale", code=code))
        with pytest.raises(Unavailable):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        fake.faults.remove(fault)
        assert (rig.desired("decode"), len(rig.ids())) == (2, 3)
        assert f'outcome="{code}"' in "".join(rig.platform.client.counts.lines())
        assert await rig.fleet.scale_up(Role.DECODE, "gpu") == "demo-decode-2"


async def test_a_server_that_asks_for_a_pause_gets_it(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        fault = fake.faults.add(Fault(verb="update", resource="statefulsets/scale", code=429, retry_after_s=30))
        with pytest.raises(Unavailable, match="busy"):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        with pytest.raises(Unavailable, match="asked for a pause"):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        assert fault.hits == 1  # others may have been on their way
        fake.faults.remove(fault)


async def test_a_watch_that_is_cut_or_expires_is_begun_again_from_a_list(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        fake.faults.add(Fault(verb="watch", resource="pods", code=410, times=1))
        fake.faults.add(Fault(verb="watch", resource="pods", cut_after=0, times=2))
        with fake.away():
            pass
        rig.delete_pod("demo-decode-1")
        await until(lambda: is_gone(rig, "demo-decode-1"))
        await until(lambda: 'reason="broken"' in "".join(rig.platform.pods.lines()))


async def test_a_size_of_which_the_answer_was_lost_is_seen_and_not_asked_for_twice(
    fake: FakeApi, tmp_path: Path
) -> None:
    async with running(fake, tmp_path) as rig:
        fake.faults.add(Fault(verb="update", resource="statefulsets/scale", drop_answer=True, times=1))
        with pytest.raises(Unavailable):
            await rig.fleet.scale_up(Role.DECODE, "gpu")
        await until(lambda: "demo-decode-2" in rig.ids())
        assert (rig.desired("decode"), rig.controller.fleet.get("demo-decode-2").state) == (3, STARTING)


async def test_a_dead_leader_s_successor_goes_on_where_it_stopped(fake: FakeApi, tmp_path: Path) -> None:
    async with running(fake, tmp_path) as rig:
        rig.controller.fleet.want_role("demo-decode-1", Role.PREFILL)
        rig.controller.let_go("demo-decode-0")
        await until(lambda: '"end"' in rig.config_map("fleet").get("fleet.json", ""))
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, decode=2)) as successor:
        assert successor.ids() == rig.ids()
        assert successor.controller.fleet.get("demo-decode-1").role is Role.PREFILL
        assert successor.controller.fleet.get("demo-decode-0").after_drain is AfterDrain.END


@asynccontextmanager
async def after_a_lost_record(
    fake: FakeApi, folder: Path, monkeypatch: pytest.MonkeyPatch, announce_s: float
) -> AsyncIterator[Rig]:
    """The next leader, in a new process, of pods that run while nobody remembers their workers."""
    async with running(fake, folder) as rig:
        await until(lambda: "fleet.json" in rig.config_map("fleet"))
        await asyncio.to_thread(rig.platform.lease.give_back)
    with kube_api(fake, folder) as api:
        api.put_config_map("demo-fleet", api.config_map("demo-fleet"), {"fleet.json": ""})
    monkeypatch.setattr(kube_fleet, "ANNOUNCE_S", announce_s)
    async with rig_of(fake, folder, cluster_of(fake, folder, decode=2)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: len(rig.ids()) == 3)
        yield rig
        looking.cancel()


async def test_workers_that_no_record_knows_are_taken_over_once_they_announce_themselves(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with after_a_lost_record(fake, tmp_path, monkeypatch, announce_s=60.0) as rig:
        await asyncio.sleep(0.2)  # more looks
        for number, name in enumerate(["demo-prefill-0", "demo-decode-0", "demo-decode-1"]):
            rig.announce(name, epoch=number + 1, ip=f"10.0.0.{number}")
        await until(lambda: len(rig.fleet._started) == 3)
        assert rig.ray.ended == []
        rig.delete_pod("demo-decode-1")  # and is looked after from now on
        rig.make_pod("demo-decode-1", ip="10.0.0.9", conditions=[])
        await until(lambda: rig.ray.ended == ["demo-decode-1"])


async def test_a_worker_that_no_record_knows_and_that_says_nothing_is_started_anew(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with after_a_lost_record(fake, tmp_path, monkeypatch, announce_s=0.3) as rig:
        await until(lambda: len(rig.ray.names()) == 3)
        assert sorted(rig.ray.ended) == sorted(rig.ray.names())


async def test_where_nobody_listens_a_worker_is_started_at_once(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_fleet, "ANNOUNCE_S", 60.0)
    fake.load(release(), NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        rig.make_pod("demo-decode-0", conditions=[{"type": "Ready", "status": "False"}])
        await until(lambda: rig.ray.names() == ["demo-decode-0"])
        looking.cancel()


async def test_a_pod_that_comes_while_a_controller_leads_is_not_waited_for(
    fake: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_fleet, "ANNOUNCE_S", 60.0)
    fake.load(release(), NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path)) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: rig.fleet._found is not None)
        rig.make_pod("demo-decode-0")
        await until(lambda: rig.ray.names() == ["demo-decode-0"])
        looking.cancel()


# -- other homes -----------------------------------------------------------------------------------------------------


async def test_pods_of_a_ray_cluster_come_under_names_of_their_own(fake: FakeApi, tmp_path: Path) -> None:
    groups = [{"groupName": "prefill", "replicas": 0}, {"groupName": "decode", "replicas": 1}]
    ray = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "demo"},
        "spec": {"workerGroupSpecs": groups},
    }
    fake.load([*release()[2:], ray], NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, prefill=0, decode=1, mode="kuberay")) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        await until(lambda: rig.ids() == ["demo-decode-awaited-0"])
        rig.make_pod("demo-decode-worker-x7", ip="10.0.0.1")
        await until(lambda: rig.ids() == ["demo-decode-worker-x7"])
        await until(lambda: rig.ray.names() == ["demo-decode-worker-x7"])
        assert await rig.fleet.scale_up(Role.DECODE, "gpu") == "demo-decode-awaited-0"
        rig.make_pod("demo-decode-worker-a1", ip="10.0.0.2")
        await until(lambda: rig.ids() == ["demo-decode-worker-a1", "demo-decode-worker-x7"])
        await rig.fleet.scale_down("demo-decode-worker-x7")  # whichever is meant
        group = rig.platform.api.ray_cluster("demo").groups[1]
        assert (group.replicas, group.to_delete) == (1, ("demo-decode-worker-x7",))
        rig.controller.forget("demo-decode-worker-x7")
        rig.delete_pod("demo-decode-worker-x7")
        await until(lambda: rig.ids() == ["demo-decode-worker-a1"])
        looking.cancel()


async def test_others_pods_are_served_on_and_never_scaled(fake: FakeApi, tmp_path: Path) -> None:
    fake.load(release()[2:], NAMESPACE)
    async with rig_of(fake, tmp_path, cluster_of(fake, tmp_path, mode="external")) as rig:
        looking = asyncio.create_task(rig.fleet.start_and_revive())
        rig.make_pod("theirs-decode-a", ip="10.0.0.1")
        await until(lambda: rig.ray.names() == ["theirs-decode-a"])
        for asked in (rig.fleet.scale_up(Role.DECODE, "gpu"), rig.fleet.scale_down("theirs-decode-a")):
            with pytest.raises(Unavailable, match="somebody else makes and ends pods"):
                await asked
        rig.delete_pod("theirs-decode-a")
        await until(lambda: rig.ids() == [])
        looking.cancel()
