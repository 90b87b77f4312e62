"""In what order calls leave the waiting room. Pure.

    1 band     the highest priority that waits; one of a lower band whose oldest call waits longer than AGEING_S comes in
               between, with at most AGED_SHARE of the tokens, so that nobody starves and the price is known
    2 tenant   within a band the one with the least tokens served, per weight: virtual token counters (VTC; Sheng et al.,
               "Fairness in Serving Large Language Models", OSDI 2024)
    3 call     a tenant's own calls in the order of their arrival

A tenant's counter rises by the tokens of a call that leaves here, and by output tokens as they come (`charge`). A tenant that
starts to wait has its counter lifted to the level at which its band is served, less `credit`: what it left unused is not
saved up beyond that. The paper lifts all the way. The credit lets a tenant that stays below its share be served as if it
were alone while others ask for more than theirs, and bounds what its burst costs them (docs/overload.md).

Removing a call anywhere is O(1), the next one O(log tenants) amortised: counters only rise, so a heap entry that is out of
date is found at the top and put back.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.tenants import Tenant

AGEING_S = 30.0  # half of the batch class's TTFT target (baton/slo.py): who waits that long can still meet it
EXACT = 64  # tenants, whose sums take 10 us; a forecast must not cost more than serving
AGED_SHARE = 1 / 16  # of tokens, for those who have aged: 6 % of its capacity is what a busy band pays at most


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in the queue, or on its way there."""

    tenant: Tenant
    band: int  # priority, higher first
    tokens: float  # of its prompt, to be computed
    since_s: float


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True)
class _Flow:
    """One tenant. Never forgotten: there are as many as tenants, and one that overdrew must not come back as new."""

    served: float = 0.0  # tokens by weight
    weight: float = 1.0
    num_waiting: int = 0


@dataclass(slots=True)
class _Line(Generic[T]):
    """One tenant's calls in one band."""

    flow: _Flow
    calls: OrderedDict[int, T] = field(default_factory=OrderedDict)  # by id()
    tokens: float = 0.0


@dataclass(slots=True)
class _Band(Generic[T]):
    lines: dict[str, _Line[T]] = field(default_factory=dict)  # of tenants that wait here
    by_age: OrderedDict[int, T] = field(default_factory=OrderedDict)
    ranks: list[tuple[float, str]] = field(
        default_factory=list
    )  # heap of (served, tenant); out of date until at the top
    level: float = 0.0  # `served` of whom was served last
    tokens: float = 0.0

    def lifted(self, flow: _Flow, credit: float) -> float:
        return max(flow.served, self.level - credit)

    def first(self) -> T:
        """Of the tenant that is served next. The band is not empty."""
        while True:
            served, name = self.ranks[0]
            line = self.lines.get(name)
            if line is None:
                heapq.heappop(self.ranks)
            elif served != line.flow.served:
                heapq.heapreplace(self.ranks, (line.flow.served, name))
            else:
                return next(iter(line.calls.values()))


class FairQueue(Generic[T]):
    """Holds calls and knows whose turn is next."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._bands: dict[int, _Band[T]] = {}
        self._order: list[int] = []  # bands in which someone waits, lowest first
        self._aged_tokens = 0.0  # what may go to the aged now; below 0: what they had in advance
        self._num_waiting = 0
        self.tokens = 0.0
        self.weight = 0.0  # of the tenants that wait

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def calls(self) -> list[T]:
        """Everybody, oldest first within each band."""
        return [call for band in self._order for call in self._bands[band].by_age.values()]

    def oldest_since_s(self) -> float | None:
        """When the oldest came; None: nobody waits. Bands hold theirs in order of coming."""
        return min((next(iter(self._bands[band].by_age.values())).since_s for band in self._order), default=None)

    # -- coming and going --------------------------------------------------------------------------------------------

    def push(self, call: T, credit: float = 0.0) -> None:
        """Let `call` wait; `credit`: tokens by weight."""
        band = self._bands.setdefault(call.band, _Band())
        if not band.by_age:
            insort(self._order, call.band)
        flow = self._flow(call.tenant)
        if not flow.num_waiting:
            flow.served = band.lifted(flow, credit)
            self.weight += flow.weight
        flow.num_waiting += 1
        self._num_waiting += 1
        line = band.lines.get(call.tenant.name)
        if line is None:
            line = band.lines[call.tenant.name] = _Line(flow)
            heapq.heappush(band.ranks, (flow.served, call.tenant.name))
        line.calls[id(call)] = band.by_age[id(call)] = call
        line.tokens += call.tokens
        band.tokens += call.tokens
        self.tokens += call.tokens

    def remove(self, call: T) -> bool:
        """It waits no more, and was not served. False where it does not wait."""
        band = self._bands.get(call.band)
        if band is None or band.by_age.pop(id(call), None) is None:
            return False
        line = band.lines[call.tenant.name]
        del line.calls[id(call)]
        line.tokens -= call.tokens
        band.tokens -= call.tokens
        self.tokens -= call.tokens
        line.flow.num_waiting -= 1
        self._num_waiting -= 1
        if not line.flow.num_waiting:
            self.weight -= line.flow.weight
        if not line.calls:
            del band.lines[call.tenant.name]
        if not band.by_age:
            self._order.remove(call.band)
            band.tokens = 0.0  # rounding errors end here
        if not self._num_waiting:
            self.tokens = self.weight = 0.0
        return True

    def take(self, call: T) -> None:
        """It is served now: the one that `head` named, and nobody has come or gone since."""
        is_aged = call.band != self._order[-1]
        band = self._bands[call.band]
        self.remove(call)
        band.level = max(band.level, self._flow(call.tenant).served)
        self.charge(call.tenant, call.tokens)
        if is_aged:
            self._aged_tokens -= call.tokens
        elif self._aged_tokens < 0:
            self._aged_tokens = min(0.0, self._aged_tokens + AGED_SHARE / (1 - AGED_SHARE) * call.tokens)

    def pass_by(self, call: T, credit: float = 0.0) -> None:
        """Serve a call that need not wait because nobody does."""
        band = self._bands.setdefault(call.band, _Band())
        flow = self._flow(call.tenant)
        flow.served = band.lifted(flow, credit)
        band.level = max(band.level, flow.served)
        self.charge(call.tenant, call.tokens)

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """`tenant` was served; below 0 where it had been charged too much."""
        flow = self._flow(tenant)
        flow.served += max(tokens, -flow.served * flow.weight) / flow.weight

    # -- who is next -------------------------------------------------------------------------------------------------

    def head(self, now_s: float) -> T | None:
        """Who leaves next; None: nobody waits."""
        if not self._order:
            return None
        if self._aged_tokens >= 0:
            for priority in self._order[:-1]:
                oldest = next(iter(self._bands[priority].by_age.values()))
                if now_s - oldest.since_s > AGEING_S:
                    return oldest
        return self._bands[self._order[-1]].first()

    def ahead(self, tenant: Tenant, priority: int, credit: float = 0.0) -> float:
        """Tokens that will be served before a call of `tenant` that comes now, if nobody else comes.

        Output tokens that tenants will be charged meanwhile, and the aged, are left out. Beyond EXACT tenants it is a bound:
        what all of them may take until this one's turn.
        """
        above = sum(self._bands[other].tokens for other in self._order if other > priority)
        band = self._bands.get(priority)
        if band is None or not band.by_age:
            return above
        flow = self._flow(tenant)
        line = band.lines.get(tenant.name)
        own = line.tokens if line is not None else 0.0
        level = (flow.served if flow.num_waiting else band.lifted(flow, credit)) + own / flow.weight
        if len(band.lines) > EXACT:
            return above + own + min(band.tokens - own, max(0.0, level - band.level) * self.weight)
        others = 0.0
        for other in band.lines.values():
            if other is not line and other.flow.served < level:
                others += min(other.tokens, (level - other.flow.served) * other.flow.weight)
        return above + own + others

    def to_displace(self, tenant: Tenant, priority: int) -> T | None:
        """Whom a full queue turns away for a call of `tenant`: the newest of whoever takes up most, by weight, in the lowest
        band. None: the call itself."""
        if not self._order or self._order[0] > priority:
            return None
        band = self._bands[self._order[0]]
        line = max(band.lines.values(), key=lambda line: line.tokens / line.flow.weight)
        if self._order[0] == priority:
            own = band.lines.get(tenant.name)
            if own is not None and own.tokens / own.flow.weight >= line.tokens / line.flow.weight:
                return None
        return next(reversed(line.calls.values()))

    def weight_with(self, tenant: Tenant) -> float:
        """Of the tenants that wait and this one."""
        return self.weight + (0.0 if self._flow(tenant).num_waiting else tenant.weight)

    def _flow(self, tenant: Tenant) -> _Flow:
        flow = self._flows.get(tenant.name)
        if flow is None:
            flow = self._flows[tenant.name] = _Flow()
        if flow.weight != tenant.weight:  # its keys' file has changed
            self.weight += (tenant.weight - flow.weight) * (flow.num_waiting > 0)
            flow.weight = tenant.weight
        return flow
