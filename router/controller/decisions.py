"""What the autoscaler decided, from what inputs and why: appended, bounded, read back by time or by number.

The newest MAX_KEPT are kept. Numbers grow by one with each; they are the order, whatever the clock does. Calls block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.errors import ConfigError, Unavailable
from router.controller.database import FIELD, Database, Row, migrate

MAX_KEPT = 100_000  # some 30 MB; at one each 10 s more than a week
MAX_NUMBER = 2**53  # as versioned.py

MIGRATIONS = (
    (
        "CREATE TABLE decisions (number BIGINT PRIMARY KEY, at_unix_s DOUBLE PRECISION NOT NULL, lever TEXT NOT NULL,"
        " body TEXT NOT NULL)",
        "CREATE INDEX decisions_by_time ON decisions (at_unix_s)",
    ),
)

Input = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Decision:
    """One act, or, where `applied` is false, what would have been done."""

    lever: str  # tune | local_prefill | flip | standby | create | drain | ...: DESIGN section 9, step 6
    action: str  # "flip decode-3 to prefill"
    reason: str
    applied: bool
    inputs: Mapping[str, Input] = field(default_factory=dict)  # what it was decided from, units in the names


@dataclass(frozen=True, slots=True)
class LoggedDecision:
    number: int
    at_unix_s: float
    decision: Decision


class DecisionLog:
    def __init__(self, database: Database, now_unix_s: Callable[[], float], max_kept: int = MAX_KEPT) -> None:
        """Raises: ConfigError: the database cannot be used."""
        self._database = database
        self._now_unix_s = now_unix_s
        self._max_kept = max_kept
        try:
            migrate(database, "decisions", MIGRATIONS)
        except Unavailable as error:
            raise ConfigError(f"cannot keep decisions: {error.message}", field=FIELD) from error

    def append(self, decision: Decision) -> LoggedDecision:
        """Raises: Unavailable."""
        with self._database.writing() as tx:
            [(newest,)] = tx.execute("SELECT COALESCE(MAX(number), 0) FROM decisions")
            logged = LoggedDecision(int(newest) + 1, self._now_unix_s(), decision)
            tx.execute(
                "INSERT INTO decisions (number, at_unix_s, lever, body) VALUES (?, ?, ?, ?)",
                (logged.number, logged.at_unix_s, decision.lever, _encode(decision)),
            )
            tx.execute("DELETE FROM decisions WHERE number <= ?", (logged.number - self._max_kept,))
        return logged

    def query(
        self, limit: int, *, since_unix_s: float = 0.0, until_unix_s: float = math.inf, before: int = MAX_NUMBER
    ) -> list[LoggedDecision]:
        """Those made in [since, until) and numbered below `before`, newest first."""
        with self._database.reading() as tx:
            rows = tx.execute(
                "SELECT number, at_unix_s, body FROM decisions WHERE at_unix_s >= ? AND at_unix_s < ? AND number < ?"
                " ORDER BY number DESC LIMIT ?",
                (since_unix_s, until_unix_s, before, limit),
            )
        return [_logged(row) for row in rows]


def _encode(decision: Decision) -> str:
    """A number that is none is written as text: the decision was made from it all the same."""
    inputs = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in decision.inputs.items()
    }
    fields = {
        "lever": decision.lever,
        "action": decision.action,
        "reason": decision.reason,
        "applied": decision.applied,
        "inputs": inputs,
    }
    return json.dumps(fields, allow_nan=False)


def _logged(row: Row) -> LoggedDecision:
    number, at_unix_s, body = row
    return LoggedDecision(int(number), float(at_unix_s), Decision(**json.loads(body)))
