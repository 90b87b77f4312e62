"""What-ifs answered by simulation: the traffic is the question's, scenarios of a seed meet the same calls, and time is kept."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest

from baton.slo import SLO
from bench.what_if import MeasuredLengths, MeasuredSteps, answer
from engine.timing.batch import Batch
from engine.timing.step_time import step_time
from router.controller.pays import APART, COLOCATED, LOCAL, asked_of, verdict_of
from router.controller.planner_process import PlannerProcess
from router.controller.step_model import terms_of
from router.controller.what_if import ANSWER, Question, Scenario
from tests.controller.live_rig import BULK, CHAT, fleet, measured, window


def question(rate: float = 4.0, classes: tuple[SLO, ...] = (CHAT,), **fields: object) -> Question:
    """Short: 20 s of calls, one seed, all the time there is."""
    seen = [window(slo.name, rate / (1 + place)) for place, slo in enumerate(classes)]
    asked = asked_of(measured(fleet(classes=classes), *seen), 0, 1e9).question
    short = replace(asked, seeds=(0,), warm_up_s=4.0, length_s=24.0)
    return replace(short, **fields)  # type: ignore[arg-type]


def only(asked: Question, *scenarios: Scenario) -> Question:
    return replace(asked, scenarios=scenarios)


def test_scenarios_of_a_seed_meet_the_same_calls_and_an_answer_is_a_function_of_its_question() -> None:
    asked = question(classes=(CHAT, BULK))
    found = answer(asked)
    assert [run.scenario for run in found.runs] == [APART, LOCAL, COLOCATED]
    assert len({tuple((one.class_name, one.num_calls) for one in run.classes) for run in found.runs}) == 1
    assert {one.class_name: one.num_calls for one in found.runs[0].classes} == {
        "interactive": pytest.approx(80, abs=30),
        "batch": pytest.approx(40, abs=20),
    }
    assert answer(asked) == ANSWER.validate_json(ANSWER.dump_json(found)) == found


def test_tighter_targets_and_slower_steps_are_met_by_fewer_calls() -> None:
    asked = question()
    base = asked.scenarios[0]
    hard = replace(base, name="hard", classes=(replace(CHAT, ttft_ms=30.0),))
    slow = replace(base, name="slow", slowness=4.0)
    none = replace(base, name="none", classes=(replace(CHAT, tpot_ms=1.0),))
    shares = {
        run.scenario: run.of("interactive").attainment for run in answer(only(asked, base, hard, slow, none)).runs
    }
    assert shares["apart"] > 0.95 > shares["hard"] > shares["none"] == 0.0
    assert shares["slow"] < shares["apart"]


def test_a_first_token_s_way_counts_against_its_target() -> None:
    asked = question()
    near = only(asked, asked.scenarios[0])
    far = replace(near, network_s=1.0)  # twice the target
    assert answer(near).runs[0].of("interactive").num_met > 0
    assert answer(far).runs[0].of("interactive").num_met == 0


def test_calls_of_a_class_that_is_not_there_do_not_come() -> None:
    asked = question(classes=(CHAT, BULK))
    alone = replace(asked.scenarios[0], classes=(CHAT,))
    [run] = answer(only(asked, alone)).runs
    assert [one.class_name for one in run.classes] == ["interactive"]


def test_what_prompts_share_is_computed_once() -> None:
    asked = question()
    cached = replace(asked, load=tuple(replace(load, cached_share=0.9) for load in asked.load))
    tight = replace(asked.scenarios[0], classes=(replace(CHAT, ttft_ms=15.0),))
    [without], [with_cache] = (answer(only(one, tight)).runs for one in (asked, cached))
    assert with_cache.of("interactive").attainment > without.of("interactive").attainment + 0.2


async def test_a_controller_gets_its_answer_from_another_process() -> None:
    asked = question(rate=2.0, length_s=10.0)
    process = PlannerProcess("bench.what_if")
    found = await process.ask(replace(asked, budget_s=60.0))
    process.close()
    assert found == answer(asked)


def test_when_time_is_up_whole_seeds_count_and_nothing_else() -> None:
    asked = question(seeds=tuple(range(50)), budget_s=25.0)
    clock = count()
    found = answer(asked, lambda: float(next(clock)))  # a second at each look, every 16 calls
    assert 0 < len(found.runs) < 150
    assert len(found.runs) % 3 == 0
    assert answer(replace(asked, budget_s=0.5), lambda: float(next(clock))).runs == ()


def test_lengths_come_from_the_histogram_with_the_mean_that_was_measured() -> None:
    seen = window("interactive", 10.0, prompt=900)
    mean = seen.mean_prompt_tokens
    assert mean is not None
    lengths, rng = MeasuredLengths(seen.prompt_lengths, mean), random.Random(0)
    drawn = [lengths.sample(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.02)
    assert sorted(drawn)[len(drawn) // 2] == pytest.approx(900, rel=0.05)


def test_steps_of_terms_are_those_of_the_gpu_and_a_run_of_decodes_is_the_sum_of_its_steps() -> None:
    real = step_time("h100", "llama-3.1-8b", 1)
    steps = MeasuredSteps(terms_of(real), 1.0)
    for batch in (Batch(((2_000, 0),)), Batch((), 20, 20_000), Batch(((512, 1_024),), 8, 8_000)):
        assert steps.step_s(batch) == pytest.approx(real.step_s(batch), rel=0.1)
    single = sum(steps.decode_steps_s(4, 1_000 + 4 * number, 1) for number in range(10))
    assert steps.decode_steps_s(4, 1_000, 10) == pytest.approx(single)
    assert MeasuredSteps(terms_of(real), 2.0).step_s(Batch((), 4, 100)) == 2 * steps.step_s(Batch((), 4, 100))
    assert steps.step_s(Batch()) == 0.0


def test_disaggregation_pays_for_tight_gaps_beside_long_prompts_and_not_where_one_prefill_worker_cannot_keep_up() -> (
    None
):
    pace = replace(CHAT, ttft_ms=3_000.0, tpot_ms=30.0, itl_p99_ms=10.0)
    for slo, prompt, output, rate, pays in ((pace, 2_000, 60, 8.0, True), (CHAT, 6_000, 8, 12.0, False)):
        seen = measured(fleet(classes=(slo,)), window("interactive", rate, prompt=prompt, output=output))
        asked = asked_of(seen, 0, 1e9)
        short = replace(asked.question, seeds=(0, 1, 2), warm_up_s=2.0, length_s=12.0)
        verdict = verdict_of(answer(short), replace(asked, question=short), 0.0)
        assert verdict.pays is pays, verdict
