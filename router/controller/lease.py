"""Of several controllers on one database one acts: it holds a lease, a row with its name and an end.

Whoever finds the row free, run out or its own writes itself in, within a write transaction; of two that try at once one wins. An
end that no holder can have written is of a wall clock that was set back since, and counts as run out. A holder that stops gives
it back. One that died is waited for, unless it can be seen from here that its process is gone (holder.py): then its lease is
taken over at once. The holder counts from before it asked, on its own monotonic clock, so it stops before others may begin, as
long as wall clocks that share a database go at one rate and differ by less than MARGIN_S. Calls block: run them off the event
loop, all but `is_held` and `check`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from baton import clock
from baton.errors import ConfigError, Unavailable
from router.controller.database import FIELD, Database, migrate
from router.controller.holder import describe, is_gone

LEASE_S = 10.0  # of a dead holder: as long as a tick, so at most one look at the fleet is missed
MARGIN_S = 2.0  # that wall clocks may differ by; NTP keeps them within milliseconds
RETRY_S = 1.0  # a lease that nobody holds is asked for each second (autoscale_loop.py)

MIGRATIONS = (
    ("CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, until_unix_s DOUBLE PRECISION NOT NULL)",),
)


class Leadership(Protocol):
    """What allows this controller to act on the fleet. `take` and `give_back` block."""

    @property
    def is_held(self) -> bool: ...

    def check(self) -> None:
        """Raises: Unavailable: it may not act, saying who may and when to ask again."""
        ...

    def take(self) -> bool:
        """Take it, or keep it for LEASE_S more. Whether it is held. Raises: Unavailable: until it runs out it is held still."""
        ...

    def give_back(self) -> None:
        """So that the next holder need not wait. Raises: Unavailable."""
        ...


class Alone:
    """Of a controller that shares its fleet with nobody."""

    is_held = True

    def check(self) -> None:
        """It always may."""

    def take(self) -> bool:
        return True

    def give_back(self) -> None:
        """There is nobody to give it to."""


ALONE = Alone()


class Lease:
    """One name's, as one process sees it."""

    def __init__(
        self,
        database: Database,
        name: str,
        holder: str,
        now_unix_s: Callable[[], float] = clock.unix_s,
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        """Raises: ConfigError: the database cannot be used."""
        self._database = database
        self._name = name
        self._holder = holder
        self._now_unix_s = now_unix_s
        self._now_s = now_s
        self._asking = threading.Lock()  # a `take` whose caller was cancelled ends before `give_back` begins
        self._until_s = float("-inf")
        self._other: tuple[str, float] | None = None  # who held it when it was last asked for, and until when (unix)
        try:
            migrate(database, "leases", MIGRATIONS)
        except Unavailable as error:
            raise ConfigError(f"cannot keep leases: {error.message}", field=FIELD) from error

    @property
    def is_held(self) -> bool:
        return self._now_s() < self._until_s

    def check(self) -> None:
        """As Leadership.check: of another's lease, what is left of it. Its holder may renew it, or be dead."""
        if self.is_held:
            return
        if self._other is None:
            raise Unavailable("this controller does not lead yet; ask again in a moment", retry_after_s=RETRY_S)
        holder, until_unix_s = self._other
        left_s = min(max(RETRY_S, until_unix_s - self._now_unix_s()), LEASE_S + 2 * MARGIN_S)
        raise Unavailable(
            f"this controller does not lead: {describe(holder)} does, unless it died; then this one does in {left_s:.0f} s",
            retry_after_s=left_s,
        )

    def take(self) -> bool:
        """Take it, or keep it for LEASE_S more. Whether it is held. Raises: Unavailable: until it runs out it is held still."""
        with self._asking:
            return self._take()

    def _take(self) -> bool:
        asked_s = self._now_s()
        with self._database.writing() as tx:
            now_unix_s = self._now_unix_s()
            rows = tx.execute("SELECT holder, until_unix_s FROM leases WHERE name = ?", (self._name,))
            for holder, until_unix_s in rows:
                if holder != self._holder and _holds(until_unix_s, now_unix_s) and not is_gone(holder):
                    self._until_s, self._other = float("-inf"), (holder, until_unix_s)
                    return False
            tx.execute(
                "INSERT INTO leases (name, holder, until_unix_s) VALUES (?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until_unix_s = excluded.until_unix_s",
                (self._name, self._holder, now_unix_s + LEASE_S + MARGIN_S),
            )
        self._until_s, self._other = asked_s + LEASE_S, None
        return True

    def give_back(self) -> None:
        """So that the next holder need not wait. Raises: Unavailable."""
        with self._asking:
            self._until_s = float("-inf")
            with self._database.writing() as tx:
                tx.execute("DELETE FROM leases WHERE name = ? AND holder = ?", (self._name, self._holder))


def _holds(until_unix_s: float, now_unix_s: float) -> bool:
    """Written LEASE_S + MARGIN_S ahead, by a clock that is MARGIN_S ahead of this one at most."""
    return now_unix_s < until_unix_s <= now_unix_s + LEASE_S + 2 * MARGIN_S
