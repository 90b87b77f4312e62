"""What is particular to a kind: its defaults, what may not change, what a subresource may change, how pods are evicted.

All functions are pure. Only what the controller or the chart can run into is here; other fields go through unread, as a real
server would not let them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from tests.kube.fake_api_resources import (
    PODS,
    STATEFUL_SETS,
    ApiError,
    Json,
    Resource,
    at,
    conflict,
    invalid,
    matches_labels,
)

# Source: StatefulSetSpec and PodSpec in the API reference of Kubernetes 1.37.
SET_DEFAULTS: Json = {
    "replicas": 1,
    "podManagementPolicy": "OrderedReady",
    "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}},
    "revisionHistoryLimit": 10,
    "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain", "whenScaled": "Retain"},
}
FIRST_STATUS: dict[Resource, Json] = {
    PODS: {"phase": "Pending"},
    STATEFUL_SETS: {"replicas": 0, "availableReplicas": 0},
}
POD_DEFAULTS: Json = {"restartPolicy": "Always", "terminationGracePeriodSeconds": 30}
SET_CHANGEABLE = (
    "replicas",
    "ordinals",
    "template",
    "updateStrategy",
    "revisionHistoryLimit",
    "minReadySeconds",
    "persistentVolumeClaimRetentionPolicy",
)
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")  # RFC 1123 subdomain


def fill_defaults(resource: Resource, obj: Json) -> None:
    if resource in (STATEFUL_SETS, PODS):
        given = obj.get("spec") or {}
        obj["spec"] = {**(SET_DEFAULTS if resource == STATEFUL_SETS else POD_DEFAULTS), **given}
    if resource in FIRST_STATUS:
        obj.setdefault("status", dict(FIRST_STATUS[resource]))


def check_new(resource: Resource, obj: Json) -> None:
    name = obj["metadata"]["name"]
    if not resource.group.startswith("rbac") and not (DNS_NAME.fullmatch(name) and len(name) <= 253):
        raise invalid(resource, name, "metadata.name", f'Invalid value: "{name}": a lowercase RFC 1123 subdomain')
    if resource == STATEFUL_SETS:
        _check_set(resource, obj)
    if resource == PODS and not at(obj, ("spec", "containers")):
        raise invalid(resource, name, "spec.containers", "Required value", "FieldValueRequired")


def _check_set(resource: Resource, obj: Json) -> None:
    name, spec = obj["metadata"]["name"], obj["spec"]
    if not isinstance(spec["replicas"], int) or spec["replicas"] < 0:
        message = f"Invalid value: {spec['replicas']}: must be greater than or equal to 0"
        raise invalid(resource, name, "spec.replicas", message)
    labels = at(spec, ("template", "metadata", "labels"), {})
    if not matches_labels(spec.get("selector"), labels):
        message = f"Invalid value: {labels}: `selector` does not match template `labels`"
        raise invalid(resource, name, "spec.template.metadata.labels", message)


def check_change(resource: Resource, live: Json, new: Json) -> None:
    name = live["metadata"]["name"]
    if resource == STATEFUL_SETS:
        _check_set(resource, new)
        if _without(live["spec"], SET_CHANGEABLE) != _without(new["spec"], SET_CHANGEABLE):
            named = "', '".join(SET_CHANGEABLE)
            message = f"Forbidden: updates to statefulset spec for fields other than '{named}' are forbidden"
            raise invalid(resource, name, "spec", message, "FieldValueForbidden")
    if resource == PODS and _frozen(live["spec"]) != _frozen(new["spec"]):
        message = "Forbidden: pod updates may not change fields other than image and tolerations"
        raise invalid(resource, name, "spec", message, "FieldValueForbidden")


def _without(spec: Json, fields: Iterable[str]) -> Json:
    return {key: value for key, value in spec.items() if key not in fields}


def _frozen(pod: Json) -> Json:
    containers = [_without(container, ("image",)) for container in pod["containers"]]
    return _without(pod, ("tolerations", "activeDeadlineSeconds")) | {"containers": containers}


def written(resource: Resource, live: Json, new: Json, subresource: str) -> Json:
    """What of a write counts: the status through /status alone, and all but it through the object itself."""
    match subresource:
        case "" if "status" in resource.subresources:
            kept = {"status": live["status"]} if "status" in live else {}
            return _without(new, ("status",)) | kept
        case "status" if resource.custom:
            return live | {"status": new.get("status", {})}
        case "status":
            return live | {"metadata": new["metadata"], "status": new.get("status", {})}
        case "binding":  # not served: the fake scheduler's own
            return live | {"spec": live["spec"] | {"nodeName": new["spec"]["nodeName"]}}
        case _:
            return new


def scale_of(obj: Json) -> Json:
    """The autoscaling/v1 view of a set."""
    meta = {k: v for k, v in obj["metadata"].items() if k in ("name", "namespace", "uid", "resourceVersion")}
    meta["creationTimestamp"] = obj["metadata"]["creationTimestamp"]
    labels = at(obj, ("spec", "selector", "matchLabels"), {})
    status = {
        "replicas": at(obj, ("status", "replicas"), 0),
        "selector": ",".join(f"{k}={v}" for k, v in sorted(labels.items())),
    }
    spec = {"replicas": obj["spec"]["replicas"]} if obj["spec"]["replicas"] else {}
    return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": meta, "spec": spec, "status": status}


def scaled(live: Json, scale: Json) -> Json:
    """The set that a write of its Scale asks for; metadata of the Scale are its preconditions."""
    replicas = at(scale, ("spec", "replicas"), 0)
    given = scale.get("metadata", {})
    meta = live["metadata"] | {k: given[k] for k in ("resourceVersion", "uid") if given.get(k)}
    if not given.get("resourceVersion"):
        meta = _without(meta, ("resourceVersion",))
    return live | {"metadata": meta, "spec": live["spec"] | {"replicas": replicas}}


def check_quota(quotas: list[Json], pods: list[Json], pod: Json) -> None:
    """Counted are pods and what they limit. Raises: ApiError: 403 where a ResourceQuota leaves no room for one more."""
    name = pod["metadata"]["name"]
    living = [p for p in pods if at(p, ("status", "phase")) not in ("Succeeded", "Failed")]
    for quota in quotas:
        for what, hard in at(quota, ("spec", "hard"), {}).items():
            used, wants = sum(_uses(p, what) for p in living), _uses(pod, what)
            if wants and used + wants > int(hard):
                sizes = f"requested: {what}={wants}, used: {what}={used}, limited: {what}={hard}"
                message = f'pods "{name}" is forbidden: exceeded quota: {quota["metadata"]["name"]}, {sizes}'
                raise ApiError(403, "Forbidden", message, {"name": name, "kind": "pods"})


def _uses(pod: Json, what: str) -> int:
    if what in ("pods", "count/pods"):
        return 1
    resource = what.removeprefix("requests.").removeprefix("limits.")
    return sum(int(at(c, ("resources", "limits", resource), 0)) for c in pod["spec"]["containers"])


def is_ready(pod: Json) -> bool:
    conditions = at(pod, ("status", "conditions"), [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def budget_status(budget: Json, pods: list[Json], sets: list[Json]) -> Json:
    """A budget's status, as the disruption controller computes it from the pods of a namespace and the sets that own them."""
    covered = [pod for pod in pods if matches_labels(budget["spec"].get("selector"), pod["metadata"].get("labels", {}))]
    owners = {o["uid"] for pod in covered for o in pod["metadata"].get("ownerReferences", ())}
    expected = sum(s["spec"]["replicas"] for s in sets if s["metadata"]["uid"] in owners) or len(covered)
    spec = budget["spec"]
    if "maxUnavailable" in spec:
        desired = max(0, expected - _count(spec["maxUnavailable"], expected))
    else:
        minimum = spec.get("minAvailable", 1)
        expected = expected if isinstance(minimum, str) else len(covered)
        desired = _count(minimum, expected)
    healthy = sum(is_ready(pod) and "deletionTimestamp" not in pod["metadata"] for pod in covered)
    return {
        "observedGeneration": budget["metadata"]["generation"],
        "expectedPods": expected,
        "desiredHealthy": desired,
        "currentHealthy": healthy,
        "disruptionsAllowed": max(0, healthy - desired) if expected else 0,
    }


def _count(value: int | str, of: int) -> int:
    return math.ceil(int(value.rstrip("%")) / 100 * of) if isinstance(value, str) else value


def check_eviction(pod: Json, budgets: list[Json], pods: list[Json], sets: list[Json]) -> None:
    """Raises: ApiError: 429 where a budget forbids it now, 500 where two cover the pod."""
    if at(pod, ("status", "phase")) in ("Pending", "Succeeded", "Failed") or "deletionTimestamp" in pod["metadata"]:
        return
    labels = pod["metadata"].get("labels", {})
    covering = [b for b in budgets if matches_labels(b["spec"].get("selector"), labels)]
    if len(covering) > 1:
        message = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        raise ApiError(500, "InternalError", message)
    for budget in covering:
        status = budget_status(budget, pods, sets)
        healthy, desired = status["currentHealthy"], status["desiredHealthy"]
        if status["disruptionsAllowed"] or (not is_ready(pod) and _spares_unready(budget, healthy, desired)):
            continue
        name = budget["metadata"]["name"]
        cause = f"The disruption budget {name} needs {desired} healthy pods and has {healthy} currently"
        details = {"causes": [{"reason": "DisruptionBudget", "message": cause}]}
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        raise ApiError(429, "TooManyRequests", message, details)


def _spares_unready(budget: Json, healthy: int, desired: int) -> bool:
    """Whether a pod that serves nobody may go."""
    return budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow" or healthy >= desired > 0


def check_preconditions(resource: Resource, live: Json, options: Json) -> None:
    for field, value in (options.get("preconditions") or {}).items():
        if (has := live["metadata"].get(field)) != value:
            label = {"uid": "UID", "resourceVersion": "ResourceVersion"}[field]
            why = f"the {label} in the precondition ({value}) does not match the {label} in record ({has}). "
            raise conflict(
                resource, live["metadata"]["name"], why + "The object might have been deleted and then recreated"
            )


def grace_s(pod: Json, options: Json) -> int:
    """How long a pod that is deleted may take; 0 where nothing runs."""
    if not at(pod, ("spec", "nodeName")) or at(pod, ("status", "phase")) in ("Succeeded", "Failed"):
        return 0
    given: Any = options.get("gracePeriodSeconds")
    return int(at(pod, ("spec", "terminationGracePeriodSeconds"), 30) if given is None else given)
