"""Postgres behind the Database interface; the only module that knows psycopg.

Write transactions take one advisory lock, which makes them as serial as SQLite's and leaves other applications of the same
server alone. Up to _MAX_IDLE connections are kept; one that broke meanwhile (a server that was restarted) is replaced before
anything was done on it. Every wait ends: for a connection, a lock, a statement, and on the server for a client that vanished.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from baton.database_url import without_password
from baton.errors import ConfigError, Unavailable
from router.controller.database import FIELD, WAIT_S, Row, Transaction, Value

_LOCK = 0x6261746F6E  # "baton": the key of the writers' advisory lock
_MAX_IDLE = 4  # the control tick, an admin call, a batch and one to spare; more are opened and closed
_WAIT_MS = round(WAIT_S * 1e3)
# Of the server's side; the URL's own `options` come after them and win
_OPTIONS = (
    f"-c lock_timeout={_WAIT_MS} -c statement_timeout={2 * _WAIT_MS}"
    f" -c idle_in_transaction_session_timeout={2 * _WAIT_MS}"
)
_WRITE = ("BEGIN", f"SELECT pg_advisory_xact_lock({_LOCK})")  # what follows sees all that was committed before
_READ = ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",)


class Postgres:
    def __init__(self, url: str) -> None:
        """Raises: ConfigError: libpq cannot read the URL."""
        self._url = url
        self._conninfo = _conninfo(url)
        self._idle: list[psycopg.Connection] = []
        self._guard = threading.Lock()

    @property
    def name(self) -> str:
        return without_password(self._url)

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        with self._transaction(_WRITE) as tx:
            yield tx

    @contextmanager
    def reading(self) -> Iterator[Transaction]:
        with self._transaction(_READ) as tx:
            yield tx

    def close(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _transaction(self, begin: Sequence[str]) -> Iterator[Transaction]:
        try:
            connection = self._begun(begin)
            try:
                yield _PostgresTransaction(connection)
                connection.execute("COMMIT")
            finally:
                self._give_back(connection)
        except psycopg.Error as error:
            raise Unavailable(
                f"the database {self.name}: {_first_line(error)}", field=FIELD, retry_after_s=WAIT_S
            ) from error

    def _begun(self, begin: Sequence[str]) -> psycopg.Connection:
        """A connection inside a transaction; those that broke while idle are dropped."""
        while (kept := self._take_idle()) is not None:
            try:
                _execute_all(kept, begin)
            except psycopg.OperationalError:
                broken = kept.broken
                kept.close()
                if not broken:
                    raise  # the lock was not to be had
            else:
                return kept
        connection = psycopg.connect(self._conninfo, autocommit=True)
        try:
            _execute_all(connection, begin)
        except psycopg.Error:
            connection.close()
            raise
        return connection

    def _take_idle(self) -> psycopg.Connection | None:
        with self._guard:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: psycopg.Connection) -> None:
        """Roll back what was not committed; keep the connection if it is good for another one."""
        with contextlib.suppress(psycopg.Error):  # what cannot be rolled back ends with its connection
            connection.rollback()
        with self._guard:
            if connection.info.transaction_status is TransactionStatus.IDLE and len(self._idle) < _MAX_IDLE:
                self._idle.append(connection)
                return
        connection.close()


class _PostgresTransaction:
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        cursor = self._connection.execute(sql.replace("?", "%s").encode(), values)
        return cursor.fetchall() if cursor.description else []


def _conninfo(url: str) -> str:
    """The URL with our bounds where it has none."""
    try:
        given: dict[str, str] = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    except (
        psycopg.ProgrammingError
    ):  # its message quotes the URL, with pieces of the password where that is the problem
        raise _unreadable() from None
    if not all(port.isdecimal() for port in given.get("port", "0").split(",")):
        raise _unreadable()  # a password with a slash in it is read as a port
    defaults = {"connect_timeout": str(round(WAIT_S)), "application_name": "baton"}
    options = {"options": f"{_OPTIONS} {given.get('options', '')}".strip()}
    return make_conninfo("", **defaults | given | options)


def _unreadable() -> ConfigError:
    return ConfigError(
        f"{FIELD}: libpq cannot read this URL; write special characters of a password as %XX", field=FIELD
    )


def _execute_all(connection: psycopg.Connection, statements: Sequence[str]) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def _first_line(error: psycopg.Error) -> str:
    """The rest is a hint or a piece of the statement."""
    return (str(error).splitlines() or [type(error).__name__])[0]
