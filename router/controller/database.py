"""Where durable state lives: one interface, SQLite by default, Postgres by URL.

A store (SLO classes, settings, decisions, batches) writes SQL that both understand: `?` for values, BIGINT, DOUBLE PRECISION,
TEXT and BYTEA for columns, no `?` or `%` inside literals, ids drawn by itself (max + 1 within a write). Its tables are its own
and come about by numbered migrations.

    writing()   write transactions of one database run one after the other, in whatever process: what one reads holds until it
                commits, so compare-and-swap is a SELECT and an INSERT. An exception rolls everything back
    reading()   one snapshot; writes nothing

Calls block for milliseconds, at most WAIT_S: run them off the event loop. Any thread may call. A database that is away, locked
or broken is Unavailable, at start ConfigError. Passwords never get into a message.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from baton.errors import ConfigError, Unavailable

WAIT_S = 5.0  # how long a transaction waits for another one's, which lasts milliseconds
FIELD = "controller.database"
_SQLITE = "sqlite://"
_POSTGRES = ("postgresql://", "postgres://")
_FILE = "file://"
_MAX_URL_BYTES = 8_192  # a URL of libpq's parameters has some hundred

Value = str | int | float | bytes | None
Row = tuple[Any, ...]


class Transaction(Protocol):
    def execute(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        """Run one statement; its rows, none where it has none."""
        ...


class Database(Protocol):
    @property
    def name(self) -> str:
        """As an operator knows it, without a password."""
        ...

    def writing(self) -> AbstractContextManager[Transaction]:
        """Raises: Unavailable."""
        ...

    def reading(self) -> AbstractContextManager[Transaction]:
        """Raises: Unavailable."""
        ...

    def close(self) -> None: ...


def open_database(url: str) -> Database:
    """`sqlite:///absolute/path`, `postgresql://...` with whatever libpq takes, or `file:///absolute/path` of a file that holds
    one of these, as a secret is mounted. Nothing is connected to yet.

    Raises:
        ConfigError: none of these, a file that cannot be read, or the driver for Postgres is not installed.
    """
    if url.startswith(_FILE):
        url = _url_in(Path(url.removeprefix(_FILE)))
    if url.startswith(_SQLITE):
        path = url.removeprefix(_SQLITE)
        if not path.startswith("/"):
            raise ConfigError(f"{FIELD} = {url!r}: give an absolute path, sqlite:///path/to/file", field=FIELD)
        return SQLite(Path(path))
    if url.startswith(_POSTGRES):
        try:
            from router.controller.postgres import Postgres  # its driver is an extra
        except ImportError as error:
            raise ConfigError(
                f"{FIELD} names Postgres, whose driver is missing ({error}); pip install 'baton[postgres]'", field=FIELD
            ) from None
        return Postgres(url)
    scheme = urlsplit(url).scheme
    raise ConfigError(f"{FIELD}: {scheme!r} is no database we know; use sqlite:/// or postgresql://", field=FIELD)


def _url_in(file: Path) -> str:
    """What it holds, without what surrounds it. That is in no message: it is a secret. Raises: ConfigError."""
    where = f"{FIELD} names the file {file}"
    if not file.is_absolute():
        raise ConfigError(f"{where}: give an absolute path, file:///path/to/file", field=FIELD)
    try:
        with file.open("rb") as opened:
            url = opened.read(_MAX_URL_BYTES).decode().strip()
    except OSError as error:
        raise ConfigError(f"{where}, which cannot be read: {error.strerror}", field=FIELD) from error
    except UnicodeDecodeError:
        raise ConfigError(f"{where}, which is not text", field=FIELD) from None
    if not url.startswith((_SQLITE, *_POSTGRES)):
        raise ConfigError(f"{where}, which holds no URL of a database: sqlite:/// or postgresql://", field=FIELD)
    return url


def migrate(database: Database, store: str, migrations: Sequence[Sequence[str]]) -> None:
    """Bring the tables of one store up to date: migration n is run once, as a whole. Never change one that was released.

    Raises:
        ConfigError: a newer Baton wrote these tables.
        Unavailable.
    """
    with database.writing() as tx:
        tx.execute("CREATE TABLE IF NOT EXISTS schema_versions (store TEXT PRIMARY KEY, version BIGINT NOT NULL)")
        rows = tx.execute("SELECT version FROM schema_versions WHERE store = ?", (store,))
        done = int(rows[0][0]) if rows else 0
        if done > len(migrations):
            raise ConfigError(
                f"{database.name} holds version {done} of the tables of {store}, this Baton knows {len(migrations)}:"
                " start the newer one, or name another database",
                field=FIELD,
            )
        for statements in migrations[done:]:
            for statement in statements:
                tx.execute(statement)
        tx.execute(
            "INSERT INTO schema_versions (store, version) VALUES (?, ?)"
            " ON CONFLICT (store) DO UPDATE SET version = excluded.version",
            (store, len(migrations)),
        )


class SQLite:
    """One file (WAL), safe for several processes. A connection lives for one transaction, some 0.2 ms."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def name(self) -> str:
        return str(self._file)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        with self._transaction("BEGIN IMMEDIATE") as tx:  # queues at once; a later upgrade could deadlock
            yield tx

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        with self._transaction("BEGIN") as tx:
            yield tx

    def close(self) -> None:
        """Nothing stays open."""

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Transaction]:
        try:
            db = sqlite3.connect(self._file, timeout=WAIT_S, isolation_level=None)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute(begin)
                yield _SQLiteTransaction(db)
                db.execute("COMMIT")
            finally:
                db.close()  # rolls back what was not committed
        except sqlite3.Error as error:
            raise Unavailable(f"the database {self._file}: {error}", field=FIELD, retry_after_s=WAIT_S) from error


class _SQLiteTransaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        return self._db.execute(sql, values).fetchall()
