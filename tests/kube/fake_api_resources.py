"""What the fake API server serves: its resources, and the errors it answers with.

Objects are plain JSON as on the wire; `Resource` holds the little that differs between kinds. An `ApiError` is a `Status` object
with the reason, code and details that the real server sends, since clients decide by these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resource:
    group: str  # "" is core
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    subresources: tuple[str, ...] = ()
    generation: bool = False  # counts changes of the spec
    must_say_version: bool = False  # a PUT without resourceVersion is refused
    custom: bool = False  # of a CRD: lists have no keys, no strategic merge

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


def custom_resource(group: str, version: str, plural: str, kind: str) -> Resource:
    """Of a CRD with a status subresource."""
    more = {"generation": True, "must_say_version": True, "custom": True}
    return Resource(group, version, plural, kind, subresources=("status",), **more)


def _workload(group: str, plural: str, kind: str, *more: str) -> Resource:
    return Resource(group, "v1", plural, kind, subresources=("status", *more), generation=True)


RBAC = "rbac.authorization.k8s.io"
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False, subresources=("status",))
PODS = Resource("", "v1", "pods", "Pod", subresources=("status", "eviction"), generation=True)
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", subresources=("status",))
EVENTS = Resource("", "v1", "events", "Event")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", subresources=("token",))
STATEFUL_SETS = _workload("apps", "statefulsets", "StatefulSet", "scale")
REVISIONS = Resource("apps", "v1", "controllerrevisions", "ControllerRevision")
BUDGETS = Resource(
    "policy",
    "v1",
    "poddisruptionbudgets",
    "PodDisruptionBudget",
    subresources=("status",),
    generation=True,
    must_say_version=True,
)
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease", must_say_version=True)
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", subresources=("status",))
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, subresources=("status",))
ROLES = Resource(RBAC, "v1", "roles", "Role")
ROLE_BINDINGS = Resource(RBAC, "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLES = Resource(RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False)
RAY_CLUSTERS = custom_resource("ray.io", "v1", "rayclusters", "RayCluster")

RESOURCES = (
    NAMESPACES,
    NODES,
    PODS,
    CLAIMS,
    EVENTS,
    SERVICE_ACCOUNTS,
    QUOTAS,
    Resource("", "v1", "configmaps", "ConfigMap"),
    Resource("", "v1", "secrets", "Secret"),
    Resource("", "v1", "services", "Service", subresources=("status",)),
    STATEFUL_SETS,
    REVISIONS,
    _workload("apps", "deployments", "Deployment", "scale"),
    _workload("apps", "daemonsets", "DaemonSet"),
    _workload("batch", "jobs", "Job"),
    _workload("batch", "cronjobs", "CronJob"),
    Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", subresources=("status",)),
    BUDGETS,
    LEASES,
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", generation=True),
    Resource("networking.k8s.io", "v1", "ingresses", "Ingress", subresources=("status",), generation=True),
    ROLES,
    ROLE_BINDINGS,
    CLUSTER_ROLES,
    CLUSTER_ROLE_BINDINGS,
    RAY_CLUSTERS,
    custom_resource("monitoring.coreos.com", "v1", "servicemonitors", "ServiceMonitor"),
    custom_resource("monitoring.coreos.com", "v1", "prometheusrules", "PrometheusRule"),
    custom_resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute"),
    custom_resource("gateway.networking.k8s.io", "v1", "grpcroutes", "GRPCRoute"),
)


class ApiError(Exception):
    """Drawn as the server answers it: `status()` is the body."""

    def __init__(
        self, code: int, reason: str, message: str, details: Json | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message
        self.details = dict(details or {})
        self.retry_after_s = retry_after_s
        if retry_after_s is not None:
            self.details["retryAfterSeconds"] = retry_after_s

    def status(self) -> Json:
        body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        body |= {"message": self.message, "reason": self.reason, "code": self.code}
        return body | ({"details": self.details} if self.details else {})


def _about(resource: Resource, name: str) -> Json:
    return {"name": name, "group": resource.group, "kind": resource.plural}


def not_found(resource: Resource, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{resource.full_name} "{name}" not found', _about(resource, name))


def already_exists(resource: Resource, name: str) -> ApiError:
    return ApiError(409, "AlreadyExists", f'{resource.full_name} "{name}" already exists', _about(resource, name))


def conflict(resource: Resource, name: str, why: str) -> ApiError:
    message = f'Operation cannot be fulfilled on {resource.full_name} "{name}": {why}'
    return ApiError(409, "Conflict", message, _about(resource, name))


STALE = "the object has been modified; please apply your changes to the latest version and try again"


def invalid(resource: Resource, name: str, field: str, message: str, reason: str = "FieldValueInvalid") -> ApiError:
    cause = {"reason": reason, "message": message, "field": field}
    qualified = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": [cause]}
    return ApiError(422, "Invalid", f'{qualified} "{name}" is invalid: {field}: {message}', details)


def bad_request(message: str) -> ApiError:
    return ApiError(400, "BadRequest", message)


def expired(message: str) -> ApiError:
    return ApiError(410, "Expired", message)


def success(details: Json | None = None) -> Json:
    body: Json = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
    return body | ({"details": details} if details else {})


def matches_labels(selector: Json | None, labels: Json) -> bool:
    """A LabelSelector of an object; one that is absent selects nothing, an empty one everything."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_expression(e, labels) for e in selector.get("matchExpressions") or ())


def _expression(expression: Json, labels: Json) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return key in labels and labels[key] in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def parse_selector(text: str) -> Json:
    """A labelSelector of a query (`a=b,c!=d,e in (f,g),h,!i`) as matchExpressions."""
    return {"matchExpressions": [_requirement(part.strip()) for part in _split(text) if part.strip()]}


def _split(text: str) -> Iterator[str]:
    """At commas outside parentheses."""
    start = depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _requirement(part: str) -> Json:
    if part.startswith("!"):
        return {"key": part[1:].strip(), "operator": "DoesNotExist"}
    if part.endswith(")"):
        key, operator, values = part.replace("(", " (", 1).split(maxsplit=2)
        named = {"in": "In", "notin": "NotIn"}.get(operator)
        if named is None:
            raise bad_request(f"unable to parse requirement: {part}")
        return {"key": key, "operator": named, "values": [v.strip() for v in values.strip("() ").split(",")]}
    for sign, operator in (("!=", "NotIn"), ("==", "In"), ("=", "In")):
        if sign in part:
            key, value = part.split(sign, 1)
            return {"key": key.strip(), "operator": operator, "values": [value.strip()]}
    return {"key": part, "operator": "Exists"}


FIELDS = (
    "metadata.name",
    "metadata.namespace",
    "spec.nodeName",
    "status.phase",
    "involvedObject.name",
    "reason",
    "type",
)


def matches_fields(text: str, obj: Json) -> bool:
    for part in filter(None, text.split(",")):
        negative = "!=" in part
        path, value = (p.strip() for p in part.replace("==", "=").split("!=" if negative else "=", 1))
        if path not in FIELDS:
            raise bad_request(f"field label not supported: {path}")
        if (str(at(obj, path.split("."), "")) == value) == negative:
            return False
    return True


def at(obj: Any, path: Sequence[str], default: Any = None) -> Any:
    """The value at a path of object keys."""
    for key in path:
        obj = obj.get(key) if isinstance(obj, dict) else None
    return default if obj is None else obj
