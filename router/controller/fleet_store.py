"""The fleet as the controller last knew it, in a file: a controller that starts again goes on from there.

So routers are not told of an empty fleet, wishes (roles, drains, tunings) are not forgotten, and a process that was replaced
or ended stays so. What changed meanwhile is found out by the Sessions and announcements of the workers. Written whole and
atomically; calls block for a millisecond: run `save` off the event loop.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.request import Role
from router.controller.autoscaler.facts import Tuning
from router.controller.fleet_state import AfterDrain, Member, SavedFleet


class FleetStore:
    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> SavedFleet:
        """Nothing where nothing was saved. Raises: ConfigError: it cannot be understood."""
        try:
            saved = json.loads(self._file.read_text(encoding="utf-8"))
            return _saved_fleet(saved)
        except FileNotFoundError:
            return SavedFleet()
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"cannot read the fleet in {self._file}: {error}; move it away and restart the workers",
                field="controller.run_dir",
            ) from error

    def save(self, fleet: SavedFleet) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(
            json.dumps({**asdict(fleet), "replaced_epochs": sorted(fleet.replaced_epochs)}), encoding="utf-8"
        )
        new.replace(self._file)


def _saved_fleet(saved: dict[str, Any]) -> SavedFleet:
    """Raises: TypeError, ValueError or KeyError: it is none. A file of an earlier release lacks what that did not know."""
    return SavedFleet(
        members=tuple(_member(member) for member in saved["members"]),
        replaced_epochs=frozenset((worker_id, epoch) for worker_id, epoch in saved["replaced_epochs"]),
        ended=tuple(saved.get("ended", ())),
        num_named=dict(saved.get("num_named", {})),
        local_prefill_tokens=saved.get("local_prefill_tokens"),
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
