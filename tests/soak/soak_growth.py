"""What long-lived processes hold at each rest of a soak, and whether it grows. Pure but for `footprint`.

Memory is judged by the slope of the least-squares line of resident bytes over calls, without the rests of the first third,
in which allocators, gRPC's pools and prefix caches grow to their working size. Descriptors and threads must be flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

# gRPC and torch keep small pools that grow on demand; a leak per kill would be tens to hundreds here.
MAX_MORE_FDS, MAX_MORE_THREADS = 16, 8


@dataclass(frozen=True, slots=True)
class Footprint:
    rss_bytes: int
    num_fds: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class Rest:
    """One look at the long-lived processes, when nothing was under way."""

    num_calls: int  # so far
    held: Mapping[str, Footprint]  # by process


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


def rss_slopes(rests: Sequence[Rest]) -> dict[str, float]:
    """Bytes per call, by process."""
    settled = rests[len(rests) // 3 :]
    names = rests[0].held if rests else ()
    return {name: slope([(rest.num_calls, rest.held[name].rss_bytes) for rest in settled]) for name in names}


def growth(rests: Sequence[Rest], max_bytes_per_call: float) -> Iterator[str]:
    """What grows and should not."""
    for name, bytes_per_call in rss_slopes(rests).items():
        if bytes_per_call > max_bytes_per_call:
            yield f"{name} grows by {bytes_per_call:.0f} bytes per call; the limit is {max_bytes_per_call:.0f}"
    if not rests:
        return
    for name, first in rests[0].held.items():
        last = rests[-1].held[name]
        if last.num_fds > first.num_fds + MAX_MORE_FDS:
            yield f"{name} had {first.num_fds} descriptors and has {last.num_fds}"
        if last.num_threads > first.num_threads + MAX_MORE_THREADS:
            yield f"{name} had {first.num_threads} threads and has {last.num_threads}"
