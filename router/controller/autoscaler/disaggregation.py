"""Falls back to prefilling where prompts are decoded while disaggregation does not pay, and comes back when it does. Pure.

    apart     prompts go to prefill workers, as configured
    local     a prompt may also be prefilled on the decode worker, however long it is; placement takes whichever is sooner

A Verdict compares the two on the same calls. What is done follows the sign of a difference that is certain and worth it, and
then only when CONFIRMATIONS verdicts in a row say so, DWELL_PERIODS after the last change. Between the two lines nothing is
done, so traffic at which both are alike never makes it flap. A verdict that is old, or of another traffic's layout, says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from router.controller.autoscaler.acts import LocalPrefill, Proposal
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import FleetFacts
from router.controller.autoscaler.scaler import Times

WHOLE_PROMPTS = 1 << 24  # tokens: above the longest context there is
WORTH = 0.01  # of all calls, that must be met more: a point, as DESIGN sections 1 and 9 count attainment
CONFIRMATIONS = (
    2  # verdicts: each is of five minutes of traffic, and two of them a chance of 1 in 400 rather than 1 in 20
)
# Between two verdicts. They look at a window of 300 s, so at this pace none overlaps the one before; controller.pd_period_s
PERIOD_S = 300.0
DWELL_PERIODS = 2.0  # one verdict is wholly of what was changed
FRESH_PERIODS = (
    3.0  # for which a verdict counts where no newer one can be made; a period is as long as one really takes
)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two layouts, in shares of the same calls that meet their targets; positive: the other one is better."""

    mean: float
    low: float  # 95 %
    high: float

    @property
    def is_gain(self) -> bool:
        return self.low > 0 and self.mean >= WORTH

    @property
    def is_loss(self) -> bool:
        return self.high < 0 and self.mean <= -WORTH


@dataclass(frozen=True, slots=True)
class LayoutGoodput:
    """Of one layout on this traffic."""

    workers: Mapping[str, int]  # by role
    local_prefill_tokens: int
    goodput: float  # calls a second within their targets
    low: float  # 95 %
    high: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether prefill and decode apart pay on the traffic of late."""

    at_s: float  # of the caller's clock: when the traffic was measured
    present: str  # the layout that is in force
    layouts: Mapping[str, LayoutGoodput]  # apart, local, colocated: what could be compared
    local: Difference | None  # local less apart
    colocated: Difference | None  # the same GPUs colocated, less apart
    rate: float  # calls a second that came
    num_calls: int  # simulated, of each layout
    assumptions: tuple[str, ...] = ()
    unknown: Mapping[str, str] = field(default_factory=dict)  # layouts that were not compared, and why
    lasts_s: float = FRESH_PERIODS * PERIOD_S  # afterwards it says nothing

    def is_fresh(self, now_s: float) -> bool:
        return 0 <= now_s - self.at_s <= self.lasts_s

    @property
    def pays(self) -> bool | None:
        """None: no alternative is better or worse for sure by a point."""
        found = [difference for difference in (self.local, self.colocated) if difference is not None]
        if any(difference.is_gain for difference in found):
            return False
        return True if found and all(difference.is_loss for difference in found) else None


class Disaggregation:
    """A Scaler of one lever: local prefill."""

    def __init__(self, verdict: Callable[[], Verdict | None], apart_tokens: int, period_s: float = PERIOD_S) -> None:
        """`verdict`: the newest, made each `period_s`; None where there is none. `apart_tokens`: the limit that belongs to
        `apart`."""
        self._verdict = verdict
        self._apart_tokens = apart_tokens
        self._dwell_s = DWELL_PERIODS * period_s
        self._seen_s = float("-inf")  # the last verdict that counted
        self._wish: int | None = None
        self._num_wishes = 0
        self._limit: int | None = None  # of the last look
        self._changed_s = float("-inf")

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        """At most one proposal; it comes again until facts show that it was done, or a verdict says otherwise."""
        if self._limit is not None and facts.local_prefill_tokens != self._limit:
            self._changed_s = facts.now_s
        self._limit = facts.local_prefill_tokens
        verdict = self._verdict()
        if verdict is None or verdict.local is None or not verdict.is_fresh(facts.now_s):
            self._wish, self._num_wishes = None, 0
            return ()
        if verdict.at_s != self._seen_s and verdict.at_s >= self._changed_s:  # else it is of what was before
            self._seen_s = verdict.at_s
            self._count(self._wanted(verdict.local))
        if self._wish is None or self._wish == self._limit or self._num_wishes < CONFIRMATIONS:
            return ()
        if facts.now_s - self._changed_s < self._dwell_s:
            return ()
        return (self._proposal(self._wish, verdict, verdict.local),)

    def _wanted(self, local: Difference) -> int | None:
        if local.is_gain:
            return WHOLE_PROMPTS
        return self._apart_tokens if local.is_loss else None

    def _count(self, wish: int | None) -> None:
        self._num_wishes = self._num_wishes + 1 if wish == self._wish else 1
        self._wish = wish

    def _proposal(self, max_tokens: int, verdict: Verdict, local: Difference) -> Proposal:
        does = "does not pay" if local.mean > 0 else "pays again"
        points = 100 * abs(local.mean)
        more = "more" if local.mean > 0 else "fewer"
        return Proposal(
            LocalPrefill(max_tokens),
            f"prefill apart from decode {does} on this traffic: {points:.1f} points {more} calls meet their targets with "
            "local prefill",
            {
                "rate_per_s": verdict.rate,
                "local_less_apart": local.mean,
                "low": local.low,
                "high": local.high,
                "num_calls": verdict.num_calls,
                "num_verdicts": self._num_wishes,
            },
        )


class FallingBack:
    """An Autoscaler that also falls back to local prefill; sizes come first, for they say why calls wait."""

    def __init__(self, sizes: Autoscaler, disaggregation: Disaggregation) -> None:
        self._sizes = sizes
        self._disaggregation = disaggregation

    def measured(self, times: Times) -> None:
        self._sizes.measured(times)

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        return [*self._sizes.look(facts), *self._disaggregation.look(facts)]
