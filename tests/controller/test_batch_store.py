"""One suite for every kind of database: who sees what, who may work, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import InvalidRequest, NotFound
from router.batch.contents import Contents, Outcome
from router.batch.records import OUTPUT, Batch, FileInfo, Status, new_id
from router.batch.store import BatchStore, Bounds, LeaseLost
from router.controller.database import Database

BOUNDS = Bounds(max_files=2, max_bytes=100, max_all_bytes=150, max_batches=2)


@pytest.fixture
def store(database: Database) -> BatchStore:
    return BatchStore(database, BOUNDS)


def file_of(tenant: str, num_bytes: int = 10, purpose: str = "batch", expires_unix_s: float = 1e6) -> FileInfo:
    return FileInfo(new_id("file"), tenant, purpose, "é.jsonl", num_bytes, 1.0, expires_unix_s)


def batch_of(info: FileInfo, created_unix_s: float = 1.0) -> Batch:
    return Batch(new_id("batch"), info.tenant, "/v1/completions", info.id, created_unix_s, 9.0, metadata={"a": "\x00"})


def test_a_tenant_sees_its_own_rows_and_no_others(store: BatchStore) -> None:
    info = file_of("a")
    batch = batch_of(info)
    store.add_file(info)
    store.add_batch(batch)
    assert (store.file("a", info.id), store.batch("a", batch.id)) == (info, batch)
    assert (store.files("a"), store.batches("a")) == ([info], [batch])
    assert (store.files("b"), store.batches("b")) == ([], [])
    asked: tuple[Callable[[], object], ...] = (
        lambda: store.file("b", info.id),
        lambda: store.drop_file("b", info.id),
        lambda: store.batch("b", batch.id),
        lambda: store.cancel("b", batch.id, 2.0),
        lambda: store.add_batch(replace(batch, id=new_id("batch"), tenant="b")),
        lambda: store.file("a", "\x00"),
    )
    for ask in asked:
        with pytest.raises(NotFound):
            ask()


def test_bounds_hold_by_number_and_by_bytes_and_outputs_count_for_everybody_alone(store: BatchStore) -> None:
    store.add_file(file_of("a", 60))
    with pytest.raises(InvalidRequest, match="bytes of files: 110; the limit is 100"):
        store.add_file(file_of("a", 50))
    store.add_file(file_of("a", 10))
    with pytest.raises(InvalidRequest, match="files: 3; the limit is 2"):
        store.add_file(file_of("a", 1))
    with pytest.raises(InvalidRequest, match="everybody"):
        store.add_file(file_of("b", 81))
    assert len(store.files("a")) == 2


def test_one_owner_at_a_time_and_a_former_one_changes_nothing(store: BatchStore) -> None:
    info = file_of("a")
    store.add_file(info)
    store.add_batch(batch_of(info))
    first = store.claim(now_unix_s=10.0, until_unix_s=15.0)
    assert first is not None
    assert store.claim(15.0, 20.0) is None
    second = store.claim(15.1, 20.1)
    assert second is not None
    assert second[0].generation == first[0].generation + 1
    with pytest.raises(LeaseLost):
        store.change(first[0], 99.0, lambda batch: batch)
    with pytest.raises(LeaseLost):
        store.finish(first[0], [file_of("a", purpose=OUTPUT)], lambda batch: batch)
    store.release(first[0])
    assert store.claim(16.0, 21.0) is None
    store.release(second[0])
    assert store.claim(16.0, 21.0) is not None
    assert store.files("a") == [info]


def test_the_last_change_and_its_files_come_together_and_then_nobody_works_on_it(store: BatchStore) -> None:
    info, output = file_of("a"), file_of("a", purpose=OUTPUT)
    store.add_file(info)
    store.add_batch(batch_of(info))
    with pytest.raises(InvalidRequest, match="not over"):
        store.drop_file("a", info.id)
    found = store.claim(10.0, 15.0)
    assert found is not None
    ended = store.finish(found[0], [output], lambda batch: batch.enter(Status.COMPLETED, 11.0))
    assert ended.status is Status.COMPLETED
    assert store.file("a", output.id) == output
    assert store.claim(99.0, 100.0) is None
    with pytest.raises(InvalidRequest, match="completed already"):
        store.cancel("a", ended.id, 12.0)
    with pytest.raises(InvalidRequest, match="purpose"):
        store.add_batch(batch_of(output))
    store.drop_file("a", info.id)


def test_what_is_past_its_time_is_forgotten_unless_a_batch_reads_it(store: BatchStore) -> None:
    old, read = file_of("a", expires_unix_s=5.0), file_of("a", expires_unix_s=5.0)
    store.add_file(old)
    store.add_file(read)
    store.add_batch(batch_of(read))
    store.expire(now_unix_s=6.0, older_than_unix_s=6.0)
    assert store.all_file_ids() == {read.id}
    assert len(store.open_batch_ids()) == 1
    found = store.claim(10.0, 15.0)
    assert found is not None
    store.finish(found[0], [], lambda batch: batch.enter(Status.EXPIRED, 11.0))
    store.expire(6.0, 6.0)
    assert (store.all_file_ids(), store.batches("a")) == (set(), [])


def test_a_torn_record_does_not_count_and_of_two_of_one_line_the_older_owners_does(tmp_path: Path) -> None:
    contents = Contents(tmp_path)
    with contents.journal("batch_x", 1) as journal:
        contents.append(journal, [Outcome(1, True, b"one"), Outcome(3, False, b"three 3")])
        journal.write(b"2 1 tor")
    with contents.journal("batch_x", 10) as journal:
        contents.append(journal, [Outcome(3, True, b"again"), Outcome(2, True, b"two")])
    found = list(contents.outcomes("batch_x"))
    assert found == [Outcome(1, True, b"one"), Outcome(3, False, b"three 3"), Outcome(2, True, b"two")]
    contents.drop_journals("batch_x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_fails_on_its_way_leaves_nothing_and_rubbish_is_swept_once_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = Contents(tmp_path)
    with pytest.raises(KeyError), contents.new("file-a") as file:  # noqa: PT012
        file.write(b"x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    for file_id in ("file-a", "file-b"):
        with contents.new(file_id) as file:
            file.write(b"x")
    (tmp_path / "batches.sqlite").touch()
    contents.sweep({"file-a"}, set())
    assert contents.path("file-b").exists()
    monkeypatch.setattr("router.batch.contents.ORPHAN_S", -1.0)
    contents.sweep({"file-a"}, set())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batches.sqlite", "file-a.jsonl"]
