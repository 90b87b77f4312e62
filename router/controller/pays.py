"""Whether disaggregation pays on the traffic of late: three layouts of the same GPUs, simulated on the same calls.

    apart       the prefill and decode workers that are there (or, of workers that do both, a split by the work of each)
    local       the same, and any prompt may be prefilled where it is decoded
    colocated   as many workers that do both

`asked_of` and `verdict_of` are pure; Pays asks the simulator each `period_s` and keeps the newest Verdict, for the admin
endpoint and for the policy that falls back (autoscaler/disaggregation.py). Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from baton.request import Role
from router.controller.autoscaler.disaggregation import (
    FRESH_PERIODS,
    PERIOD_S,
    WHOLE_PROMPTS,
    WORTH,
    Difference,
    LayoutGoodput,
    Verdict,
)
from router.controller.autoscaler.facts import State
from router.controller.measured_fleet import TOO_MUCH, WINDOW_S, Measured, Unknown, pools, question
from router.controller.step_model import StepWork, Terms
from router.controller.what_if import Answer, Question, Run, Scenario, Simulator, WorkerPool

log = get_log("controller.pays")

APART, LOCAL, COLOCATED = "apart", "local", "colocated"
MIN_SEEDS = 3  # two differences have no spread worth the name
# Student's t at 95 %, by degrees of freedom from 1 on
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, and what an answer needs beside it."""

    question: Question
    present: str
    unknown: Mapping[str, str]
    assumptions: tuple[str, ...]


# -- the question ------------------------------------------------------------------------------------------------------


def asked_of(measured: Measured, apart_tokens: int, budget_s: float) -> Asked:
    """`apart_tokens`: the limit of local prefill that belongs to `apart`. Raises: Unknown."""
    facts = measured.facts
    there = pools(facts)
    classes = tuple(traffic.slo for traffic in facts.classes)
    is_apart = any(pool.role is not Role.BOTH for pool in there)
    alike = len({(w.shape, w.num_gpus) for w in facts.workers if w.state is State.READY}) == 1
    apart = there if is_apart else _taken_apart(there[0], measured)
    tokens = facts.local_prefill_tokens if facts.local_prefill_tokens < WHOLE_PROMPTS else apart_tokens
    scenarios = [Scenario(APART, classes, apart, tokens), Scenario(LOCAL, classes, apart, WHOLE_PROMPTS)]
    if alike:
        scenarios.append(Scenario(COLOCATED, classes, (_colocated(there),) if is_apart else there, 0))
    present = (LOCAL if facts.local_prefill_tokens >= WHOLE_PROMPTS else APART) if is_apart else COLOCATED
    return Asked(
        question(facts, measured.windows, scenarios, budget_s),
        present,
        {}
        if alike
        else {COLOCATED: "the workers are of several shapes: there is no telling what each would do as both"},
        _ASSUMPTIONS if is_apart else (*_ASSUMPTIONS, _SPLIT),
    )


_ASSUMPTIONS = (
    f"traffic stays as it was over the last {WINDOW_S:g} s; arrivals are Poisson",
    "step times are the learned ones; a worker that does both has decode's for weights and context, prefill's for prompts",
    "a colocated worker keeps the limits of a decode worker (max batch, token budget, chunk)",
)
_SPLIT = "no worker prefills or decodes alone now: they are split by the time that each kind of work takes"


def _colocated(there: Sequence[WorkerPool]) -> WorkerPool:
    """As many workers of one shape, each for all of a call."""
    by_role = {pool.role: pool for pool in there}
    both, decode = by_role.get(Role.BOTH), by_role.get(Role.DECODE)
    model = both or decode
    assert model is not None, "a fleet that serves has workers that decode"
    prefill = by_role.get(Role.PREFILL, model)
    steps = both.steps if both else _joined(prefill.steps, model.steps)
    kv_tokens = min(pool.kv_tokens for pool in there)
    return WorkerPool(Role.BOTH, sum(pool.num_workers for pool in there), steps, kv_tokens, model.tuning)


def _joined(prefill: Terms, decode: Terms) -> Terms:
    """Each pool's model knows well what its workers do all day: prompts' tokens and pairs, or weights and context."""
    return replace(decode, s_per_token=prefill.s_per_token, s_per_pair=prefill.s_per_pair)


def _taken_apart(both: WorkerPool, measured: Measured) -> tuple[WorkerPool, ...]:
    """By the time that prompts and answers take of the workers, at full steps. Raises: Unknown: there is but one worker."""
    if both.num_workers < 2:
        raise Unknown("one worker does both, and cannot be taken apart")
    steps, budget, seqs = both.steps, both.tuning.max_num_batched_tokens, both.tuning.max_num_seqs
    prompt_s = answer_s = 0.0
    for traffic in measured.facts.classes:
        prompt, output, rate = traffic.prompt_tokens, traffic.output_tokens, traffic.rate
        if prompt and output and rate:
            lacking = max(1.0, prompt - (traffic.cached_tokens or 0.0))
            work = StepWork(budget, 0.0, budget / lacking * (traffic.prompt_pairs or 0.0))
            prompt_s += rate * steps.step_s(work) * lacking / budget
            answer_s += rate * output * steps.step_s(StepWork(seqs, seqs * (prompt + output / 2))) / seqs
    share = prompt_s / (prompt_s + answer_s) if prompt_s else 0.5
    num_prefill = min(both.num_workers - 1, max(1, round(both.num_workers * share)))
    whole = replace(both.tuning, chunk_tokens=budget)
    return (
        replace(both, role=Role.PREFILL, num_workers=num_prefill, tuning=whole),
        replace(both, role=Role.DECODE, num_workers=both.num_workers - num_prefill),
    )


# -- the verdict -------------------------------------------------------------------------------------------------------


def verdict_of(answer: Answer, asked: Asked, at_s: float) -> Verdict:
    """Raises: Unknown: too little was simulated in time."""
    runs = {scenario.name: answer.of(scenario.name) for scenario in asked.question.scenarios}
    apart = runs[APART]
    if len(apart) < MIN_SEEDS:
        budget_s = asked.question.budget_s
        raise Unknown(f"only {len(apart)} of {MIN_SEEDS} samples could be simulated within {budget_s:g} s: {TOO_MUCH}")
    if any(len(of) != len(apart) or not sum(run.num_calls for run in of) for of in runs.values()):
        raise Unknown("a layout was simulated without calls to judge it by")
    return Verdict(
        at_s=at_s,
        present=asked.present,
        layouts={s.name: _layout(s, runs[s.name]) for s in asked.question.scenarios},
        local=_difference(runs[LOCAL], apart),
        colocated=_difference(runs[COLOCATED], apart) if COLOCATED in runs else None,
        rate=sum(load.rate for load in asked.question.load),
        num_calls=sum(run.num_calls for run in apart),
        assumptions=asked.assumptions,
        unknown=asked.unknown,
    )


def _layout(scenario: Scenario, runs: Sequence[Run]) -> LayoutGoodput:
    goodput, low, high = _interval([run.goodput for run in runs])
    num_calls, num_met = (sum(getattr(run, name) for run in runs) for name in ("num_calls", "num_met"))
    workers = {pool.role.name.lower(): pool.num_workers for pool in scenario.pools}
    return LayoutGoodput(workers, scenario.local_prefill_tokens, goodput, max(0.0, low), high, num_met / num_calls)


def _difference(other: Sequence[Run], apart: Sequence[Run]) -> Difference:
    pairs = zip(other, apart, strict=True)
    return Difference(*_interval([(one.num_met - base.num_met) / max(1, base.num_calls) for one, base in pairs]))


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % interval; seeds are independent."""
    mean, num = fmean(values), len(values)
    half = _T[min(num - 2, len(_T) - 1)] * stdev(values) / math.sqrt(num)
    return mean, mean - half, mean + half


def sentence(verdict: Verdict) -> str:
    """What an operator wants to know."""
    apart = verdict.layouts[APART].attainment
    found = {LOCAL: verdict.local, COLOCATED: verdict.colocated}
    parts = [
        f"{name} {difference.mean:+.1%} ({difference.low:+.1%} to {difference.high:+.1%})"
        for name, difference in found.items()
        if difference is not None
    ]
    says = {
        True: "disaggregation pays on this traffic",
        False: "disaggregation does not pay on this traffic",
        None: f"no layout is better for sure by {WORTH:.0%} on this traffic",
    }[verdict.pays]
    return f"{says}: apart {apart:.1%} of calls meet their targets; {', '.join(parts)}"


# -- live --------------------------------------------------------------------------------------------------------------


class Pays:
    """Of one fleet."""

    def __init__(
        self,
        simulator: Simulator,
        measured: Callable[[], Measured],
        apart_tokens: int,
        budget_s: float,
        now_s: Callable[[], float] = clock.now_s,
        period_s: float = PERIOD_S,
    ) -> None:
        self.verdict: Verdict | None = None  # the newest
        self.reason = "nothing was simulated yet"  # why the last look found no verdict; "" = it did
        self._simulator = simulator
        self._measured = measured
        self._apart_tokens = apart_tokens
        self._budget_s = budget_s
        self._now_s = now_s
        self.period_s = period_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self.period_s)
            await self.look()

    def fresh(self) -> tuple[Verdict, float] | None:
        """The newest and its age; None: it is too old to say anything, or there is none."""
        now_s = self._now_s()
        if self.verdict is None or not self.verdict.is_fresh(now_s):
            return None
        return self.verdict, now_s - self.verdict.at_s

    async def look(self) -> None:
        at_s = self._now_s()
        try:
            asked = asked_of(self._measured(), self._apart_tokens, self._budget_s)
            answer = await self._simulator.ask(asked.question)
            verdict = verdict_of(answer, asked, at_s)
            # The next one takes as long, and has to find this one still counted
            lasts_s = FRESH_PERIODS * (self.period_s + self._now_s() - at_s)
            self.verdict, self.reason = replace(verdict, lasts_s=lasts_s), ""
            log.info("disaggregation", pays=verdict.pays, said=sentence(verdict))
        except (Unknown, BatonError) as error:
            self.reason = str(error)
