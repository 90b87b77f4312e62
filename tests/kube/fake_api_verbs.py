"""The verbs of the fake API server on its objects, without HTTP, identities or faults. The fake controllers call it directly.

A write reads, checks and stores under the store's lock, so of two writers that name the same resourceVersion one gets 409.
A write that changes nothing takes no version and tells no watch. Objects that go in and out are copies.
"""

from __future__ import annotations

import copy
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.kube import fake_api_rules as rules
from tests.kube.fake_api_apply import SERVERS, Claim, Manager, applied, changed, claims_of, managed_fields
from tests.kube.fake_api_patches import APPLY, PATCHES
from tests.kube.fake_api_resources import (
    BUDGETS,
    NAMESPACES,
    PODS,
    QUOTAS,
    RESOURCES,
    REVISIONS,
    SERVICE_ACCOUNTS,
    STALE,
    STATEFUL_SETS,
    ApiError,
    Json,
    Resource,
    already_exists,
    bad_request,
    conflict,
    expired,
    invalid,
    matches_fields,
    matches_labels,
    not_found,
    parse_selector,
    success,
)
from tests.kube.fake_api_store import Event, Key, Store, key_of

BOOKMARK_EVERY_S = 1.0  # the real one: about a minute
SUFFIX = "bcdfghjklmnpqrstvwxz2456789"  # of generated names


@dataclass(frozen=True, slots=True)
class Write:
    manager: str = "fake"
    dry_run: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class Selection:
    labels: str = ""
    fields: str = ""

    def __call__(self, obj: Json) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return matches_labels(parse_selector(self.labels), labels) and matches_fields(self.fields, obj)


ALL = Selection()
PLAIN = Write()


def now(after_s: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=after_s)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Verbs:
    def __init__(self, store: Store) -> None:
        self.store = store
        self._pages: dict[
            str, tuple[int, list[Json]]
        ] = {}  # continue token -> version of its snapshot, what is left of it

    # Reading

    def get(self, resource: Resource, namespace: str, name: str, subresource: str = "") -> Json:
        live = self._live(resource, namespace, name)
        return copy.deepcopy(rules.scale_of(live) if subresource == "scale" else live)

    def find(self, resource: Resource, namespace: str, name: str) -> Json | None:
        return copy.deepcopy(self.store.get(key_of(resource, namespace, name)))

    def objects(self, resource: Resource, namespace: str = "", selects: Callable[[Json], bool] = ALL) -> list[Json]:
        return [copy.deepcopy(obj) for obj in self.store.all(resource, namespace) if selects(obj)]

    def listing(
        self, resource: Resource, namespace: str, selects: Selection = ALL, limit: int = 0, token: str = ""
    ) -> Json:
        with self.store.changed:
            revision, items = self._page(token) if token else (self.store.revision, [])
            if not token:
                items = self.objects(resource, namespace, selects)
        meta: Json = {"resourceVersion": str(revision)}
        if limit and len(items) > limit:
            meta["continue"] = secrets.token_urlsafe(12)
            self._pages[meta["continue"]] = (revision, items[limit:])
            if selects == ALL:
                meta["remainingItemCount"] = len(items) - limit
            items = items[:limit]
        if not resource.custom:  # the kind of the list says it
            items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in items]
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": meta,
            "items": items,
        }

    def _page(self, token: str) -> tuple[int, list[Json]]:
        if token not in self._pages:
            raise bad_request("continue key is not valid")
        revision, items = self._pages[token]
        if revision < self.store.compacted:
            raise expired("The provided continue parameter is too old to display a consistent list result.")
        return revision, items

    def watch(
        self,
        resource: Resource,
        namespace: str,
        selects: Selection,
        since: str,
        ends_s: float,
        going: Callable[[], bool],
        *,
        bookmarks: bool = False,
        initial_end: bool = False,
    ) -> Iterator[Json]:
        """Events until `ends_s` (monotonic) or until `going` says no. From "" or "0" it begins with what is there."""
        with self.store.changed:
            seen = self.store.revision
            first = [self._told("ADDED", obj) for obj in self.objects(resource, namespace, selects)]
        if since not in ("", "0"):
            seen, first = _number(since), []
        yield from first
        if initial_end:
            yield self._bookmark(resource, seen, {"annotations": {"k8s.io/initial-events-end": "true"}})
        while going() and time.monotonic() < ends_s:
            news = self._news(resource, namespace, selects, seen, ends_s)
            if news is None:
                error = expired(f"too old resource version: {seen} ({self.store.compacted})")
                yield {"type": "ERROR", "object": error.status()}
                return
            seen, events = news
            yield from events
            if bookmarks and not events:
                yield self._bookmark(resource, seen)

    def _news(
        self, resource: Resource, namespace: str, selects: Selection, seen: int, ends_s: float
    ) -> tuple[int, list[Json]] | None:
        """The version that is known now and what happened since `seen`; waits a while for something. None: compacted."""
        with self.store.changed:
            if seen >= self.store.revision:
                self.store.changed.wait(min(BOOKMARK_EVERY_S, max(0.0, ends_s - time.monotonic())))
            if seen < self.store.compacted:
                return None
            news = [
                told
                for event in self.store.after(seen, resource)
                if not namespace or event.obj["metadata"].get("namespace") == namespace
                if (told := _selected(event, selects)) is not None
            ]
            return max(seen, self.store.revision), [self._told(kind, obj) for kind, obj in news]

    @staticmethod
    def _told(kind: str, obj: Json) -> Json:
        return {"type": kind, "object": copy.deepcopy(obj)}

    @staticmethod
    def _bookmark(resource: Resource, revision: int, more: Json | None = None) -> Json:
        meta = {"resourceVersion": str(revision), "creationTimestamp": None} | (more or {})
        return {
            "type": "BOOKMARK",
            "object": {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": meta},
        }

    # Writing

    def create(self, resource: Resource, namespace: str, body: Json, write: Write = PLAIN) -> Json:
        obj = copy.deepcopy(body)
        self._check_type(resource, obj)
        meta = obj.setdefault("metadata", {})
        if meta.get("namespace", namespace) != namespace and resource.namespaced:
            raise bad_request("the namespace of the provided object does not match the namespace sent on the request")
        if meta.get("resourceVersion"):
            raise ApiError(500, "", "resourceVersion should not be set on objects to be created")
        if "name" not in meta and "generateName" in meta:
            meta["name"] = meta["generateName"] + "".join(random.choices(SUFFIX, k=5))
        if not meta.get("name"):
            raise invalid(resource, "", "metadata.name", "Required value: name or generateName is required")
        claims = changed(resource, {"metadata": {}}, obj, Manager(write.manager, "Update"), now())
        return self._add(resource, namespace, obj, claims, write)

    def _add(self, resource: Resource, namespace: str, obj: Json, claims: list[Claim], write: Write) -> Json:
        meta = obj["metadata"]
        if resource.namespaced:
            meta["namespace"] = namespace
        if "status" in resource.subresources:
            obj.pop("status", None)
        rules.fill_defaults(resource, obj)
        rules.check_new(resource, obj)
        key = key_of(resource, namespace, meta["name"])
        with self.store.changed:
            if resource.namespaced and self.store.get(key_of(NAMESPACES, "", namespace)) is None:
                raise not_found(NAMESPACES, namespace)
            if self.store.get(key) is not None:
                raise already_exists(resource, meta["name"])
            if resource == PODS:
                rules.check_quota(self.store.all(QUOTAS, namespace), self.store.all(PODS, namespace), obj)
            meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now()}
            meta |= {"generation": 1} if resource.generation else {}
            meta["managedFields"] = managed_fields(claims, resource.api_version)
            if write.dry_run:
                return obj
            stored = copy.deepcopy(self.store.put(key, obj))
            if resource == NAMESPACES:  # as a controller does
                self.create(SERVICE_ACCOUNTS, stored["metadata"]["name"], {"metadata": {"name": "default"}})
            if resource == QUOTAS:  # likewise: from then on it is enforced
                status = {"hard": stored["spec"].get("hard", {})}
                self.update(QUOTAS, namespace, meta["name"], stored | {"status": status}, "status")
            return stored

    def update(
        self, resource: Resource, namespace: str, name: str, body: Json, subresource: str = "", write: Write = PLAIN
    ) -> Json:
        """A PUT. Through /scale the body and the answer are a Scale."""
        with self.store.changed:
            live = self._live(resource, namespace, name)
            if subresource == "scale":
                return rules.scale_of(self._replace(resource, live, rules.scaled(live, body), subresource, write))
            self._check_type(resource, body)
            meta = body.get("metadata", {})
            if meta.get("name") != name:
                raise bad_request(
                    f"the name of the object ({meta.get('name')}) does not match the name on the URL ({name})"
                )
            if resource.must_say_version and not meta.get("resourceVersion"):
                message = "Invalid value: 0: must be specified for an update"
                raise invalid(resource, name, "metadata.resourceVersion", message)
            return self._replace(resource, live, copy.deepcopy(body), subresource, write)

    def patch(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        content_type: str,
        body: Any,
        subresource: str = "",
        write: Write = PLAIN,
    ) -> Json:
        if content_type == APPLY:
            return self._apply(resource, namespace, name, body, subresource, write)
        if content_type not in PATCHES or (resource.custom and content_type.startswith("application/strategic")):
            supported = ", ".join([*PATCHES, APPLY])
            message = "the body of the request was in an unknown format - accepted media types include: "
            raise ApiError(415, "UnsupportedMediaType", message + supported)
        with self.store.changed:
            live = self._live(resource, namespace, name)
            view = rules.scale_of(live) if subresource == "scale" else live
            patched = PATCHES[content_type](view, body)
            new = rules.scaled(live, patched) if subresource == "scale" else patched
            stored = self._replace(resource, live, new, subresource, write)
            return rules.scale_of(stored) if subresource == "scale" else stored

    def _apply(self, resource: Resource, namespace: str, name: str, body: Json, subresource: str, write: Write) -> Json:
        config = {k: v for k, v in body.items() if k != "status" or subresource == "status"}
        if config.get("metadata", {}).get("managedFields"):
            raise bad_request("metadata.managedFields must be nil")
        manager = Manager(write.manager, "Apply", subresource)
        with self.store.changed:
            live = self.store.get(key_of(resource, namespace, name))
            if live is None and not subresource:
                new, claims = self._first_apply(resource, name, config, manager)
                return self._add(resource, namespace, new, claims, write)
            live = self._live(resource, namespace, name)
            preconditions = {k: v for k, v in config.get("metadata", {}).items() if k in ("uid", "resourceVersion")}
            new, claims = applied(resource, live, config, manager, force=write.force, now=now())
            own = {k: v for k, v in new["metadata"].items() if k not in ("uid", "resourceVersion")}
            new = new | {"metadata": own | preconditions}
            stored = self._replace(resource, live, new, subresource, write, claims)
            return rules.scale_of(stored) if subresource == "scale" else stored

    def _first_apply(self, resource: Resource, name: str, config: Json, manager: Manager) -> tuple[Json, list[Claim]]:
        self._check_type(resource, config)
        empty: Json = {"apiVersion": resource.api_version, "kind": resource.kind, "metadata": {"name": name}}
        new, claims = applied(resource, empty, config, manager, force=False, now=now())
        return new | {"metadata": {**new["metadata"], "name": name}}, claims

    def _replace(
        self,
        resource: Resource,
        live: Json,
        new: Json,
        subresource: str,
        write: Write,
        claims: list[Claim] | None = None,
    ) -> Json:
        """The one way by which an object changes. `new` may share parts with `live`; neither is mutated."""
        name, given = live["metadata"]["name"], new["metadata"]
        if given.get("uid", live["metadata"]["uid"]) != live["metadata"]["uid"]:
            why = f"Precondition failed: UID in precondition: {given['uid']}, "
            raise conflict(resource, name, f"{why}UID in object meta: {live['metadata']['uid']}")
        if (version := given.get("resourceVersion")) and version != live["metadata"]["resourceVersion"]:
            raise conflict(resource, name, STALE)
        new = rules.written(resource, live, new, subresource)
        rules.fill_defaults(resource, new)
        if subresource in ("", "scale"):
            rules.check_change(resource, live, new)
        kept = {k: v for k, v in live["metadata"].items() if k in SERVERS}
        new["metadata"] = {k: v for k, v in new["metadata"].items() if k not in SERVERS} | kept
        if resource.generation and _desired(live) != _desired(new):
            new["metadata"]["generation"] += 1
        if claims is None:
            claims = changed(resource, live, new, Manager(write.manager, "Update", subresource), now())
        new["metadata"]["managedFields"] = managed_fields(_untouched(live, claims), resource.api_version)
        if new == live:
            return copy.deepcopy(live)
        new = copy.deepcopy(new)
        if write.dry_run:
            return new
        key = key_of(resource, new["metadata"].get("namespace", ""), name)
        stored = self.store.put(key, new)
        if "deletionTimestamp" in stored["metadata"] and not stored["metadata"].get("finalizers") and resource != PODS:
            stored = self.store.remove(key)
        return copy.deepcopy(stored)

    # Deleting

    def delete(
        self, resource: Resource, namespace: str, name: str, options: Json | None = None, write: Write = PLAIN
    ) -> Json:
        """A pod that runs somewhere is only told to end; its kubelet deletes it for good, with grace 0."""
        options = options or {}
        with self.store.changed:
            live = self._live(resource, namespace, name)
            rules.check_preconditions(resource, live, options)
            key = key_of(resource, namespace, name)
            grace_s = rules.grace_s(live, options) if resource == PODS else 0
            if write.dry_run:
                return copy.deepcopy(live)
            if grace_s or live["metadata"].get("finalizers"):
                return self._mark(key, live, grace_s if resource == PODS else None)
            if resource == NAMESPACES:
                self._empty(name)
            if options.get("propagationPolicy") == "Orphan":
                self._orphan(namespace, live["metadata"]["uid"])
            removed = self.store.remove(key)
        if resource == PODS:
            return copy.deepcopy(removed)
        uid = removed["metadata"]["uid"]
        return success({"name": name, "group": resource.group, "kind": resource.plural, "uid": uid})

    def _mark(self, key: Key, live: Json, grace_s: int | None) -> Json:
        meta = dict(live["metadata"])
        if "deletionTimestamp" in meta and (grace_s is None or grace_s >= meta["deletionGracePeriodSeconds"]):
            return copy.deepcopy(live)
        meta["deletionTimestamp"] = now(grace_s or 0)
        if grace_s is not None:
            meta["deletionGracePeriodSeconds"] = grace_s
        return copy.deepcopy(self.store.put(key, live | {"metadata": meta}))

    def _orphan(self, namespace: str, uid: str) -> None:
        """What it owned stays; otherwise a garbage collector deletes it (fake_kubelet.py)."""
        for resource in (PODS, REVISIONS):
            for obj in self.store.all(resource, namespace):
                owners = obj["metadata"].get("ownerReferences", [])
                others = [o for o in owners if o["uid"] != uid]
                if others != owners:
                    meta = obj["metadata"] | {"ownerReferences": others}
                    self.store.put(key_of(resource, namespace, meta["name"]), obj | {"metadata": meta})

    def _empty(self, namespace: str) -> None:
        for resource in RESOURCES:
            if resource.namespaced:
                for obj in self.store.all(resource, namespace):
                    self.store.remove(key_of(resource, namespace, obj["metadata"]["name"]))

    def delete_all(self, resource: Resource, namespace: str, selects: Selection, options: Json | None = None) -> Json:
        listed = self.listing(resource, namespace, selects)
        for item in listed["items"]:
            self.delete(resource, item["metadata"].get("namespace", ""), item["metadata"]["name"], options)
        return listed

    def evict(self, namespace: str, name: str, body: Json, write: Write = PLAIN) -> Json:
        with self.store.changed:
            pod = self._live(PODS, namespace, name)
            budgets, pods, sets = (self.store.all(r, namespace) for r in (BUDGETS, PODS, STATEFUL_SETS))
            rules.check_eviction(pod, budgets, pods, sets)
            options = body.get("deleteOptions") or {}
            rules.check_preconditions(PODS, pod, options)
            if not write.dry_run:
                self.disrupt(pod, "EvictionByEvictionAPI", "Eviction API: evicting")
                self.delete(PODS, namespace, name, {k: v for k, v in options.items() if k != "preconditions"})
        return success()

    def disrupt(self, pod: Json, reason: str, message: str) -> None:
        """Say in a pod's status why it is taken away."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        others = [c for c in pod["status"].get("conditions", ()) if c["type"] != "DisruptionTarget"]
        conditions = [*others, condition | {"lastTransitionTime": now()}]
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        body = pod | {"status": pod["status"] | {"conditions": conditions}}
        self.update(PODS, namespace, name, body, "status")

    def _live(self, resource: Resource, namespace: str, name: str) -> Json:
        if (live := self.store.get(key_of(resource, namespace, name))) is None:
            raise not_found(resource, name)
        return live

    @staticmethod
    def _check_type(resource: Resource, body: Json) -> None:
        for field, wanted in (("apiVersion", resource.api_version), ("kind", resource.kind)):
            if body.setdefault(field, wanted) != wanted:
                raise bad_request(f"{field} {body[field]} in the body, where the URL asks for {wanted}")


def _selected(event: Event, selects: Selection) -> tuple[str, Json] | None:
    """What a watch with a selector makes of an event: an object comes or goes as it begins or ceases to match."""
    was = event.before is not None and selects(event.before)
    if event.type != "DELETED" and selects(event.obj):
        return ("MODIFIED" if was else "ADDED", event.obj)
    return ("DELETED", event.obj) if was else None


def _desired(obj: Json) -> Json:
    """What a generation counts: all but metadata and status."""
    return {k: v for k, v in obj.items() if k not in ("metadata", "status")}


def _untouched(live: Json, claims: list[Claim]) -> list[Claim]:
    """A claim on the same fields as before is as old as before."""
    before = {claim.manager: claim for claim in claims_of(live)}
    return [b if (b := before.get(c.manager)) and b.fields == c.fields else c for c in claims]


def _number(version: str) -> int:
    if not version.isdigit():
        raise bad_request(f'invalid resource version "{version}"')
    return int(version)
