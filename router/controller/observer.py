"""One view of what all routers saw, per SLO class, pool and worker, and how many calls came since the last look. Pure.

A router's windows replace its last ones. One that was not heard of for FRESH_S is gone and stops counting, however good its
last word was. Arrivals are counted from the routers' totals: what a lost report said is in the next one, and a router's first
word is where its counting starts, so a controller that was away does not take an hour's calls for a burst.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from router.windows import ClassWindow, RouterWindows, WorkerWindow, add_classes, add_workers

FRESH_S = 5.0  # routers report each second, at the least each 4 s (router/control_client.py)
MAX_ROUTERS = 256  # more than a controller can hear each second; the ones heard of longest ago go first

Window = TypeVar("Window")


@dataclass(frozen=True, slots=True)
class FleetView:
    """Sums over the routers that live; each tuple is empty where nothing happened of late."""

    num_routers: int
    classes: tuple[ClassWindow, ...]  # by name, then by window
    pools: tuple[WorkerWindow, ...]  # by role; worker_id is the role's name
    workers: tuple[WorkerWindow, ...]
    oldest_queued_s: float


@dataclass(slots=True)
class _Router:
    heard_s: float
    windows: RouterWindows


class Observer:
    """Of one fleet."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}  # the one heard of longest ago first
        self._arrived: Counter[str] = Counter()

    def heard(self, router_id: str, windows: RouterWindows, now_s: float) -> None:
        self._forget(now_s)
        known = self._routers.pop(router_id, None)
        before = dict(known.windows.arrived if known else windows.arrived)
        for name, total in windows.arrived:
            if (num_new := round(total - before.get(name, 0))) > 0:
                self._arrived[name] += num_new
        self._routers[router_id] = _Router(now_s, windows)
        if len(self._routers) > MAX_ROUTERS:
            self._routers.pop(next(iter(self._routers)))

    def take_arrivals(self) -> Counter[str]:
        """Calls by class since this was asked last."""
        taken, self._arrived = self._arrived, Counter()
        return taken

    def hears(self, now_s: float) -> bool:
        """Whether any router lives."""
        self._forget(now_s)
        return bool(self._routers)

    def view(self, now_s: float) -> FleetView:
        self._forget(now_s)
        told = [router.windows for router in self._routers.values()]
        workers = _added(
            (w for windows in told for w in windows.workers), lambda w: (w.role, w.worker_id, w.window_s), add_workers
        )
        return FleetView(
            num_routers=len(told),
            classes=_added(
                (c for windows in told for c in windows.classes), lambda c: (c.class_name, c.window_s), add_classes
            ),
            pools=_added(
                workers, lambda w: (w.role, w.window_s), lambda of_role: add_workers(of_role, named_by_role=True)
            ),
            workers=workers,
            oldest_queued_s=max((windows.oldest_queued_s for windows in told), default=0.0),
        )

    def _forget(self, now_s: float) -> None:
        gone = [name for name, router in self._routers.items() if now_s - router.heard_s > FRESH_S]
        for name in gone:
            del self._routers[name]


def _added(
    windows: Iterable[Window], key: Callable[[Window], Hashable], add: Callable[[list[Window]], Window]
) -> tuple[Window, ...]:
    """Sums of windows with equal keys, in the order of the keys."""
    groups: dict[Hashable, list[Window]] = {}
    for window in windows:
        groups.setdefault(key(window), []).append(window)
    return tuple(add(groups[name]) for name in sorted(groups, key=str))
