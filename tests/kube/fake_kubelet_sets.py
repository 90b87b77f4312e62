"""StatefulSets as their controller runs them: which pods are to be made, which to be deleted next, and the set's status.

`steps` is pure and follows the real controller's order: missing pods, then pods beyond the size from the highest ordinal down,
then pods of another revision. With OrderedReady each step waits for every lower pod to be available; with Parallel none does,
but an update still takes no more pods away than `maxUnavailable`, and counts a sick one among them.
Source: pkg/controller/statefulset/stateful_set_control.go of Kubernetes 1.37, with MaxUnavailableStatefulSet on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.kube.fake_api_resources import CLAIMS, EVENTS, PODS, REVISIONS, STATEFUL_SETS, ApiError, Json, at
from tests.kube.fake_api_rules import is_ready
from tests.kube.fake_api_store import key_of
from tests.kube.fake_api_verbs import Verbs, Write, now

POD_NAME = "statefulset.kubernetes.io/pod-name"
POD_INDEX = "apps.kubernetes.io/pod-index"
REVISION = "controller-revision-hash"
WRITE = Write("kube-controller-manager")


@dataclass(frozen=True, slots=True)
class Pod:
    """What the controller looks at."""

    ordinal: int
    revision: str
    available: bool = True  # Ready for minReadySeconds, and not terminating
    ready: bool = True
    terminating: bool = False
    over: bool = False  # Failed or Succeeded


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a set asks for."""

    ordinals: range
    ordered: bool
    current: str  # revisions: of the last finished update, and of the template as it is now
    update: str
    num_current: int = 0  # pods of the current revision, as the status says
    partition: int = 0  # ordinals below it are not updated
    max_unavailable: int = 1
    rolling: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    verb: str  # create or delete
    ordinal: int
    revision: str = ""


def steps(wanted: Wanted, pods: Sequence[Pod]) -> Iterator[Step]:
    """What to do now; called again after every change."""
    there = {pod.ordinal: pod for pod in pods}
    for ordinal in wanted.ordinals:
        pod = there.get(ordinal)
        if pod is None:
            yield Step("create", ordinal, _revision_for(wanted, ordinal))
        elif pod.over and not pod.terminating:
            yield Step("delete", ordinal)
        if wanted.ordered and (pod is None or not pod.available):
            return
    condemned = sorted((p for p in pods if p.ordinal not in wanted.ordinals), key=lambda p: -p.ordinal)
    yield from _shrink(wanted, condemned)
    if wanted.rolling and not (wanted.ordered and condemned):
        yield from _update(wanted, [there.get(ordinal) for ordinal in wanted.ordinals])


def _shrink(wanted: Wanted, condemned: list[Pod]) -> Iterator[Step]:
    if not wanted.ordered:
        yield from (Step("delete", pod.ordinal) for pod in condemned if not pod.terminating)
    elif condemned and not (last := condemned[0]).terminating:
        unavailable = [pod for pod in condemned if not pod.available]
        if last.available or last is unavailable[-1]:  # of several sick ones the lowest is waited for
            yield Step("delete", last.ordinal)


def _update(wanted: Wanted, replicas: list[Pod | None]) -> Iterator[Step]:
    budget = wanted.max_unavailable - sum(pod is None or not pod.available for pod in replicas)
    for pod in reversed(replicas):
        if pod is None or pod.ordinal < wanted.partition or pod.terminating or pod.revision == wanted.update:
            continue
        if budget <= 0:
            return
        budget -= 1
        yield Step("delete", pod.ordinal)


def _revision_for(wanted: Wanted, ordinal: int) -> str:
    """Of a pod that is made in the middle of an update."""
    old = wanted.partition or wanted.ordinals.start + wanted.num_current
    return wanted.current if wanted.rolling and ordinal < old else wanted.update


class SetController:
    """Carries the steps out; called under the store's lock."""

    def __init__(self, verbs: Verbs, pace: float) -> None:
        self._verbs = verbs
        self._pace = pace  # of minReadySeconds

    def reconcile(self, the_set: Json) -> None:
        update = self._revision(the_set)
        current = at(the_set, ("status", "currentRevision")) or update
        wanted = _wanted(the_set, current, update)
        if "deletionTimestamp" not in the_set["metadata"]:
            for step in list(steps(wanted, self._pods(the_set))):
                if not self._carry_out(the_set, step):
                    break
        self._write_status(the_set, wanted)

    def _pods(self, the_set: Json) -> list[Pod]:
        pause_s = the_set["spec"].get("minReadySeconds", 0) * self._pace
        return [
            _seen(pod, pause_s)
            for pod in self._verbs.objects(PODS, the_set["metadata"]["namespace"])
            if _owns(the_set, pod)
        ]

    def _carry_out(self, the_set: Json, step: Step) -> bool:
        name = f"{the_set['metadata']['name']}-{step.ordinal}"
        namespace = the_set["metadata"]["namespace"]
        if step.verb == "delete":
            self._verbs.delete(PODS, namespace, name)
            self.tell(the_set, "Normal", "SuccessfulDelete", f"delete Pod {name} in StatefulSet successful")
            return True
        try:
            self._make_claims(the_set, name)
            self._verbs.create(PODS, namespace, self._pod(the_set, name, step), WRITE)
        except ApiError as error:
            set_name = the_set["metadata"]["name"]
            message = f"create Pod {name} in StatefulSet {set_name} failed error: {error.message}"
            self.tell(the_set, "Warning", "FailedCreate", message)
            return False
        self.tell(the_set, "Normal", "SuccessfulCreate", f"create Pod {name} in StatefulSet successful")
        return True

    def _pod(self, the_set: Json, name: str, step: Step) -> Json:
        meta, spec = the_set["metadata"], the_set["spec"]
        revision = self._verbs.get(REVISIONS, meta["namespace"], step.revision)
        template = revision["data"]["spec"]["template"]
        labels = {POD_NAME: name, POD_INDEX: str(step.ordinal), REVISION: step.revision}
        pod = dict(template["spec"]) | {"hostname": name, "subdomain": spec.get("serviceName", "")}
        return {
            "metadata": {
                "name": name,
                "labels": (at(template, ("metadata", "labels"), {})) | labels,
                "annotations": at(template, ("metadata", "annotations"), {}),
                "ownerReferences": [_owner(the_set)],
            },
            "spec": pod,
        }

    def _make_claims(self, the_set: Json, pod: str) -> None:
        for template in the_set["spec"].get("volumeClaimTemplates", ()):
            name = f"{template['metadata']['name']}-{pod}"
            namespace = the_set["metadata"]["namespace"]
            if self._verbs.find(CLAIMS, namespace, name) is None:
                labels = dict(the_set["spec"]["selector"]["matchLabels"])
                claim = {"metadata": {"name": name, "labels": labels}, "spec": template["spec"]}
                made = self._verbs.create(CLAIMS, namespace, claim, WRITE)
                self._verbs.update(CLAIMS, namespace, name, made | {"status": {"phase": "Bound"}}, "status", WRITE)

    def _revision(self, the_set: Json) -> str:
        """The name of the ControllerRevision that holds the set's template; a template that comes back has its old one."""
        meta, template = the_set["metadata"], the_set["spec"]["template"]
        digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]
        name = f"{meta['name']}-{digest}"
        if self._verbs.store.get(key_of(REVISIONS, meta["namespace"], name)) is None:
            number = 1 + len([r for r in self._verbs.store.all(REVISIONS, meta["namespace"]) if _owns(the_set, r)])
            body: Json = {
                "metadata": {"name": name, "ownerReferences": [_owner(the_set)]},
                "data": {"spec": {"template": template}},
                "revision": number,
            }
            self._verbs.create(REVISIONS, meta["namespace"], body, WRITE)
        return name

    def _write_status(self, the_set: Json, wanted: Wanted) -> None:
        meta = the_set["metadata"]
        pods = self._pods(the_set)
        current = wanted.current
        updated = sum(pod.revision == wanted.update and not pod.terminating for pod in pods)
        ready = sum(pod.ready for pod in pods)
        whole = len(wanted.ordinals)
        if wanted.rolling and updated == ready == len(pods) == whole:
            current = wanted.update
        kept: Json = {k: v for k, v in the_set.get("status", {}).items() if k == "conditions"}
        status: Json = kept | {
            "observedGeneration": meta["generation"],
            "replicas": len(pods),
            "readyReplicas": ready,
            "availableReplicas": sum(pod.available for pod in pods),
            "currentReplicas": sum(pod.revision == current and not pod.terminating for pod in pods),
            "updatedReplicas": updated,
            "currentRevision": current,
            "updateRevision": wanted.update,
            "collisionCount": 0,
        }
        live = self._verbs.get(STATEFUL_SETS, meta["namespace"], meta["name"])
        self._verbs.update(STATEFUL_SETS, meta["namespace"], meta["name"], live | {"status": status}, "status", WRITE)

    def tell(self, about: Json, kind: str, reason: str, message: str) -> None:
        tell(self._verbs, about, kind, reason, message)


def tell(verbs: Verbs, about: Json, kind: str, reason: str, message: str) -> None:
    """An Event; one that says the same again is counted."""
    meta = about["metadata"]
    namespace = meta["namespace"]
    digest = hashlib.sha256(f"{meta['uid']}{reason}{message}".encode()).hexdigest()[:16]
    name = f"{meta['name']}.{digest}"
    if (known := verbs.find(EVENTS, namespace, name)) is not None:
        news = {"count": known["count"] + 1, "lastTimestamp": now()}
        verbs.update(EVENTS, namespace, name, known | news, "", WRITE)
        return
    involved = {k: meta[k] for k in ("name", "namespace", "uid", "resourceVersion")}
    involved |= {"kind": about["kind"], "apiVersion": about["apiVersion"]}
    event: Json = {
        "metadata": {"name": name},
        "involvedObject": involved,
        "type": kind,
        "reason": reason,
        "message": message,
    }
    event |= {"count": 1, "firstTimestamp": now(), "lastTimestamp": now()}
    event |= {"source": {"component": "statefulset-controller" if about["kind"] == "StatefulSet" else "kubelet"}}
    verbs.create(EVENTS, namespace, event, WRITE)


def _wanted(the_set: Json, current: str, update: str) -> Wanted:
    spec = the_set["spec"]
    start, replicas = at(spec, ("ordinals", "start"), 0), spec["replicas"]
    rolling = at(spec, ("updateStrategy", "rollingUpdate"), {})
    given = rolling.get("maxUnavailable", 1)
    most = int(given.rstrip("%")) * replicas // 100 if isinstance(given, str) else given
    return Wanted(
        ordinals=range(start, start + replicas),
        ordered=spec["podManagementPolicy"] == "OrderedReady",
        current=current,
        update=update,
        num_current=at(the_set, ("status", "currentReplicas"), 0),
        partition=rolling.get("partition", 0),
        max_unavailable=max(1, most),
        rolling=spec["updateStrategy"].get("type", "RollingUpdate") == "RollingUpdate",
    )


def _seen(pod: Json, pause_s: float) -> Pod:
    terminating = "deletionTimestamp" in pod["metadata"]
    ready = is_ready(pod)
    return Pod(
        ordinal=int(pod["metadata"]["name"].rsplit("-", 1)[1]),
        revision=pod["metadata"]["labels"].get(REVISION, ""),
        ready=ready,
        available=ready and not terminating and _ready_for_s(pod) >= pause_s,
        terminating=terminating,
        over=at(pod, ("status", "phase")) in ("Failed", "Succeeded"),
    )


def _ready_for_s(pod: Json) -> float:
    since = next(c["lastTransitionTime"] for c in pod["status"]["conditions"] if c["type"] == "Ready")
    return (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()


def _owner(the_set: Json) -> Json:
    meta = the_set["metadata"]
    named = {"apiVersion": the_set["apiVersion"], "kind": the_set["kind"], "name": meta["name"], "uid": meta["uid"]}
    return named | {"controller": True, "blockOwnerDeletion": True}


def _owns(the_set: Json, obj: Json) -> bool:
    return any(o["uid"] == the_set["metadata"]["uid"] for o in obj["metadata"].get("ownerReferences", ()))
