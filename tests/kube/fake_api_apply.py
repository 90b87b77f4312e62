"""Who owns which field: server-side apply and the `managedFields` that make it possible.

A field is the path to a leaf, in the words of FieldsV1 (`f:spec`, `k:{"name":"main"}`). An apply takes the fields that it names;
one of them that another manager owns with another value is a conflict, unless forced. What a manager applied before, names no
longer and nobody else owns is removed. Any other write takes the fields it changes from all others, which is how a scaler that
patches /scale comes to own `.spec.replicas`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.kube.fake_api_patches import merge_key
from tests.kube.fake_api_resources import ApiError, Json, Resource

Path = tuple[str, ...]
ITEM = "."  # the last step to an item of a keyed list itself
SERVERS = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields"}
SERVERS |= {"deletionTimestamp", "deletionGracePeriodSeconds", "generateName"}


@dataclass(frozen=True, slots=True)
class Manager:
    name: str
    operation: str  # Apply or Update
    subresource: str = ""

    def describe(self, api_version: str) -> str:
        through = f' with subresource "{self.subresource}"' if self.subresource else ""
        return f'conflict with "{self.name}"{through} using {api_version}'


@dataclass(frozen=True, slots=True)
class Claim:
    manager: Manager
    fields: frozenset[Path]
    time: str


def applied(
    resource: Resource, live: Json, config: Json, manager: Manager, *, force: bool, now: str
) -> tuple[Json, list[Claim]]:
    """The object after an apply, and who owns what in it then.

    Raises: ApiError: 409 naming each field that another manager holds with another value.
    """
    claims = claims_of(live)
    leaves = _leaves(config, keyed=not resource.custom)
    ours = frozenset(leaves)
    theirs = [c for c in claims if c.manager != manager]
    merged = _merged(live, config, keyed=not resource.custom)
    taken = {p for p in ours if p[-1] != ITEM and _value(live, p) != leaves[p]}
    if not force and (disputes := [(c.manager, sorted(c.fields & taken)) for c in theirs if c.fields & taken]):
        raise _refused(disputes, live["apiVersion"])
    dropped = {p for c in claims if c.manager == manager for p in c.fields} - ours
    held = {p for c in theirs for p in c.fields}
    for path in sorted(dropped - held):  # a whole item before its fields
        if path[-1] != ITEM or not any(p[: len(path) - 1] == path[:-1] for p in held):
            _remove(merged, path)
    kept = [replace(c, fields=c.fields - taken) for c in theirs]
    return merged, [c for c in kept if c.fields] + [Claim(manager, ours, now)]


def changed(resource: Resource, live: Json, new: Json, manager: Manager, now: str) -> list[Claim]:
    """Who owns what after a write that is no apply."""
    before, after = (_leaves(obj, keyed=not resource.custom) for obj in (live, new))
    touched = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = before.keys() - after.keys()
    if not touched and not gone:
        return claims_of(live)
    claims = {c.manager: replace(c, fields=c.fields - touched - gone) for c in claims_of(live)}
    if touched:
        mine = claims.get(manager, Claim(manager, frozenset(), now))
        claims[manager] = Claim(manager, mine.fields | touched, now)
    return [claim for claim in claims.values() if claim.fields]


def claims_of(obj: Json) -> list[Claim]:
    return [
        Claim(
            Manager(entry["manager"], entry["operation"], entry.get("subresource", "")),
            frozenset(_paths(entry["fieldsV1"])),
            entry["time"],
        )
        for entry in obj["metadata"].get("managedFields", ())
    ]


def managed_fields(claims: Iterable[Claim], api_version: str) -> list[Json]:
    return [
        {
            "manager": claim.manager.name,
            "operation": claim.manager.operation,
            "apiVersion": api_version,
            "time": claim.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": _tree(claim.fields),
        }
        | ({"subresource": claim.manager.subresource} if claim.manager.subresource else {})
        for claim in claims
    ]


def _refused(disputes: list[tuple[Manager, list[Path]]], api_version: str) -> ApiError:
    causes = [
        {"reason": "FieldManagerConflict", "message": manager.describe(api_version), "field": _shown(path)}
        for manager, paths in disputes
        for path in paths
    ]
    plural = "" if len(causes) == 1 else "s"
    named = ", ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    message = f"Apply failed with {len(causes)} conflict{plural}: {named}"
    return ApiError(409, "Conflict", message, {"causes": causes})


def _shown(path: Path) -> str:
    return "".join(f".{step[2:]}" if step.startswith("f:") else f"[{step[2:].strip('{}')}]" for step in path)


def _leaves(obj: Json, keyed: bool) -> dict[Path, Any]:
    """Each field that can be owned, with its value; what the server alone writes is left out."""
    mine = {k: v for k, v in obj.items() if k not in ("apiVersion", "kind", "metadata")}
    labels = {k: v for k, v in obj.get("metadata", {}).items() if k not in SERVERS}
    return dict(_walk(mine | ({"metadata": labels} if labels else {}), (), "", keyed))


def _walk(value: Any, path: Path, field: str, keyed: bool) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _walk(inner, (*path, f"f:{key}"), key, keyed)
    elif isinstance(value, list) and value and keyed and (key := merge_key(field, value)):
        for item in value:
            here = (*path, _item(key, item))
            yield (*here, ITEM), True
            yield from _walk(item, here, "", keyed)
    elif value is not None:
        yield path, value


def _item(key: str, item: Json) -> str:
    return "k:" + json.dumps({key: item[key]}, separators=(",", ":"))


def _merged(live: Any, config: Any, keyed: bool, field: str = "") -> Any:
    if isinstance(config, dict) and isinstance(live, dict):
        return live | {key: _merged(live.get(key), value, keyed, key) for key, value in config.items()}
    if isinstance(config, list) and isinstance(live, list) and keyed and (key := merge_key(field, live + config)):
        items = {item[key]: item for item in live}
        items |= {item[key]: _merged(items.get(item[key], {}), item, keyed) for item in config}
        return list(items.values())
    return copy.deepcopy(config)


def _value(obj: Any, path: Path) -> Any:
    """At a path, None where nothing is."""
    for step in path:
        obj = _step(obj, step)
    return obj


def _step(obj: Any, step: str) -> Any:
    if step.startswith("f:"):
        return obj.get(step[2:]) if isinstance(obj, dict) else None
    wanted = json.loads(step[2:])
    return next((i for i in obj or () if wanted.items() <= i.items()), None)


def _remove(obj: Json, path: Path) -> None:
    """Copies on the way down: the parts of a live object are shared."""
    own = path[:-1] if path[-1] == ITEM else path
    parent: Any = obj
    for step in own[:-1]:
        inner = copy.copy(_step(parent, step))
        if inner is None:
            return
        _put(parent, step, inner)
        parent = inner
    if own[-1].startswith("k:"):
        parent.remove(_step(parent, own[-1]))
    elif len(own) < 2 or f'"{own[-1][2:]}":' not in own[-2]:  # an item that stays keeps its key
        parent.pop(own[-1][2:], None)


def _put(parent: Any, step: str, value: Any) -> None:
    if step.startswith("f:"):
        parent[step[2:]] = value
    else:
        parent[parent.index(_step(parent, step))] = value


def _tree(fields: Iterable[Path]) -> Json:
    tree: Json = {}
    for path in sorted(fields):
        node = tree
        for step in path:
            node = node.setdefault(step, {})
    return tree


def _paths(tree: Json, path: Path = ()) -> Iterator[Path]:
    for step, inner in tree.items():
        if inner:
            yield from _paths(inner, (*path, step))
        else:
            yield (*path, step)
