"""What a dry run says: from measurements to a question, from simulated calls to an interval, and when it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from baton.errors import Unavailable
from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.facts import State
from router.controller.feasibility import NoForecast, Outlook, Prediction
from router.controller.live_forecast import MAX_WIDTH, LiveForecast
from router.controller.measured_fleet import MIN_CALLS, Measured
from router.controller.step_model import StepWork
from router.controller.what_if import QUESTION, Answer, Question
from router.windows import ClassWindow
from tests.controller.live_rig import BULK, CHAT, TERMS, ScriptedSimulator, by_scenario, fleet, measured, window, worker

TIGHTER = replace(CHAT, ttft_ms=250.0)
STEADY = {"now": 950, "after": 900, "slower": 890, "quicker": 910}


async def outlook_of(met: Mapping[str, int], *windows: ClassWindow, is_settled: bool = True) -> Outlook:
    seen = measured(fleet(), *windows, is_settled=is_settled)
    return await LiveForecast(ScriptedSimulator(by_scenario(met)), lambda: seen, 5.0).predict((CHAT,), (TIGHTER,))


async def predicted(met: Mapping[str, int], *windows: ClassWindow, is_settled: bool = True) -> Prediction:
    return (await outlook_of(met, *windows, is_settled=is_settled)).classes["interactive"]


async def test_a_prediction_is_moved_by_how_far_the_simulation_is_from_what_routers_measure() -> None:
    right = await predicted(STEADY, window("interactive", 10.0, met=0.95))
    assert right.attainment == pytest.approx(0.90, abs=0.005)
    better = await predicted(STEADY, window("interactive", 10.0, met=0.97))
    assert better.attainment == pytest.approx(0.93, abs=0.015)  # odds of 19 became 32, so odds of 9 become nearly 15
    worse = await predicted(STEADY, window("interactive", 10.0, met=0.90))
    assert worse.attainment == pytest.approx(0.82, abs=0.015)


async def test_measurements_under_other_targets_move_nothing() -> None:
    found = await predicted(STEADY, window("interactive", 10.0, met=0.5), is_settled=False)
    assert found.attainment == pytest.approx(0.90, abs=0.005)


async def test_an_interval_grows_with_what_step_times_may_be_off_by_up_to_ten_points() -> None:
    seen = window("interactive", 10.0)
    sure = await predicted(STEADY, seen)
    unsure = await predicted({**STEADY, "slower": 870, "quicker": 930}, seen)
    wide = await predicted({**STEADY, "slower": 840, "quicker": 960}, seen)
    widths = [found.high - found.low for found in (sure, unsure, wide)]
    assert widths == sorted(widths)
    assert 0.0 < widths[0] < widths[1] < widths[2] == pytest.approx(MAX_WIDTH)
    assert all(found.low <= found.attainment <= found.high for found in (sure, unsure, wide))


async def test_what_may_be_almost_anything_is_not_squeezed_into_an_interval() -> None:
    seen = window("interactive", 10.0)
    found = await outlook_of({**STEADY, "slower": 500, "quicker": 1_000}, seen)
    assert found.classes == {}
    assert found.unknown["interactive"].startswith("anything from 5")
    assert "step times are not known well enough for this target" in found.unknown["interactive"]


async def test_the_question_is_what_was_measured_and_survives_the_way_to_another_process() -> None:
    simulator = ScriptedSimulator(by_scenario(STEADY))
    seen = measured(fleet(2, 3, local_prefill_tokens=64), window("interactive", 10.0, prompt=900, cached=0.25))
    await LiveForecast(simulator, lambda: seen, 5.0).predict((CHAT,), (TIGHTER,))
    [question] = simulator.asked
    assert QUESTION.validate_json(QUESTION.dump_json(question)) == question
    [load] = question.load
    assert (load.rate, sum(load.prompt_lengths)) == (10.0, 3_000)
    assert load.cached_share == pytest.approx(0.25)
    assert question.network_s == pytest.approx(0.002)  # 3 ms were measured, and the simulator has hops of its own
    assert question.length_s > question.warm_up_s > 0
    now, after, slower, quicker = question.scenarios
    assert [pool.num_workers for pool in now.pools] == [2, 3]
    assert (now.classes, after.classes, after.local_prefill_tokens) == ((CHAT,), (TIGHTER,), 64)
    assert quicker.slowness < 1.0 < slower.slowness


async def test_a_class_without_traffic_is_left_out_and_said() -> None:
    seen = measured(fleet(), window("interactive", 10.0), window("batch", 0.1))
    simulator = ScriptedSimulator(by_scenario(STEADY))
    outlook = await LiveForecast(simulator, lambda: seen, 5.0).predict((CHAT,), (TIGHTER, BULK))
    assert set(outlook.classes) == {"interactive"}
    assert outlook.unknown == {"batch": f"fewer than {MIN_CALLS} calls in the last 300 s"}
    assert any("Poisson" in assumption for assumption in outlook.assumptions)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (measured(fleet()), "too little traffic to say: it takes 60 s"),
        (measured(fleet(), window("interactive", 10.0, span_s=30.0)), "too little traffic to say: it takes 60 s"),
        (
            measured(fleet(), window("interactive", 0.1)),
            "of no class 50 calls ended in the last 300 s, of one at most 30",
        ),
        (measured(fleet(1, 0), window("interactive", 10.0)), "cannot serve a call"),
        (measured(replace(fleet(), steps={}), window("interactive", 10.0)), "the prefill pool are not learned yet"),
        (
            measured(
                replace(fleet(), workers=(worker("p", Role.PREFILL), worker("d", Role.DECODE, state=State.FAILED))),
                window("interactive", 10.0),
            ),
            "cannot serve a call",
        ),
    ],
)
async def test_where_nothing_can_be_said_the_reason_is(seen: Measured, words: str) -> None:
    forecast = LiveForecast(ScriptedSimulator(by_scenario(STEADY)), lambda: seen, 5.0)
    with pytest.raises(NoForecast, match=words):
        await forecast.predict((CHAT,), (TIGHTER,))


class NoTime:
    async def ask(self, question: Question) -> Answer:
        return Answer(())


class Away:
    async def ask(self, question: Question) -> Answer:
        raise Unavailable("the planner did not answer within 11 s")


async def test_a_simulator_that_had_no_time_or_did_not_answer_is_said() -> None:
    seen = measured(fleet(), window("interactive", 10.0))
    with pytest.raises(NoForecast, match="cannot be simulated within 5 s: it is too much, or this machine is busy"):
        await LiveForecast(NoTime(), lambda: seen, 5.0).predict((CHAT,), (TIGHTER,))
    with pytest.raises(NoForecast, match="did not answer within 11 s"):
        await LiveForecast(Away(), lambda: seen, 5.0).predict((CHAT,), (TIGHTER,))


async def test_runs_in_which_no_call_of_a_class_came_say_nothing_of_it() -> None:
    class Rare(ScriptedSimulator):
        async def ask(self, question: Question) -> Answer:
            runs = (await super().ask(question)).runs
            return Answer(tuple(run if run.seed == question.seeds[0] else replace(run, classes=()) for run in runs))

    seen = measured(fleet(), window("interactive", 10.0))
    found = await LiveForecast(Rare(by_scenario(STEADY)), lambda: seen, 5.0).predict((CHAT,), (TIGHTER,))
    assert found.classes["interactive"].attainment == pytest.approx(0.90, abs=0.01)


async def test_where_nothing_comes_or_the_planner_left_a_scenario_out_there_is_no_forecast() -> None:
    class Forgetful(ScriptedSimulator):
        async def ask(self, question: Question) -> Answer:
            return Answer(tuple(run for run in (await super().ask(question)).runs if run.scenario != "after"))

    seen = window("interactive", 10.0)
    for simulator, windows, words in (
        (ScriptedSimulator(by_scenario(STEADY)), replace(seen, num_arrived=0.0), "none came"),
        (Forgetful(by_scenario(STEADY)), seen, "cannot be simulated"),
    ):
        forecast = LiveForecast(simulator, lambda windows=windows: measured(fleet(), windows), 5.0)  # type: ignore[misc]
        with pytest.raises(NoForecast, match=words):
            await forecast.predict((CHAT,), (TIGHTER,))


async def test_a_class_whose_tpot_target_is_about_a_lone_step_is_not_predicted_and_others_are() -> None:
    step_ms = 1e3 * TERMS.step_s(StepWork(1.0))
    seen = (window("interactive", 10.0), window("batch", 2.0))

    async def asked(before: SLO, after: SLO, *windows: ClassWindow) -> Outlook:
        fleet_now = measured(fleet(classes=(before, BULK)), *windows)
        forecast = LiveForecast(ScriptedSimulator(by_scenario(STEADY)), lambda: fleet_now, 5.0)
        return await forecast.predict((before, BULK), (after, BULK))

    for share in (0.96, 1.0, 1.04):
        found = await asked(CHAT, replace(CHAT, tpot_ms=share * step_ms), *seen)
        assert "one sequence alone" in found.unknown["interactive"]
        assert found.classes.keys() == {"batch"}, "its calls wait for no target that cannot be kept"
    for share in (0.9, 1.1, 1 / 0.85):
        assert "interactive" in (await asked(CHAT, replace(CHAT, tpot_ms=share * step_ms), *seen)).classes

    odd = window("interactive", 10.0, met=0.5)
    moved = (await asked(CHAT, TIGHTER, odd)).classes["interactive"].attainment
    kept = (await asked(replace(CHAT, tpot_ms=step_ms), TIGHTER, odd)).classes["interactive"].attainment
    assert moved < 0.6
    assert kept == pytest.approx(0.90, abs=0.005), "what was measured under such a target is no measure"


async def test_no_interval_is_narrower_than_a_point_on_either_side_but_at_the_ends_of_what_is_possible() -> None:
    all_met = dict.fromkeys(STEADY, 1_000)
    found = await predicted(all_met, window("interactive", 100.0, met=1.0))
    assert found.low == pytest.approx(found.attainment - 0.01)
    assert found.high == 1.0
