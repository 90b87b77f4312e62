"""Pods that are real processes, on nodes that are not: what starts them, what ends them, and what their status says."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.controller.kube.objects import pod_of
from tests.kube import pod_process
from tests.kube.conformance_clusters import until
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import BUDGETS, EVENTS, NODES, PODS, STATEFUL_SETS, ApiError, Json, at
from tests.kube.fake_api_rules import is_ready
from tests.kube.fake_kubelet import FakeKubelet, Node
from tests.kube.fake_kubelet_pods import Command, PodToRun, Pretend, Process, run_command

NS = "baton"
GPU = "nvidia.com/gpu"
PATIENCE_S = 20.0  # other work shares these cores
READY = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1}
PACE = 0.02  # a back-off of 10 s is 0.2 s


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def nodes(api: FakeApi) -> Iterator[FakeKubelet]:
    """Two of four GPUs each; their pods run `pod_process`."""
    with FakeKubelet(api, run_command, nodes=[Node("a", {GPU: 4}), Node("b", {GPU: 4})], pace=PACE) as cluster:
        yield cluster


def worker(*args: str, gpus: int = 1, grace_s: int = 10, **container: Any) -> Json:
    """A container spec of a pod."""
    main = {
        "name": "main",
        "image": "worker:1",
        "command": ["python", "-m", "tests.kube.pod_process"],
        "args": list(args),
        "env": [
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ROLE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['role']"}}},
            {"name": "WORKER", "value": "$(ROLE)-of-$(POD_NAME)"},
        ],
        "ports": [{"name": "http", "containerPort": pod_process.PORT}],
        "readinessProbe": READY,
        "resources": {"limits": {GPU: str(gpus), "cpu": "500m"}},
        **container,
    }
    return {"containers": [main], "terminationGracePeriodSeconds": grace_s}


def make(api: FakeApi, spec: Json, replicas: int = 1, name: str = "decode") -> None:
    labels = {"app": name, "role": "decode"}
    template = {"metadata": {"labels": labels}, "spec": spec}
    whole = {"replicas": replicas, "podManagementPolicy": "Parallel", "selector": {"matchLabels": {"app": name}}}
    body = {"metadata": {"name": name}, "spec": whole | {"serviceName": name, "template": template}}
    api.verbs.create(STATEFUL_SETS, NS, body)


def pod(api: FakeApi, name: str = "decode-0") -> Json:
    """Empty where there is none."""
    return api.verbs.find(PODS, NS, name) or {"metadata": {}}


def state(api: FakeApi, name: str = "decode-0") -> Json:
    """The status of its one container."""
    statuses = at(pod(api, name), ("status", "containerStatuses"), [{}])
    return dict(statuses[0])


def until_ready(api: FakeApi, *names: str) -> None:
    until(lambda: all(is_ready(pod(api, name)) for name in names), PATIENCE_S)


def until_gone(api: FakeApi, name: str, uid: str) -> None:
    until(lambda: pod(api, name)["metadata"].get("uid") != uid, PATIENCE_S)


def ask(api: FakeApi, name: str, path: str) -> bytes:
    address = f"http://{pod(api, name)['status']['podIP']}:{pod_process.PORT}{path}"
    with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


def process_of(nodes: FakeKubelet, name: str = "decode-0") -> Command:
    process = nodes.pod(name).process
    assert isinstance(process, Command)
    return process


def scale(api: FakeApi, replicas: int) -> None:
    api.verbs.patch(
        STATEFUL_SETS, NS, "decode", "application/merge-patch+json", {"spec": {"replicas": replicas}}, "scale"
    )


def told(api: FakeApi, reason: str) -> list[str]:
    return [event["message"] for event in api.verbs.objects(EVENTS, NS) if event["reason"] == reason]


def test_a_scale_starts_and_ends_processes(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker(), replicas=1)
    until_ready(api, "decode-0")
    scale(api, 2)
    until_ready(api, "decode-0", "decode-1")
    first, second = process_of(nodes, "decode-0"), process_of(nodes, "decode-1")
    assert ask(api, "decode-1", "/env") != ask(api, "decode-0", "/env"), "the same port, at another address"
    scale(api, 1)
    until_gone(api, "decode-1", pod(api, "decode-1")["metadata"].get("uid", ""))
    assert (first.poll(), second.poll()) == (None, 0)


def test_a_process_has_the_environment_that_its_pod_says(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker())
    until_ready(api, "decode-0")
    env = json.loads(ask(api, "decode-0", "/env"))
    assert env["POD_NAME"] == "decode-0"
    assert env["POD_NAMESPACE"] == NS
    assert env["POD_IP"] == pod(api)["status"]["podIP"]
    assert env["WORKER"] == "decode-of-decode-0"


def test_a_pod_is_ready_by_what_its_process_answers(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker())
    until_ready(api, "decode-0")
    ask(api, "decode-0", "/drain")
    until(lambda: not is_ready(pod(api)), PATIENCE_S)
    assert process_of(nodes).poll() is None, "an unready pod is left alone"
    assert api.verbs.get(STATEFUL_SETS, NS, "decode")["status"]["replicas"] == 1


def test_a_pod_that_ends_hears_its_hook_then_a_signal_and_has_its_grace(
    api: FakeApi, nodes: FakeKubelet, tmp_path: Path
) -> None:
    hook = ["sh", "-c", f'echo "$POD_NAME" > {tmp_path}/hook; sleep 0.3']
    make(api, worker("--drain", "0.3", lifecycle={"preStop": {"exec": {"command": hook}}}))
    until_ready(api, "decode-0")
    process, uid = process_of(nodes), pod(api)["metadata"]["uid"]
    api.verbs.delete(PODS, NS, "decode-0")
    until((tmp_path / "hook").exists, PATIENCE_S)
    assert process.poll() is None, "the signal comes after the hook"
    assert pod(api)["metadata"]["uid"] == uid, "the object is there until the process has ended"
    until_gone(api, "decode-0", uid)
    assert process.poll() == 0
    assert (tmp_path / "hook").read_text() == "decode-0\n"


def test_a_hook_over_http_drains_the_process(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker("--drain", "30", lifecycle={"preStop": {"httpGet": {"path": "/drain", "port": "http"}}}))
    until_ready(api, "decode-0")
    api.verbs.delete(PODS, NS, "decode-0")
    until(lambda: _status(api) == 503, PATIENCE_S)
    api.verbs.delete(PODS, NS, "decode-0", {"gracePeriodSeconds": 0})


def _status(api: FakeApi) -> int:
    try:
        ask(api, "decode-0", "/ready")
    except urllib.error.HTTPError as error:
        error.close()
        return int(error.code)
    return 200


def test_a_process_that_does_not_hear_is_killed_when_its_grace_is_over(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker("--deaf", grace_s=1))
    until_ready(api, "decode-0")
    process, uid = process_of(nodes), pod(api)["metadata"]["uid"]
    api.verbs.delete(PODS, NS, "decode-0")
    until_gone(api, "decode-0", uid)
    assert process.poll() == -signal.SIGKILL


def test_a_pod_that_is_deleted_by_force_is_killed_at_once(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker("--deaf", grace_s=3600))
    until_ready(api, "decode-0")
    process = process_of(nodes)
    api.verbs.delete(PODS, NS, "decode-0", {"gracePeriodSeconds": 0})
    until(lambda: process.poll() == -signal.SIGKILL, PATIENCE_S)
    until_ready(api, "decode-0")
    assert process_of(nodes).pid != process.pid


def test_a_crash_is_followed_by_a_restart_of_the_same_pod(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker())
    until_ready(api, "decode-0")
    uid, first = pod(api)["metadata"]["uid"], process_of(nodes)
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: state(api).get("restartCount") == 1 and is_ready(pod(api)), PATIENCE_S)
    assert pod(api)["metadata"]["uid"] == uid
    ended = state(api)["lastState"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("Error", 137)


def test_a_process_that_keeps_crashing_is_backed_off(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker(command=["python", "-c", "raise SystemExit(3)"], readinessProbe=None))
    until(lambda: at(state(api), ("state", "waiting", "reason")) == "CrashLoopBackOff", PATIENCE_S)
    assert state(api)["lastState"]["terminated"]["exitCode"] == 3
    assert not is_ready(pod(api))


def test_a_process_that_the_kernel_ends_for_its_memory_is_said_to_be_so(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker())
    until_ready(api, "decode-0")
    nodes.pod("decode-0").kill(out_of_memory=True)
    until(lambda: at(state(api), ("lastState", "terminated", "reason")) == "OOMKilled", PATIENCE_S)
    until_ready(api, "decode-0")


def test_a_liveness_probe_that_fails_restarts_the_process(api: FakeApi, nodes: FakeKubelet) -> None:
    alive = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 1, "failureThreshold": 1}
    make(api, worker(livenessProbe=alive, startupProbe=READY | {"failureThreshold": 1000}))
    until_ready(api, "decode-0")
    ask(api, "decode-0", "/drain")
    until(lambda: state(api).get("restartCount") == 1 and is_ready(pod(api)), PATIENCE_S)


def test_a_pod_for_which_no_gpus_are_left_waits_until_some_are(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker(gpus=3), replicas=3)
    until_ready(api, "decode-0", "decode-1")
    until(lambda: told(api, "FailedScheduling") == [f"0/2 nodes are available: 2 Insufficient {GPU}."], PATIENCE_S)
    waiting = pod(api, "decode-2")
    assert waiting["status"]["phase"] == "Pending"
    assert [c["reason"] for c in waiting["status"]["conditions"]] == ["Unschedulable"]
    nodes.add_node(Node("c", {GPU: 4}))
    until_ready(api, "decode-2")


def test_an_image_that_cannot_be_had_keeps_a_pod_waiting(api: FakeApi, nodes: FakeKubelet) -> None:
    nodes.bad_images.add("worker:1")
    make(api, worker())
    until(lambda: at(state(api), ("state", "waiting", "reason")) == "ImagePullBackOff", PATIENCE_S)
    assert pod(api)["status"]["phase"] == "Pending"
    nodes.bad_images.clear()
    until_ready(api, "decode-0")


def test_a_pod_whose_settings_are_missing_waits_for_them(api: FakeApi, nodes: FakeKubelet) -> None:
    reference = {"configMapKeyRef": {"name": "settings", "key": "level"}}
    spec = worker()
    spec["containers"][0]["env"].append({"name": "LEVEL", "valueFrom": reference})
    make(api, spec)
    until(lambda: at(state(api), ("state", "waiting", "reason")) == "CreateContainerConfigError", PATIENCE_S)
    settings = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"level": "debug"}}
    api.load([settings], NS)
    until_ready(api, "decode-0")
    assert json.loads(ask(api, "decode-0", "/env"))["LEVEL"] == "debug"


def test_of_a_lost_node_pods_stay_and_come_back_elsewhere_only_when_forced(api: FakeApi) -> None:
    both = [Node("a", {GPU: 4}), Node("b", {GPU: 4})]
    with FakeKubelet(api, run_command, nodes=both, pace=0.002) as nodes:
        make(api, worker())
        until_ready(api, "decode-0")
        lose_and_force(api, nodes)


def lose_and_force(api: FakeApi, nodes: FakeKubelet) -> None:
    node, uid, process = pod(api)["spec"]["nodeName"], pod(api)["metadata"]["uid"], process_of(nodes)
    nodes.lose_node(node)
    until(lambda: pod_of(pod(api)).on_lost_node and not is_ready(pod(api)), PATIENCE_S)
    until(lambda: "deletionTimestamp" in pod(api)["metadata"], PATIENCE_S)  # after 300 s at this pace
    assert pod(api)["metadata"]["uid"] == uid
    assert process.poll() is None, "nobody can tell it"
    api.verbs.delete(PODS, NS, "decode-0", {"gracePeriodSeconds": 0})
    until_ready(api, "decode-0")
    assert pod(api)["spec"]["nodeName"] != node
    assert process.poll() is None, "two of one name, until the node is back"
    nodes.node_back(node)
    until(lambda: process.poll() is not None, PATIENCE_S)


def test_a_node_that_is_off_starts_nothing_until_it_is_back(api: FakeApi) -> None:
    with FakeKubelet(api, run_command, nodes=[Node("a", {GPU: 4})], pace=PACE) as nodes:
        make(api, worker())
        until_ready(api, "decode-0")
        process = process_of(nodes)
        nodes.lose_node("a", kill=True)
        until(lambda: process.poll() is not None, PATIENCE_S)
        until(lambda: not is_ready(pod(api)), PATIENCE_S)
        assert process_of(nodes) is process
        nodes.node_back("a")
        until_ready(api, "decode-0")
        assert process_of(nodes) is not process


def test_a_lost_node_that_comes_back_soon_has_its_pods_ready_again(api: FakeApi) -> None:
    with FakeKubelet(api, run_command, nodes=[Node("a", {GPU: 4})], pace=PACE) as nodes:
        make(api, worker())
        until_ready(api, "decode-0")
        process = process_of(nodes)
        nodes.lose_node("a")
        until(lambda: not is_ready(pod(api)), PATIENCE_S)
        nodes.node_back("a")
        until_ready(api, "decode-0")
        assert process.poll() is None


def test_a_cordoned_node_takes_no_new_pods(api: FakeApi, nodes: FakeKubelet) -> None:
    for name in "ab":
        node = api.verbs.get(NODES, "", name)
        api.verbs.update(NODES, "", name, node | {"spec": {"unschedulable": True}})
    make(api, worker())
    until(
        lambda: told(api, "FailedScheduling") == ["0/2 nodes are available: 2 node(s) were unschedulable."], PATIENCE_S
    )


def test_while_the_server_is_away_processes_run_on_and_nothing_is_decided(api: FakeApi, nodes: FakeKubelet) -> None:
    make(api, worker())
    until_ready(api, "decode-0")
    first = process_of(nodes)
    with api.away(compact=True):
        os.kill(first.pid, signal.SIGKILL)
        until(lambda: nodes.pod("decode-0").process is not first, PATIENCE_S)
        assert state(api)["restartCount"] == 0, "nobody could be told"
    until(lambda: state(api)["restartCount"] == 1 and is_ready(pod(api)), PATIENCE_S)


def test_a_budget_counts_the_pods_that_are_ready(api: FakeApi, nodes: FakeKubelet) -> None:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "decode"}}}
    api.verbs.create(BUDGETS, NS, {"metadata": {"name": "decode"}, "spec": spec})
    make(api, worker("--drain", "30"), replicas=2)
    until_ready(api, "decode-0", "decode-1")
    until(lambda: api.verbs.get(BUDGETS, NS, "decode")["status"].get("disruptionsAllowed") == 1, PATIENCE_S)
    api.verbs.evict(NS, "decode-0", {})
    with pytest.raises(ApiError, match="Cannot evict pod"):
        api.verbs.evict(NS, "decode-1", {})
    until(lambda: api.verbs.get(BUDGETS, NS, "decode")["status"]["currentHealthy"] == 1, PATIENCE_S)


def test_a_launcher_makes_of_a_pod_what_it_likes(api: FakeApi) -> None:
    made: list[tuple[str, int]] = []

    def launch(pod: PodToRun) -> Process:
        made.append((pod.name, pod.num_restarts))
        return Pretend()

    with FakeKubelet(api, launch, pace=PACE) as nodes:
        make(api, worker(readinessProbe=None), replicas=2)
        until_ready(api, "decode-0", "decode-1")
        process = nodes.pod("decode-1").process
        assert isinstance(process, Pretend)
        process.crash()
        until(lambda: ("decode-1", 1) in made, PATIENCE_S)
    assert sorted(made) == [("decode-0", 0), ("decode-1", 0), ("decode-1", 1)]
