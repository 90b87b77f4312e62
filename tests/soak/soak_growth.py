"""What long-lived processes hold at each rest of a soak, and whether it grows. Pure but for `footprint`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    rss_bytes: int
    num_fds: int
    num_threads: int


def footprint(pid: int) -> Footprint:
    process = psutil.Process(pid)
    with process.oneshot():
        return Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the least-squares line through (x, y); 0 where there is no line."""
    if len(points) < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
