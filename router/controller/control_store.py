"""All that must outlive the controller: SLO classes, settings, decisions. One database, but for what a cluster itself keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from baton.slo import DEFAULT_CLASSES
from router.controller.database import Database, open_database
from router.controller.decisions import DecisionLog
from router.controller.settings import ControlSettings, settings_format
from router.controller.slo_store import SLO_SET, SLOSet
from router.controller.versioned import Format, Versioned, Versions

T = TypeVar("T")

SLO_FILE = "slo.sqlite"  # in the run folder, unless controller.database says otherwise


class Documents(Protocol):
    """Makes the store of one document."""

    def __call__(self, written: Format[T]) -> Versions[T]:
        """Raises: ConfigError: it cannot be used."""
        ...


class ControlStore:
    def __init__(
        self,
        database: Database,
        now_unix_s: Callable[[], float],
        configured: Mapping[str, int] | None = None,
        classes: SLOSet = DEFAULT_CLASSES,
        documents: Documents | None = None,
    ) -> None:
        """`configured`: workers of each role, which seed a new store's budget; `classes` are its first. `documents`: where SLO
        classes and settings are, if not in the database.

        Raises:
            ConfigError: the database cannot be used.
        """

        def in_database(written: Format[T]) -> Versions[T]:
            return Versioned(database, written, now_unix_s)

        make = documents or in_database
        self.slo: Versions[SLOSet] = make(replace(SLO_SET, default=classes))
        self.settings: Versions[ControlSettings] = make(settings_format(configured or {}))
        self.decisions = DecisionLog(database, now_unix_s)


def database_of(url: str, run_dir: Path) -> Database:
    """The database that `controller.database` names. Raises: ConfigError."""
    return open_database(url or f"sqlite://{(run_dir / SLO_FILE).absolute()}")
