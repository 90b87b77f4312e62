"""What workers that decode hold: now, and on average of late. Pure.

Calls come by chance, so the sequences of a pool vary, and nothing has changed: of 36 on average there are 50 every few minutes.
Whoever sizes a pool by what it holds goes by the mean, unless now is further from it than chance explains (sizes.py). Counts
are of the whole pool, so that its size may change meanwhile.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from router.ring import LONG_S


@dataclass(frozen=True, slots=True)
class Held:
    """By a pool."""

    num_seqs: float
    kv_workers: float  # whose memory it would fill: 1.5 = one and a half


@dataclass(frozen=True, slots=True)
class Holding:
    now: Held
    mean: Held  # of the last LONG_S


@dataclass(slots=True)
class Holdings:
    """One pool's."""

    _seen: deque[tuple[float, Held]] = field(default_factory=deque)

    def look(self, held: Held | None, now_s: float) -> Holding | None:
        """`held`: by now; None: nobody says."""
        while self._seen and self._seen[0][0] < now_s - LONG_S:
            self._seen.popleft()
        if held is None:
            return None
        self._seen.append((now_s, held))
        num = len(self._seen)
        num_seqs = math.fsum(seen.num_seqs for _, seen in self._seen)
        kv_workers = math.fsum(seen.kv_workers for _, seen in self._seen)
        return Holding(held, Held(num_seqs / num, kv_workers / num))

    def forget(self) -> None:
        self._seen.clear()
