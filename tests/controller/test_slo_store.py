import threading
from pathlib import Path

import pytest

from baton.errors import ConfigError, NotFound
from baton.slo import DEFAULT_CLASSES, SLO
from router.controller.slo_store import Revision, SQLiteSLOStore, StaleVersion

FAST = (SLO("interactive", ttft_ms=100.0, tpot_ms=10.0, itl_p99_ms=50.0),)


@pytest.fixture
def store(tmp_path: Path) -> SQLiteSLOStore:
    return SQLiteSLOStore(tmp_path / "slo.sqlite", now_unix_s=lambda: 7.0)


def test_a_new_store_holds_the_defaults_as_version_one(store: SQLiteSLOStore) -> None:
    assert store.current() == Revision(1, DEFAULT_CLASSES, 7.0, "baton", "defaults")


def test_a_set_survives_the_process(store: SQLiteSLOStore, tmp_path: Path) -> None:
    store.replace(1, FAST, "ann", "launch")
    again = SQLiteSLOStore(tmp_path / "slo.sqlite", now_unix_s=lambda: 9.0)
    assert again.current() == Revision(2, FAST, 7.0, "ann", "launch")
    assert [revision.version for revision in again.history(10)] == [2, 1]
    assert again.revision(1).classes == DEFAULT_CLASSES


def test_a_stale_writer_is_told_what_is_in_force(store: SQLiteSLOStore) -> None:
    store.replace(1, FAST, "ann", "")
    with pytest.raises(StaleVersion) as stale:
        store.replace(1, DEFAULT_CLASSES, "bob", "")
    assert (stale.value.current.version, stale.value.current.who) == (2, "ann")
    assert store.current().classes == FAST


def test_of_many_writers_at_once_exactly_one_wins(store: SQLiteSLOStore, tmp_path: Path) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def write(name: str) -> None:
        mine = SQLiteSLOStore(tmp_path / "slo.sqlite", now_unix_s=lambda: 8.0)
        start.wait()
        try:
            mine.replace(1, FAST, name, "")
            outcomes.append(name)
        except StaleVersion:
            outcomes.append("stale")

    threads = [threading.Thread(target=write, args=(f"writer-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome != "stale"]
    assert (len(winners), outcomes.count("stale")) == (1, 7)
    assert (store.current().version, store.current().who) == (2, winners[0])


def test_an_unknown_version_is_not_found(store: SQLiteSLOStore) -> None:
    with pytest.raises(NotFound, match="no SLO version 5"):
        store.revision(5)


@pytest.mark.parametrize("content", [b"no database" * 100, b""])
def test_a_damaged_or_unreachable_store_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "slo.sqlite" if content else tmp_path / "missing" / "slo.sqlite"
    if content:
        file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"cannot use the SLO store .*slo\.sqlite.*move it away.*controller\.slo_store"
    ):
        SQLiteSLOStore(file, lambda: 0.0)
