"""A cluster that runs pods on the fake API server: scheduler, StatefulSet controller, node controller and one kubelet per node.

    with FakeApi() as api, FakeKubelet(api, launch, nodes=[Node("gpu-1", {"nvidia.com/gpu": 8})], pace=0.05) as cluster:
        ...                                  # a set that is scaled now has real processes, made by `launch`
        cluster.lose_node("gpu-1")           # its pods stay, unready and later Terminating, until they are deleted by force
        cluster.bad_images.add("image:2")    # ErrImagePull
        cluster.pod("decode-0").kill(out_of_memory=True)

`pace` shortens what Kubernetes waits of its own accord: probe periods, back-offs, minReadySeconds, the eviction from lost nodes.
Grace periods are the processes' and stay. While the API server is away nothing is decided, and processes run on.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import BUDGETS, NODES, PODS, REVISIONS, STATEFUL_SETS, Json, at
from tests.kube.fake_api_rules import budget_status
from tests.kube.fake_api_verbs import Write, now
from tests.kube.fake_kubelet_nodes import NodeController, Scheduler
from tests.kube.fake_kubelet_pods import Launch, PodLife
from tests.kube.fake_kubelet_sets import SetController

PASS_S = 0.02  # between two passes, at least
WRITE = Write("kube-controller-manager")


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    capacity: dict[str, int] = field(default_factory=lambda: {"nvidia.com/gpu": 8})
    labels: dict[str, str] = field(default_factory=dict)


class FakeKubelet:
    def __init__(
        self,
        api: FakeApi,
        launch: Launch,
        *,
        nodes: Sequence[Node] = (Node("node-1"),),
        pace: float = 1.0,
        network: str = "",
    ) -> None:
        """`network`: the first three numbers of pods' addresses; "" = some of the loopback's."""
        self.api = api
        self.verbs = api.verbs
        self.launch = launch
        self.pace = pace
        self.bad_images: set[str] = set()
        self._lives: dict[str, PodLife] = {}
        self._lost: set[str] = set()
        self._off: set[str] = set()  # of the lost ones
        # Others run such tests at the same time
        self._network = network or f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"
        self._num_ips = 0
        self._sets = SetController(self.verbs, pace)
        self._scheduler = Scheduler(self.verbs)
        self._nodes = NodeController(self.verbs, pace)
        for node in nodes:
            self.add_node(node)
        self._going = True
        self._thread = threading.Thread(target=self._run, name="fake-kubelet")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill every pod's process and stop deciding; objects stay as they are."""
        self._going = False
        self._wake()
        self._thread.join()
        for life in self._lives.values():
            life.quit()
        for life in self._lives.values():
            life.join()

    # What a test does to the cluster

    def pod(self, name: str) -> PodLife:
        return next(life for life in self._lives.values() if life.name == name and not life.is_over)

    def add_node(self, node: Node) -> None:
        capacity = {key: str(value) for key, value in node.capacity.items()}
        made = self.verbs.create(NODES, "", {"metadata": {"name": node.name, "labels": node.labels}, "spec": {}})
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [_node_ready("True")]}
        self.verbs.update(NODES, "", node.name, made | {"status": status}, "status", WRITE)

    def lose_node(self, name: str, *, kill: bool = False) -> None:
        """Nothing is heard of it any more; its processes run on unless they are killed with it."""
        self._lost.add(name)
        self._nodes.lose(name)
        if kill:
            self._off.add(name)
            for life in self._lives.values():
                if life.node == name:
                    life.kill()
        self._wake()

    def node_back(self, name: str) -> None:
        self._lost.discard(name)
        self._off.discard(name)
        self._nodes.back(name)
        self._wake()

    # What pods ask

    def is_cut_off(self, node: str) -> bool:
        return not self.api.up or node in self._lost

    def is_off(self, node: str) -> bool:
        return node in self._off

    def can_pull(self, image: str) -> bool:
        return image not in self.bad_images

    def _wake(self) -> None:
        with self.api.store.changed:
            self.api.store.changed.notify_all()

    def _run(self) -> None:
        seen = -1
        while self._going:
            with self.api.store.changed:
                if self.api.store.revision == seen:
                    self.api.store.changed.wait(0.1)  # minReadySeconds and evictions come with time alone
                seen = self.api.store.revision
                if self.api.up and self._going:
                    self._pass()
            threading.Event().wait(PASS_S)

    def _pass(self) -> None:
        for the_set in self.verbs.objects(STATEFUL_SETS):
            self._sets.reconcile(the_set)
        self._collect_garbage()
        self._nodes.reconcile()
        self._scheduler.reconcile()
        self._start_pods()
        for budget in self.verbs.objects(BUDGETS):
            self._write_budget(budget)

    def _start_pods(self) -> None:
        self._lives = {uid: life for uid, life in self._lives.items() if not life.is_over}
        for pod in self.verbs.objects(PODS):
            node, uid = at(pod, ("spec", "nodeName")), pod["metadata"]["uid"]
            if node and node not in self._lost and uid not in self._lives:
                self._num_ips += 1
                self._lives[uid] = PodLife(self, pod, f"{self._network}.{1 + self._num_ips % 254}")

    def _collect_garbage(self) -> None:
        """What a set that is gone has left."""
        sets = {s["metadata"]["uid"] for s in self.verbs.store.all(STATEFUL_SETS)}
        for resource in (PODS, REVISIONS):
            for obj in self.verbs.store.all(resource):
                owners = [o for o in obj["metadata"].get("ownerReferences", ()) if o["kind"] == "StatefulSet"]
                terminating = "deletionTimestamp" in obj["metadata"]
                if owners and not terminating and not any(o["uid"] in sets for o in owners):
                    self.verbs.delete(resource, obj["metadata"]["namespace"], obj["metadata"]["name"])

    def _write_budget(self, budget: Json) -> None:
        namespace, name = budget["metadata"]["namespace"], budget["metadata"]["name"]
        pods, sets = self.verbs.store.all(PODS, namespace), self.verbs.store.all(STATEFUL_SETS, namespace)
        status = budget_status(budget, pods, sets)
        self.verbs.update(BUDGETS, namespace, name, budget | {"status": status}, "status", WRITE)


def _node_ready(status: str) -> Json:
    return {"type": "Ready", "status": status, "lastTransitionTime": now(), "reason": "KubeletReady"}
