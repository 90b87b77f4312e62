"""Where the formulas were wrong: what calls really felt, against what was foreseen. Pure; held in memory.

A pool that should have been enough, that nothing has changed of since long before the calls that are judged came, and whose
calls miss their targets all the same, in two windows that have no call in common, does less than its steps say, for whatever
reason: bursts, long tails, a slow disk. (One window alone may be a queue that chance made.) From then on it is STEP times as
large as steps say, more if need be, up to MOST. That fades so slowly that a size which failed is not tried again within hours.
To blame:

    late first tokens   prefill; decode, where its memory is full, since prompts then wait for it
    late tokens         decode
    both                whatever is late

Nobody is, where a target cannot be kept by any size: its lone prompt takes too long, or its lone step.
Likewise a class that fills slack only and misses its targets is counted in for COUNT_FOR_S.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from baton.request import Role
from router.controller.autoscaler.facts import ClassTraffic
from router.ring import SHORT_S

SETTLED_S = 60.0  # twice the window in which attainment is measured: all in it came after the last change
STEP = 1.1  # one worker of ten: less changes no size of common pools
LEAST = 0.02  # beyond 1; what is left of a lesson after half a day
MOST = 2.0  # what still fails at twice the size fails for another reason
HALF_LIFE_S = 6 * 3_600.0  # a busy time of day
COUNT_FOR_S = 3_600.0
DOUBTS = 2.0  # standard deviations that misses must be beyond what is allowed
LEAST_ALLOWED = (
    1e-3  # share of calls that may miss, also of a class that allows none: chance is judged beside something
)


class Lessons:
    """Of one fleet."""

    def __init__(self) -> None:
        self._factors = dict.fromkeys(Role, 1.0)
        self._learned_s = dict.fromkeys(Role, -math.inf)
        self._suspected_s: dict[tuple[Role, float], float] = {}  # by window, too: classes are judged over their own
        self._counted_s: dict[str, float] = {}  # until when, by class

    def factor(self, role: Role, now_s: float) -> float:
        """How many times the workers that steps ask for."""
        since_s = now_s - self._learned_s[role]
        more = (self._factors[role] - 1.0) * math.exp2(-since_s / HALF_LIFE_S)
        return 1.0 + more if more >= LEAST else 1.0

    def learn(self, role: Role, now_s: float, judged_s: float = SHORT_S) -> None:
        """It was not enough, as the window says that ends now and is so long."""
        since_s = now_s - self._suspected_s.get((role, judged_s), -math.inf)
        if since_s > 2 * judged_s:
            self._suspected_s[role, judged_s] = now_s
        elif since_s >= judged_s and now_s - self._learned_s[role] >= 2 * judged_s:
            self._factors[role] = min(MOST, STEP * self.factor(role, now_s))
            self._learned_s[role] = now_s

    def changed(self) -> None:
        """Sizes have: what was suspected is of others."""
        self._suspected_s.clear()

    def count(self, class_name: str, now_s: float) -> None:
        """It does not get by on slack."""
        self._counted_s[class_name] = now_s + COUNT_FOR_S

    def counted(self, now_s: float) -> frozenset[str]:
        self._counted_s = {name: until_s for name, until_s in self._counted_s.items() if until_s > now_s}
        return frozenset(self._counted_s)

    def kept(self, now_s: float) -> Mapping[str, float]:
        """Classes that are counted, and for how long yet; factors are asked for one by one."""
        return {name: until_s - now_s for name, until_s in self._counted_s.items() if until_s > now_s}

    def restore(self, factors: Mapping[Role, float], counted_s: Mapping[str, float], now_s: float) -> None:
        """As if it had been learned now; a factor that is none counts as 1."""
        for role, factor in factors.items():
            self._factors[role] = min(MOST, factor) if factor > 1.0 else 1.0  # NaN is not
            self._learned_s[role] = now_s
        for name, left_s in counted_s.items():
            if left_s > 0.0:  # NaN is not
                self._counted_s[name] = now_s + min(left_s, COUNT_FOR_S)


def judged_since(classes: Iterable[ClassTraffic], since_s: float) -> list[ClassTraffic]:
    """Those of whom all the calls that were judged came after what changed last, `since_s` ago."""
    return [of_class for of_class in classes if since_s >= SETTLED_S - SHORT_S + of_class.judged_s]


def too_many(num_missed: float, of_class: ClassTraffic) -> bool:
    """Whether more calls missed than the percentile allows, and than chance explains. Of six calls that is three, of 43 seven,
    where one of twenty may: the root of a binomial's deviance, half a call less for whole numbers, is nearly normal however
    few they are (McCullagh and Nelder 1989)."""
    judged, allowed = of_class.num_judged, max(LEAST_ALLOWED, 1 - of_class.slo.percentile)
    if not 1 <= num_missed <= judged < math.inf:  # NaN fails, too
        return False
    missed, met = num_missed - 0.5, judged - num_missed + 0.5
    if missed <= allowed * judged:
        return False
    deviance = 2 * (missed * math.log(missed / judged / allowed) + met * math.log(met / judged / (1 - allowed)))
    return deviance > DOUBTS**2


def blamed(classes: Iterable[ClassTraffic], decode_is_full: bool, roles: Iterable[Role]) -> Mapping[Role, float]:
    """Roles that calls were too late because of, each with the span in which these ended. Classes: those whose targets can be
    kept."""
    found: dict[Role, float] = {}
    for of_class in sorted(classes, key=lambda of_class: of_class.judged_s):
        if too_many(of_class.num_missed_ttft, of_class):
            found.setdefault(Role.DECODE if decode_is_full else Role.PREFILL, of_class.judged_s)
        if too_many(of_class.num_missed_tpot, of_class):
            found.setdefault(Role.DECODE, of_class.judged_s)
    has = set(roles)
    if Role.BOTH in has and found:
        found[Role.BOTH] = min(found.values())
    return {role: judged_s for role, judged_s in found.items() if role in has}
