"""A versioned document in a ConfigMap: the same store as versioned.Versioned, where the release's state lives in the cluster.

One ConfigMap holds all documents, each under two keys: `<name>.json`, the revision in force, and `<name>.history.json`, older
ones, newest first. A ConfigMap holds 1 MiB in all, so history is bounded in bytes, the oldest go first. `kubectl get configmap
F-slo -o yaml` is a backup, and `kubectl replace` brings it back.

Compare-and-swap twice: on the document's version, which a writer names, and on the object's resourceVersion, so that nobody's
write is lost, also not one of the other document. A write that conflicts is decided again from what stands there then. Blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from baton.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import Stored
from router.controller.versioned import MAX_VERSION, Format, Revision, StaleVersion

T = TypeVar("T")

MAX_CURRENT_BYTES = 128 << 10  # 64 classes take 16 KB
MAX_HISTORY_BYTES = 256 << 10  # with the one in force, of two documents: three quarters of what the API server takes
_TRIES = 5  # writers are operators, and one controller


class ConfigMapVersions(Generic[T]):
    def __init__(self, api: KubeApi, name: str, written: Format[T], now_unix_s: Callable[[], float]) -> None:
        """Write version 1 where there is none.

        Raises:
            ConfigError: the ConfigMap cannot be used, or what is in force cannot be read.
        """
        self._api = api
        self._name = name
        self._format = written
        self._now_unix_s = now_unix_s
        try:
            self._write(
                lambda found: None if found else Revision(1, written.default, now_unix_s(), "baton", "defaults")
            )
            self.current()
        except (Unavailable, NotFound, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot use the {written.name} document in ConfigMap {name}: {error}; `helm upgrade` renders one that is"
                f" missing, and without its data it starts from the defaults",
                field="kubernetes.fullname",
            ) from error

    def current(self) -> Revision[T]:
        found = self._revisions(self._read(), is_history=False)
        if not found:
            raise Unavailable(
                f"ConfigMap {self._name} holds no {self._format.name} any more; the last one stays in force"
            )
        return found[0]

    def replace(self, expected_version: int, value: T, who: str, reason: str) -> Revision[T]:
        """Put `value` in force after `expected_version`.

        Raises:
            StaleVersion: another version is in force.
            InvalidRequest: it is too large for a ConfigMap.
            Unavailable: the API server is away. Where it went meanwhile, only `current` tells what holds.
        """

        def next_one(found: list[Revision[T]]) -> Revision[T]:
            current = found[0] if found else None
            if current is None or current.version != expected_version:
                raise StaleVersion(current.version if current else 0, current.who if current else "nobody")
            return Revision(expected_version + 1, value, self._now_unix_s(), who, reason)

        written = self._write(next_one)
        assert written is not None
        return written

    def history(self, limit: int, before: int = MAX_VERSION) -> list[Revision[T]]:
        """The newest `limit` revisions older than `before`, newest first."""
        found = self._revisions(self._read(), is_history=True)
        return [revision for revision in found if revision.version < before][:limit]

    def revision(self, version: int) -> Revision[T]:
        """Raises: NotFound."""
        for found in self._revisions(self._read(), is_history=True):
            if found.version == version:
                return found
        raise NotFound(f"no {self._format.name} version {version}; a ConfigMap keeps the newest", field="version")

    # -- the object --------------------------------------------------------------------------------------------------

    def _read(self) -> Stored:
        return self._api.config_map(self._name)

    def _write(self, decide: Callable[[list[Revision[T]]], Revision[T] | None]) -> Revision[T] | None:
        """Put in force what `decide` makes of what is; None: it stays. Raises: Unavailable, and what `decide` raises."""
        for _ in range(_TRIES):
            read = self._read()
            found = self._revisions(read, is_history=False)
            if (revision := decide(found)) is None:
                return None
            try:
                self._api.put_config_map(self._name, read, self._with(read, revision))
            except Conflict:
                continue
            return revision
        raise Unavailable(f"ConfigMap {self._name} changes faster than it can be written", retry_after_s=1.0)

    def _with(self, read: Stored, revision: Revision[T]) -> Mapping[str, str]:
        current = json.dumps(self._written(revision), allow_nan=False)
        if len(current) > MAX_CURRENT_BYTES:
            raise InvalidRequest(
                f"{self._format.name}: {len(current)} bytes are more than a ConfigMap keeps of it, {MAX_CURRENT_BYTES}",
                field=self._format.name,
            )
        older: list[Any] = json.loads(read.data.get(self._history_key, "[]"))
        if self._current_key in read.data:
            older.insert(0, json.loads(read.data[self._current_key]))
        return {**read.data, self._current_key: current, self._history_key: _newest(older)}

    def _revisions(self, read: Stored, *, is_history: bool) -> list[Revision[T]]:
        """The one in force first, older ones where `is_history`. Raises: ValueError, TypeError or KeyError."""
        if self._current_key not in read.data:
            return []
        bodies = [json.loads(read.data[self._current_key])]
        if is_history:
            bodies += json.loads(read.data.get(self._history_key, "[]"))
        return [self._of(body) for body in bodies]

    def _written(self, revision: Revision[T]) -> dict[str, object]:
        return {
            "version": revision.version,
            "at_unix_s": revision.at_unix_s,
            "who": revision.who,
            "reason": revision.reason,
            "value": json.loads(self._format.encode(revision.value)),
        }

    def _of(self, body: Mapping[str, Any]) -> Revision[T]:
        value = self._format.decode(json.dumps(body["value"]))
        return Revision(int(body["version"]), value, float(body["at_unix_s"]), str(body["who"]), str(body["reason"]))

    @property
    def _current_key(self) -> str:
        return f"{self._format.name}.json"

    @property
    def _history_key(self) -> str:
        return f"{self._format.name}.history.json"


def _newest(revisions: list[Any]) -> str:
    """As many as are kept."""
    kept, num_bytes = [], 2
    for revision in revisions:
        num_bytes += len(json.dumps(revision)) + 2
        if num_bytes > MAX_HISTORY_BYTES:
            break
        kept.append(revision)
    return json.dumps(kept)
