"""Parts of the simulator: links that are shared, gaps that are counted, means and how sure they are."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial

import pytest

from baton.slo import SLO, Verdict
from bench.sim.call import Call, request_of
from bench.sim.clock import Clock, Event
from bench.sim.decode_times import FastDecodes
from bench.sim.deployment import Deployment, Layout
from bench.sim.links import Nic, send
from bench.sim.measures import BatchMeans, Histogram
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceRow
from engine.timing.step_time import Batch, StepTime


class Sent:
    """Flows on one clock, and when each was over."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.done_s: dict[str, float] = {}

    def at(self, at_s: float, name: str, source: Nic, target: Nic, nbytes: float) -> None:
        def start(now_s: float) -> Iterable[Event]:
            return send(source, target, nbytes, now_s, partial(self._done, name))

        self.clock.add([Event(at_s, start)])

    def _done(self, name: str, now_s: float) -> Iterable[Event]:
        self.done_s[name] = now_s
        return ()

    def run(self) -> dict[str, float]:
        self.clock.run(until=lambda: False)
        return self.done_s


def test_a_flow_alone_takes_its_bytes_over_the_slower_end() -> None:
    sent = Sent()
    sent.at(1.0, "a", Nic(100.0), Nic(50.0), 200.0)
    assert sent.run() == {"a": pytest.approx(5.0)}


def test_incast_halves_the_rate_of_two_senders_and_gives_it_back() -> None:
    sent, target = Sent(), Nic(100.0)
    sent.at(0.0, "short", Nic(100.0), target, 100.0)
    sent.at(0.0, "long", Nic(100.0), target, 200.0)
    assert sent.run() == {"short": pytest.approx(2.0), "long": pytest.approx(3.0)}


def test_full_duplex_flows_do_not_slow_each_other() -> None:
    sent, one, other = Sent(), Nic(100.0), Nic(100.0)
    sent.at(0.0, "there", one, other, 100.0)
    sent.at(0.0, "back", other, one, 100.0)
    assert sent.run() == {"there": pytest.approx(1.0), "back": pytest.approx(1.0)}


def test_a_late_flow_slows_what_is_left_of_the_first() -> None:
    sent, source = Sent(), Nic(100.0)
    sent.at(0.0, "first", source, Nic(100.0), 100.0)
    sent.at(0.5, "late", source, Nic(100.0), 50.0)
    assert sent.run() == {"first": pytest.approx(1.5), "late": pytest.approx(1.5)}


class Steps:
    """10 ms for decodes, and 1 ms for each token of a prompt."""

    def step_s(self, batch: Batch) -> float:
        return 0.01 + 0.001 * batch.num_prefill_tokens

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        return 0.01 * num_steps


class Fixed(Deployment):
    def step_time(self) -> StepTime:
        return Steps()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("limit_ms", "verdict"), [(50.0, Verdict.ITL), (150.0, Verdict.MET)])
def test_a_stream_held_up_by_a_prompt_beside_it_misses_a_limit_on_gaps(
    fast: bool, limit_ms: float, verdict: Verdict
) -> None:
    """The prompt of 100 tokens makes one gap of 110 ms among 59; of fewer than 100 gaps none may be longer."""
    calls: list[Call] = []
    mix = Mix((SLO("one", 1_000.0, 100.0, itl_p99_ms=limit_ms),))
    simulation = Simulation(Fixed(Layout(num_both=1)), mix, fast=fast, bounds=None, on_call=calls.append)
    simulation.run([TraceRow(0.0, 10, 60), TraceRow(0.3, 100, 2)])
    first = min(calls, key=lambda call: call.seq)
    assert first.verdict is verdict
    assert first.num_long_gaps == (limit_ms < 110.0)
    assert first.tpot_s == pytest.approx((58 * 0.01 + 0.11) / 59)


def test_a_narrow_network_shows_in_the_handoff_gap_alone() -> None:
    gaps = []
    for bytes_per_s in (1e12, 1e9):
        deployment = Fixed(Layout(1, 1))
        calls: list[Call] = []
        simulation = Simulation(deployment, on_call=calls.append)
        for worker in simulation.workers:
            worker.nic.bytes_per_s = bytes_per_s
        simulation.run([TraceRow(0.0, 800, 20)])
        assert calls[0].ttft_s == pytest.approx(0.8125, rel=0.01)
        gaps.append(calls[0].handoff_gap_s)
    wide_s, narrow_s = gaps
    assert wide_s is not None
    assert narrow_s is not None
    assert narrow_s - wide_s == pytest.approx(800 * 131_072 / 1e9, rel=0.02)


def test_whoever_is_told_the_time_sees_the_fleet_and_keeps_no_run_alive() -> None:
    simulation = Simulation(Deployment(Layout(1, 1)), bounds=None)
    seen: list[tuple[float, int]] = []

    def tick(now_s: float) -> Iterable[Event]:
        seen.append((now_s, sum(worker.num_running for worker in simulation.workers)))
        return [Event(now_s + 1.0, tick)]

    simulation.at(1.0, tick)
    outcome = simulation.run([TraceRow(0.2, 100, 400), TraceRow(0.5, 100, 400)])
    assert [at_s for at_s, _ in seen] == [float(second) for second in range(1, 1 + int(outcome.run_s))]
    assert seen[0] == (1.0, 2)


def test_what_no_pool_can_hold_is_refused_and_counted_as_missed() -> None:
    simulation = Simulation(Deployment(Layout(1, 1), max_pool_tokens=1_000))
    outcome = simulation.run([TraceRow(0.0, 5_000, 20), TraceRow(1.0, 100, 20)])
    assert outcome.classes[0].verdicts == {Verdict.FAILED: 1, Verdict.MET: 1}
    assert outcome.attainment == 0.5


def test_decode_times_that_are_remembered_are_those_asked_for() -> None:
    times = Deployment(Layout(num_both=1)).step_time()
    assert isinstance(times, FastDecodes)
    for num, context, steps in ((1, 0, 1), (7, 9_000, 40), (200, 150_000, 3)):
        expected = times.times.decode_steps_s(num, context, steps)
        assert times.decode_steps_s(num, context, steps) == pytest.approx(expected, rel=1e-12)
        single = sum(times.step_s(Batch((), num, context + step * num)) for step in range(steps))
        assert times.decode_steps_s(num, context, steps) == pytest.approx(single, rel=1e-12)


def test_equal_blocks_become_equal_tokens_and_the_rest_is_nobody_elses() -> None:
    slo = SLO("x", 1.0, 1.0)
    one = request_of(TraceRow(0.0, 10, 5, (3, 4), 4), 1, slo).token_ids
    two = request_of(TraceRow(0.0, 9, 5, (3, 5), 4), 2, slo).token_ids
    assert one[:4] == two[:4]
    assert not set(one[4:]) & set(two[4:])
    assert (len(one), len(two)) == (10, 9)


def test_percentiles_of_a_histogram_are_right_to_a_quarter_of_a_percent() -> None:
    rng, histogram = random.Random(0), Histogram()
    values = sorted(rng.lognormvariate(-3, 1) for _ in range(5_000))
    for value in values:
        histogram.add(value)
    for percent in (1, 50, 90, 99):
        assert histogram.percentile(percent) == pytest.approx(values[percent * 50 - 1], rel=0.003)
    assert Histogram().percentile(50) is None


def test_batch_means_cover_the_truth_as_often_as_they_say() -> None:
    """Of 200 streams whose neighbours are alike; one that took calls for independent would cover it in half of them."""
    rng, covered = random.Random(1), 0
    for _ in range(200):
        means, state = BatchMeans(), rng.gauss(0, 1)
        for _ in range(2_000):
            state = 0.9 * state + rng.gauss(0, 0.19**0.5)
            means.add(state)
        assert means.mean is not None
        assert means.half_width is not None
        covered += abs(means.mean) <= means.half_width
    assert 0.88 <= covered / 200 <= 1.0


def test_a_load_that_outgrows_the_fleet_is_not_called_steady() -> None:
    rows = [TraceRow(number / 100.0, 3_000, 4) for number in range(200)]
    queued = Simulation(Deployment(Layout(1, 1)), bounds=None).run(rows).classes[0]
    assert queued.is_steady is False
    rows = [TraceRow(number / 4.0, 3_000, 4) for number in range(100)]
    calm = Simulation(Deployment(Layout(1, 1)), bounds=None).run(rows).classes[0]
    assert calm.is_steady is True
