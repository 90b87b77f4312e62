"""How long what happens to workers takes: fixed, or drawn anew each time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from bench.workload import Z_95


@dataclass(frozen=True, slots=True)
class Delay:
    """Lognormal by its p50 and p95, as times of starts are skewed; equal = fixed. Seconds."""

    p50_s: float
    p95_s: float = 0.0  # 0 = as p50

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if not 0 <= self.p50_s < math.inf or not (self.p95_s == 0 or 0 < self.p50_s <= self.p95_s < math.inf):
            raise ValueError(f"a delay of p50 {self.p50_s:g} s and p95 {self.p95_s:g} s makes no sense")

    @classmethod
    def parse(cls, text: str) -> Delay:
        """Read "60" or "60,180". Raises: ValueError."""
        try:
            parts = [float(part) for part in text.split(",")]
        except ValueError:
            parts = []
        if len(parts) not in (1, 2):
            raise ValueError(f"{text!r} is no delay: give SECONDS, or P50,P95")
        return cls(*parts)

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.p50_s:g},{self.p95_s:g}" if self.p95_s > self.p50_s else f"{self.p50_s:g}"

    def draw(self, rng: random.Random) -> float:
        if self.p95_s <= self.p50_s:
            return self.p50_s
        return self.p50_s * math.exp(math.log(self.p95_s / self.p50_s) / Z_95 * rng.gauss(0, 1))


@dataclass(frozen=True, slots=True)
class Delays:
    """Of one fleet. Start-up: 60 s for weights from disk (DESIGN section 9's lead); the rest as measured, DESIGN section 10."""

    start_up: Delay = Delay(60.0)  # from Create to ready
    wake: Delay = Delay(1.0)  # of a standby, whose weights are loaded
    flip: Delay = Delay(1.0)  # once idle
    detect: Delay = Delay(1.5)  # until a death is noticed: three heartbeats
    restart: Delay = Delay(60.0)  # from a death to ready again, where somebody restarts it: a start-up
    drain_limit_s: float = 600.0  # then what still runs on a draining worker is moved
