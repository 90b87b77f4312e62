"""The fleet as the controller last knew it, in a file: a controller that starts again goes on from there.

So routers are not told of an empty fleet, wishes (roles, drains) are not forgotten, and a process that was replaced stays
replaced. What changed meanwhile is found out by the Sessions and announcements of the workers. Written whole and atomically;
calls block for a millisecond: run `save` off the event loop.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.errors import ConfigError
from baton.request import Role
from router.controller.fleet_state import Member


@dataclass(frozen=True, slots=True)
class SavedFleet:
    members: tuple[Member, ...] = ()
    replaced_epochs: frozenset[tuple[str, int]] = frozenset()


class FleetStore:
    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> SavedFleet:
        """Nothing where nothing was saved. Raises: ConfigError: it cannot be understood."""
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            members = tuple(Member(**{**member, "role": Role(member["role"])}) for member in saved["members"])
            return SavedFleet(members, frozenset((worker_id, epoch) for worker_id, epoch in saved["replaced_epochs"]))
        except FileNotFoundError:
            return SavedFleet()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot read the fleet in {self._file}: {error}; move it away and restart the workers",
                field="controller.run_dir",
            ) from error

    def save(self, fleet: SavedFleet) -> None:
        new = self._file.with_suffix(".new")
        members = [asdict(member) for member in fleet.members]
        new.write_text(
            json.dumps({"members": members, "replaced_epochs": sorted(fleet.replaced_epochs)}), encoding="utf-8"
        )
        new.replace(self._file)
