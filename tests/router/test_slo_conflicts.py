"""Classes with conflicting targets on one prefill and one decode worker: admission and placement hold each by its own target.

Virtual time: the router's policy objects over modelled GPUs (bench/sim), so the figures are the same on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from baton.config import EngineConfig
from baton.slo import SLO
from bench.sim.deployment import Deployment, Layout
from bench.sim.measures import ClassMeasure
from bench.sim.simulation import Mix, Simulation
from bench.tight_target import CHAT as OTHERS
from bench.tight_target import TIGHT, World, measured
from bench.traces import TraceRow
from router.placement import Demand
from tests.router.test_placement import chosen, decode, prefill

PAIR = Deployment(Layout(num_prefill=1, num_decode=1), engine=EngineConfig(max_num_seqs=256, block_size=64))
CHAT = SLO("chat", ttft_ms=1_000.0, tpot_ms=30.0, priority=5)
VOICE = SLO("voice", ttft_ms=400.0, tpot_ms=1_000.0, itl_p99_ms=40.0, priority=10)
WHOLE = SLO("whole", ttft_ms=60_000.0, tpot_ms=1_000.0, e2e_ms=3_000.0)
MIX = Mix((CHAT, VOICE, WHOLE), (0.4, 0.3, 0.3))
FITS, TOO_MANY = 60.0, 96.0  # calls per second; prefill is busy at about 90
SECONDS = 12.0


def calls(rate: float) -> Iterator[TraceRow]:
    """Prompts of 540 tokens in the median, answers of 100."""
    rng, at_s = random.Random(7), 0.0
    while at_s < SECONDS:
        at_s += rng.expovariate(rate)
        num_prompt = 1 + int(rng.lognormvariate(6.3, 0.6))
        yield TraceRow(at_s, min(3_000, num_prompt), 2 + min(600, int(rng.lognormvariate(4.6, 0.5))))


def served(rate: float) -> dict[str, ClassMeasure]:
    outcome = Simulation(PAIR, MIX, seed=1, warm_up_s=3.0).run(calls(rate))
    return {measure.slo.name: measure for measure in outcome.classes}


def attained(measure: ClassMeasure) -> float:
    assert measure.attained.mean is not None
    return measure.attained.mean


def test_three_classes_with_conflicting_targets_on_one_pair_hold() -> None:
    for name, measure in served(FITS).items():
        assert attained(measure) >= measure.slo.percentile, name
        assert measure.num > 100


def test_beyond_capacity_the_higher_classes_hold_and_no_time_goes_to_answers_that_would_be_late() -> None:
    seen = served(TOO_MANY)
    assert min(attained(seen["chat"]), attained(seen["voice"])) >= 0.95
    whole = seen["whole"]
    assert whole.num_shed > 0, "at its end an answer is worth nothing: who cannot make it is told at once"
    assert attained(whole) > 0.4, "those that are taken make it: served in turn, whoever came, it is 25 %"
    assert attained(whole) > 0.7 * (1 - whole.num_shed / whole.num)


def test_a_tpot_target_from_impossible_to_loose_takes_no_other_class_along_and_has_no_cliff() -> None:
    """A lone sequence's step takes 15.6 ms, and 17.3 with all that come; seats of 0.85 of the target would begin at 18.3 ms."""
    rows = [measured(World(), tight_ms, seed=1) for tight_ms in (15.0, 17.0, 18.4, 19.0)]
    for row, looser in pairwise(rows):
        assert looser.goodput > 0.97 * row.goodput, f"{looser.tight_ms} ms is worse than {row.tight_ms} ms"
    assert min(row.met[OTHERS] for row in rows) > 0.85
    assert [row.met[TIGHT] > 0.95 for row in rows] == [False, False, True, True]
    assert rows[0].shed[TIGHT] < 0.1, "what no load makes late is served where there is room"


@pytest.mark.parametrize(("itl_p99_ms", "is_local"), [(0.0, True), (40.0, True), (15.0, False)])
def test_a_prompt_is_not_computed_where_its_chunk_would_hold_up_streams_beyond_the_tightest_gap(
    itl_p99_ms: float, is_local: bool
) -> None:
    busy = prefill("p0", "d0", waiting_tokens=100_000, prefill_tokens_per_s=20_000.0)
    streams = decode("d0", num_running=4, step_s=0.005, prefill_tokens_per_s=20_000.0)
    demand = Demand(400, 500, tpot_ms=1_000.0, itl_p99_ms=itl_p99_ms)  # 20 ms of computing
    assert chosen(busy, streams, demand=demand, local_prefill_tokens=512).local is is_local
    idle = replace(streams, num_running=0)
    assert chosen(busy, idle, demand=demand, local_prefill_tokens=512).local


@pytest.mark.parametrize(("chunk_tokens", "is_local"), [(200, True), (512, False), (2_048, False)])
def test_a_worker_whose_chunks_are_short_holds_its_streams_up_for_no_longer_than_one(
    chunk_tokens: int, is_local: bool
) -> None:
    busy = prefill("p0", "d0", waiting_tokens=100_000, prefill_tokens_per_s=20_000.0)
    streams = decode("d0", num_running=4, step_s=0.005, prefill_tokens_per_s=20_000.0, chunk_tokens=chunk_tokens)
    demand = Demand(
        400, 500, tpot_ms=1_000.0, itl_p99_ms=20.0
    )  # 20 ms of computing, in chunks of 200 half of it at once
    assert chosen(busy, streams, demand=demand, local_prefill_tokens=512).local is is_local
