"""Need, outlook and search, against figures worked out by hand from TERMS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler import need
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.layouts import Layout
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.outlook import Analytic, Evaluator, Outlook, Scene, _late
from router.controller.autoscaler.search import Search
from router.controller.autoscaler.traffic import MAX_RATE, ClassLoad, Load, loads_of, sizing
from router.controller.settings import Budget, PoolBounds
from router.controller.step_model import StepWork
from tests.controller.autoscaler.fleets import AT_LEAST_ONE, CHAT, MOST, TERMS, TO_ZERO, chat, facts, fleet

KINDS = {role: Kind(role, TERMS, MOST, 200_000, shape="h100") for role in Role}
PAIR = (Role.PREFILL, Role.DECODE)


def load(rate: float, prompt: float = 1_000.0, output: float = 200.0, slo: SLO = CHAT) -> Load:
    return Load((ClassLoad(slo, rate, prompt, prompt, prompt**2 / 2, output),))


def test_prefill_is_busy_for_what_full_steps_take_and_the_pairs() -> None:
    # a full step: 1 ms + 8,192 x 20 us = 164.84 ms, so 20.122 us a token; pairs: 500,000 x 0.1 ns
    assert need.prefill_busy(KINDS[Role.PREFILL], load(10.0)) == pytest.approx(
        10 * (1_000 * 20.122e-6 + 50e-6), rel=1e-4
    )


def test_decode_has_the_largest_batch_that_keeps_the_pace() -> None:
    # 85 % of 12 ms: 1 + max(0.02 B, 4) + 1,100 x 20e-6 B <= 10.2 ms; compute binds beyond 200: B = 219; memory line: B = 236
    tight = load(10.0, slo=replace(CHAT, tpot_ms=12.0))
    roomy = replace(KINDS[Role.DECODE], kv_tokens=0, tuning=replace(MOST, max_num_seqs=1_000))
    best = need.decoding(roomy, tight)
    assert best.limit == "tpot"
    assert best.batch == 219
    assert best.step_s == pytest.approx((1 + 219 * 0.042) * 1e-3)


def test_decode_has_no_larger_batch_than_memory_and_seats_hold() -> None:
    assert need.decoding(KINDS[Role.DECODE], load(10.0)).limit == "kv"
    assert need.decoding(KINDS[Role.DECODE], load(10.0)).batch == pytest.approx(0.9 * 200_000 / 1_100)
    few = replace(KINDS[Role.DECODE], tuning=replace(MOST, max_num_seqs=8))
    assert need.decoding(few, load(10.0)).batch == 8


def test_a_batch_varies_by_more_than_chance_calls_as_far_as_it_makes_its_own_steps_longer() -> None:
    # 1 + 4 ms, and 10 sequences of 25,000 tokens 20 ns each: 5 ms, so a step is twice what it is without them
    long = replace(load(1.0), measured_context=25_000.0)
    assert need.deviation(KINDS[Role.DECODE], long, 40.0, 4) == pytest.approx(math.sqrt(2 * 40.0))
    short = replace(load(1.0), measured_context=0.0)
    assert need.deviation(KINDS[Role.DECODE], short, 40.0, 4) == pytest.approx(math.sqrt(40.0))


def test_a_target_that_leaves_room_for_two_and_a_half_sequences_holds_two() -> None:
    # 5 ms, and 0.4 ms for each sequence of 20,000 tokens; 85 % of 7.06 ms is 6 ms
    near = replace(load(10.0, slo=replace(CHAT, tpot_ms=6.0 / 0.85)), measured_context=20_000.0)
    best = need.decoding(replace(KINDS[Role.DECODE], kv_tokens=0), near)
    assert best.batch == 2
    assert best.step_s == pytest.approx(5.8e-3)


def test_targets_that_no_batch_keeps_do_not_count() -> None:
    hopeless = load(10.0, slo=replace(CHAT, tpot_ms=1.0))
    assert need.decoding(KINDS[Role.DECODE], hopeless).limit == "none keeps its tpot"
    mixed = Load((*hopeless.classes, *load(10.0, slo=replace(CHAT, name="other", tpot_ms=8.0)).classes))
    assert need.decoding(KINDS[Role.DECODE], mixed).step_s == pytest.approx(6.8e-3, rel=5e-3)


def test_a_steady_batch_makes_the_tokens_that_are_asked_for() -> None:
    for rate in (1.0, 20.0, 80.0):
        of = load(rate)
        batch = need.steady_batch(KINDS[Role.DECODE], of, of.outputs_per_s)
        assert batch / need.step_s(KINDS[Role.DECODE], of, batch) == pytest.approx(of.outputs_per_s)
    assert math.isinf(need.steady_batch(KINDS[Role.DECODE], load(1.0), 1e6))


def test_a_worker_of_both_carries_the_prompts_of_whom_it_decodes() -> None:
    # each of B sequences lasts 200 steps, so a step begins B/200 prompts of 1,000 tokens: 6 tokens and 2,500 pairs per sequence
    both = need.step_s(KINDS[Role.BOTH], load(10.0), 100.0)
    assert both == pytest.approx(TERMS.step_s(StepWork(600.0, 110_000.0, 250_000.0)))


def test_a_backlog_within_the_target_asks_for_nobody() -> None:
    of = load(10.0)  # 10,000 tokens a second, 2 s: 20,000 may wait
    assert need.backlog_busy(KINDS[Role.PREFILL], of, 20_000.0) == 0
    assert need.backlog_busy(KINDS[Role.PREFILL], of, 80_000.0) == pytest.approx(
        need.prompt_s(KINDS[Role.PREFILL], 60_000.0, 30e6) / 60.0
    )


def attainment(layout: Layout, of: Load) -> float:
    return Analytic().outlook(layout, Scene(KINDS, of)).attainment[CHAT.name]


def test_one_worker_keeps_as_many_in_time_as_m_m_1_says() -> None:
    slow = replace(CHAT, ttft_ms=200.0)
    of = load(30.0, slo=slow)
    busy = need.prefill_busy(KINDS[Role.PREFILL], of)  # 0.605
    own_s = TERMS.step_s(StepWork(1_000.0, 0.0, 500_000.0))
    late = busy * math.exp(-(1 - busy) * (0.2 - own_s) / (busy / 30.0))
    assert attainment(Layout(1, 50), of) == pytest.approx(1 - late)


@pytest.mark.parametrize("of", [load(5.0), load(40.0), load(90.0), load(400.0), load(90.0, 4_000.0, 10.0)])
def test_more_workers_are_never_worse_and_more_load_is_never_better(of: Load) -> None:
    for prefill in range(1, 12):
        for decode in range(1, 8):
            here = attainment(Layout(prefill, decode), of)
            assert attainment(Layout(prefill + 1, decode), of) >= here - 1e-12
            assert attainment(Layout(prefill, decode + 1), of) >= here - 1e-12
            assert attainment(Layout(prefill, decode), of.times(1.2)) <= here + 1e-12


def test_urgent_calls_do_not_wait_for_background_ones() -> None:
    bulk = SLO("bulk", ttft_ms=60_000.0, tpot_ms=1_000.0, priority=-10)
    together = Load((*load(20.0).classes, *load(100.0, 1_000.0, 1.0, slo=bulk).classes))
    seen = Analytic().outlook(Layout(1, 8), Scene(KINDS, together)).attainment
    assert seen[CHAT.name] > 0.99
    assert seen["bulk"] < 0.6


def search(of: Load, budget: Budget = AT_LEAST_ONE, roles: tuple[Role, ...] = PAIR) -> Search:
    return Search(Analytic(), Scene(KINDS, of), budget, roles, Layout(), Layout())


def test_who_waits_is_erlang_s_c_however_large_the_pool() -> None:
    def by_recursion(num: int, busy: float) -> float:
        blocked = 1.0
        for k in range(1, num + 1):
            blocked = busy * blocked / (k + busy * blocked)
        return blocked / (1 - (busy / num) * (1 - blocked))

    for num, busy in [(1, 0.5), (2, 1.9), (40, 1e-3), (40, 39.9), (300, 150.0), (3_000, 2_950.0)]:
        assert _late(num, busy, 0.0) == pytest.approx(by_recursion(num, busy), rel=1e-9, abs=1e-29)
    num = 10**8  # Halfin and Whitt 1981, with beta = 1; one by one it would take a minute
    cdf, pdf = 0.5 * math.erfc(-1 / math.sqrt(2)), math.exp(-0.5) / math.sqrt(2 * math.pi)
    assert _late(num, num - math.sqrt(num), 0.0) == pytest.approx(1 / (1 + cdf / pdf), rel=1e-3)


@pytest.mark.parametrize("max_gpus", [None, 0, 64, 1_000])
@pytest.mark.parametrize("prompt", [1_000.0, 1e7])
def test_a_rate_that_cannot_be_costs_a_look_a_bounded_number_of_evaluations(
    max_gpus: int | None, prompt: float
) -> None:
    class Counted(Analytic):
        num_asked = 0

        def outlook(self, layout: Layout, scene: Scene) -> Outlook:
            self.num_asked += 1
            assert self.num_asked < 3_000, "it has no end"
            return super().outlook(layout, scene)

    evaluator = Counted()
    scaler = Autoscaler(evaluator=evaluator)
    scaler.look(facts(fleet(2, 2), chat(MAX_RATE, prompt), budget=Budget(max_gpus, PoolBounds(1), PoolBounds(1))))
    size = scaler.wanted.prefill + scaler.wanted.decode
    assert size == max(2, max_gpus) if max_gpus is not None else 4 < size <= 4 * 4 + 64


def test_a_start_far_beyond_its_budget_goes_down_in_proportion_but_never_below_what_pools_must_have() -> None:
    seen: list[Layout] = []

    class Seen(Analytic):
        def outlook(self, layout: Layout, scene: Scene) -> Outlook:
            seen.append(layout)
            return super().outlook(layout, scene)

    budget = Budget(60, PoolBounds(40), PoolBounds(1))
    found = Search(Seen(), Scene(KINDS, load(1e4)), budget, PAIR, Layout(), Layout(1, 1)).best(Layout(100, 10**6))
    assert found.prefill >= 40
    assert found.prefill + found.decode == 60
    assert max(num.prefill + num.decode for num in seen) <= 60 + 16


@pytest.mark.parametrize("rate", [5.0, 50.0, 150.0, 400.0])
def test_the_search_ends_at_the_same_size_wherever_it_begins_and_no_smaller_one_would_do(rate: float) -> None:
    found = {search(load(rate)).best(start) for start in (Layout(1, 1), Layout(40, 40), Layout(20, 1), Layout(1, 20))}
    assert len({num.prefill + num.decode for num in found}) == 1
    [best, *_] = found
    asked = rate * CHAT.percentile
    assert search(load(rate)).value(best) >= 0.995 * asked
    for role in PAIR:
        if best.of(role) > 1:
            assert search(load(rate)).value(best.plus(role, -1)) < 0.995 * asked


def test_a_budget_is_spent_where_it_brings_most() -> None:
    for max_gpus in range(2, 13):
        within = search(load(300.0), Budget(max_gpus, PoolBounds(1), PoolBounds(1)))
        found = within.best(Layout(9, 4))
        every = [Layout(n, max_gpus - n) for n in range(1, max_gpus)]
        assert found.prefill + found.decode <= max_gpus
        assert within.value(found) >= 0.98 * max(map(within.value, every))


def test_the_cheaper_pool_is_kept_where_either_would_do() -> None:
    class Either:
        """Calls meet their targets with any four workers."""

        def outlook(self, layout: Layout, scene: Scene) -> Outlook:
            share = min(1.0, sum(num for _, num in layout) / 4)
            return Outlook({of.slo.name: share for of in scene.load.classes})

    evaluator: Evaluator = Either()
    kinds: Mapping[Role, Kind] = {**KINDS, Role.PREFILL: replace(KINDS[Role.PREFILL], usd_per_hour=3.0)}
    found = Search(evaluator, Scene(kinds, load(10.0)), TO_ZERO, PAIR, Layout(), Layout(1, 1))
    assert found.best(Layout(5, 5)) == Layout(0, 4)


def test_rates_and_lengths_that_are_not_known_are_the_last_ones_or_none() -> None:
    [known] = loads_of([chat(10.0)], {})
    unknown = replace(chat(20.0), prompt_tokens=None, output_tokens=math.nan, prompt_pairs=None)
    assert loads_of([unknown], {}) == []
    [kept] = loads_of([unknown], {CHAT.name: known})
    assert (kept.rate, kept.prompt_tokens, kept.output_tokens) == (20.0, 1_000.0, 200.0)
    assert loads_of([replace(chat(None), rate=math.inf, coming_rate=None)], {}) == []


def test_now_counts_beside_a_forecast_only_as_far_as_chance_does_not_explain_it() -> None:
    rates = [loads_of([replace(chat(10.0), rate=now)], {})[0].rate for now in (5.0, 11.0, 30.0)]
    assert rates == [10.0, 10.0, pytest.approx(30 - 2 * math.sqrt(30 / 30))]


def test_background_calls_are_sized_for_only_where_nobody_else_calls() -> None:
    bulk = chat(50.0, slo=SLO("bulk", ttft_ms=60_000.0, tpot_ms=1_000.0, priority=-10))
    assert [c.slo.name for c in sizing(loads_of([chat(1.0), bulk], {})).classes] == [CHAT.name]
    assert [c.slo.name for c in sizing(loads_of([bulk], {})).classes] == ["bulk"]
    assert len(sizing(loads_of([chat(1.0), bulk], {}), {"bulk"}).classes) == 2
