"""The sizes that are wanted. Pure.

    1 what loads keep busy (need.py) is where the search begins
    2 no pool is wanted below MAX_BUSY of that, what lessons add to it (lessons.py), nor below what its memory holds already, nor
      at 0 while anybody calls or waits
    3 neighbours (search.py) with what calls would meet there (outlook.py)

Four answers, so that a load must move by BAND before what was done is undone: for the load; for half a BAND less, or for as much
less as it is not sure yet (who is short even then, is short; where calls miss their targets, who is short now); for half a BAND
more (what is enough for a pool that lets a worker go); for a BAND more (what a pool keeps that gives one to another). And one
for the most that may come in minutes, where forecasts are known to be good: what is enough then, too, goes sooner (patience.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.request import Role
from router.controller.autoscaler import need
from router.controller.autoscaler.census import Census
from router.controller.autoscaler.chance import unless_changed
from router.controller.autoscaler.facts import FleetFacts, State
from router.controller.autoscaler.held import Holding
from router.controller.autoscaler.layouts import PAIR, Kinds, Layout
from router.controller.autoscaler.outlook import Evaluator, Scene
from router.controller.autoscaler.search import Search
from router.controller.autoscaler.sound import pressure
from router.controller.autoscaler.traffic import LEAST_RATE, Load, known, later
from router.controller.decisions import Input

SPREAD = 2.0  # of sequences' memory: its mean square by its squared mean, where lengths vary by about their mean. As outlook.py
MAX_BUSY = 0.92  # of a pool: however well queues behave on paper, an hour's bursts and long tails need something

# What one look may want where no budget is known: more than any load asks for within a tick, and the next look may want as much
# again. A rate of 1e6 calls/s (traffic.py, MAX_RATE) would otherwise be tens of thousands of workers to look at one by one
MOST_TIMES, MOST_MORE = 4, 64


@dataclass(frozen=True, slots=True)
class Sizes:
    wanted: Layout
    short: Layout  # up to it a pool takes
    enough: Layout  # down to it a pool may let go
    later: Layout | None  # enough for the most that may come in minutes; None: nobody knows
    spare: Layout  # above it a pool gives to another
    max_gpus: int | None  # of budget and machines
    reasons: Mapping[Role, str]  # why a pool is wanted as large as it is
    inputs: Mapping[str, Input]


def roles_of(facts: FleetFacts, before: tuple[Role, ...]) -> tuple[Role, ...]:
    """That the fleet has; `before`: what it had, for a fleet at zero."""
    pools = facts.budget.pools()
    has = {worker.role for worker in facts.workers} | {role for role in Role if pools[role.name.lower()].min_workers}
    roles = has or set(before) or set(facts.blueprints) & set(PAIR) or set(facts.blueprints)
    if roles & set(PAIR) or not roles:
        roles = roles | set(PAIR)
    return tuple(role for role in Role if role in roles)


class Sizing:
    """One look's."""

    def __init__(
        self,
        facts: FleetFacts,
        there: Census,
        load: Load,
        kinds: Kinds,
        roles: tuple[Role, ...],
        lessons: Mapping[Role, float],
        holdings: Mapping[Role, Holding | None],
        evaluator: Evaluator,
        *,
        is_missed: bool = False,
    ) -> None:
        """`facts`: sound ones. `lessons`: how many times the workers that steps ask for. `holdings`: None: nobody says.
        `is_missed`: calls miss their targets, and nobody is on the way."""
        self._facts = facts
        self._there = there
        self._kinds = kinds
        self._lessons = lessons
        self._load = load
        self._roles = roles
        self._holdings = holdings
        self._evaluator = evaluator
        self._is_missed = is_missed
        self._pressure = {role: pressure(there.of(role)) for role in roles}
        self._calls = _calls(facts)

    def sizes(self) -> Sizes:
        wanted, high, higher = self._times(1.0), self._times(need.HALF_BAND), self._times(need.BAND)
        low = wanted if self._is_missed else self._times(1 / max(need.HALF_BAND, 1 + self._doubt()))
        coming = later(self._load, self._facts.classes)
        return Sizes(
            wanted=wanted,
            short=Layout(*(min(low.of(role), num) for role, num in wanted)),
            enough=Layout(*(max(high.of(role), num) for role, num in wanted)),
            later=self._best(coming) if coming is not None else None,
            spare=Layout(*(max(higher.of(role), num) for role, num in wanted)),
            max_gpus=self._max_gpus(),
            reasons={role: self._reason(role, wanted.of(role)) for role in self._roles},
            inputs=self._inputs(wanted),
        )

    def _doubt(self) -> float:
        """One standard deviation of the load, as a share of it: of few calls neither number nor sizes are sure."""
        num = sum(known(traffic.num_arrived, math.inf) or 0.0 for traffic in self._facts.classes)
        return math.sqrt(SPREAD / num) if num else 0.0

    def _times(self, factor: float) -> Layout:
        """For so many times the load."""
        return self._best(self._load.times(factor), factor)

    def _best(self, load: Load, factor: float = 1.0) -> Layout:
        """`factor`: of what runs already."""
        have = self._there.layout
        least, start = Layout(), Layout()
        for role in self._roles:
            busy = self._busy(role, load)
            if busy is None:
                size = self._unmodelled(role)
                least, start = least.plus(role, size), start.plus(role, size)
                continue
            full = _whole(self._held(role) * factor / need.DECODE_BUSY)
            if self._is_mixed:  # what workers of both do, the others need not
                least, start = least.plus(role, full), start.plus(role, have.of(role))
                continue
            size, more = _whole(busy / _target(role)), self._lessons.get(role, 1.0)
            enough = _whole(size * more) if more > 1 else _whole(busy / MAX_BUSY)
            least = least.plus(role, max(int(self._calls), full, enough))
            start = start.plus(role, max(size, least.of(role)))
        scene = Scene(self._kinds, load, self._waiting_tokens())
        budget = replace(self._facts.budget, max_gpus=self._most_gpus())
        floor = Layout() if self._is_mixed or not self._calls else self._one_each()
        return Search(self._evaluator, scene, budget, self._roles, least, floor).best(start)

    def _one_each(self) -> Layout:
        layout = Layout()
        for role in self._roles:
            layout = layout.plus(role)
        return layout

    @property
    def _is_mixed(self) -> bool:
        return len(self._roles) == len(Role)

    def _busy(self, role: Role, load: Load) -> float | None:
        """Workers that would be busy all the time; None: nobody knows how long their steps take."""
        if not load.classes:
            return 0.0 if not self._calls else None
        if role not in self._kinds:
            return None
        kind = self._kinds[role]
        if role is Role.PREFILL:
            return need.prefill_busy(kind, load) + _target(role) * need.backlog_busy(kind, load, self._waiting_tokens())
        return need.decode_busy(kind, load)

    def _held(self, role: Role) -> float:
        """Workers whose memory or batch would be full of what runs. It is more than are busy where answers' lengths are told too
        short, since the long ones have not ended yet."""
        holding = self._holdings[role]
        if role is Role.PREFILL or holding is None:
            return 0.0
        now, mean = holding.now, holding.mean
        of_one = math.sqrt(SPREAD / mean.num_seqs) if mean.num_seqs else 0.0
        in_kv = unless_changed(mean.kv_workers, now.kv_workers, of_one * mean.kv_workers)
        if role not in self._kinds or not self._load.classes:
            return in_kv
        kind, num_ready = self._kinds[role], max(1, self._there.ready.of(role))
        deviation = need.deviation(kind, self._load, mean.num_seqs, num_ready)
        num_seqs = unless_changed(mean.num_seqs, now.num_seqs, deviation)
        return max(in_kv, num_seqs / need.decoding(kind, self._load).batch)

    def _unmodelled(self, role: Role) -> int:
        """Without step times only memory says what is enough: of a pool of prefill workers nothing does."""
        have = max(1, self._there.layout.of(role))
        share = self._pressure[role].used_share
        if role is Role.PREFILL or share is None:
            return have
        return max(1, _whole(self._held(role) / need.DECODE_BUSY))

    def _waiting_tokens(self) -> float:
        """Of prompts: in routers, and in the queues of who computes them."""
        waiting = float(self._facts.queued_tokens)
        for role in self._roles:
            if role is not Role.DECODE:
                num = sum(worker.state is State.READY for worker in self._there.of(role))
                waiting += num * (self._pressure[role].waiting_tokens or 0.0)
        return waiting

    def _max_gpus(self) -> int | None:
        limits = [self._facts.budget.max_gpus]
        if self._facts.spare_gpus is not None:
            limits.append(self._there.num_gpus + max(0, self._facts.spare_gpus))
        return min((limit for limit in limits if limit is not None), default=None)

    def _most_gpus(self) -> int:
        """That a look may want: a limit where none is known, so that a rate that cannot be costs a look no more than others."""
        limit = self._max_gpus()
        return limit if limit is not None else MOST_TIMES * self._there.num_gpus + MOST_MORE * self._largest_gpus()

    def _largest_gpus(self) -> int:
        return max((kind.num_gpus for kind in self._kinds.values()), default=1)

    # -- for the operator ----------------------------------------------------------------------------------------------

    def _reason(self, role: Role, wanted: int) -> str:
        name, busy = role.name.lower(), self._busy(role, self._load)
        if busy is None:
            return f"{wanted} {name}: how long its steps take is not known yet"
        have = self._there.layout.of(role)
        return f"{self._load.rate:.3g} calls/s keep {busy:.2f} {name} workers busy: {wanted} wanted, {have} there or coming"

    def _inputs(self, wanted: Layout) -> dict[str, Input]:
        load = self._load
        inputs: dict[str, Input] = {
            "rate_per_s": load.rate,
            "prompt_tokens": load.lacking_per_s / load.rate if load.rate else 0.0,
            "output_tokens": load.outputs_per_s / load.rate if load.rate else 0.0,
            "waiting_tokens": self._waiting_tokens(),
            "oldest_queued_s": self._facts.oldest_queued_s,
            "max_gpus": self._max_gpus(),
            "num_gpus": self._there.num_gpus,
        }
        for role in self._roles:
            name = role.name.lower()
            inputs |= {f"{name}_wanted": wanted.of(role), f"{name}_there": self._there.layout.of(role)}
            if role in self._kinds and load.classes:
                inputs[f"{name}_busy_workers"] = self._busy(role, load)
                if role is not Role.PREFILL:
                    best = need.decoding(self._kinds[role], load)
                    inputs |= {f"{name}_batch": best.batch, f"{name}_step_ms": 1e3 * best.step_s}
        return inputs


def _calls(facts: FleetFacts) -> bool:
    """Whether anybody calls, or waits."""
    rates = [known(rate, math.inf) or 0.0 for traffic in facts.classes for rate in (traffic.rate, traffic.coming_rate)]
    return facts.queued_tokens > 0 or facts.oldest_queued_s > 0 or max(rates, default=0.0) >= LEAST_RATE


def _target(role: Role) -> float:
    return need.PREFILL_BUSY if role is Role.PREFILL else need.DECODE_BUSY


def _whole(workers: float) -> int:
    """Rounded up, but not for a rounding error."""
    return math.ceil(workers - 1e-9)
