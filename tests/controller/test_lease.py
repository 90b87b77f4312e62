"""Of several holders of one lease one has it, whatever their clocks do and whenever they die."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.errors import ConfigError, Unavailable
from router.controller.database import Database, Transaction
from router.controller.lease import LEASE_S, MARGIN_S, Lease


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
    clocks.pass_s(LEASE_S + MARGIN_S / 2)
    assert (dead.is_held, next_one.take()) == (False, False)
    clocks.pass_s(MARGIN_S)
    assert next_one.take()
    assert not dead.take()


def test_two_leases_of_one_database_are_two(database: Database, clocks: Clocks) -> None:
    assert lease(database, "a", clocks).take()
    assert Lease(database, "other", "b", lambda: clocks.unix_s, lambda: clocks.monotonic_s).take()


def test_a_wall_clock_that_jumps_forward_lets_the_next_one_in_and_the_first_one_sees_it(
    database: Database, clocks: Clocks
) -> None:
    first, second = lease(database, "a", clocks), lease(database, "b", clocks)
    assert first.take()
    clocks.unix_s += 3_600
    assert second.take()
    assert (first.take(), first.is_held) == (False, False)


def test_a_wall_clock_that_is_set_back_keeps_a_successor_waiting_no_longer_than_a_lease(
    database: Database, clocks: Clocks
) -> None:
    dead, next_one = lease(database, "a", clocks), lease(database, "b", clocks)
    assert dead.take()
    clocks.unix_s -= MARGIN_S  # as far as clocks may differ, it holds
    assert not next_one.take()
    clocks.unix_s += MARGIN_S - 3_600
    assert next_one.take()
    assert (dead.take(), next_one.take()) == (False, True)


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


class Slow:
    """A database whose next write takes until it is let go."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.name = database.name
        self.reading = database.reading
        self.began, self.go_on = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Transaction]:
        self.began.set()
        assert self.go_on.wait(10)
        with self._database.writing() as tx:
            yield tx

    def close(self) -> None: ...


def test_a_renewal_under_way_as_its_controller_stops_is_over_before_the_lease_is_given_back(
    database: Database, clocks: Clocks
) -> None:
    slow = Slow(database)
    slow.go_on.set()
    stops, next_one = lease(slow, "a", clocks), lease(database, "b", clocks)
    assert stops.take()
    slow.began.clear()
    slow.go_on.clear()
    with ThreadPoolExecutor() as threads:
        renewal = threads.submit(stops.take)
        assert slow.began.wait(10)
        slow.began.clear()
        given_back = threads.submit(stops.give_back)
        assert not slow.began.wait(0.2)  # it waits for the renewal
        slow.go_on.set()
        assert renewal.result(10)
        given_back.result(10)
    assert not stops.is_held
    assert next_one.take()
