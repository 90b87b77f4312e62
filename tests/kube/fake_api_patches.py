"""The three patches that carry no owner: JSON (RFC 6902), merge (RFC 7386), strategic merge. All return a new object.

A strategic merge joins lists of built-in kinds by a key, which the real server reads from its schema and this one from
`MERGE_KEYS`. Server-side apply is fake_api_apply.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tests.kube.fake_api_resources import ApiError, Json, bad_request

# Source: x-kubernetes-patch-merge-key in the OpenAPI document of Kubernetes 1.37. Lists not named are replaced as a whole.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "imagePullSecrets": "name",
    "conditions": "type",
    "ownerReferences": "uid",
    "topologySpreadConstraints": "topologyKey",
}


def merge_key(field: str, items: list[Any]) -> str:
    """By which the items of a list are told apart; "" where the list is one value."""
    if not all(isinstance(item, dict) for item in items):
        return ""
    if field == "ports":
        return "containerPort" if all("containerPort" in item for item in items) else "port"
    key = MERGE_KEYS.get(field, "")
    return key if all(key in item for item in items) else ""


def merge(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def strategic_merge(target: Any, patch: Any, field: str = "") -> Any:
    if isinstance(patch, list) and isinstance(target, list) and (key := merge_key(field, target + patch)):
        return _merge_items(target, patch, key)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {k: copy.deepcopy(v) for k, v in patch.items() if k != "$patch"}
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = strategic_merge(merged.get(key), value, key)
    return merged


def _merge_items(target: list[Json], patch: list[Json], key: str) -> list[Json]:
    merged = {item[key]: item for item in target}
    for item in patch:
        if item.get("$patch") == "delete":
            merged.pop(item[key], None)
        else:
            merged[item[key]] = strategic_merge(merged.get(item[key], {}), item)
    return list(merged.values())


def json_patch(target: Json, operations: Any) -> Json:
    """Raises: ApiError: 422 where an operation does not apply or a `test` fails; nothing is changed then."""
    if not isinstance(operations, list):
        raise bad_request("json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    patched = copy.deepcopy(target)
    for operation in operations:
        try:
            _apply(patched, operation)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            message = "the server rejected our request due to an error in our request"
            cause = {"reason": "UnexpectedServerResponse", "message": f"{operation}: {error!r}"}
            raise ApiError(422, "Invalid", message, {"causes": [cause]}) from error
    return patched


def _apply(document: Json, operation: Json) -> None:
    path = _pointer(operation["path"])
    match operation["op"]:
        case "test":
            if _get(document, path) != operation["value"]:
                raise ValueError("testing value failed")
        case "add":
            _add(document, path, copy.deepcopy(operation["value"]))
        case "remove":
            _remove(document, path)
        case "replace":
            _remove(document, path)
            _add(document, path, copy.deepcopy(operation["value"]))
        case "move":
            source = _pointer(operation["from"])
            value = _get(document, source)
            _remove(document, source)
            _add(document, path, value)
        case "copy":
            _add(document, path, copy.deepcopy(_get(document, _pointer(operation["from"]))))
        case other:
            raise ValueError(f"unexpected kind: {other}")


def _pointer(text: str) -> list[str]:
    if not text.startswith("/"):
        raise ValueError(f"not a path below the object: {text!r}")
    return [part.replace("~1", "/").replace("~0", "~") for part in text[1:].split("/")]


def _get(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _add(document: Json, path: list[str], value: Any) -> None:
    parent = _get(document, path[:-1])
    if not isinstance(parent, list):
        parent[path[-1]] = value
        return
    index = len(parent) if path[-1] == "-" else int(path[-1])
    if not 0 <= index <= len(parent):
        raise IndexError(index)
    parent.insert(index, value)


def _remove(document: Json, path: list[str]) -> None:
    parent = _get(document, path[:-1])
    if isinstance(parent, list):
        del parent[int(path[-1])]
    else:
        del parent[path[-1]]


Patch = Callable[[Json, Any], Json]
PATCHES: dict[str, Patch] = {
    "application/json-patch+json": json_patch,
    "application/merge-patch+json": merge,
    "application/strategic-merge-patch+json": strategic_merge,
}
APPLY = "application/apply-patch+yaml"
