"""A document of which every version ever in force is kept: who put it in force, when and why.

Compare-and-swap: a writer names the version that it read; of two that read the same one wins, the other gets StaleVersion.
Order is that of the version numbers, never of the times, which are what the wall clock said and may jump. All documents are
in one table. Calls block, see database.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.errors import ConfigError, NotFound, Unavailable
from router.controller.database import FIELD, Database, Row, Transaction, migrate

T = TypeVar("T")

MAX_VERSION = 2**53  # beyond it JSON readers lose digits; a change each millisecond gets there in 285,000 years

# The first one is what earlier releases made in slo.sqlite.
MIGRATIONS = (
    (
        "CREATE TABLE IF NOT EXISTS revisions"
        " (version BIGINT PRIMARY KEY, classes TEXT, at_unix_s DOUBLE PRECISION, who TEXT, reason TEXT)",
    ),
    (
        "CREATE TABLE documents (name TEXT, version BIGINT, body TEXT NOT NULL, at_unix_s DOUBLE PRECISION NOT NULL,"
        " who TEXT NOT NULL, reason TEXT NOT NULL, PRIMARY KEY (name, version))",
        "INSERT INTO documents SELECT 'slo', version, classes, at_unix_s, who, reason FROM revisions",
        "DROP TABLE revisions",
    ),
)


@dataclass(frozen=True, slots=True)
class Revision(Generic[T]):
    version: int
    value: T
    at_unix_s: float
    who: str  # the token's name
    reason: str


class StaleVersion(Exception):
    """The version that a writer read is no longer in force; another one is, set by `who`."""

    def __init__(self, version: int, who: str) -> None:
        super().__init__(f"version {version} is in force, set by {who}")
        self.version = version
        self.who = who


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """How a document is written down. `decode` raises ValueError, TypeError or KeyError for what it cannot read."""

    name: str  # of the document
    encode: Callable[[T], str]
    decode: Callable[[str], T]
    default: T  # version 1 of a new one


class Versions(Protocol[T]):
    """A document's store: Versioned, or in a cluster kube/documents.py."""

    def current(self) -> Revision[T]:
        """In force. Raises: Unavailable."""
        ...

    def replace(self, expected_version: int, value: T, who: str, reason: str) -> Revision[T]:
        """Raises: StaleVersion, Unavailable."""
        ...

    def history(self, limit: int, before: int = MAX_VERSION) -> list[Revision[T]]:
        """The newest `limit` revisions that are kept and older than `before`, newest first. Raises: Unavailable."""
        ...

    def revision(self, version: int) -> Revision[T]:
        """Raises: NotFound, Unavailable."""
        ...


class Versioned(Generic[T]):
    def __init__(self, database: Database, written: Format[T], now_unix_s: Callable[[], float]) -> None:
        """Make the tables and version 1 where there are none.

        Raises:
            ConfigError: the database cannot be used, or what is in force cannot be read.
        """
        self._database = database
        self._format = written
        self._now_unix_s = now_unix_s
        try:
            migrate(database, "documents", MIGRATIONS)
            with database.writing() as tx:
                if not self._newest(tx, 1):
                    self._insert(tx, Revision(1, written.default, now_unix_s(), "baton", "defaults"))
            self.current()
        except (Unavailable, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot use the {written.name} store in {database.name}: {error}; move it away to start from the"
                f" defaults, or name another in {FIELD}",
                field=FIELD,
            ) from error

    def current(self) -> Revision[T]:
        return self.history(1)[0]

    def replace(self, expected_version: int, value: T, who: str, reason: str) -> Revision[T]:
        """Put `value` in force after `expected_version`.

        Raises:
            StaleVersion: another version is in force.
            Unavailable: the database is away. Where it went during the commit, only `current` tells what holds.
        """
        with self._database.writing() as tx:
            [current] = self._newest(tx, 1)
            if current.version != expected_version:
                raise StaleVersion(current.version, current.who)
            revision = Revision(current.version + 1, value, self._now_unix_s(), who, reason)
            self._insert(tx, revision)
        return revision

    def history(self, limit: int, before: int = MAX_VERSION) -> list[Revision[T]]:
        """The newest `limit` revisions older than `before`, newest first."""
        with self._database.reading() as tx:
            return self._newest(tx, limit, before)

    def revision(self, version: int) -> Revision[T]:
        """Raises: NotFound."""
        with self._database.reading() as tx:
            rows = tx.execute(
                f"SELECT {_COLUMNS} FROM documents WHERE name = ? AND version = ?", (self._format.name, version)
            )
        if not rows:
            raise NotFound(f"no {self._format.name} version {version}", field="version")
        return self._revision(rows[0])

    def _newest(self, tx: Transaction, limit: int, before: int = MAX_VERSION) -> list[Revision[T]]:
        rows = tx.execute(
            f"SELECT {_COLUMNS} FROM documents WHERE name = ? AND version < ? ORDER BY version DESC LIMIT ?",
            (self._format.name, before, limit),
        )
        return [self._revision(row) for row in rows]

    def _insert(self, tx: Transaction, revision: Revision[T]) -> None:
        body = self._format.encode(revision.value)
        tx.execute(
            f"INSERT INTO documents (name, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)",
            (self._format.name, revision.version, body, revision.at_unix_s, revision.who, revision.reason),
        )

    def _revision(self, row: Row) -> Revision[T]:
        version, body, at_unix_s, who, reason = row
        return Revision(int(version), self._format.decode(body), float(at_unix_s), str(who), str(reason))


_COLUMNS = "version, body, at_unix_s, who, reason"
