"""May this caller do that? Answered from the Role, RoleBinding, ClusterRole and ClusterRoleBinding objects in the store.

Nothing is cached: a role that changes counts for the next call. Nobody is kept from granting more than they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.kube.fake_api_resources import (
    CLUSTER_ROLE_BINDINGS,
    CLUSTER_ROLES,
    ROLE_BINDINGS,
    ROLES,
    ApiError,
    Json,
    Resource,
)
from tests.kube.fake_api_store import Store, key_of

MASTERS = "system:masters"


@dataclass(frozen=True, slots=True)
class User:
    name: str
    groups: tuple[str, ...] = ()

    @classmethod
    def service_account(cls, namespace: str, name: str) -> User:
        groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated")
        return cls(f"system:serviceaccount:{namespace}:{name}", groups)


ADMIN = User("kubernetes-admin", (MASTERS, "system:authenticated"))


@dataclass(frozen=True, slots=True)
class Access:
    """What one call wants to do. A list or watch that a field selector narrows to one name has that name."""

    verb: str
    resource: Resource
    namespace: str
    name: str
    subresource: str

    @property
    def path(self) -> str:
        return f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural


def authorize(store: Store, user: User, access: Access) -> None:
    """Raises: ApiError: 403, with the real server's words."""
    if allowed(store, user, access):
        return
    where = f' in the namespace "{access.namespace}"' if access.namespace else " at the cluster scope"
    what = f'{access.resource.full_name} "{access.name}"' if access.name else access.resource.full_name
    message = f'{what} is forbidden: User "{user.name}" cannot {access.verb} resource "{access.path}" in API group '
    details = {"name": access.name, "group": access.resource.group, "kind": access.resource.plural}
    raise ApiError(403, "Forbidden", f'{message}"{access.resource.group}"{where}', details)


def allowed(store: Store, user: User, access: Access) -> bool:
    return MASTERS in user.groups or any(_permits(rule, access) for rule in _rules(store, user, access.namespace))


def _rules(store: Store, user: User, namespace: str) -> Iterator[Json]:
    bindings = store.all(CLUSTER_ROLE_BINDINGS)
    if namespace:
        bindings = bindings + store.all(ROLE_BINDINGS, namespace)
    for binding in bindings:
        if any(_is(subject, user) for subject in binding.get("subjects") or ()):
            role = binding["roleRef"]
            resource = ROLES if role["kind"] == "Role" else CLUSTER_ROLES
            yield from (store.get(key_of(resource, namespace, role["name"])) or {}).get("rules") or ()


def _is(subject: Json, user: User) -> bool:
    match subject["kind"]:
        case "ServiceAccount":
            return user.name == f"system:serviceaccount:{subject.get('namespace', '')}:{subject['name']}"
        case "Group":
            return subject["name"] in user.groups
        case _:
            return bool(subject["name"] == user.name)


def _permits(rule: Json, access: Access) -> bool:
    names = rule.get("resourceNames")
    return (
        _has(rule.get("verbs"), access.verb)
        and _has(rule.get("apiGroups"), access.resource.group)
        and (_has(rule.get("resources"), access.path) or f"*/{access.subresource}" in rule.get("resources", ()))
        and (not names or access.name in names)
    )


def _has(values: list[str] | None, value: str) -> bool:
    return "*" in (values or ()) or value in (values or ())
