"""Of several holders of one lease one has it, whatever their clocks do and whenever they die."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import ConfigError, Unavailable
from router.controller.database import Database, Transaction
from router.controller.lease import LEASE_S, MARGIN_S, STANDS_S, Lease


class Clocks:
    def __init__(self) -> None:
        self.unix_s = 1_000.0
        self.monotonic_s = 5.0

    def pass_s(self, seconds: float) -> None:
        self.unix_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


def lease(database: Database, holder: str, clocks: Clocks) -> Lease:
    return Lease(database, "autoscaler", holder, lambda: clocks.unix_s, lambda: clocks.monotonic_s)


def test_one_holds_it_until_it_gives_it_back(database: Database, clocks: Clocks) -> None:
    first, second = lease(database, "a", clocks), lease(database, "b", clocks)
    assert (first.take(), second.take()) == (True, False)
    assert (first.is_held, second.is_held) == (True, False)
    clocks.pass_s(LEASE_S / 2)
    assert (first.take(), second.take()) == (True, False)
    first.give_back()
    assert not first.is_held
    assert (second.take(), first.take()) == (True, False)


def test_of_a_dead_holder_it_runs_out_for_itself_before_others_get_it(database: Database, clocks: Clocks) -> None:
    dead, next_one = lease(database, "a", clocks), lease(database, "b", clocks)
    assert dead.take()
    assert not next_one.take()  # it has seen it: from now on it counts
    clocks.pass_s(LEASE_S + MARGIN_S / 2)
    assert (dead.is_held, next_one.take()) == (False, False)
    clocks.pass_s(MARGIN_S)
    assert next_one.take()
    assert not dead.take()


def test_two_leases_of_one_database_are_two(database: Database, clocks: Clocks) -> None:
    assert lease(database, "a", clocks).take()
    assert Lease(database, "other", "b", lambda: clocks.unix_s, lambda: clocks.monotonic_s).take()


@pytest.mark.parametrize("jump_s", [-3_600.0, -MARGIN_S - 1, 0.0, 3_600.0])
def test_whatever_is_done_to_a_wall_clock_one_acts_and_a_dead_one_is_waited_for_as_long(
    database: Database, clocks: Clocks, jump_s: float
) -> None:
    first, second = lease(database, "a", clocks), lease(database, "b", clocks)
    assert (first.take(), second.take()) == (True, False)
    clocks.unix_s += jump_s
    assert not second.take()
    clocks.pass_s(LEASE_S - 1)
    assert (first.take(), second.take()) == (True, False)
    clocks.pass_s(LEASE_S + MARGIN_S / 2)
    assert (first.is_held, second.take()) == (False, False)
    clocks.pass_s(MARGIN_S)
    assert second.take()


def test_wall_clocks_that_differ_decide_nothing(database: Database) -> None:
    here, there = Clocks(), Clocks()
    there.unix_s -= 1e6
    first, second = lease(database, "a", here), lease(database, "b", there)
    assert (first.take(), second.take(), first.take(), second.take()) == (True, False, True, False)


def test_who_only_comes_counts_from_when_it_came(database: Database, clocks: Clocks) -> None:
    assert lease(database, "a", clocks).take()
    clocks.pass_s(1_000)
    late = lease(database, "b", clocks)
    assert not late.take()
    with pytest.raises(Unavailable) as refused:
        late.check()
    assert refused.value.retry_after_s == STANDS_S
    clocks.pass_s(STANDS_S + 0.1)
    assert late.take()


class Late:
    """A database that begins a write once `meanwhile` has happened."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = database.name
        self.reading = database.reading
        self.meanwhile: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def writing(self) -> Iterator[Transaction]:
        self.meanwhile()
        with self._database.writing() as tx:
            yield tx

    def close(self) -> None: ...


def test_what_was_written_while_one_waited_to_read_it_is_not_dated_back(database: Database, clocks: Clocks) -> None:
    late = Late(database)
    holder, waits = lease(database, "a", clocks), lease(late, "b", clocks)

    def meanwhile() -> None:
        clocks.pass_s(5.0)
        assert holder.take()

    late.meanwhile = meanwhile
    assert not waits.take()
    late.meanwhile = lambda: None
    clocks.pass_s(STANDS_S - 4.0)
    assert (holder.is_held, waits.take()) == (True, False)


class Away:
    """A database that is not there."""

    name = "away"

    @contextlib.contextmanager
    def writing(self) -> Iterator[Transaction]:
        raise Unavailable("the database is away")
        yield

    reading = writing

    def close(self) -> None: ...


def test_a_database_that_is_away_at_the_start_is_one_clear_line(clocks: Clocks) -> None:
    with pytest.raises(ConfigError, match="cannot keep leases: the database is away"):
        lease(Away(), "a", clocks)


def test_a_renewal_under_way_as_its_controller_stops_is_over_before_the_lease_is_given_back(
    database: Database, clocks: Clocks
) -> None:
    slow, began, go_on = Late(database), threading.Event(), threading.Event()
    stops, next_one = lease(slow, "a", clocks), lease(database, "b", clocks)
    assert stops.take()

    def meanwhile() -> None:
        began.set()
        assert go_on.wait(10)

    slow.meanwhile = meanwhile
    with ThreadPoolExecutor() as threads:
        renewal = threads.submit(stops.take)
        assert began.wait(10)
        began.clear()
        given_back = threads.submit(stops.give_back)
        assert not began.wait(0.2)  # it waits for the renewal
        go_on.set()
        assert renewal.result(10)
        given_back.result(10)
    assert not stops.is_held
    assert next_one.take()
