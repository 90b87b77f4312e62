"""What a container is run with: its environment with the downward API filled in, its command with `$(NAME)` replaced."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

from tests.kube.fake_api_resources import Json, Resource, at
from tests.kube.fake_api_verbs import Verbs

CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")


class MissingReference(Exception):
    """A key of a ConfigMap or Secret that the container needs is not there: CreateContainerConfigError."""


def environment(verbs: Verbs, pod: Json, container: Json) -> dict[str, str]:
    """In the order of the list: a later value may name an earlier one."""
    env: dict[str, str] = {}
    for entry in container.get("env", ()):
        value = _referenced(verbs, pod, entry) if "valueFrom" in entry else entry.get("value", "")
        if value is not None:
            env[entry["name"]] = expanded(value, env)
    return env


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` of a name that is known; `$$(NAME)` stays `$(NAME)`."""

    def value(match: re.Match[str]) -> str:
        return match[0][1:] if match[0].startswith("$$") else env.get(match[1], match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_]*)\)", value, text)


def _referenced(verbs: Verbs, pod: Json, entry: Json) -> str | None:
    match entry["valueFrom"]:
        case {"fieldRef": {"fieldPath": path}}:
            return _field(pod, path)
        case {"configMapKeyRef": reference}:
            return _keyed(verbs, CONFIG_MAPS, pod, reference)
        case {"secretKeyRef": reference}:
            held = _keyed(verbs, SECRETS, pod, reference)
            return None if held is None else base64.b64decode(held).decode()
        case other:
            raise ValueError(f"{entry['name']}: {other} is not supported here")


def _keyed(verbs: Verbs, resource: Resource, pod: Json, reference: Json) -> str | None:
    found = verbs.find(resource, pod["metadata"]["namespace"], reference["name"])
    value: Any = at(found, ("data", reference["key"]))
    if value is None and not reference.get("optional"):
        raise MissingReference(f'{resource.kind.lower()} "{reference["name"]}" has no key "{reference["key"]}"')
    return None if value is None else str(value)


def _field(pod: Json, path: str) -> str:
    if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
        return str(at(pod, ("metadata", keyed[1], keyed[2]), ""))
    return str(at(pod, path.split("."), ""))
