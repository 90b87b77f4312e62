"""What we read of Kubernetes objects, as plain values. Pure: from decoded JSON, which may lack anything but a name.

What is missing in an answer is empty here; what is none of our business is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

FLEET_LABEL = "baton.dev/fleet"
HOME_LABEL = "baton.dev/home"
ROLE_LABEL = "baton.dev/role"
LLMD_ROLE_LABEL = "llm-d.ai/role"
CONTROLLER_LABEL = "baton.dev/controller"  # on the pods of controllers: whose they are
LEADS_LABEL = "baton.dev/leads"  # on the one that leads
REVISION_LABEL = "controller-revision-hash"  # written by the StatefulSet controller
JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a container does not run, or how it last ended."""

    reason: str = ""  # ImagePullBackOff, CrashLoopBackOff, OOMKilled, ...
    message: str = ""
    exit_code: int = 0
    ended_unix_s: float = float("-inf")  # long ago, where nobody said when


@dataclass(frozen=True, slots=True)
class Pod:
    """One life of a pod: the same name with another uid is another pod."""

    name: str
    uid: str
    version: str  # resourceVersion
    labels: Mapping[str, str] = field(default_factory=dict)
    phase: str = ""
    ip: str = ""
    node: str = ""
    is_ready: bool = False
    on_lost_node: bool = False  # unready only because nothing is heard of its node
    is_terminating: bool = False
    is_preparing: bool = False  # an init container runs, for the first time: it fetches a model, say
    reason: str = ""  # of the whole pod: Evicted, NodeLost
    message: str = ""
    unschedulable: str = ""  # the scheduler's words
    disrupted: str = ""  # DisruptionTarget: why the platform takes it away
    waiting: Waiting = Waiting()
    last_end: Waiting = Waiting()
    num_restarts: int = 0

    @property
    def home(self) -> str:
        return self.labels.get(HOME_LABEL, "")

    @property
    def revision(self) -> str:
        return self.labels.get(REVISION_LABEL, "")

    @property
    def runs(self) -> bool:
        """A worker can be started there, or is there."""
        return self.phase == "Running" and bool(self.ip) and not self.is_terminating


@dataclass(frozen=True, slots=True)
class Scale:
    """`/scale` of a set."""

    name: str
    version: str  # resourceVersion of the set itself
    desired: int
    body: JsonObject  # as it was read, so that a write returns what it does not know


@dataclass(frozen=True, slots=True)
class PodSet:
    """A StatefulSet."""

    name: str
    uid: str
    desired: int
    ready: int
    update_revision: str
    updates_on_delete: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A ConfigMap, or a Lease: `data` of the former, `spec` of the latter."""

    version: str
    data: Mapping[str, Any]
    body: JsonObject


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """One of a RayCluster's."""

    index: int
    name: str
    replicas: int
    to_delete: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RayCluster:
    name: str
    version: str
    groups: tuple[WorkerGroup, ...]


@dataclass(frozen=True, slots=True)
class Happened:
    """An Event that somebody wrote down."""

    reason: str
    message: str
    about: str  # the object's name
    count: int
    at: str  # RFC 3339; "" = not said


def pod_of(body: JsonObject) -> Pod:
    """Raises: KeyError, TypeError, ValueError: it is none."""
    meta, status = body["metadata"], body.get("status") or {}
    conditions = {c.get("type", ""): c for c in status.get("conditions") or ()}
    containers: Sequence[JsonObject] = status.get("containerStatuses") or ()
    inits: Sequence[JsonObject] = status.get("initContainerStatuses") or ()
    return Pod(
        name=meta["name"],
        uid=meta.get("uid", ""),
        version=meta.get("resourceVersion", ""),
        labels=meta.get("labels") or {},
        phase=status.get("phase", ""),
        ip=status.get("podIP", ""),
        node=(body.get("spec") or {}).get("nodeName", ""),
        is_ready=_holds(conditions.get("Ready")),
        on_lost_node=_on_lost_node(body, conditions),
        is_terminating=bool(meta.get("deletionTimestamp")),
        is_preparing=any(_runs_first(c) for c in inits),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        unschedulable=_unschedulable(conditions.get("PodScheduled")),
        disrupted=_disrupted(conditions.get("DisruptionTarget")),
        waiting=_waiting([*inits, *containers]),
        last_end=_last_end(containers),
        num_restarts=sum(int(c.get("restartCount", 0)) for c in containers),
    )


def _holds(condition: JsonObject | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _on_lost_node(body: JsonObject, conditions: Mapping[str, JsonObject]) -> bool:
    """Whether the node controller has made the pod unready, which is 300 s before it does anything else.

    It turns Ready alone and gives no reason, while a kubelet writes Ready and ContainersReady together; but for readiness gates,
    which others hold. Source: MarkPodsNotReady of Kubernetes' pkg/controller/util/node.
    """
    ready = conditions.get("Ready") or {}
    if ready.get("status") != "False":
        return False
    has_gates = bool((body.get("spec") or {}).get("readinessGates"))
    is_said = bool(ready.get("reason") == "NodeNotReady")
    return is_said or (_holds(conditions.get("ContainersReady")) and not has_gates)


def _runs_first(container: JsonObject) -> bool:
    return "running" in (container.get("state") or {}) and not container.get("restartCount")


def _unschedulable(condition: JsonObject | None) -> str:
    if condition is None or condition.get("status") != "False":
        return ""
    return condition.get("message") or condition.get("reason") or "not scheduled"


def _disrupted(condition: JsonObject | None) -> str:
    if condition is None or not _holds(condition):
        return ""
    return condition.get("reason") or "disrupted"


def _waiting(containers: Sequence[JsonObject]) -> Waiting:
    for container in containers:
        said = (container.get("state") or {}).get("waiting")
        if said and said.get("reason") not in ("", None, "ContainerCreating", "PodInitializing"):
            return Waiting(said["reason"], said.get("message", ""))
    return Waiting()


def _last_end(containers: Sequence[JsonObject]) -> Waiting:
    for container in containers:
        state = container.get("state") or {}
        ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
        if ended:
            code, at = int(ended.get("exitCode", 0)), ended.get("finishedAt")
            ended_unix_s = datetime.fromisoformat(at).timestamp() if at else float("-inf")
            return Waiting(ended.get("reason", ""), ended.get("message", ""), code, ended_unix_s)
    return Waiting()


def scale_of(body: JsonObject) -> Scale:
    meta = body["metadata"]
    return Scale(
        meta["name"], meta.get("resourceVersion", ""), int((body.get("spec") or {}).get("replicas") or 0), body
    )


def set_of(body: JsonObject) -> PodSet:
    meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    replicas = spec.get("replicas")
    return PodSet(
        name=meta["name"],
        uid=meta.get("uid", ""),
        desired=1 if replicas is None else int(replicas),  # the API's own default
        ready=int(status.get("readyReplicas") or 0),
        update_revision=status.get("updateRevision", ""),
        updates_on_delete=(spec.get("updateStrategy") or {}).get("type") == "OnDelete",
    )


def stored_of(body: JsonObject, key: str) -> Stored:
    """`key`: "data" of a ConfigMap, "spec" of a Lease."""
    return Stored(body["metadata"].get("resourceVersion", ""), body.get(key) or {}, body)


def ray_cluster_of(body: JsonObject) -> RayCluster:
    meta = body["metadata"]
    groups = (body.get("spec") or {}).get("workerGroupSpecs") or ()
    return RayCluster(meta["name"], meta.get("resourceVersion", ""), tuple(map(_group, range(len(groups)), groups)))


def _group(index: int, body: JsonObject) -> WorkerGroup:
    to_delete = (body.get("scaleStrategy") or {}).get("workersToDelete") or ()
    return WorkerGroup(index, body["groupName"], int(body.get("replicas") or 0), tuple(to_delete))


def happened_of(body: JsonObject) -> Happened:
    about = body.get("involvedObject") or body.get("regarding") or {}
    at = body.get("lastTimestamp") or body.get("eventTime") or body["metadata"].get("creationTimestamp") or ""
    return Happened(
        body.get("reason", ""), body.get("message", ""), about.get("name", ""), int(body.get("count") or 1), at
    )
