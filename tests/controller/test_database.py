"""One suite for every kind of database, and what only one of them can do wrong."""

from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.errors import ConfigError, Unavailable
from router.controller.database import Database, SQLite, migrate, open_database
from tests.controller.postgres_rig import PostgresServer

TABLE = (("CREATE TABLE numbers (number BIGINT PRIMARY KEY, share DOUBLE PRECISION, name TEXT, body BYTEA)",),)
NUM_THREADS = 6
INCREMENTS = 10


def test_values_come_back_as_they_went_in(database: Database) -> None:
    migrate(database, "numbers", TABLE)
    row = (2**53, 0.1, "ä % ? ' \\", b"\x00\xff")
    with database.writing() as tx:
        assert tx.execute("INSERT INTO numbers VALUES (?, ?, ?, ?)", row) == []
    with database.reading() as tx:
        assert tx.execute("SELECT * FROM numbers WHERE name = ?", (row[2],)) == [row]


def test_a_transaction_that_fails_leaves_nothing(database: Database) -> None:
    migrate(database, "numbers", TABLE)
    with pytest.raises(KeyError), database.writing() as tx:  # noqa: PT012
        tx.execute("INSERT INTO numbers (number) VALUES (1)")
        raise KeyError
    with pytest.raises(Unavailable), database.writing() as tx:  # noqa: PT012
        tx.execute("INSERT INTO numbers (number) VALUES (1)")
        tx.execute("INSERT INTO numbers (number) VALUES (1)")
    with database.reading() as tx:
        assert tx.execute("SELECT number FROM numbers") == []


def test_writers_in_many_threads_and_connections_run_one_after_the_other(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    migrate(databases[0], "numbers", TABLE)
    with databases[0].writing() as tx:
        tx.execute("INSERT INTO numbers (number, share) VALUES (1, 0)")
    start = threading.Barrier(NUM_THREADS)

    def count_up(thread: int) -> None:
        start.wait()
        for _ in range(INCREMENTS):
            with databases[thread % 2].writing() as tx:
                [(share,)] = tx.execute("SELECT share FROM numbers")
                tx.execute("UPDATE numbers SET share = ?", (share + 1,))

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(count_up, range(NUM_THREADS)))
    with databases[1].reading() as tx:
        assert tx.execute("SELECT share FROM numbers") == [(NUM_THREADS * INCREMENTS,)]
    for one in databases:
        one.close()


def test_a_reader_sees_one_moment(database: Database) -> None:
    migrate(database, "numbers", TABLE)
    with database.reading() as before:
        assert before.execute("SELECT number FROM numbers") == []
        with database.writing() as tx:
            tx.execute("INSERT INTO numbers (number) VALUES (1)")
        assert before.execute("SELECT number FROM numbers") == []
    with database.reading() as after:
        assert after.execute("SELECT number FROM numbers") == [(1,)]


def test_migrations_run_once_and_only_forward(database: Database) -> None:
    more = (*TABLE, ("ALTER TABLE numbers ADD COLUMN note TEXT", "UPDATE numbers SET note = 'old'"))
    migrate(database, "numbers", TABLE)
    with database.writing() as tx:
        tx.execute("INSERT INTO numbers (number) VALUES (1)")
    for _ in range(2):
        migrate(database, "numbers", more)
    with database.reading() as tx:
        assert tx.execute("SELECT number, note FROM numbers") == [(1, "old")]
    with pytest.raises(ConfigError, match="version 2 of the tables of numbers, this Baton knows 1"):
        migrate(database, "numbers", TABLE)


def test_a_migration_that_fails_is_not_half_done(database: Database) -> None:
    with pytest.raises(Unavailable):
        migrate(database, "numbers", (*TABLE, ("CREATE TABLE more (number BIGINT)", "DROP TABLE nothing_of_the_kind")))
    migrate(database, "numbers", TABLE)
    with pytest.raises(Unavailable), database.reading() as tx:
        tx.execute("SELECT number FROM more")


def test_a_writer_that_waits_too_long_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.controller.database.WAIT_S", 0.01)
    database = SQLite(tmp_path / "store.sqlite")
    with database.writing(), pytest.raises(Unavailable, match="locked"), database.writing():
        raise AssertionError("two writers at once")


def test_a_restarted_server_is_found_again_and_one_that_is_away_is_unavailable(postgres: PostgresServer) -> None:
    database = open_database(postgres.new_database())
    migrate(database, "numbers", TABLE)
    postgres.stop()
    try:
        with pytest.raises(Unavailable) as away, database.reading():
            raise AssertionError("nobody is there")
    finally:
        postgres.start()
    assert "not-needed" not in str(away.value)
    assert "test_" in str(away.value)
    with database.writing() as tx:
        tx.execute("INSERT INTO numbers (number) VALUES (1)")
    database.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://ann:secret@host/x", "'mysql' is no database we know"),
        ("store.sqlite", "is no database we know"),
        ("sqlite://store.sqlite", "absolute path"),
        ("postgresql://ann:secret/@host/x", "cannot read this URL"),
    ],
)
def test_other_urls_are_refused_without_their_passwords(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        open_database(url)
    assert "secret" not in refused.value.message


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(Unavailable, match="not a database"), SQLite(tmp_path / "store.sqlite").reading():
        raise AssertionError("it was opened")


def test_sqlite_files_of_earlier_releases_keep_their_versions(tmp_path: Path) -> None:
    from router.controller.control_store import ControlStore

    old = sqlite3.connect(tmp_path / "slo.sqlite")
    old.execute(
        "CREATE TABLE revisions (version INTEGER PRIMARY KEY, classes TEXT, at_unix_s REAL, who TEXT, reason TEXT)"
    )
    classes = '[{"name": "interactive", "ttft_ms": 5.0, "tpot_ms": 1.0}]'
    old.execute("INSERT INTO revisions VALUES (?, ?, ?, ?, ?)", (7, classes, 3.0, "ann", "launch"))
    old.commit()
    old.close()
    current = ControlStore(SQLite(tmp_path / "slo.sqlite"), lambda: 9.0).slo.current()
    assert (current.version, current.who, current.at_unix_s, current.value[0].ttft_ms) == (7, "ann", 3.0, 5.0)


def test_a_url_may_be_in_a_file_as_a_secret_is_mounted(tmp_path: Path) -> None:
    secret = tmp_path / "url"
    secret.write_text(f"sqlite://{tmp_path}/there.sqlite\n")
    database = open_database(f"file://{secret}")
    assert database.name == f"{tmp_path}/there.sqlite"
    migrate(database, "numbers", TABLE)
    assert (tmp_path / "there.sqlite").exists()


@pytest.mark.parametrize(
    ("holds", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"postgres-password: hunter2", "holds no URL of a database"),
        (b"file:///etc/hunter2", "holds no URL of a database"),
        (b"\xff hunter2", "is not text"),
    ],
)
def test_a_file_of_no_url_is_refused_and_what_it_holds_is_not_told(
    holds: bytes | None, says: str, tmp_path: Path
) -> None:
    secret = tmp_path / "url"
    if holds is not None:
        secret.write_bytes(holds)
    with pytest.raises(ConfigError, match=says) as refused:
        open_database(f"file://{secret}")
    assert "hunter2" not in refused.value.message
    assert str(secret) in refused.value.message


def test_a_file_of_a_url_must_be_named_from_the_root() -> None:
    with pytest.raises(ConfigError, match="give an absolute path"):
        open_database("file://secrets/url")
