"""Versioned documents and the decision log on both kinds of database."""

import math
import threading
from pathlib import Path

import pytest

from baton.errors import ConfigError, InvalidRequest, NotFound
from baton.slo import DEFAULT_CLASSES, SLO
from router.controller.control_store import ControlStore
from router.controller.database import Database, SQLite, open_database
from router.controller.decisions import Decision, DecisionLog
from router.controller.settings import Budget, ControlSettings, Mode, PoolBounds
from router.controller.versioned import Revision, StaleVersion

FAST = (SLO("interactive", ttft_ms=100.0, tpot_ms=10.0, itl_p99_ms=50.0),)


@pytest.fixture
def store(database: Database) -> ControlStore:
    return ControlStore(database, now_unix_s=lambda: 7.0, configured={"prefill": 2, "decode": 1})


def test_a_new_store_holds_the_defaults_as_version_one(store: ControlStore) -> None:
    assert store.slo.current() == Revision(1, DEFAULT_CLASSES, 7.0, "baton", "defaults")
    settings = store.settings.current()
    assert (settings.version, settings.value.mode) == (1, Mode.AUTO)
    assert settings.value.budget == Budget(None, PoolBounds(1), PoolBounds(1), PoolBounds(0))


def test_what_was_put_survives_the_process(store: ControlStore, database_url: str) -> None:
    settings = ControlSettings(Mode.FROZEN, Budget(8, PoolBounds(1, 4)))
    store.slo.replace(1, FAST, "ann", "launch")
    store.settings.replace(1, settings, "bob", "holidays")
    store.decisions.append(Decision("flip", "flip decode-0", "prefill is short", True))
    database = open_database(database_url)
    again = ControlStore(database, now_unix_s=lambda: 9.0)
    assert again.slo.current() == Revision(2, FAST, 7.0, "ann", "launch")
    assert [revision.version for revision in again.slo.history(10)] == [2, 1]
    assert [revision.version for revision in again.slo.history(10, before=2)] == [1]
    assert again.slo.revision(1).value == DEFAULT_CLASSES
    assert again.settings.current() == Revision(2, settings, 7.0, "bob", "holidays")
    assert [logged.number for logged in again.decisions.query(10)] == [1]
    database.close()


def test_a_stale_writer_is_told_what_is_in_force(store: ControlStore) -> None:
    store.slo.replace(1, FAST, "ann", "")
    with pytest.raises(StaleVersion) as stale:
        store.slo.replace(1, DEFAULT_CLASSES, "bob", "")
    assert (stale.value.version, stale.value.who) == (2, "ann")
    assert store.slo.current().value == FAST


def test_of_many_writers_at_once_exactly_one_wins(store: ControlStore, database_url: str) -> None:
    outcomes: list[str] = []
    start = threading.Barrier(8)

    def write(name: str) -> None:
        database = open_database(database_url)
        mine = ControlStore(database, now_unix_s=lambda: 8.0)
        start.wait()
        try:
            mine.slo.replace(1, FAST, name, "")
            outcomes.append(name)
        except StaleVersion:
            outcomes.append("stale")
        finally:
            database.close()

    threads = [threading.Thread(target=write, args=(f"writer-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [outcome for outcome in outcomes if outcome != "stale"]
    assert (len(winners), outcomes.count("stale")) == (1, 7)
    assert (store.slo.current().version, store.slo.current().who) == (2, winners[0])


def test_order_is_that_of_versions_when_the_clock_jumps_back(database: Database) -> None:
    times = iter([1e9, 1e9, 2e9, 5.0, 3e9])
    store = ControlStore(database, now_unix_s=lambda: next(times))
    store.slo.replace(1, FAST, "ann", "")
    store.slo.replace(2, DEFAULT_CLASSES, "ann", "")
    assert [(revision.version, revision.at_unix_s) for revision in store.slo.history(9)] == [
        (3, 5.0),
        (2, 2e9),
        (1, 1e9),
    ]
    assert store.slo.current().value == DEFAULT_CLASSES


def test_an_unknown_version_is_not_found(store: ControlStore) -> None:
    with pytest.raises(NotFound, match="no slo version 5"):
        store.slo.revision(5)


@pytest.mark.parametrize("content", [b"no database" * 100, b""])
def test_a_damaged_or_unreachable_store_is_refused_with_a_remedy(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "slo.sqlite" if content else tmp_path / "missing" / "slo.sqlite"
    if content:
        file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=r"cannot use the slo store .*slo\.sqlite.*move it away.*controller\.database"
    ):
        ControlStore(SQLite(file), lambda: 0.0)


def test_classes_that_cannot_be_read_are_refused_at_start(tmp_path: Path) -> None:
    database = SQLite(tmp_path / "slo.sqlite")
    ControlStore(database, lambda: 0.0)
    with database.writing() as tx:
        tx.execute("UPDATE documents SET body = ? WHERE name = 'slo'", ('[{"surprise": 1}]',))
    with pytest.raises(ConfigError, match="cannot use the slo store"):
        ControlStore(database, lambda: 0.0)


def test_decisions_are_found_by_time_and_by_number_and_only_the_newest_are_kept(database: Database) -> None:
    now_s = [100.0]
    log = DecisionLog(database, lambda: now_s[0], max_kept=3)
    for number in range(5):
        log.append(Decision("tune", f"step {number}", "why", number % 2 == 0, {"queue_age_s": math.nan, "rate": 1.5}))
        now_s[0] += 10.0
    assert [logged.decision.action for logged in log.query(10)] == ["step 4", "step 3", "step 2"]
    assert [logged.number for logged in log.query(10, since_unix_s=120.0, until_unix_s=140.0)] == [4, 3]
    [oldest] = log.query(1, before=4)
    assert (oldest.number, oldest.decision.applied) == (3, True)
    assert oldest.decision.inputs == {"queue_age_s": "nan", "rate": 1.5}


def test_decisions_of_two_processes_get_numbers_of_their_own(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    logs = [DecisionLog(database, lambda: 0.0) for database in databases]
    threads = [
        threading.Thread(target=lambda log=log: [log.append(Decision("tune", "", "", True)) for _ in range(10)])
        for log in logs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [logged.number for logged in logs[0].query(100)] == list(range(20, 0, -1))
    for database in databases:
        database.close()


@pytest.mark.parametrize(
    ("budget", "field", "words"),
    [
        (Budget(prefill=PoolBounds(3, 2)), "prefill.min_workers", "min_workers = 3 is above prefill.max_workers = 2"),
        (
            Budget(7, PoolBounds(1), PoolBounds(1)),
            "max_gpus",
            "floor of 8: the smallest pools are 1 prefill \\+ 1 decode",
        ),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused(budget: Budget, field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        budget.check(gpus_per_worker=4)
    assert refused.value.field == field
