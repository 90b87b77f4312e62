"""Which path means what, and what the fake API server says about itself: enough for `kubectl` and `helm` to find their way."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kube.fake_api_rbac import Access, User, allowed
from tests.kube.fake_api_resources import NAMESPACES, ApiError, Json, Resource, bad_request
from tests.kube.fake_api_store import Store

VERSION = {"major": "1", "minor": "37", "gitVersion": "v1.37.0", "platform": "linux/amd64"}
VERSION |= dict.fromkeys(("buildDate", "compiler", "gitCommit", "gitTreeState", "goVersion"), "")
MY_ACCESS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
HEALTH = ("/healthz", "/livez", "/readyz")
VERBS = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]


@dataclass(frozen=True, slots=True)
class Target:
    resource: Resource
    namespace: str
    name: str
    subresource: str


def parse(path: str, resources: tuple[Resource, ...]) -> Target:
    """Raises: ApiError: 404 where the path names no resource or subresource that is served."""
    match path.strip("/").split("/"):
        case ["api", version, *rest]:
            group = ""
        case ["apis", group, version, *rest]:
            pass
        case _:
            raise _unknown()
    namespace = ""
    if len(rest) >= 3 and rest[0] == "namespaces" and rest[2] != "status":
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        raise _unknown()
    plural, name, subresource = (*rest, "", "")[:3]
    for resource in resources:
        if (resource.group, resource.version, resource.plural) == (group, version, plural):
            if subresource and subresource not in resource.subresources:
                break
            return Target(resource, name if resource == NAMESPACES else namespace, name, subresource)
    raise _unknown()


def _unknown() -> ApiError:
    return ApiError(404, "NotFound", "the server could not find the requested resource")


def document(path: str, resources: tuple[Resource, ...]) -> Json | None:
    """What a path of discovery answers, None for any other path."""
    match path.strip("/").split("/"):
        case ["version"]:
            return dict(VERSION)
        case ["healthz" | "livez" | "readyz"]:
            return {"status": "ok"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            groups = sorted({(r.group, r.version) for r in resources if r.group})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*g) for g in groups]}
        case ["api", version]:
            return _resource_list("", version, resources)
        case ["apis", group, version]:
            return _resource_list(group, version, resources)
        case _:
            return None


def _group(group: str, version: str) -> Json:
    named = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [named], "preferredVersion": named}


def _resource_list(group: str, version: str, resources: tuple[Resource, ...]) -> Json:
    served = [r for r in resources if (r.group, r.version) == (group, version)]
    if not served:
        raise _unknown()
    entries = []
    for r in served:
        entry = {"name": r.plural, "singularName": r.kind.lower(), "namespaced": r.namespaced, "kind": r.kind}
        entries.append(entry | {"verbs": VERBS})
        for subresource in r.subresources:
            verbs = ["create"] if subresource in ("eviction", "token") else ["get", "patch", "update"]
            entries.append(entry | {"name": f"{r.plural}/{subresource}", "verbs": verbs})
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": served[0].api_version,
        "resources": entries,
    }


def review(store: Store, user: User, body: Json, resources: tuple[Resource, ...]) -> Json:
    """The answer to a SelfSubjectAccessReview."""
    asked = body.get("spec", {}).get("resourceAttributes")
    if asked is None:
        raise bad_request("only resourceAttributes can be reviewed here")
    group, plural = asked.get("group", ""), asked.get("resource", "")
    resource = next((r for r in resources if (r.group, r.plural) == (group, plural)), Resource(group, "v1", plural, ""))
    access = Access(
        asked.get("verb", ""), resource, asked.get("namespace", ""), asked.get("name", ""), asked.get("subresource", "")
    )
    return body | {"status": {"allowed": allowed(store, user, access)}}
