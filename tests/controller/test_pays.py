"""Whether disaggregation pays: layouts of the same GPUs, verdicts both ways, and what cannot be said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest

from baton.request import Role
from router.controller.autoscaler.disaggregation import WHOLE_PROMPTS, Disaggregation, Verdict
from router.controller.autoscaler.facts import FleetFacts
from router.controller.measured_fleet import Unknown
from router.controller.pays import APART, COLOCATED, LOCAL, Pays, asked_of, sentence
from router.controller.what_if import Answer, Question, Scenario
from tests.controller.live_rig import BULK, CHAT, TERMS, TUNING, ScriptedSimulator, by_scenario, fleet, measured, window

SEEN = window("interactive", 10.0)


def scenarios(facts: FleetFacts) -> Mapping[str, Scenario]:
    return {scenario.name: scenario for scenario in asked_of(measured(facts, SEEN), 0, 5.0).question.scenarios}


async def verdict(met: Mapping[str, int], facts: FleetFacts | None = None) -> Verdict:
    pays = Pays(ScriptedSimulator(by_scenario(met)), lambda: measured(facts or fleet(), SEEN), 0, 5.0, lambda: 7.0)
    await pays.look()
    assert pays.verdict is not None, pays.reason
    assert pays.reason == ""
    return pays.verdict


def test_the_same_gpus_are_compared_apart_with_local_prefill_and_colocated() -> None:
    found = scenarios(fleet(2, 3, local_prefill_tokens=64))
    assert {name: [(pool.role, pool.num_workers) for pool in one.pools] for name, one in found.items()} == {
        APART: [(Role.PREFILL, 2), (Role.DECODE, 3)],
        LOCAL: [(Role.PREFILL, 2), (Role.DECODE, 3)],
        COLOCATED: [(Role.BOTH, 5)],
    }
    assert [found[name].local_prefill_tokens for name in (APART, LOCAL)] == [64, WHOLE_PROMPTS]
    assert all(one.classes == (CHAT,) for one in found.values())


def test_a_colocated_worker_has_each_pool_s_steps_for_what_that_pool_does() -> None:
    prompts, answers = replace(TERMS, s_per_token=3.0, s_per_pair=4.0), replace(TERMS, weights_s=5.0, fixed_s=6.0)
    facts = replace(fleet(), steps={Role.PREFILL: prompts, Role.DECODE: answers})
    [both] = scenarios(facts)[COLOCATED].pools
    assert (both.steps.s_per_token, both.steps.s_per_pair, both.steps.weights_s, both.steps.fixed_s) == (3, 4, 5, 6)


def test_colocated_workers_are_taken_apart_by_the_work_of_each_kind() -> None:
    found = scenarios(fleet(0, 0, 8))
    sizes = {pool.role: pool.num_workers for pool in found[APART].pools}
    assert sum(sizes.values()) == 8
    assert sizes[Role.PREFILL] >= 1
    prefill = next(pool for pool in found[APART].pools if pool.role is Role.PREFILL)
    assert prefill.tuning.chunk_tokens == TUNING.max_num_batched_tokens
    long = replace(fleet(0, 0, 8).classes[0], prompt_tokens=20_000.0, prompt_pairs=2e8, output_tokens=4.0)
    of_prompts = scenarios(replace(fleet(0, 0, 8), classes=(long,)))[APART].pools
    assert {pool.role: pool.num_workers for pool in of_prompts}[Role.PREFILL] > sizes[Role.PREFILL]


def test_while_local_prefill_is_on_the_configured_limit_is_what_apart_means() -> None:
    facts = fleet(local_prefill_tokens=WHOLE_PROMPTS)
    asked = asked_of(measured(facts, SEEN), 512, 5.0)
    assert asked.present == LOCAL
    assert [scenario.local_prefill_tokens for scenario in asked.question.scenarios] == [512, WHOLE_PROMPTS, 0]


async def test_it_pays_where_both_others_are_worse_for_sure() -> None:
    found = await verdict({APART: 950, LOCAL: 900, COLOCATED: 850})
    assert found.pays is True
    assert found.colocated is not None
    assert found.colocated.mean == pytest.approx(-0.1)
    assert found.layouts[APART].goodput == pytest.approx(9.5, abs=0.1)
    assert found.layouts[APART].low <= found.layouts[APART].goodput <= found.layouts[APART].high
    assert "disaggregation pays on this traffic: apart 95." in sentence(found)


@pytest.mark.parametrize("met", [{APART: 900, LOCAL: 950, COLOCATED: 800}, {APART: 900, LOCAL: 890, COLOCATED: 950}])
async def test_it_does_not_pay_where_either_other_is_better_for_sure(met: Mapping[str, int]) -> None:
    found = await verdict(met)
    assert found.pays is False
    assert "does not pay" in sentence(found)


async def test_less_than_a_point_and_what_chance_may_be_is_no_difference() -> None:
    assert (await verdict({APART: 950, LOCAL: 955, COLOCATED: 944})).pays is None
    noisy = ScriptedSimulator(lambda scenario, seed: 900 if scenario == APART else 880 + 60 * (seed % 2))
    pays = Pays(noisy, lambda: measured(fleet(), SEEN), 0, 5.0)
    await pays.look()
    assert pays.verdict is not None
    assert pays.verdict.local is not None
    assert pays.verdict.local.low < 0 < pays.verdict.local.high
    assert pays.verdict.pays is None


async def test_workers_of_several_shapes_are_not_compared_with_colocated_ones_and_the_reason_is_said() -> None:
    found = await verdict({APART: 950, LOCAL: 900}, fleet(decode_shape="h200"))
    assert (found.colocated, set(found.layouts)) == (None, {APART, LOCAL})
    assert "several shapes" in found.unknown[COLOCATED]
    assert found.pays is True


async def test_too_little_traffic_too_little_time_and_one_worker_alone_have_no_verdict() -> None:
    simulator = ScriptedSimulator(by_scenario({APART: 900, LOCAL: 900, COLOCATED: 900}), num_seeds=2)
    for seen, words in (
        (measured(fleet(), window("interactive", 0.1)), "too little traffic"),
        (measured(fleet(), SEEN), "only 2 of 3 samples could be simulated within 5 s"),
        (measured(fleet(0, 0, 1), SEEN), "one worker does both"),
    ):
        pays = Pays(simulator, partial(replace, seen), 0, 5.0)
        await pays.look()
        assert pays.verdict is None
        assert words in pays.reason
    with pytest.raises(Unknown):
        asked_of(measured(fleet(0, 0, 1), SEEN), 0, 5.0)


async def test_neither_calls_that_stopped_coming_nor_runs_without_calls_divide_by_nothing() -> None:
    alike = by_scenario({APART: 900, LOCAL: 900, COLOCATED: 900})
    for seen, simulator, words in (
        (replace(SEEN, num_arrived=0.0), ScriptedSimulator(alike), "none came"),
        (SEEN, ScriptedSimulator(alike, num_calls=0), "without calls"),
    ):
        pays = Pays(simulator, lambda seen=seen: measured(fleet(), seen), 0, 5.0)  # type: ignore[misc]
        await pays.look()
        assert pays.verdict is None
        assert words in pays.reason
    load = asked_of(measured(fleet(), SEEN, replace(SEEN, class_name="batch", num_arrived=0.0)), 0, 5.0).question.load
    assert [one.class_name for one in load] == ["interactive"]


async def test_only_classes_in_force_are_compared() -> None:
    asked = asked_of(measured(fleet(classes=(CHAT, BULK)), SEEN, window("batch", 1.0), window("gone", 9.0)), 0, 5.0)
    assert [slo.name for slo in asked.question.scenarios[0].classes] == ["interactive", "batch"]


async def test_a_verdict_that_took_long_counts_until_the_one_after_the_next_can_be_there() -> None:
    now_s, took_s, period_s = 0.0, 200.0, 60.0

    class SlowSimulator(ScriptedSimulator):
        async def ask(self, question: Question) -> Answer:
            nonlocal now_s
            now_s += took_s
            return await super().ask(question)

    simulator = SlowSimulator(by_scenario({APART: 900, LOCAL: 950, COLOCATED: 850}))
    pays = Pays(simulator, lambda: measured(fleet(), SEEN), 0, 5.0, lambda: now_s, period_s)
    policy = Disaggregation(lambda: pays.verdict, 0, period_s)
    await pays.look()
    assert pays.verdict is not None
    assert pays.verdict.at_s == 0.0, "it is of the traffic that was measured then"
    for _ in range(round(period_s + took_s)):
        now_s += 1.0
        assert policy.look(replace(fleet(), now_s=now_s)) == (), "one verdict is not enough"
    now_s -= took_s
    await pays.look()
    assert policy.look(replace(fleet(), now_s=now_s)), "two verdicts in a row"
    assert pays.fresh() is not None
    now_s += 3 * (period_s + took_s)
    assert pays.fresh() is None
