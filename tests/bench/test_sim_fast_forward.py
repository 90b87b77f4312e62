"""Many steps at once are the same as one after the other: the same instants for every request."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from baton.config import EngineConfig
from baton.slo import SLO
from bench.sim.call import Call
from bench.sim.deployment import Deployment, Layout
from bench.sim.simulation import BOUNDS, Mix, Outcome, Simulation
from bench.traces import TraceRow
from router.admission import Bounds

SAME = 1e-9  # relative: sums of steps are rounded in another order
TIGHT = SLO("tight", ttft_ms=300.0, tpot_ms=15.0, itl_p99_ms=12.0, e2e_ms=4_000.0)
LOOSE = SLO("loose", ttft_ms=2_000.0, tpot_ms=100.0, itl_p99_ms=40.0, priority=-1)
MIX = Mix((TIGHT, LOOSE), (0.5, 0.5))


def load(num_calls: int, rate: float, seed: int = 0) -> list[TraceRow]:
    """Poisson calls of very different lengths, some of them of one token, some of a common beginning."""
    rng = random.Random(seed)
    at_s, rows = 0.0, []
    for number in range(num_calls):
        at_s += rng.expovariate(rate)
        prompt, answer = max(1, round(rng.lognormvariate(6.5, 1.0))), max(1, round(rng.lognormvariate(4.5, 0.9)))
        ids = (number % 7, *range(1_000 + 64 * number, 1_000 + 64 * number + prompt // 64))
        rows.append(TraceRow(at_s, min(prompt, 8_000), min(answer, 800), ids[: prompt // 64], 64))
    return rows


@dataclass(frozen=True)
class Seen:
    """What the clients saw of one run."""

    outcome: Outcome
    calls: dict[int, Call]
    num_cached_tokens: int


def run(deployment: Deployment, rows: list[TraceRow], *, fast: bool, bounds: Bounds | None = BOUNDS) -> Seen:
    calls: dict[int, Call] = {}
    simulation = Simulation(
        deployment, MIX, fast=fast, bounds=bounds, on_call=lambda call: calls.update({call.seq: call})
    )
    outcome = simulation.run(rows)
    for worker in simulation.workers:
        worker.engine.scheduler.check_integrity()
        assert worker.engine.pool.is_idle
    totals = [worker.engine.scheduler.totals for worker in simulation.workers]
    return Seen(outcome, calls, sum(one.prompt_tokens_cached for one in totals))


def assert_same(fast: Seen, slow: Seen) -> None:
    assert fast.calls.keys() == slow.calls.keys()
    for seq, call in fast.calls.items():
        other = slow.calls[seq]
        assert instants(call) == pytest.approx(instants(other), rel=SAME, abs=0.0)
        assert (call.verdict, call.num_long_gaps) == (other.verdict, other.num_long_gaps)
    assert [worker.num_steps for worker in fast.outcome.workers] == [
        worker.num_steps for worker in slow.outcome.workers
    ]
    assert [worker.num_preemptions for worker in fast.outcome.workers] == [
        worker.num_preemptions for worker in slow.outcome.workers
    ]


def instants(call: Call) -> list[float]:
    """-1 = it did not come so far."""
    return [-1.0 if at_s is None else at_s for at_s in (call.first_s, call.end_s, call.handoff_gap_s)]


def deployment(layout: Layout, **changes: object) -> Deployment:
    engine = EngineConfig(max_num_seqs=64, prefix_cache=False)
    return replace(Deployment(layout, engine=engine, max_pool_tokens=60_000), **changes)  # type: ignore[arg-type]


LAYOUTS = {
    "prefill and decode": Layout(1, 2),
    "colocated": Layout(num_both=2),
    "mixed": Layout(1, 1, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_fast_forward_gives_every_request_the_instants_that_stepping_gives(layout: Layout) -> None:
    shape, rows = deployment(layout), load(120, rate=40.0)
    fast, slow = run(shape, rows, fast=True), run(shape, rows, fast=False)
    assert_same(fast, slow)
    assert fast.outcome.num_events < slow.outcome.num_events


def test_fast_forward_stops_where_memory_runs_out_and_somebody_is_preempted() -> None:
    shape, rows = deployment(Layout(num_both=1), max_pool_tokens=8_800), load(60, rate=40.0)
    fast, slow = run(shape, rows, fast=True, bounds=None), run(shape, rows, fast=False, bounds=None)
    assert_same(fast, slow)
    assert fast.outcome.workers[0].num_preemptions > 0


def test_fast_forward_is_the_same_with_prefix_caches_and_full_seats() -> None:
    engine = EngineConfig(max_num_seqs=8, prefix_cache=True)
    shape, rows = deployment(Layout(1, 1), engine=engine), load(100, rate=15.0)
    fast, slow = run(shape, rows, fast=True), run(shape, rows, fast=False)
    assert_same(fast, slow)
    assert fast.num_cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.timeout(1_200)
def test_fast_forward_gives_ten_thousand_requests_the_instants_that_stepping_gives(layout: Layout) -> None:
    shape, rows = deployment(layout, max_pool_tokens=0), load(10_000, rate=40.0)
    assert_same(run(shape, rows, fast=True), run(shape, rows, fast=False))
