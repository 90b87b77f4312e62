"""The objects of the fake API server and the history of their changes, as etcd keeps them.

Every change takes the next resource version, which is one counter over all kinds. The history answers watches from a version on
until `compact` cuts it. `changed` guards all of it and is notified of every change; who reads and then writes holds it
meanwhile. What is stored is never mutated: callers hand in objects they let go of, and copy before they change one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from tests.kube.fake_api_resources import Json, Resource

Key = tuple[str, str, str]  # full name of the resource, namespace or "", name


@dataclass(frozen=True, slots=True)
class Event:
    revision: int
    type: str  # ADDED, MODIFIED, DELETED
    resource: str
    obj: Json
    before: Json | None  # decides whether a watch with a selector sees the object come or go


def key_of(resource: Resource, namespace: str, name: str) -> Key:
    return (resource.full_name, namespace if resource.namespaced else "", name)


class Store:
    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.revision = 100  # of the last change; a real one never starts at 0 either
        self.compacted = 100  # events up to here are gone
        self._objects: dict[Key, Json] = {}
        self._events: list[Event] = []

    def get(self, key: Key) -> Json | None:
        with self.changed:
            return self._objects.get(key)

    def all(self, resource: Resource, namespace: str = "") -> list[Json]:
        """Of one namespace, or of all; by namespace and name."""
        with self.changed:
            keys = (k for k in self._objects if k[0] == resource.full_name and (not namespace or k[1] == namespace))
            return [self._objects[key] for key in sorted(keys)]

    def put(self, key: Key, obj: Json) -> Json:
        """Takes ownership of the object."""
        with self.changed:
            before = self._objects.get(key)
            self._objects[key] = self._stamp(obj)
            self._log("ADDED" if before is None else "MODIFIED", key, obj, before)
            return obj

    def remove(self, key: Key) -> Json:
        with self.changed:
            before = self._objects.pop(key)
            obj = self._stamp(before | {"metadata": dict(before["metadata"])})
            self._log("DELETED", key, obj, before)
            return obj

    def compact(self) -> None:
        """Forget the history: a watch from before now is told 410."""
        with self.changed:
            self._events.clear()
            self.compacted = self.revision

    def after(self, revision: int, resource: Resource) -> Iterator[Event]:
        """What happened to a resource since; the caller has checked `compacted`."""
        with self.changed:
            first = next((i for i, e in enumerate(self._events) if e.revision > revision), len(self._events))
            events = self._events[first:]
        return (event for event in events if event.resource == resource.full_name)

    def _stamp(self, obj: Json) -> Json:
        self.revision += 1
        obj["metadata"]["resourceVersion"] = str(self.revision)
        return obj

    def _log(self, kind: str, key: Key, obj: Json, before: Json | None) -> None:
        self._events.append(Event(self.revision, kind, key[0], obj, before))
        self.changed.notify_all()
