"""The fleet as the controller last knew it, in a file: a controller that starts again goes on from there.

So routers are not told of an empty fleet, wishes (roles, drains, tunings) are not forgotten, and a process that was replaced
or ended stays so. What changed meanwhile is found out by the Sessions and announcements of the workers. Written whole and
atomically; calls block for a millisecond: run `save` off the event loop.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from baton.errors import ConfigError
from baton.request import Role
from router.controller.autoscaler.facts import Tuning
from router.controller.fleet_state import AfterDrain, Member, SavedFleet


class Fleets(Protocol):
    """Where the fleet outlives a controller. Calls block."""

    def load(self) -> SavedFleet:
        """Nothing where nothing was saved. Raises: ConfigError: it cannot be understood."""
        ...

    def save(self, fleet: SavedFleet) -> None:
        """Raises: OSError: it is not saved."""
        ...


class FleetStore:
    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> SavedFleet:
        """Nothing where nothing was saved. Raises: ConfigError: it cannot be understood."""
        try:
            return fleet_from_json(self._file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return SavedFleet()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot read the fleet in {self._file}: {error}; move it away and restart the workers",
                field="controller.run_dir",
            ) from error

    def save(self, fleet: SavedFleet) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(fleet_to_json(fleet), encoding="utf-8")
        new.replace(self._file)


def fleet_to_json(fleet: SavedFleet) -> str:
    return json.dumps({**asdict(fleet), "replaced_epochs": sorted(fleet.replaced_epochs)})


def fleet_from_json(text: str) -> SavedFleet:
    """Raises: TypeError, ValueError or KeyError: it is none. What an earlier release wrote lacks what that did not know."""
    saved: dict[str, Any] = json.loads(text)
    return SavedFleet(
        members=tuple(_member(member) for member in saved["members"]),
        replaced_epochs=frozenset((worker_id, epoch) for worker_id, epoch in saved["replaced_epochs"]),
        ended=tuple(saved.get("ended", ())),
        num_named=dict(saved.get("num_named", {})),
        local_prefill_tokens=saved.get("local_prefill_tokens"),
        surged_from=dict(saved.get("surged_from", {})),
    )


def _member(fields: dict[str, Any]) -> Member:
    tuning = fields.get("tuning")
    return Member(
        **{
            **fields,
            "role": Role(fields["role"]),
            "after_drain": AfterDrain(fields.get("after_drain", "")),
            "tuning": None if tuning is None else Tuning(**tuning),
        }
    )
