"""SLO classes and the verdict on one call. Targets are live and versioned (DESIGN section 9)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

MIN_TARGET_MS = 0.1  # below one loopback round trip (0.26 ms, DESIGN section 8) no target can hold


class Verdict(enum.StrEnum):
    """First miss wins, in this order."""

    MET = "met"
    TTFT = "ttft"
    TPOT = "tpot"
    ITL = "itl"
    E2E = "e2e"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SLO:
    """Targets of one class, milliseconds as the router measures them."""

    name: str
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float | None = None
    e2e_ms: float | None = None
    percentile: float = 0.95  # the share of calls that should meet them
    weight: float = 1.0
    priority: int = 0

    def meets_pace(self, *, tpot_ms: float, itl_p99_ms: float) -> bool:
        """Whether tokens came fast enough, whatever else was missed: what a decode worker answers for."""
        return tpot_ms <= self.tpot_ms and (self.itl_p99_ms is None or itl_p99_ms <= self.itl_p99_ms)

    def verdict(self, *, ttft_ms: float, tpot_ms: float, itl_p99_ms: float, e2e_ms: float) -> Verdict:
        """Judge one finished call; tpot_ms is 0 for one-token answers, which cannot miss it."""
        if ttft_ms > self.ttft_ms:
            return Verdict.TTFT
        if tpot_ms > self.tpot_ms:
            return Verdict.TPOT
        if self.itl_p99_ms is not None and itl_p99_ms > self.itl_p99_ms:
            return Verdict.ITL
        if self.e2e_ms is not None and e2e_ms > self.e2e_ms:
            return Verdict.E2E
        return Verdict.MET


# Starting points an operator overrides: 2 s to a first token and 10 tokens/s, a reading pace, on the CPU demo model;
# batch: only that it ends. The physical floor is the planner's business (a later issue).
DEFAULT_CLASSES = (
    SLO("interactive", ttft_ms=2_000.0, tpot_ms=100.0),
    SLO("batch", ttft_ms=60_000.0, tpot_ms=1_000.0, percentile=0.9, weight=0.1, priority=-10),
)
