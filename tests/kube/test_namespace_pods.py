"""Pods that are namespaces have what a runtime gives them, and nothing of them is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube.fake_api_resources import Json
from tests.kube.fake_api_store import Store
from tests.kube.fake_api_verbs import Verbs
from tests.kube.fake_kubelet_pods import PodToRun
from tests.kube.namespace_pods import NamespacePods, Network, needs_namespaces
from tests.kube.pod_volumes import Volumes

pytestmark = needs_namespaces

POD: Json = {
    "metadata": {"name": "demo-0", "namespace": "baton", "uid": "u-1"},
    "spec": {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001},
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    },
}


def container(name: str, script: str) -> Json:
    return {
        "name": name,
        "command": ["sh", "-c"],
        "args": [script],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "data", "mountPath": "/var/lib/data"}],
    }


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.close()


@pytest.fixture
def pods(network: Network, tmp_path: Path) -> Iterator[NamespacePods]:
    volumes = Volumes(tmp_path, Verbs(Store()), lambda namespace, name: "")
    pods = NamespacePods(network, volumes, lambda: "10.0.0.9 demo-head\n", tmp_path)
    yield pods
    pods.close()


def to_run(network: Network, *containers: Json, shares: bool = False) -> PodToRun:
    spec = POD["spec"] | {"containers": list(containers), "shareProcessNamespace": shares}
    return PodToRun(POD | {"spec": spec}, spec["containers"][0], f"{network.pods}.7", {}, 0)


SAY = """
hostname; id -u; id -g; grep demo-head /etc/hosts; echo "$POD_IP"; cat /proc/net/fib_trie | grep -c "$POD_IP"
touch /x 2>/dev/null || echo read-only; echo kept > /tmp/kept; echo of-claim > /var/lib/data/claim; ps -e | wc -l
"""


def test_a_container_has_its_own_name_address_user_volumes_and_a_root_it_cannot_write(
    network: Network, pods: NamespacePods, tmp_path: Path
) -> None:
    pod = pods.launch(to_run(network, container("one", SAY)))
    while pod.poll() is None:
        os.sched_yield()
    said = pods.log("demo-0", "one").read_text().split("\n")
    assert said[:4] == ["demo-0", "10001", "10001", "10.0.0.9 demo-head"]
    assert said[4] == f"{network.pods}.7"
    assert int(said[5]) > 0, "it is an address of its network"
    assert said[6] == "read-only"
    assert int(said[7]) <= 6, "it sees its own processes alone"
    assert (tmp_path / "claims" / "data" / "claim").read_text() == "of-claim\n"
    again = pods.launch(to_run(network, container("one", "cat /tmp/kept; exit 3")))
    while (status := again.poll()) is None:
        os.sched_yield()
    assert status == 3
    assert pods.log("demo-0", "one").read_text().endswith("kept\n")


def test_containers_see_each_others_processes_only_where_the_pod_says_so(network: Network, pods: NamespacePods) -> None:
    for shares, seen in ((False, "0"), (True, "1")):
        up = f"/tmp/up-{seen}"
        one = container("one", f"touch {up}; exec sleep 77")
        look = f"until test -e {up}; do sleep 0.05; done; sleep 0.5; ps -eo args | grep -c '^sleep 77'; exec sleep 78"
        pod = pods.launch(to_run(network, one, container("two", look), shares=shares))
        log = pods.log("demo-0", "two")
        while not (said := log.read_text()):
            assert pod.poll() is None
        assert said == f"{seen}\n"
        left = [process for one in pod.containers.values() for process in one.processes()]
        pod.kill()
        assert pod.poll() == -9
        assert left
        assert not any(process.is_running() and process.status() != "zombie" for process in left)
        log.unlink()


def test_a_pod_is_told_to_end_and_a_command_runs_beside_it(network: Network, pods: NamespacePods) -> None:
    pod = pods.launch(
        to_run(network, container("one", 'trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.1; done'))
    )
    log = pods.log("demo-0", "one")
    while log.read_text() != "up\n":
        assert pod.poll() is None
    beside = pod.run(["sh", "-c", "test $(hostname) = demo-0 && test -w /tmp && echo beside > /tmp/beside"], {})
    while (status := beside.poll()) is None:
        os.sched_yield()
    assert status == 0
    pod.terminate()
    while (status := pod.poll()) is None:
        os.sched_yield()
    assert status == 0
    assert log.read_text().endswith("bye\n")


def test_nothing_is_left_of_a_network(network: Network, pods: NamespacePods) -> None:
    pods.launch(to_run(network, container("one", "exec sleep 77")))
    shown = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert f"p{network.number}-7" in shown
    pods.close()
    shown = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert f"p{network.number}-7" not in shown
