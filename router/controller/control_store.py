"""All that must outlive the controller, in one database: SLO classes, settings, decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from baton.slo import DEFAULT_CLASSES
from router.controller.database import Database, open_database
from router.controller.decisions import DecisionLog
from router.controller.settings import ControlSettings, settings_format
from router.controller.slo_store import SLO_SET, SLOSet
from router.controller.versioned import Versioned

SLO_FILE = "slo.sqlite"  # in the run folder, unless controller.database says otherwise


class ControlStore:
    def __init__(
        self,
        database: Database,
        now_unix_s: Callable[[], float],
        configured: Mapping[str, int] | None = None,
        classes: SLOSet = DEFAULT_CLASSES,
    ) -> None:
        """`configured`: workers of each role, which seed a new store's budget; `classes` are its first.

        Raises:
            ConfigError: the database cannot be used.
        """
        self.slo: Versioned[SLOSet] = Versioned(database, replace(SLO_SET, default=classes), now_unix_s)
        self.settings: Versioned[ControlSettings] = Versioned(database, settings_format(configured or {}), now_unix_s)
        self.decisions = DecisionLog(database, now_unix_s)


def database_of(url: str, run_dir: Path) -> Database:
    """The database that `controller.database` names. Raises: ConfigError."""
    return open_database(url or f"sqlite://{(run_dir / SLO_FILE).absolute()}")
