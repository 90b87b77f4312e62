"""Where files and batches are known: rows, small ones, in one database; contents lie beside it (contents.py).

Every question names a tenant, and what is another's does not exist. A batch is worked on by one owner at a time, who holds a
Lease: it ends by itself where it is not renewed, and a claim starts the next generation, so that what a former owner still
writes is refused with LeaseLost. Leases are compared by the wall clock, which all owners of one database must share to within a
fraction of a lease. Calls block as the database does: run them off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields

from baton.errors import ConfigError, InvalidRequest, NotFound, Unavailable
from router.batch.records import INPUT, OPEN_STATUSES, Batch, FileInfo, Status, is_id
from router.controller.database import Database, Row, Transaction, migrate


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


class BatchStore:
    """All files and batches of one database. Every method raises Unavailable where that is away."""

    def __init__(self, database: Database, bounds: Bounds) -> None:
        """Raises: ConfigError: the database cannot be used."""
        self._database = database
        self._bounds = bounds
        try:
            migrate(database, "batches", _MIGRATIONS)
        except Unavailable as error:
            raise ConfigError(error.message, field="router.batch.database") from error

    # -- files -------------------------------------------------------------------------------------------------------

    def add_file(self, info: FileInfo) -> None:
        """Raises: InvalidRequest, where a bound would be passed."""
        with self._database.writing() as tx:
            [(num_files, num_bytes)] = tx.execute(
                "SELECT COUNT(*), COALESCE(SUM(num_bytes), 0) FROM batch_files WHERE tenant = ? AND purpose = ?",
                (info.tenant, INPUT),
            )
            [(all_bytes,)] = tx.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM batch_files")
            _within("files", num_files + 1, self._bounds.max_files)
            _within("bytes of files", int(num_bytes) + info.num_bytes, self._bounds.max_bytes)
            _within("bytes of everybody's files", int(all_bytes) + info.num_bytes, self._bounds.max_all_bytes)
            _insert_file(tx, info)

    def file(self, tenant: str, file_id: str) -> FileInfo:
        """Raises: NotFound."""
        with self._database.reading() as tx:
            return _file(tx, tenant, file_id)

    def files(self, tenant: str) -> Sequence[FileInfo]:
        """Oldest first: inputs, at most `max_files`, and what came of them."""
        with self._database.reading() as tx:
            rows = tx.execute(
                f"SELECT {_FILE_COLUMNS} FROM batch_files WHERE tenant = ? ORDER BY created_unix_s, id", (tenant,)
            )
            return [FileInfo(*row) for row in rows]

    def drop_file(self, tenant: str, file_id: str) -> None:
        """Raises: NotFound; InvalidRequest, while a batch reads it."""
        with self._database.writing() as tx:
            _file(tx, tenant, file_id)
            [(num_readers,)] = tx.execute(
                f"SELECT COUNT(*) FROM batches WHERE input_file_id = ? AND {_IS_OPEN}", (file_id,)
            )
            if num_readers:
                raise InvalidRequest("the file is read by a batch that is not over; cancel it first", field="file_id")
            tx.execute("DELETE FROM batch_files WHERE id = ?", (file_id,))

    # -- batches -----------------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> None:
        """Raises: NotFound, where its input is not there; InvalidRequest, where a bound would be passed."""
        with self._database.writing() as tx:
            info = _file(tx, batch.tenant, batch.input_file_id, field="input_file_id")
            if info.purpose != INPUT:
                raise InvalidRequest(
                    f"input_file_id has the purpose {info.purpose}; the limit is {INPUT}", field="input_file_id"
                )
            [(num_open,)] = tx.execute(f"SELECT COUNT(*) FROM batches WHERE tenant = ? AND {_IS_OPEN}", (batch.tenant,))
            _within("batches that are not over", num_open + 1, self._bounds.max_batches)
            tx.execute(
                "INSERT INTO batches (id, tenant, created_unix_s, input_file_id, status, record) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    batch.id,
                    batch.tenant,
                    batch.created_unix_s,
                    batch.input_file_id,
                    batch.status.value,
                    batch.to_text(),
                ),
            )

    def batch(self, tenant: str, batch_id: str) -> Batch:
        """Raises: NotFound."""
        with self._database.reading() as tx:
            return _batch(tx, tenant, batch_id)

    def batches(self, tenant: str) -> Sequence[Batch]:
        """Oldest first."""
        with self._database.reading() as tx:
            rows = tx.execute("SELECT record FROM batches WHERE tenant = ? ORDER BY created_unix_s, id", (tenant,))
            return [Batch.from_text(text) for (text,) in rows]

    def cancel(self, tenant: str, batch_id: str, now_unix_s: float) -> Batch:
        """Ask its owner to end it. Raises: NotFound; InvalidRequest, when it is over."""
        with self._database.writing() as tx:
            batch = _batch(tx, tenant, batch_id)
            if not batch.is_open:
                raise InvalidRequest(f"the batch is {batch.status} already and cannot be cancelled", field="batch_id")
            if batch.status is not Status.FINALIZING:  # every line has its outcome: too late to change any
                batch = batch.enter(Status.CANCELLING, now_unix_s)
            _write(tx, batch)
            return batch

    # -- owners ------------------------------------------------------------------------------------------------------

    def claim(self, now_unix_s: float, until_unix_s: float) -> tuple[Lease, Batch] | None:
        """The oldest batch that nobody works on."""
        with self._database.writing() as tx:
            rows = tx.execute(
                f"SELECT record, generation FROM batches WHERE {_IS_OPEN} AND lease_until_unix_s < ?"
                " ORDER BY created_unix_s, id LIMIT 1",
                (now_unix_s,),
            )
            if not rows:
                return None
            batch, generation = Batch.from_text(rows[0][0]), rows[0][1] + 1
            tx.execute(
                "UPDATE batches SET generation = ?, lease_until_unix_s = ? WHERE id = ?",
                (generation, until_unix_s, batch.id),
            )
            return Lease(batch.id, generation), batch

    def change(self, lease: Lease, until_unix_s: float, step: Callable[[Batch], Batch]) -> Batch:
        """Put `step` of what is kept in its place, and renew the lease. Raises: LeaseLost."""
        with self._database.writing() as tx:
            batch = step(_held(tx, lease))
            _write(tx, batch)
            tx.execute("UPDATE batches SET lease_until_unix_s = ? WHERE id = ?", (until_unix_s, batch.id))
            return batch

    def finish(self, lease: Lease, outputs: Sequence[FileInfo], step: Callable[[Batch], Batch]) -> Batch:
        """The last change, together with the files that came of it. Raises: LeaseLost."""
        with self._database.writing() as tx:
            batch = step(_held(tx, lease))
            _write(tx, batch)
            for info in outputs:
                _insert_file(tx, info)
            return batch

    def release(self, lease: Lease) -> None:
        """Let somebody else go on, now."""
        with self._database.writing() as tx:
            tx.execute(
                "UPDATE batches SET lease_until_unix_s = 0 WHERE id = ? AND generation = ?",
                (lease.batch_id, lease.generation),
            )

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def expire(self, now_unix_s: float, older_than_unix_s: float) -> None:
        """Forget files past their time, unless a batch reads them, and batches created before the other, unless they are open."""
        with self._database.writing() as tx:
            tx.execute(
                "DELETE FROM batch_files WHERE expires_unix_s < ?"
                f" AND id NOT IN (SELECT input_file_id FROM batches WHERE {_IS_OPEN})",
                (now_unix_s,),
            )
            tx.execute(f"DELETE FROM batches WHERE created_unix_s < ? AND NOT {_IS_OPEN}", (older_than_unix_s,))

    def all_file_ids(self) -> set[str]:
        with self._database.reading() as tx:
            return {file_id for (file_id,) in tx.execute("SELECT id FROM batch_files")}

    def open_batch_ids(self) -> set[str]:
        with self._database.reading() as tx:
            return {batch_id for (batch_id,) in tx.execute(f"SELECT id FROM batches WHERE {_IS_OPEN}")}


_FILE_COLUMNS = ", ".join(field.name for field in fields(FileInfo))
_IS_OPEN = f"status IN ({', '.join(repr(status.value) for status in OPEN_STATUSES)})"
_MIGRATIONS = (
    (
        "CREATE TABLE batch_files (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, purpose TEXT NOT NULL,"
        " filename TEXT NOT NULL, num_bytes BIGINT NOT NULL, created_unix_s DOUBLE PRECISION NOT NULL,"
        " expires_unix_s DOUBLE PRECISION NOT NULL)",
        "CREATE INDEX batch_files_of_tenant ON batch_files (tenant, created_unix_s)",
        "CREATE TABLE batches (id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created_unix_s DOUBLE PRECISION NOT NULL,"
        " input_file_id TEXT NOT NULL, status TEXT NOT NULL, record TEXT NOT NULL, generation BIGINT NOT NULL DEFAULT 0,"
        " lease_until_unix_s DOUBLE PRECISION NOT NULL DEFAULT 0)",
        "CREATE INDEX batches_of_tenant ON batches (tenant, created_unix_s)",
    ),
)


def _within(what: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequest(f"{what}: {value}; the limit is {limit}; delete some", field="file")


def _insert_file(tx: Transaction, info: FileInfo) -> None:
    marks = ", ".join("?" * len(fields(FileInfo)))
    tx.execute(f"INSERT INTO batch_files ({_FILE_COLUMNS}) VALUES ({marks})", astuple(info))


def _file(tx: Transaction, tenant: str, file_id: str, field: str = "file_id") -> FileInfo:
    rows = _by_id(tx, f"SELECT {_FILE_COLUMNS} FROM batch_files WHERE id = ? AND tenant = ?", file_id, tenant)
    if not rows:
        raise NotFound("no such file", field=field)
    return FileInfo(*rows[0])


def _by_id(tx: Transaction, sql: str, row_id: str, tenant: str) -> list[Row]:
    """What a caller names may be any text, also such as no database takes."""
    return tx.execute(sql, (row_id, tenant)) if is_id(row_id) else []


def _batch(tx: Transaction, tenant: str, batch_id: str) -> Batch:
    rows = _by_id(tx, "SELECT record FROM batches WHERE id = ? AND tenant = ?", batch_id, tenant)
    if not rows:
        raise NotFound("no such batch", field="batch_id")
    return Batch.from_text(rows[0][0])


def _held(tx: Transaction, lease: Lease) -> Batch:
    rows = tx.execute("SELECT record FROM batches WHERE id = ? AND generation = ?", (lease.batch_id, lease.generation))
    if not rows:
        raise LeaseLost(lease.batch_id)
    return Batch.from_text(rows[0][0])


def _write(tx: Transaction, batch: Batch) -> None:
    tx.execute(
        "UPDATE batches SET status = ?, record = ? WHERE id = ?", (batch.status.value, batch.to_text(), batch.id)
    )
