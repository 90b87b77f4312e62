"""What is wrong with the cluster, in an operator's words: one condition per cause, however many pods, and its remedy. Pure.

A condition is found from what is there at one look, so it ends when its cause does, a crash RECENT_S later. Whatever it is, the
rest serves on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from router.controller.fleet_state import FAILED, Member
from router.controller.kube.objects import Happened, Pod

API_AWAY = "ApiServerAway"
HEAD_AWAY = "RayHeadAway"
UNSCHEDULABLE = "PodsUnschedulable"
QUOTA = "PodsRefused"
IMAGE = "ImageCannotBePulled"
CONTAINER = "ContainerCannotStart"
CRASHING = "PodsCrash"
OUT_OF_MEMORY = "PodsOutOfMemory"
NODE_LOST = "NodeLost"
EVICTED = "PodsEvicted"
SICK = "WorkersDoNotStart"
OVER_BUDGET = "OverBudget"
UPGRADE_PAUSED = "UpgradePaused"
KINDS = (
    API_AWAY, HEAD_AWAY, UNSCHEDULABLE, QUOTA, IMAGE, CONTAINER, CRASHING, OUT_OF_MEMORY, NODE_LOST, EVICTED, SICK,
    OVER_BUDGET, UPGRADE_PAUSED,
)  # fmt: skip

AWAY_S = 15.0  # of the API server: three calls that were not answered
RECENT_S = 600.0  # a crash that brings down a Ready pod is said for so long: twice the kubelet's longest pause between restarts
_IMAGE = ("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_NODE_LOST = ("NodeLost", "DeletionByTaintManager", "NodeUnreachable")
_OUT_OF_MEMORY = "OOMKilled"
_CRASHES = 2  # restarts, from which on it is no accident


@dataclass(frozen=True, slots=True)
class Condition:
    kind: str
    about: tuple[str, ...]  # objects
    message: str  # what is the case, as the cluster says it
    remedy: str


@dataclass(frozen=True, slots=True)
class Short:
    """A set that has fewer pods than it should."""

    name: str
    missing: int
    events: Sequence[Happened]  # about the set


@dataclass(frozen=True, slots=True)
class Symptoms:
    """At one instant."""

    pods: Mapping[str, Pod]
    members: Sequence[Member]
    now_unix_s: float
    short: Sequence[Short] = ()
    api_silence_s: float = 0.0
    head_away: str = ""  # why; "" = it answers
    over_budget: str = ""
    upgrade_paused: str = ""


def conditions(now: Symptoms) -> list[Condition]:
    """One per kind, the worst first."""
    found: dict[str, Condition] = {}
    for one in _all(now):
        known = found.get(one.kind)
        if known is None:
            found[one.kind] = one
        else:
            found[one.kind] = Condition(one.kind, (*known.about, *one.about), known.message, known.remedy)
    return sorted(found.values(), key=lambda one: KINDS.index(one.kind))


def _all(now: Symptoms) -> Iterator[Condition]:
    if now.api_silence_s > AWAY_S:
        yield Condition(
            API_AWAY, (), f"the API server has not answered for {now.api_silence_s:.0f} s",
            "workers and routers serve on; pools keep their sizes meanwhile. Look at the control plane and at NetworkPolicies",
        )  # fmt: skip
    if now.head_away:
        yield Condition(
            HEAD_AWAY, (), now.head_away,
            "workers serve on; none can be started or ended. See its pod and volume with kubectl describe",
        )  # fmt: skip
    for short in now.short:
        yield from _refused(short)
    for name in sorted(now.pods):
        if (one := _of_pod(now.pods[name], now.now_unix_s)) is not None:
            yield one
    for member in now.members:
        pod = now.pods.get(member.worker_id)
        if member.state == FAILED and pod is not None and pod.runs and not _of_pod(pod, now.now_unix_s):
            yield Condition(
                SICK, (member.worker_id,), member.reason or "the worker does not answer",
                "it is tried again, and its pod evicted where that does not help; kubectl logs shows why it fails",
            )  # fmt: skip
    if now.over_budget:
        yield Condition(
            OVER_BUDGET, (), now.over_budget,
            "somebody scaled a pool by hand: nothing grows until it fits. Raise the budget, or scale a pool down",
        )  # fmt: skip
    if now.upgrade_paused:
        yield Condition(
            UPGRADE_PAUSED, (), now.upgrade_paused,
            "the upgrade goes on by itself once that is over; kubectl rollout undo, or helm rollback, takes it back",
        )  # fmt: skip


def is_node_lost(pod: Pod) -> bool:
    """Its node does not answer: what it runs is not known, nor when it ends."""
    return pod.on_lost_node or pod.reason in _NODE_LOST or pod.disrupted in _NODE_LOST or pod.phase == "Unknown"


def _refused(short: Short) -> Iterator[Condition]:
    said = [event for event in short.events if event.reason in ("FailedCreate", "FailedCreatePodSandBox")]
    if said:
        newest = max(said, key=lambda event: event.at)
        yield Condition(
            QUOTA, (short.name,), newest.message,
            "raise the namespace's ResourceQuota or LimitRange, or lower the GPU budget; what was asked for is given back",
        )  # fmt: skip


def _of_pod(pod: Pod, now_unix_s: float) -> Condition | None:
    """The first that explains why it does not serve."""
    waiting, about = pod.waiting, (pod.name,)
    if is_node_lost(pod):
        return Condition(
            NODE_LOST, about, pod.message or f"node {pod.node} does not answer",
            f"if the machine is gone for good: kubectl delete node {pod.node or '<node>'}; its pods then come back elsewhere",
        )  # fmt: skip
    if pod.phase == "Failed" and pod.reason == "Evicted":
        return Condition(
            EVICTED, about, pod.message or "the node was short of memory or disk",
            "it comes back by itself; raise pools.<role>.memory or modelCache.emptyDir.sizeLimit, or give nodes more",
        )  # fmt: skip
    if waiting.reason in _IMAGE:
        return Condition(
            IMAGE, about, f"{waiting.reason}: {waiting.message}",
            "check image.registry, image.worker (repository, tag, digest) and image.pullSecrets of the values",
        )  # fmt: skip
    if waiting.reason in _CONTAINER:
        return Condition(
            CONTAINER,
            about,
            f"{waiting.reason}: {waiting.message}",
            "a Secret, ConfigMap or volume that the pod names is missing",
        )
    if pod.is_ready and now_unix_s - pod.last_end.ended_unix_s >= RECENT_S:
        return None  # it is over, however often it restarted before
    if pod.last_end.reason == _OUT_OF_MEMORY:
        return Condition(
            OUT_OF_MEMORY, about, f"killed for memory, {pod.num_restarts} restarts; exit code {pod.last_end.exit_code}",
            "raise pools.<role>.memory of the values: the weights are in it once while they are loaded",
        )  # fmt: skip
    if waiting.reason == "CrashLoopBackOff" or pod.num_restarts > _CRASHES:
        return Condition(
            CRASHING, about, f"{pod.num_restarts} restarts; {waiting.message or pod.last_end.reason}",
            f"kubectl logs --previous {pod.name}",
        )  # fmt: skip
    if pod.unschedulable:
        return Condition(
            UNSCHEDULABLE, about, pod.unschedulable,
            "add nodes, free GPUs or lower the budget; a pod that the scaler asked for is given back in time",
        )  # fmt: skip
    return None
