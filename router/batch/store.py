"""Where files and batches are known: rows, small ones, in one database; contents lie beside it (contents.py).

Every question names a tenant, and what is another's does not exist. A batch is worked on by one owner at a time, who holds a
Lease: it ends by itself where it is not renewed, and a claim starts the next generation, so that what a former owner still
writes is refused with LeaseLost. Leases are compared by the wall clock, which all owners of one database must share to within a
fraction of a lease. Calls block for a few milliseconds on the disk: run them off the event loop. A connection lives for one call.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Protocol

from baton.errors import ConfigError, InvalidRequest, NotFound
from router.batch.records import INPUT, OPEN_STATUSES, Batch, FileInfo, Status

_BUSY_S = 5.0  # how long a writer waits for another one's transaction, which lasts milliseconds


class LeaseLost(Exception):
    """Somebody else works on the batch now."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on one batch."""

    batch_id: str
    generation: int  # counts owners


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of what is kept. Defaults and their sources: baton/config.py, BatchConfig."""

    max_files: int  # of one tenant
    max_bytes: int  # of one tenant's files
    max_all_bytes: int  # of everybody's
    max_batches: int  # of one tenant, that are not over


class BatchStore(Protocol):
    # -- a tenant's view
    def add_file(self, info: FileInfo) -> None:
        """Raises: InvalidRequest, where a bound would be passed."""
        ...

    def file(self, tenant: str, file_id: str) -> FileInfo:
        """Raises: NotFound."""
        ...

    def files(self, tenant: str) -> Sequence[FileInfo]:
        """Oldest first; as many as `max_files` and its batches' outputs."""
        ...

    def drop_file(self, tenant: str, file_id: str) -> None:
        """Raises: NotFound; InvalidRequest, while a batch reads it."""
        ...

    def add_batch(self, batch: Batch) -> None:
        """Raises: NotFound, where its input is not there; InvalidRequest, where a bound would be passed."""
        ...

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises: NotFound."""
        ...

    def batches(self, tenant: str) -> Sequence[Batch]:
        """Oldest first."""
        ...

    def cancel(self, tenant: str, batch_id: str, now_unix_s: float) -> Batch:
        """Ask its owner to end it. Raises: NotFound; InvalidRequest, when it is over."""
        ...

    # -- an owner's view
    def claim(self, now_unix_s: float, until_unix_s: float) -> tuple[Lease, Batch] | None:
        """The oldest batch that nobody works on."""
        ...

    def change(self, lease: Lease, until_unix_s: float, step: Callable[[Batch], Batch]) -> Batch:
        """Put `step` of what is kept in its place, and renew the lease. Raises: LeaseLost."""
        ...

    def finish(self, lease: Lease, outputs: Sequence[FileInfo], step: Callable[[Batch], Batch]) -> Batch:
        """The last change, together with the files that came of it. Raises: LeaseLost."""
        ...

    def release(self, lease: Lease) -> None:
        """Let somebody else go on, now."""
        ...

    # -- housekeeping
    def expire(self, now_unix_s: float, older_than_unix_s: float) -> None:
        """Forget files past their expiry, and batches that were over before `older_than_unix_s`."""
        ...

    def all_file_ids(self) -> set[str]: ...

    def open_batch_ids(self) -> set[str]: ...


class SQLiteBatchStore:
    """One file, safe for several processes of one machine.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, file: Path, bounds: Bounds) -> None:
        self._file = file
        self._bounds = bounds
        try:
            with self._transaction() as db:
                for statement in _TABLES:
                    db.execute(statement)
        except sqlite3.Error as error:
            raise ConfigError(f"cannot use the batch store {file}: {error}", field="router.batch.folder") from error

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

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, info: FileInfo) -> None:
        with self._transaction() as db:
            num_files, num_bytes = db.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM batch_files WHERE tenant = ? AND purpose = ?",
                (info.tenant, INPUT),
            ).fetchone()
            [all_bytes] = db.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM batch_files").fetchone()
            _within("files", num_files + 1, self._bounds.max_files)
            _within("bytes of files", num_bytes + info.num_bytes, self._bounds.max_bytes)
            _within("bytes of everybody's files", all_bytes + info.num_bytes, self._bounds.max_all_bytes)
            _insert_file(db, info)

    def file(self, tenant: str, file_id: str) -> FileInfo:
        with self._transaction() as db:
            return _file(db, tenant, file_id)

    def files(self, tenant: str) -> Sequence[FileInfo]:
        with self._transaction() as db:
            rows = db.execute(
                f"SELECT {_FILE_COLUMNS} FROM batch_files WHERE tenant = ? ORDER BY created_unix_s, id", (tenant,)
            )
            return [FileInfo(*row) for row in rows]

    def drop_file(self, tenant: str, file_id: str) -> None:
        with self._transaction() as db:
            _file(db, tenant, file_id)
            [num_readers] = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE input_file_id = ? AND {_IS_OPEN}", (file_id,)
            ).fetchone()
            if num_readers:
                raise InvalidRequest("the file is read by a batch that is not over; cancel it first", field="file_id")
            db.execute("DELETE FROM batch_files WHERE id = ?", (file_id,))

    # -- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        with self._transaction() as db:
            info = _file(db, batch.tenant, batch.input_file_id, field="input_file_id")
            if info.purpose != INPUT:
                raise InvalidRequest(
                    f"input_file_id has the purpose {info.purpose}; the limit is {INPUT}", field="input_file_id"
                )
            [num_open] = db.execute(
                f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND {_IS_OPEN}", (batch.tenant,)
            ).fetchone()
            _within("batches that are not over", num_open + 1, self._bounds.max_batches)
            db.execute(
                "INSERT INTO batches (id, tenant, created_unix_s, input_file_id, status, record) VALUES (?, ?, ?, ?, ?, ?)",
                (batch.id, batch.tenant, batch.created_unix_s, batch.input_file_id, batch.status, batch.to_text()),
            )

    def batch(self, tenant: str, batch_id: str) -> Batch:
        with self._transaction() as db:
            return _batch(db, tenant, batch_id)

    def batches(self, tenant: str) -> Sequence[Batch]:
        with self._transaction() as db:
            rows = db.execute("SELECT record FROM batches WHERE tenant = ? ORDER BY created_unix_s, id", (tenant,))
            return [Batch.from_text(text) for (text,) in rows]

    def cancel(self, tenant: str, batch_id: str, now_unix_s: float) -> Batch:
        with self._transaction() as db:
            batch = _batch(db, tenant, batch_id)
            if not batch.is_open:
                raise InvalidRequest(f"the batch is {batch.status} already and cannot be cancelled", field="batch_id")
            if batch.status is not Status.FINALIZING:  # every line has its outcome: too late to change any
                batch = batch.enter(Status.CANCELLING, now_unix_s)
            _write(db, batch)
            return batch

    # -- owners ------------------------------------------------------------------------------------------------------

    def claim(self, now_unix_s: float, until_unix_s: float) -> tuple[Lease, Batch] | None:
        with self._transaction() as db:
            row = db.execute(
                f"SELECT record, generation FROM batches WHERE {_IS_OPEN} AND lease_until_unix_s < ?"
                " ORDER BY created_unix_s, id LIMIT 1",
                (now_unix_s,),
            ).fetchone()
            if row is None:
                return None
            batch, generation = Batch.from_text(row[0]), row[1] + 1
            db.execute(
                "UPDATE batches SET generation = ?, lease_until_unix_s = ? WHERE id = ?",
                (generation, until_unix_s, batch.id),
            )
            return Lease(batch.id, generation), batch

    def change(self, lease: Lease, until_unix_s: float, step: Callable[[Batch], Batch]) -> Batch:
        with self._transaction() as db:
            batch = step(_held(db, lease))
            _write(db, batch)
            db.execute("UPDATE batches SET lease_until_unix_s = ? WHERE id = ?", (until_unix_s, batch.id))
            return batch

    def finish(self, lease: Lease, outputs: Sequence[FileInfo], step: Callable[[Batch], Batch]) -> Batch:
        with self._transaction() as db:
            batch = step(_held(db, lease))
            _write(db, batch)
            for info in outputs:
                _insert_file(db, info)
            return batch

    def release(self, lease: Lease) -> None:
        with self._transaction() as db:
            db.execute(
                "UPDATE batches SET lease_until_unix_s = 0 WHERE id = ? AND generation = ?",
                (lease.batch_id, lease.generation),
            )

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def expire(self, now_unix_s: float, older_than_unix_s: float) -> None:
        with self._transaction() as db:
            db.execute(
                "DELETE FROM batch_files WHERE expires_unix_s < ?"
                f" AND id NOT IN (SELECT input_file_id FROM batches WHERE {_IS_OPEN})",
                (now_unix_s,),
            )
            db.execute(f"DELETE FROM batches WHERE created_unix_s < ? AND NOT {_IS_OPEN}", (older_than_unix_s,))

    def all_file_ids(self) -> set[str]:
        with self._transaction() as db:
            return {file_id for (file_id,) in db.execute("SELECT id FROM batch_files")}

    def open_batch_ids(self) -> set[str]:
        with self._transaction() as db:
            return {batch_id for (batch_id,) in db.execute(f"SELECT id FROM batches WHERE {_IS_OPEN}")}


_FILE_COLUMNS = ", ".join(field.name for field in fields(FileInfo))
_IS_OPEN = f"status IN ({', '.join(repr(status.value) for status in OPEN_STATUSES)})"
_TABLES = (
    "CREATE TABLE IF NOT EXISTS batch_files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL,"
    " filename TEXT NOT NULL, num_bytes BIGINT NOT NULL, created_unix_s DOUBLE PRECISION NOT NULL,"
    " expires_unix_s DOUBLE PRECISION NOT NULL)",
    "CREATE INDEX IF NOT EXISTS batch_files_of_tenant ON batch_files (tenant, created_unix_s)",
    "CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_unix_s DOUBLE PRECISION NOT NULL,"
    " input_file_id TEXT NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL, generation BIGINT NOT NULL DEFAULT 0,"
    " lease_until_unix_s DOUBLE PRECISION NOT NULL DEFAULT 0)",
    "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, created_unix_s)",
)


def _within(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequest(f"{what}: {value}; the limit is {limit}; delete some", field="file")


def _insert_file(db: sqlite3.Connection, info: FileInfo) -> None:
    marks = ", ".join("?" * len(fields(FileInfo)))
    db.execute(f"INSERT INTO batch_files ({_FILE_COLUMNS}) VALUES ({marks})", astuple(info))


def _file(db: sqlite3.Connection, tenant: str, file_id: str, field: str = "file_id") -> FileInfo:
    row = db.execute(
        f"SELECT {_FILE_COLUMNS} FROM batch_files WHERE id = ? AND tenant = ?", (file_id, tenant)
    ).fetchone()
    if row is None:
        raise NotFound("no such file", field=field)
    return FileInfo(*row)


def _batch(db: sqlite3.Connection, tenant: str, batch_id: str) -> Batch:
    row = db.execute("SELECT record FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant)).fetchone()
    if row is None:
        raise NotFound("no such batch", field="batch_id")
    return Batch.from_text(row[0])


def _held(db: sqlite3.Connection, lease: Lease) -> Batch:
    row = db.execute(
        "SELECT record FROM batches WHERE id = ? AND generation = ?", (lease.batch_id, lease.generation)
    ).fetchone()
    if row is None:
        raise LeaseLost(lease.batch_id)
    return Batch.from_text(row[0])


def _write(db: sqlite3.Connection, batch: Batch) -> None:
    db.execute("UPDATE batches SET status = ?, record = ? WHERE id = ?", (batch.status, batch.to_text(), batch.id))
