"""Facts say what windows say, and no more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from baton.errors import InvalidRequest
from baton.request import Role
from baton.slo import SLO
from baton.v1 import worker_pb2
from router.controller.arrivals import Forecast
from router.controller.autoscaler.facts import FleetFacts
from router.controller.autoscaler.gather import Surroundings, gather, learned, load_of
from router.controller.autoscaler.levels import Levels
from router.controller.measures import ClassForecast
from router.controller.observer import FleetView
from router.controller.settings import Budget
from router.controller.step_model import MIN_SAMPLES, StepModel, StepWork
from router.windows import NUM_LENGTH_BUCKETS, ClassWindow, length_bucket
from tests.controller.autoscaler.fleets import CHAT, TERMS, fleet

NOTHING = FleetView(0, (), (), (), 0.0)
SURROUNDINGS = Surroundings(131_072.0, 40e9)


def lengths(*prompts: int) -> tuple[float, ...]:
    counts = [0.0] * NUM_LENGTH_BUCKETS
    for prompt in prompts:
        counts[length_bucket(prompt)] += 1
    return tuple(counts)


def window(window_s: float, calls: int, prompt: int, cached: int = 0, output: int = 100) -> ClassWindow:
    return ClassWindow(
        CHAT.name,
        window_s,
        window_s,
        num_met=calls - 3,
        num_missed_ttft=1,
        num_missed_itl=1,
        num_failed=1,
        num_arrived=calls,
        num_prompts=calls,
        prompt_tokens=calls * prompt,
        cached_tokens=calls * cached,
        num_outputs=calls,
        output_tokens=calls * output,
        prompt_lengths=lengths(*[prompt] * calls),
    )


def told(*windows: ClassWindow, rate: float = 10.0) -> FleetFacts:
    leads = tuple(Forecast(lead_s, rate * times, 0, 1, "last", 0.1, None) for lead_s, times in ((60.0, 2), (300.0, 3)))
    return gather(
        100.0,
        view=FleetView(1, windows, (), (), 0.0) if windows else NOTHING,
        forecasts=[ClassForecast(CHAT.name, rate, leads)],
        classes=[CHAT],
        steps={Role.DECODE: TERMS},
        workers=fleet(1, 1),
        budget=Budget(),
        surroundings=SURROUNDINGS,
        levels=Levels(),
        start_up_s=60.0,
    )


def test_a_class_is_told_from_its_windows_and_the_forecast_at_the_start_up_lead() -> None:
    [chat] = told(window(30.0, 300, 1_000, cached=200), window(300.0, 3_000, 1_000, cached=200)).classes
    assert chat.num_arrived == 3_000
    assert chat.rate == 10.0
    assert chat.coming_rate == 20.0
    assert (chat.prompt_tokens, chat.cached_tokens, chat.output_tokens) == (1_000, 200, 100)
    assert chat.prompt_pairs == pytest.approx((1_000**2 - 200**2) / 2)
    assert (chat.num_judged, chat.num_missed_ttft, chat.num_missed_tpot, chat.num_failed) == (300, 1, 1, 1)
    assert chat.num_met == 297


def test_many_calls_show_a_change_at_once_and_a_few_do_not() -> None:
    varied = replace(window(300.0, 1_000, 1_000), prompt_lengths=lengths(*[100] * 900, *[9_100] * 100))
    [many] = told(window(30.0, 100, 3_000), varied).classes
    [few] = told(window(30.0, 4, 3_000), varied).classes
    assert many.prompt_tokens == 3_000  # 7 standard deviations away
    assert few.prompt_tokens == 1_000  # 1.5


def test_few_calls_are_judged_over_the_long_window() -> None:
    [few] = told(window(30.0, 19, 1_000), window(300.0, 60, 1_000)).classes
    [enough] = told(window(30.0, 20, 1_000), window(300.0, 60, 1_000)).classes
    assert (few.judged_s, few.num_judged) == (300.0, 60)
    assert (enough.judged_s, enough.num_judged) == (30.0, 20)


def test_the_most_that_may_come_is_known_once_forecasts_of_every_lead_came_true() -> None:
    near, far = (Forecast(lead_s, 5.0, 4.0, 7.0, "last", 0.1, None) for lead_s in (60.0, 300.0))
    peak = replace(near, high=9.0)
    for forecasts, later in (
        ((near, far), 7.0),
        ((peak, far), 9.0),
        ((near, replace(far, error=None)), None),
        ((), None),
    ):
        [chat] = gather(
            0.0,
            view=NOTHING,
            forecasts=[ClassForecast(CHAT.name, 1.0, forecasts)],
            classes=[CHAT],
            steps={},
            workers=(),
            budget=Budget(),
            surroundings=SURROUNDINGS,
            levels=Levels(),
            start_up_s=60.0,
        ).classes
        assert chat.later_rate == later


def test_one_prompt_of_many_that_was_cached_is_no_change_and_half_of_them_are_one() -> None:
    lately = window(300.0, 300, 1_000)
    [one] = told(
        replace(window(30.0, 30, 1_000), cached_tokens=1_000.0), replace(lately, cached_tokens=1_000.0)
    ).classes
    [half] = told(
        replace(window(30.0, 30, 1_000), cached_tokens=15_000.0), replace(lately, cached_tokens=15_000.0)
    ).classes
    assert one.cached_tokens is not None
    assert one.cached_tokens < 5.0
    assert half.cached_tokens == 500.0


def test_prompts_that_vary_have_more_pairs_than_their_mean_says() -> None:
    mixed = replace(window(30.0, 100, 1_000), prompt_lengths=lengths(*[100] * 90, *[9_100] * 10))
    [chat] = told(mixed, replace(mixed, window_s=300.0, span_s=300.0)).classes
    assert chat.prompt_pairs is not None
    assert 6 < chat.prompt_pairs / (1_000**2 / 2) < 10  # (90 x 100^2 + 10 x 9100^2) / 100 / 1000^2 = 8.3


def test_without_routers_nothing_is_known_and_without_calls_there_are_none() -> None:
    [nobody] = told().classes
    assert nobody.rate is None
    assert nobody.prompt_tokens is None
    silent = gather(
        0.0,
        view=FleetView(2, (), (), (), 0.0),
        forecasts=[],
        classes=[CHAT, SLO("other", 1.0, 1.0)],
        steps={},
        workers=(),
        budget=Budget(),
        surroundings=SURROUNDINGS,
        levels=Levels(),
        start_up_s=60.0,
    )
    assert [traffic.rate for traffic in silent.classes] == [0.0, 0.0]
    assert [traffic.coming_rate for traffic in silent.classes] == [None, None]


def test_a_start_up_longer_than_every_lead_gets_the_longest() -> None:
    facts = gather(
        0.0,
        view=NOTHING,
        forecasts=[ClassForecast(CHAT.name, 1.0, (Forecast(60.0, 5.0, 0, 9, "last", 0.1, None),))],
        classes=[CHAT],
        steps={},
        workers=(),
        budget=Budget(),
        surroundings=SURROUNDINGS,
        levels=Levels(),
        start_up_s=1_000.0,
    )
    assert facts.classes[0].coming_rate == 5.0


def test_only_models_that_have_learned_are_believed() -> None:
    new, seen = StepModel(TERMS), StepModel(TERMS)
    for _ in range(MIN_SAMPLES):
        seen.observe(StepWork(64.0, 64_000.0), 0.02)
    assert learned({"prefill": new, "decode": seen}) == {Role.DECODE: seen.terms}


def test_a_report_becomes_a_load_in_tokens_and_seconds() -> None:
    load = worker_pb2.Load(num_running=3, num_waiting=2, num_tickets=1, active_blocks=10, reserved_blocks=5, step_ms=20)
    told_of = load_of(load, 7.0, 16)
    assert (told_of.at_s, told_of.num_seqs, told_of.used_tokens) == (7.0, 6, 240)
    assert told_of.step_s == pytest.approx(0.02)


def test_a_report_of_an_engine_that_stands_still_is_as_old_as_what_that_said_last() -> None:
    assert load_of(worker_pb2.Load(num_running=3, age_s=40.0), 100.0, 16).at_s == 60.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_surroundings_that_cannot_be_are_refused_by_name(bad: float) -> None:
    with pytest.raises(InvalidRequest, match="link_bytes_per_s"):
        Surroundings(1.0, bad)
    with pytest.raises(InvalidRequest, match="h100"):
        Surroundings(1.0, 1.0, {"h100": bad})
