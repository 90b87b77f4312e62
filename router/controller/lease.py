"""Of several controllers on one database one acts: it holds a lease, a row with its name that it writes anew again and again.

Whoever finds no row, its own, or one that has not changed for STANDS_S writes itself in, within a write transaction; of two that
try at once one wins. A holder that stops gives it back. One that died is waited for, unless it can be seen from here that its
process is gone (holder.py): then its lease is taken over at once. The holder counts from before it asked, those who wait from
after they first saw what it wrote, each on its own monotonic clock. So no two clocks are ever compared, and a holder stops before
others may begin, whatever is done to wall clocks; who begins anew waits for as long, too, since it has seen nothing yet. Calls
block: run them off the event loop, all but `is_held` and `check`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from baton import clock
from baton.errors import ConfigError, Unavailable
from router.controller.database import FIELD, Database, Row, migrate
from router.controller.holder import describe, is_gone

LEASE_S = 10.0  # of a dead holder: as long as a tick, so at most one look at the fleet is missed
MARGIN_S = 2.0  # an act that the holder began in time ends; clocks go at rates that differ by much less
STANDS_S = LEASE_S + MARGIN_S  # what nobody writes anew for that long is nobody's
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
        """`now_unix_s`: for those who read the table; it decides nothing. Raises: ConfigError: the database cannot be used."""
        self._database = database
        self._name = name
        self._holder = holder
        self._now_unix_s = now_unix_s
        self._now_s = now_s
        self._asking = threading.Lock()  # a `take` whose caller was cancelled ends before `give_back` begins
        self._until_s = float("-inf")
        self._seen: Row | None = None  # another's row as it was when it was last asked for
        self._seen_s = 0.0  # and since when it has been like that, at most
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
        if self._seen is None:
            raise Unavailable("this controller does not lead yet; ask again in a moment", retry_after_s=RETRY_S)
        left_s = max(RETRY_S, self._seen_s + STANDS_S - self._now_s())
        raise Unavailable(
            f"this controller does not lead: {describe(self._seen[0])} does, unless it died; then this one does in"
            f" {left_s:.0f} s",
            retry_after_s=left_s,
        )

    def take(self) -> bool:
        """Take it, or keep it for LEASE_S more. Whether it is held. Raises: Unavailable: until it runs out it is held still."""
        with self._asking:
            return self._take()

    def _take(self) -> bool:
        asked_s = self._now_s()
        with self._database.writing() as tx:
            for row in tx.execute("SELECT holder, until_unix_s FROM leases WHERE name = ?", (self._name,)):
                if row[0] != self._holder and self._stands(row) and not is_gone(row[0]):
                    self._until_s = float("-inf")
                    return False
            tx.execute(
                "INSERT INTO leases (name, holder, until_unix_s) VALUES (?, ?, ?)"
                " ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, until_unix_s = excluded.until_unix_s",
                (self._name, self._holder, self._now_unix_s() + STANDS_S),
            )
        self._until_s, self._seen = asked_s + LEASE_S, None
        return True

    def give_back(self) -> None:
        """So that the next holder need not wait. Raises: Unavailable."""
        with self._asking:
            self._until_s = float("-inf")
            with self._database.writing() as tx:
                tx.execute("DELETE FROM leases WHERE name = ? AND holder = ?", (self._name, self._holder))

    def _stands(self, row: Row) -> bool:
        """Whether it changed less than STANDS_S ago, as far as anybody here has seen. Each renewal writes another end."""
        now_s = self._now_s()  # it was read by now: what is written later is not it
        if row != self._seen:
            self._seen, self._seen_s = row, now_s
        return now_s - self._seen_s <= STANDS_S
