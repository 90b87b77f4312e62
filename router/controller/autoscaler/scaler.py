"""Who decides sizes, and how long things take that it decides. The seam between policies and whoever carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.facts import FleetFacts


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, seconds. Defaults are DESIGN section 9's; start-ups are measured live."""

    tick_s: float = 10.0  # between two looks
    start_up_s: float = 60.0  # from Create to ready
    flip_s: float = 1.0  # once idle
    dwell_s: float = 60.0  # between flips, at least
    shrink_after_s: float = 300.0  # that a smaller size must have been enough, at most: patience.py
    # That machines need to bring a lost worker back, at most: they retry each 15 s (ray_fleet.py, REVIVE_S), and a start may
    # take controller.worker_start_timeout_s = 120 s
    bring_back_s: float = 135.0


class Scaler(Protocol):
    """Decides sizes. Ours is `Autoscaler`; benches bring baselines."""

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        """What to do now, in order. May remember what it saw; must be told of every tick."""
        ...
