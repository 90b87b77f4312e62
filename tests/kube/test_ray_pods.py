"""Pods that are Ray nodes, made from the rendered chart, under calls that go on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc.aio
import pytest

from baton.v1 import serving_pb2_grpc
from tests.chart.chart_rig import needs_helm
from tests.kube.checked_calls import Caller
from tests.kube.fake_api_resources import PODS
from tests.kube.fake_kubelet import Node
from tests.kube.kube_rig import NAMESPACE
from tests.kube.namespace_pods import needs_namespaces
from tests.kube.ray_rig import CALL_S, FULLNAME, GPU, HEAD, ROUTER, RayRig, deployment_pod, helm_tests, ray_rig

# Each starts a head and a Ray node per pod: 40 processes
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_helm, needs_namespaces]

PREFILL, FIRST, SECOND = (f"{FULLNAME}-{name}" for name in ("prefill-0", "decode-0", "decode-1"))
AWAY_S = 120.0  # of the head
CONTROL_IMAGE = "baton-control:0.1.0"


async def test_pods_of_the_chart_become_ray_nodes_with_one_worker_each_and_pools_change_size(tmp_path: Path) -> None:
    async with ray_rig(tmp_path) as rig, rig.calls() as calls:
        await rig.until(lambda: calls.worked(FIRST), "calls are answered")
        before = await rig.worker_pids()
        assert {name: len(pids) for name, pids in before.items()} == {PREFILL: 1, FIRST: 1}
        for pod in before:
            said = rig.pods_here.log(pod, "worker").read_text()
            assert '"event":"worker_ready"' in said, "what the worker says is what the pod says"
            assert len(said) < 20_000, "and not much else is"
        await rig.scale("decode", 2)
        took_s = await rig.until(lambda: calls.worked(SECOND), "a second pod, its Ray node and worker have served")
        print(f"the second decode worker served {took_s:.1f} s after it was asked for")
        assert rig.size("decode") == 2
        assert await rig.worker_pids() == before | {SECOND: (await rig.worker_pids())[SECOND]}
        await rig.until_condition(set())
        await rig.scale("decode", 1)
        await rig.until(lambda: SECOND not in rig.ready(), "the router knows that it drains")
        assert SECOND in rig.pods(), "its pod is there until it has drained"
        took_s = await rig.until(lambda: SECOND not in rig.pods(), "the second pod is gone")
        print(f"its pod was gone {took_s:.1f} s after it began to drain")
        assert rig.size("decode") == 1
        assert await rig.worker_pids() == before, "and nobody else was touched"
        assert await rig.num_moved() == 0
    calls.check(at_least=20)


async def test_a_router_of_the_chart_serves_and_the_release_passes_its_helm_tests(tmp_path: Path) -> None:
    async with ray_rig(tmp_path) as rig:
        deployment_pod(rig.api, ROUTER, 0)
        await rig.until(lambda: rig.is_ready(f"{ROUTER}-0"), "the router's pod is Ready")
        tests = helm_tests()
        assert len(tests) == 3
        for test in tests:
            name = test["metadata"]["name"]
            rig.api.verbs.create(PODS, NAMESPACE, test)
            await rig.until(lambda: rig.phase(name) in ("Succeeded", "Failed"), f"{name} has ended")  # noqa: B023
            assert rig.phase(name) == "Succeeded", rig.pods_here.log(name, "check").read_text()
        async with (
            grpc.aio.insecure_channel(f"{rig.services.ip(ROUTER)}:50051") as channel,
            Caller(serving_pb2_grpc.ServingStub(channel), CALL_S).calls(2, 60) as calls,
        ):
            await rig.until(lambda: calls.worked(FIRST), "calls through its Service are answered")
        calls.check()


async def be_away(rig: RayRig, seconds: float) -> tuple[float, float]:
    """The head's pod is lost, and its next one's image cannot be had for so long. Returns since when, until when."""
    rig.nodes.bad_images.add(CONTROL_IMAGE)
    before, ip = rig.uid(HEAD), rig.ip(HEAD)
    await rig.kill(HEAD)
    rig.api.verbs.delete(PODS, NAMESPACE, HEAD, {"gracePeriodSeconds": 0})
    began_s = time.monotonic()
    took_s = await rig.until_condition({"RayHeadAway"})
    print(f"the condition held {took_s:.1f} s after the head had died")
    while (left_s := began_s + seconds - time.monotonic()) > 0:
        await asyncio.sleep(min(5.0, left_s))
        assert (await rig.conditions()).keys() == {"RayHeadAway"}
    back_s = time.monotonic()
    rig.nodes.bad_images.clear()
    await rig.until(lambda: rig.is_ready(HEAD), "the head's next pod is Ready")
    took_s = await rig.until_condition(set())
    print(f"the condition was over {took_s:.1f} s after the head's next pod was Ready")
    assert rig.uid(HEAD) != before
    assert rig.ip(HEAD) != ip, "it is at another address"
    return began_s, back_s


async def test_a_head_that_is_away_costs_no_call_and_comes_back_to_the_same_workers(tmp_path: Path) -> None:
    async with ray_rig(tmp_path) as rig, rig.calls() as calls:
        await rig.until(lambda: calls.worked(FIRST), "calls are answered")
        await rig.until_condition(set())
        before, workers = await rig.worker_pids(), await rig.workers()
        began_s, back_s = await be_away(rig, AWAY_S)
        assert back_s - began_s >= AWAY_S
        num_meanwhile = sum(began_s <= call.ended_s <= back_s for call in calls.done)
        print(f"{num_meanwhile} calls were answered meanwhile")
        assert num_meanwhile >= 100
        assert await rig.worker_pids() == before
        assert await rig.workers() == workers
        print(f"{await rig.num_moved()} streams moved: a starved router may miss three heartbeats")
        await rig.scale("decode", 2)
        await rig.until(lambda: calls.worked(SECOND), "a worker is placed as before")
        assert await rig.worker_pids() == before | {SECOND: (await rig.worker_pids())[SECOND]}
    calls.check()


async def test_a_head_whose_container_dies_restarts_in_place_with_the_same_workers(tmp_path: Path) -> None:
    async with ray_rig(tmp_path) as rig, rig.calls() as calls:
        await rig.until(lambda: calls.worked(FIRST), "calls are answered")
        before, uid = await rig.worker_pids(), rig.uid(HEAD)
        await rig.kill(HEAD)
        await rig.until(lambda: not rig.is_ready(HEAD), "it is seen")
        await rig.until(lambda: rig.is_ready(HEAD), "its container runs again")
        assert rig.uid(HEAD) == uid
        await rig.scale("decode", 2)
        await rig.until(lambda: calls.worked(SECOND), "a worker is placed as before")
        assert await rig.worker_pids() == before | {SECOND: (await rig.worker_pids())[SECOND]}
        await rig.until_condition(set())
    calls.check(at_least=20)


async def test_a_pod_whose_node_and_worker_are_killed_gets_its_worker_again(tmp_path: Path) -> None:
    async with ray_rig(tmp_path, decode=2) as rig, rig.calls(8) as calls:
        await rig.until(lambda: calls.worked(SECOND), "the second decode worker has served")
        before, uid = await rig.worker_pids(), rig.uid(SECOND)
        pod = rig.process(SECOND)
        for process in (*pod.processes("raylet"), *pod.processes("ray::WorkerActor")):
            process.kill()
        await rig.until(lambda: SECOND not in rig.ready(), "the router has noticed")
        took_s = await rig.until(lambda: SECOND in rig.ready(), "a worker serves there again")
        print(f"the worker served {took_s:.1f} s after the router had noticed")
        after = await rig.worker_pids()
        assert rig.uid(SECOND) == uid
        assert after.keys() == before.keys()
        assert {name for name in after if after[name] != before[name]} == {SECOND}
        assert await rig.num_moved() > 0, "streams went on elsewhere"
        num_before = sum(call.decode_worker == SECOND for call in calls.done)
        await rig.until(lambda: sum(c.decode_worker == SECOND for c in calls.done) > num_before, "it has calls again")
    calls.check(at_least=20)


async def test_a_machine_that_is_lost_takes_no_answer_along_and_its_pod_comes_back_elsewhere(tmp_path: Path) -> None:
    async with (
        ray_rig(tmp_path, nodes=[Node("gpu-1", {GPU: 4}), Node("gpu-2", {GPU: 2})]) as rig,
        rig.calls(8) as calls,
    ):
        await rig.scale("decode", 2)
        await rig.until(lambda: calls.worked(SECOND), "the second decode worker has served")
        await rig.until(lambda: rig.is_ready(SECOND), "its kubelet has said so")
        before, uid = await rig.worker_pids(), rig.uid(SECOND)
        assert rig.pods()[SECOND]["spec"]["nodeName"] == "gpu-2"
        await asyncio.to_thread(rig.process(SECOND).sandbox.unplug)
        await asyncio.to_thread(rig.nodes.lose_node, "gpu-2", kill=True)
        took_s = await rig.until(lambda: SECOND not in rig.ready(), "the router has noticed")
        print(f"the router noticed {took_s:.1f} s after the machine had gone")
        await rig.until_condition({"NodeLost"})
        rig.nodes.add_node(Node("gpu-3", {GPU: 2}))
        rig.api.verbs.delete(PODS, NAMESPACE, SECOND, {"gracePeriodSeconds": 0})  # what follows `kubectl delete node`
        took_s = await rig.until(lambda: SECOND in rig.ready(), "a worker serves on another machine")
        print(f"the worker served {took_s:.1f} s after its pod was let go")
        assert rig.pods()[SECOND]["spec"]["nodeName"] == "gpu-3"
        assert rig.uid(SECOND) != uid
        assert await rig.worker_pids() == before | {SECOND: (await rig.worker_pids())[SECOND]}
        assert await rig.num_moved() > 0, "streams went on elsewhere"
        await rig.until_condition(set())
    calls.check(at_least=20)


async def test_a_controller_that_dies_is_followed_by_one_with_a_ray_node_of_its_own(tmp_path: Path) -> None:
    async with ray_rig(tmp_path, controllers=2) as rig, rig.calls() as calls:
        await rig.until(lambda: calls.worked(FIRST), "calls are answered")
        before, leader = await rig.worker_pids(), rig.leader()
        assert rig.uid(leader)
        await rig.kill(leader)
        rig.api.verbs.delete(PODS, NAMESPACE, leader, {"gracePeriodSeconds": 0})
        took_s = await rig.until(lambda: rig.leader() not in ("", leader), "the other one leads")
        print(f"the other one led {took_s:.1f} s after the leader had died")
        await rig.until_led()
        assert await rig.worker_pids() == before, "nobody was restarted"
        await rig.scale("decode", 2)
        await rig.until(lambda: calls.worked(SECOND), "it places workers as the first one did")
        assert await rig.worker_pids() == before | {SECOND: (await rig.worker_pids())[SECOND]}
    calls.check(at_least=20)


async def test_an_eviction_by_name_drains_the_worker_before_its_pod_ends(tmp_path: Path) -> None:
    async with ray_rig(tmp_path, decode=2) as rig, rig.calls(8) as calls:
        await rig.until(lambda: calls.worked(SECOND), "the second decode worker has served")
        before, uid = await rig.worker_pids(), rig.uid(SECOND)
        await rig.until(lambda: rig.is_ready(FIRST) and rig.is_ready(SECOND), "the disruption budget allows it")
        rig.api.verbs.evict(NAMESPACE, SECOND, {})
        await rig.until(lambda: SECOND not in rig.ready(), "the router knows that it drains")
        assert rig.uid(SECOND) == uid, "its pod is there until it has drained"
        await rig.until(lambda: rig.uid(SECOND) not in ("", uid), "another pod of that name")
        took_s = await rig.until(lambda: SECOND in rig.ready(), "and a worker on it")
        print(f"the next worker served {took_s:.1f} s after its pod was made")
        assert {name: pids for name, pids in (await rig.worker_pids()).items() if name != SECOND} == {
            name: pids for name, pids in before.items() if name != SECOND
        }
        assert await rig.num_moved() == 0, "what ran there ended there"
    calls.check(at_least=20)
