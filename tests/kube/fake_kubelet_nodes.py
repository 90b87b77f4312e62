"""Which node a pod runs on, and what becomes of the pods of a node of which nothing is heard.

A pod fits a node that is up, not cordoned, has its labels and enough left of every countable resource that it limits (GPUs; CPU
and memory are not counted). A pod that ends keeps what it holds until its object is gone.
"""

from __future__ import annotations

import time
from collections import Counter

from tests.kube.fake_api_resources import NODES, PODS, Json, at
from tests.kube.fake_api_verbs import Verbs, Write, now
from tests.kube.fake_kubelet_sets import tell

EVICTED_AFTER_S = 300.0  # source: the default toleration of node.kubernetes.io/unreachable
UNCOUNTED = ("cpu", "memory", "ephemeral-storage")
SCHEDULER, NODES_WRITE = Write("kube-scheduler"), Write("kube-controller-manager")


class Scheduler:
    def __init__(self, verbs: Verbs) -> None:
        self._verbs = verbs

    def reconcile(self) -> None:
        nodes = self._verbs.objects(NODES)
        pods = self._verbs.objects(PODS)
        free = {node["metadata"]["name"]: _free(node, pods) for node in nodes}
        for pod in pods:
            if not at(pod, ("spec", "nodeName")) and "deletionTimestamp" not in pod["metadata"]:
                self._place(pod, nodes, free)

    def _place(self, pod: Json, nodes: list[Json], free: dict[str, Counter[str]]) -> None:
        why: Counter[str] = Counter()
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        for node in nodes:
            node_name = node["metadata"]["name"]
            if problem := _problem(pod, node, free[node_name]):
                why[problem] += 1
                continue
            free[node_name].subtract(needs(pod))
            bound = pod | {"spec": pod["spec"] | {"nodeName": node_name}}
            self._verbs.update(PODS, namespace, name, bound, "binding", SCHEDULER)
            return
        reasons = ", ".join(f"{count} {problem}" for problem, count in sorted(why.items()))
        message = f"0/{len(nodes)} nodes are available: {reasons}."
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        if [c.get("message") for c in at(pod, ("status", "conditions"), [])] != [message]:
            status = {"phase": "Pending", "conditions": [condition | {"lastTransitionTime": now()}]}
            self._verbs.update(PODS, namespace, name, pod | {"status": status}, "status", SCHEDULER)
            tell(self._verbs, pod, "Warning", "FailedScheduling", message)


def needs(pod: Json) -> Counter[str]:
    counted: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        limits = at(container, ("resources", "limits"), {})
        counted.update({key: int(value) for key, value in limits.items() if key not in UNCOUNTED})
    return counted


def _free(node: Json, pods: list[Json]) -> Counter[str]:
    left = Counter({k: int(v) for k, v in at(node, ("status", "allocatable"), {}).items() if k not in UNCOUNTED})
    for pod in pods:
        runs_here = at(pod, ("spec", "nodeName")) == node["metadata"]["name"]
        if runs_here and at(pod, ("status", "phase")) not in ("Succeeded", "Failed"):
            left.subtract(needs(pod))
    return left


def _problem(pod: Json, node: Json, free: Counter[str]) -> str:
    labels = node["metadata"].get("labels", {})
    if not _is_up(node):
        return "node(s) had untolerated taint {node.kubernetes.io/unreachable: }"
    if at(node, ("spec", "unschedulable"), False):
        return "node(s) were unschedulable"
    if not at(pod, ("spec", "nodeSelector"), {}).items() <= labels.items():
        return "node(s) didn't match Pod's node affinity/selector"
    short = [key for key, count in sorted(needs(pod).items()) if free[key] < count]
    return f"Insufficient {short[0]}" if short else ""


def _is_up(node: Json) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in at(node, ("status", "conditions"), []))


class NodeController:
    """A lost node's pods are unready at once and told to end after a while; none is there to end them."""

    def __init__(self, verbs: Verbs, pace: float) -> None:
        self._verbs = verbs
        self._pace = pace
        self._lost_at_s: dict[str, float] = {}

    def lose(self, name: str) -> None:
        self._lost_at_s[name] = time.monotonic()
        self._write(name, "Unknown", "NodeStatusUnknown")

    def back(self, name: str) -> None:
        del self._lost_at_s[name]
        self._write(name, "True", "KubeletReady")

    def reconcile(self) -> None:
        for name, lost_at_s in self._lost_at_s.items():
            evicts = time.monotonic() - lost_at_s > EVICTED_AFTER_S * self._pace
            for pod in self._verbs.objects(PODS):
                if at(pod, ("spec", "nodeName")) == name:
                    self._unready(pod)
                    if evicts and "deletionTimestamp" not in pod["metadata"]:
                        self._evict(pod)

    def _evict(self, pod: Json) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        live = self._verbs.get(PODS, namespace, name)
        self._verbs.disrupt(live, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        self._verbs.delete(PODS, namespace, name)

    def _unready(self, pod: Json) -> None:
        """Ready alone, and without a reason: MarkPodsNotReady of pkg/controller/util/node."""
        status = pod["status"]
        conditions = [
            {**c, "status": "False", "lastTransitionTime": now()} if c["type"] == "Ready" else c
            for c in status.get("conditions", ())
        ]
        if all(c["status"] == "False" for c in status.get("conditions", ()) if c["type"] == "Ready"):
            return
        lost = status | {"conditions": conditions}
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        self._verbs.update(PODS, namespace, name, pod | {"status": lost}, "status", NODES_WRITE)

    def _write(self, name: str, status: str, reason: str) -> None:
        with self._verbs.store.changed:
            node = self._verbs.get(NODES, "", name)
            condition = {"type": "Ready", "status": status, "reason": reason, "lastTransitionTime": now()}
            node["status"]["conditions"] = [condition]
            self._verbs.update(NODES, "", name, node, "status", NODES_WRITE)
