"""The planner's parts, each alone: traffic, space, guess, judge, regimes, picture."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from baton.errors import ConfigError
from baton.slo import SLO, Verdict
from bench.plan.baselines import Perturbed, prefill_first
from bench.plan.judge import Judge, mean_and_half_width
from bench.plan.plan import Gain, Pays, gain_of
from bench.plan.plot import Line, Mark, plot
from bench.plan.regime import Regime, regime_of, remedies
from bench.plan.screen import Limit, Targets, guess
from bench.plan.space import OWN_WINDOW_S, Candidate, Offer, Space, neighbours
from bench.plan.traffic import Drawn, Recorded, Seen, load_of, recorded
from bench.sim.call import Call
from bench.sim.deployment import Hardware, Layout
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceError, TraceRow
from bench.workload import Lengths
from engine.timing.batch import Batch

CHAT = Drawn(10.0, Lengths(1_000, 1_000), Lengths(20, 20))
CLASSES = Mix((SLO("chat", 500.0, 20.0),))
TARGETS = Targets.of(CLASSES.classes)
LOAD = load_of(CHAT)
ROW = '{"timestamp": %d, "input_length": %d, "output_length": 5, "hash_ids": []}\n'
SPACE = Space("llama-3.1-8b", [Offer.parse("h100")], widths=(1, 2), held_tokens=LOAD.held_tokens)


def candidate(layout: Layout, *, space: Space = SPACE, budget: int = 512, gpu: str = "h100") -> Candidate:
    return space.candidate(layout, Hardware(gpu), None, budget=budget, local_tokens=0, window_s=OWN_WINDOW_S)


def test_drawn_and_seen_calls_are_the_same_for_a_seed_at_every_rate_but_for_their_pace() -> None:
    for traffic in (CHAT, Seen(1.0, [(100, 10), (900, 90)])):
        slow, fast = traffic.calls(1.0, 50, 3), traffic.calls(10.0, 50, 3)
        assert [row.input_tokens for row in slow] == [row.input_tokens for row in fast]
        assert [row.at_s for row in slow] == pytest.approx([10 * row.at_s for row in fast])
        assert slow != traffic.calls(1.0, 50, 4)


def test_a_recorded_window_has_the_rate_that_is_asked_for_and_keeps_its_bursts() -> None:
    rows = [TraceRow(float(at_s), 10, 1) for at_s in (0, 1, 2, 10, 11, 12, 20, 21, 22)]
    calls = Recorded(1.0, rows).calls(4.0, 9, 0)
    assert (len(calls) - 1) / (calls[-1].at_s - calls[0].at_s) == pytest.approx(4.0)
    gaps = [after.at_s - before.at_s for before, after in pairwise(calls)]
    assert gaps[2] / gaps[0] == pytest.approx(8.0)


def test_a_short_trace_is_played_again_as_other_content() -> None:
    rows = [TraceRow(0.0, 512, 1, (0,)), TraceRow(1.0, 512, 1, (0,))]
    calls = Recorded(1.0, rows).calls(1.0, 4, 0)
    assert [call.block_ids for call in calls] == [(0,), (0,), (1,), (1,)]
    assert sorted(call.at_s for call in calls) == [call.at_s for call in calls]


def test_load_counts_what_no_earlier_prompt_had() -> None:
    rows = [TraceRow(float(n), 1_024, 10, (7, n + 8)) for n in range(4)]
    load = load_of(Recorded(1.0, rows))
    assert load.prompt_tokens == 1_024
    assert load.computed_tokens < 1_024


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_a_rate_that_is_no_number_above_0_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"traffic\.rate"):
        replace(CHAT, rate=rate)


def test_a_seen_pair_without_tokens_is_named() -> None:
    with pytest.raises(ConfigError, match=r"traffic.pairs\[1\]"):
        Seen(1.0, [(5, 5), (0, 5)])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (ROW % (0, 5), "two rows at different times"),
        (ROW % (0, -5), "line 1: input_length is -5"),
        (ROW % (0, 5) + ROW % (9_000, 5) + ROW % (3_000, 5), "line 3: timestamp is 3000, before 9000"),
        ('{"timestamp": 0, "output_length": 5, "hash_ids": []}\n', "line 1: input_length is missing"),
    ],
)
def test_a_trace_row_that_is_not_as_it_should_be_is_named(lines: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines)
    with pytest.raises(TraceError, match=message):
        recorded(str(path))


@pytest.mark.parametrize("text", ["h1000", "h100=free", "h100=-1", "h100=nan", "h100=0"])
def test_an_offer_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="gpu"):
        Offer.parse(text)


def test_the_space_holds_each_structure_once_and_nothing_that_could_serve_nothing() -> None:
    found = list(SPACE.of_size(4))
    assert len(set(found)) == len(found)
    assert all(one.num_gpus == 4 for one in found)
    assert any(one.is_colocated for one in found)
    assert any(one.layout.num_prefill and one.layout.num_both and one.layout.num_decode for one in found)
    assert any(one.deployment.decode_hardware == Hardware("h100", 2) for one in found)
    assert not any(one.layout.num_decode and not one.layout.num_prefill for one in found)


def test_a_model_that_fits_nothing_on_offer_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit 2 x h100"):
        Space("llama-3.1-405b", [Offer.parse("h100")], widths=(1, 2))


def test_neighbours_use_the_same_gpus_and_differ_in_one_thing() -> None:
    one = candidate(Layout(0, 0, 4))
    found = list(neighbours(SPACE, one))
    assert {other.budget for other in found if other.is_colocated} == {384, 640}
    assert all(other.num_gpus == 4 and other != one for other in found)


def test_prices_are_those_of_the_offer() -> None:
    assert candidate(Layout(1, 1), space=replace(SPACE, offers=[Offer("h100", 2.5)])).usd_per_hour == 5.0


def test_a_guess_grows_with_workers_and_with_looser_targets_and_its_least_limit_binds() -> None:
    small, large = (guess(candidate(Layout(0, 0, num)), LOAD, TARGETS) for num in (2, 4))
    assert large.rate > 1.5 * small.rate
    assert guess(candidate(Layout(0, 0, 2)), LOAD, replace(TARGETS, tpot_s=0.04)).rate >= small.rate
    assert small.rate == small.limits[small.binding]


def test_the_four_regimes_are_told_apart() -> None:
    def regime(prompt: int, answer: int, targets: Targets, **space: object) -> Regime:
        load = load_of(Drawn(1.0, Lengths(prompt, prompt), Lengths(answer, answer)))
        return regime_of(guess(candidate(Layout(1, 1)), load, targets), targets)

    assert regime(4_000, 5, replace(TARGETS, ttft_s=0.3)) is Regime.PREFILL
    assert regime(500, 400, replace(TARGETS, tpot_s=0.008)) is Regime.LATENCY
    assert regime(500, 400, replace(TARGETS, tpot_s=0.012)) is Regime.THROUGHPUT
    assert regime(16_000, 4_000, replace(TARGETS, ttft_s=9.0, tpot_s=0.2)) is Regime.MEMORY


def test_half_as_many_bytes_of_kv_help_where_memory_binds() -> None:
    load = load_of(Drawn(1.0, Lengths(16_000, 16_000), Lengths(4_000, 4_000)))
    loose = replace(TARGETS, ttft_s=9.0, tpot_s=0.2)
    assert guess(candidate(Layout(1, 1)), load, loose).binding is Limit.MEMORY
    assert any(
        "KV cache in fp8" in one.what and one.gain > 0.5 for one in remedies(candidate(Layout(1, 1)), load, loose)
    )


def test_the_knee_lies_between_a_rate_that_holds_and_one_that_does_not() -> None:
    judge = Judge(CHAT, CLASSES)
    knee = judge.knee(candidate(Layout(0, 0, 1)), 40.0, num_calls=150, seed=0)
    assert knee.below is not None
    assert knee.above is not None
    assert knee.below.holds
    assert not knee.above.holds
    assert knee.below.rate <= knee.rate <= knee.above.rate
    assert judge.num_calls >= 150 * judge.num_trials
    before = judge.num_calls
    assert not judge.holds(candidate(Layout(0, 0, 1)), 3 * knee.rate, num_calls=400, seed=0)
    assert judge.num_calls - before < 400 / 2, "it went on long after it had missed too much"


def test_a_trial_lasts_until_a_deployment_has_filled_up_and_half_as_long_again() -> None:
    """Answers of 20 tokens at 20 ms: nine tenths of what will be there are there after 0.36 s."""
    trial = Judge(CHAT, CLASSES).trial(candidate(Layout(0, 0, 1)), 40.0, num_calls=1, seed=0)
    assert trial.num_calls == math.ceil(2.5 * 0.36 * 40.0)


def test_a_trial_that_the_cap_ends_before_its_fleet_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.plan.judge.MAX_CALLS", 36)
    judge, one = Judge(CHAT, CLASSES), candidate(Layout(0, 0, 1))
    assert not judge.trial(one, 40.0, num_calls=1, seed=0).is_cut
    assert not judge.trial(one, 20.0, num_calls=1_000, seed=0).is_cut, "it needs 18 calls to be full"
    cut = judge.trial(one, 80.0, num_calls=1, seed=0)
    assert (cut.is_cut, cut.num_calls) == (True, 36)


def test_disaggregation_pays_only_where_the_interval_says_so() -> None:
    assert Gain(0.1, 0.05).verdict is Pays.PAYS
    assert Gain(-0.1, 0.05).verdict is Pays.DOES_NOT
    assert Gain(0.1, 0.2).verdict is Pays.UNSURE
    assert Gain(0.1, None).verdict is Pays.UNSURE
    gain = gain_of([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert gain is not None
    assert gain.mean == pytest.approx(0.1)


def test_an_interval_is_that_of_students_t() -> None:
    mean, half = mean_and_half_width([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / math.sqrt(3))
    assert mean_and_half_width([1.0]) == (1.0, None)


def test_a_plot_is_well_formed_and_escapes_its_labels() -> None:
    text = plot("a < b", [Line("x & y", [(1.0, 1.0), (2.0, 0.5)])], wanted=0.95, marks=[Mark("wanted", 1.5)])
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "x &amp; y" in text


def first_of(num_gpus: int, *, budget: int, admits: bool = True) -> Candidate:
    return next(one for one in prefill_first(SPACE, num_gpus, admits=admits) if one.budget == budget)


def test_prefill_first_makes_running_sequences_wait_and_chunks_do_not() -> None:
    traffic = Drawn(4.0, Lengths(4_000, 4_000), Lengths(40, 40))
    judge = Judge(traffic, Mix((SLO("chat", 2_000.0, 100.0, itl_p99_ms=40.0),)))
    chunked = judge.trial(candidate(Layout(0, 0, 1)), 4.0, num_calls=100, seed=0)
    whole = judge.trial(first_of(1, budget=8_192), 4.0, num_calls=100, seed=0)
    assert chunked.holds
    assert not whole.holds
    assert whole.missed[Verdict.ITL] > whole.num_calls / 4


def test_prompts_one_after_the_other_make_one_long_gap_for_who_waits() -> None:
    """A prompt of 2,000 tokens takes 30 ms in its own step: one is shorter than the limit of 50 ms, two in a row are not."""

    def gaps(num_prompts: int) -> list[int]:
        calls: list[Call] = []
        mix = Mix((SLO("chat", 10_000.0, 1_000.0, itl_p99_ms=50.0),))
        simulation = Simulation(first_of(1, budget=2_048).deployment, mix, bounds=None, on_call=calls.append)
        late = [TraceRow(0.1, 2_000, 5) for _ in range(num_prompts)]
        simulation.run([TraceRow(0.0, 10, 80), *late])
        return [call.num_long_gaps for call in sorted(calls, key=lambda call: call.seq)]

    assert gaps(1) == [0, 0]
    assert gaps(3) == [1, 1, 0, 0], (
        "the first prompt of three waits for two more, the second for one, which is no longer than that"
    )


def test_without_admission_every_call_is_taken_however_late() -> None:
    judge = Judge(CHAT, CLASSES)
    admitted, open_ = (
        judge.trial(first_of(1, budget=2_048, admits=admits), 200.0, num_calls=100, seed=0) for admits in (True, False)
    )
    assert admitted.missed[Verdict.FAILED]
    assert not open_.missed[Verdict.FAILED]
    assert open_.missed[Verdict.TTFT] > admitted.missed[Verdict.TTFT]


def test_perturbed_steps_are_off_by_no_more_than_was_asked_and_the_same_for_a_seed() -> None:
    plain = candidate(Layout(0, 0, 1)).deployment
    times, again, other = (Perturbed(0.2, seed)(plain).step_time() for seed in (1, 1, 2))
    for batch in (Batch(((2_048, 0),)), Batch((), 1, 1), Batch((), 200, 200_000)):
        assert 0.8 <= times.step_s(batch) / plain.step_time().step_s(batch) <= 1.2
        assert times.step_s(batch) == again.step_s(batch)
    assert times.step_s(Batch((), 1, 1)) != other.step_s(Batch((), 1, 1))
