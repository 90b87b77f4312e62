"""Where SLO classes live: every set ever in force is a numbered revision, and a new one names the one it replaces.

Compare-and-swap: of two writers that read the same version one wins, the other gets StaleVersion. On a laptop the store is
one SQLite file (WAL), safe for several processes; a cluster will use a ConfigMap or Postgres behind the same Protocol.
Calls block for a few milliseconds on the disk: run them off the event loop. A connection lives for one call.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from baton.errors import ConfigError, NotFound
from baton.slo import DEFAULT_CLASSES, SLO

_BUSY_S = 5.0  # how long a writer waits for another one's transaction, which lasts milliseconds


@dataclass(frozen=True, slots=True)
class Revision:
    """One version of the whole set."""

    version: int
    classes: tuple[SLO, ...]
    at_unix_s: float
    who: str  # the token's name
    reason: str


class StaleVersion(Exception):
    """The version that a writer read is no longer in force; `current` is."""

    def __init__(self, current: Revision) -> None:
        super().__init__(f"version {current.version} is in force")
        self.current = current


class SLOStore(Protocol):
    def current(self) -> Revision: ...

    def replace(self, expected_version: int, classes: Sequence[SLO], who: str, reason: str) -> Revision:
        """Put `classes` in force after `expected_version`.

        Raises:
            StaleVersion: another version is in force.
        """
        ...

    def history(self, limit: int) -> list[Revision]:
        """The newest `limit` revisions, newest first."""
        ...

    def revision(self, version: int) -> Revision:
        """Raises: NotFound."""
        ...


class SQLiteSLOStore:
    """One file. A new one starts with the default classes as version 1.

    Raises:
        ConfigError: it cannot be opened, or is no SLO store.
    """

    def __init__(self, file: Path, now_unix_s: Callable[[], float]) -> None:
        self._file = file
        self._now_unix_s = now_unix_s
        try:
            self._create()
        except (sqlite3.Error, ValueError, TypeError) as error:  # the latter two: rows that are no classes
            raise ConfigError(
                f"cannot use the SLO store {file}: {error}; move it away to start from the default classes, or name another"
                " in controller.slo_store",
                field="controller.slo_store",
            ) from error

    def _create(self) -> None:
        with self._transaction() as db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS revisions"
                " (version INTEGER PRIMARY KEY, classes TEXT, at_unix_s REAL, who TEXT, reason TEXT)"
            )
            if _newest(db, 1) == []:
                _insert(db, Revision(1, DEFAULT_CLASSES, self._now_unix_s(), "baton", "defaults"))

    def current(self) -> Revision:
        return self.history(1)[0]

    def replace(self, expected_version: int, classes: Sequence[SLO], who: str, reason: str) -> Revision:
        with self._transaction() as db:
            [current] = _newest(db, 1)
            if current.version != expected_version:
                raise StaleVersion(current)
            revision = Revision(current.version + 1, tuple(classes), self._now_unix_s(), who, reason)
            _insert(db, revision)
        return revision

    def history(self, limit: int) -> list[Revision]:
        with self._transaction() as db:
            return _newest(db, limit)

    def revision(self, version: int) -> Revision:
        with self._transaction() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM revisions WHERE version = ?", (version,)).fetchall()
        if not rows:
            raise NotFound(f"no SLO version {version}", field="version")
        return _revision(rows[0])

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction from its first statement, so that two writers queue rather than deadlock."""
        db = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None)
        try:
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        finally:
            db.close()  # rolls back what was not committed


_COLUMNS = "version, classes, at_unix_s, who, reason"


def _newest(db: sqlite3.Connection, limit: int) -> list[Revision]:
    rows = db.execute(f"SELECT {_COLUMNS} FROM revisions ORDER BY version DESC LIMIT ?", (limit,))
    return [_revision(row) for row in rows]


def _insert(db: sqlite3.Connection, revision: Revision) -> None:
    classes = json.dumps([asdict(slo) for slo in revision.classes])
    db.execute(
        f"INSERT INTO revisions ({_COLUMNS}) VALUES (?, ?, ?, ?, ?)",
        (revision.version, classes, revision.at_unix_s, revision.who, revision.reason),
    )


def _revision(row: tuple[int, str, float, str, str]) -> Revision:
    version, classes, at_unix_s, who, reason = row
    return Revision(version, tuple(SLO(**fields) for fields in json.loads(classes)), at_unix_s, who, reason)
