"""What an autoscaler has found out and the next one would have to find out again, as plain values. Pure.

Ages and remainders, no instants: clocks of two processes have nothing in common. Whoever restores must doubt every value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeptPool:
    """Of one role."""

    num_regrets: int = 0  # patience.py
    wanted: tuple[tuple[float, int], ...] = ()  # sizes that were wanted, and how many seconds ago, oldest first
    lesson: float = 1.0  # lessons.py: the factor by then


@dataclass(frozen=True, slots=True)
class Kept:
    pools: Mapping[str, KeptPool] = field(default_factory=dict)  # by name of the role
    counted_s: Mapping[str, float] = field(
        default_factory=dict
    )  # classes that do not get by on slack, and for how long yet
