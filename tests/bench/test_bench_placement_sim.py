"""The goals of placement, on a real trace where there is one and on made-up conversations everywhere: the router's own policy
objects over simulated workers. Times in the simulator are the model's, so nothing here depends on the machine."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.placement import Bench, index_figures, placement_figures
from bench.placement_sim import BLOCK, Fleet, Sim, at_load, figures, global_lru_hits, tail_ratio
from bench.traces import TraceRow, load_trace

TRACES = Path(os.environ.get("BATON_TRACES", Path(__file__).parents[3] / "shared" / "traces"))
MOONCAKE = TRACES / "mooncake" / "conversation_trace.jsonl"
SMALL = Fleet(num_prefill=20, num_decode=20, num_routers=1, local_prefill_tokens=0)


@pytest.fixture(scope="module")
def trace() -> list[TraceRow]:
    if not MOONCAKE.is_file():
        pytest.skip(
            f"no trace at {MOONCAKE}; set BATON_TRACES to the folder that holds mooncake/conversation_trace.jsonl"
        )
    return load_trace(MOONCAKE, seed=0)


def talk(num_sessions: int, seed: int = 0) -> list[TraceRow]:
    """Conversations of one to six turns that share a first block; each turn repeats all before it."""
    rng, rows = random.Random(seed), []
    for session in range(num_sessions):
        at_s, blocks = rng.uniform(0, 600), [0]
        for turn in range(rng.randint(1, 6)):
            blocks += [1_000 * (session + 1) + 50 * turn + n for n in range(rng.randint(1, 8))]
            rows.append(TraceRow(at_s, len(blocks) * BLOCK - rng.randint(0, BLOCK - 1), 120, tuple(blocks)))
            at_s += rng.uniform(5, 60)
    return sorted(rows, key=lambda row: row.at_s)


def check_goals(rows: Sequence[TraceRow], fleet: Fleet, load: float) -> None:
    sim = Sim(fleet)
    sim.run(at_load(rows, load, fleet.num_prefill))
    found = figures(sim)
    assert found.num_requests == len(rows)
    assert found.hit_share >= 0.9 * found.global_hit_share, found
    assert found.queued_p95_to_mean <= 1.5, found
    assert found.least_served > 0.2, found


def test_on_a_real_trace_hits_are_near_a_global_cache_queues_are_even_and_nobody_starves(trace: list[TraceRow]) -> None:
    check_goals(trace[:3_000], SMALL, load=0.9)


def test_on_a_real_trace_long_prompts_do_not_hold_short_ones_up(trace: list[TraceRow]) -> None:
    assert tail_ratio(trace[:6_000], Fleet(num_prefill=50, num_decode=50, num_routers=1), load=0.6) <= 1.5


def test_conversations_find_their_cache_while_queues_stay_even() -> None:
    check_goals(talk(400), Fleet(num_prefill=8, num_decode=8, num_routers=1), load=0.7)


def test_every_request_is_served_and_every_count_of_work_goes_back_to_zero() -> None:
    sim = Sim(Fleet(num_prefill=4, num_decode=4, num_routers=2))
    rows = at_load(talk(60), 0.7, 4)
    sim.run(rows)
    assert len(sim.jobs) == len(rows)
    assert all(job.ttft_s > 0 and job.tpot_s > 0 for job in sim.jobs)
    assert not any(ledger.num_held for router in sim.routers for ledger in router.ledgers)
    assert not any(worker.reserved_tokens or worker.queued_tokens for worker in sim.workers.values())


def test_a_global_cache_is_the_bound_that_it_should_be() -> None:
    rows = [TraceRow(0, 3 * BLOCK + 1, 1, (1, 2, 3)), TraceRow(1, 3 * BLOCK, 1, (1, 2, 3)), TraceRow(2, BLOCK, 1, (4,))]
    assert global_lru_hits(rows, 10) == 2 * BLOCK, "the block with the last token is always computed"
    assert global_lru_hits(rows, 1) == BLOCK, "the beginning of a chain is what is kept of it"


def test_the_bench_of_cost_runs_what_the_router_runs() -> None:
    names = [figures["what"] for figures in placement_figures(4, 4, num_calls=3)]
    assert names[:2] == ["placement", "placement"]
    bench = Bench(2, 2)
    _, choice, _ = bench.place(bench.demand(), 0)
    assert choice.prefill.startswith("p")
    assert index_figures(2_000, num_workers=8)["ignored"] == 0
