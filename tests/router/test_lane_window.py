"""The work that a prefill worker has before it gets more: learned from what its prompts wait for room, within bounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config import EngineConfig
from baton.slo import SLO
from baton.v1 import worker_pb2
from bench.sim.arrivals import Constant, instants, synthetic
from bench.sim.deployment import Deployment, Layout
from bench.sim.simulation import BOUNDS, Mix, Simulation
from bench.workload import Lengths
from router.admission import Admission, Bounds, Turn
from router.capacity import WorkerLoad
from router.lane_window import LEAST_S, MOST_S, GrantWait, window_s
from router.tenants import OPEN, Tenant
from tests.router.attempt_rig import Run

RATE = 5_000.0  # tokens per second of a prefill worker
STEP_S = 0.03  # of a decode worker


def waits(seed: int, num: int = 200) -> GrantWait:
    """For the end of a decode step that began at any time."""
    draw, grants = random.Random(seed), GrantWait()
    for _ in range(num):
        grants.observe(draw.uniform(0.0, STEP_S))
    return grants


@pytest.mark.parametrize("seed", range(5))
def test_what_is_learned_covers_a_whole_decode_step_and_not_two(seed: int) -> None:
    assert 0.8 * STEP_S < waits(seed).most_s < 1.4 * STEP_S


def test_the_first_prompt_is_enough_to_go_by_and_a_quicker_decode_pool_is_followed() -> None:
    grants = GrantWait()
    assert window_s(grants.most_s) == LEAST_S
    grants.observe(0.02)
    assert grants.most_s == pytest.approx(0.04)
    for _ in range(50):
        grants.observe(0.002)
    assert grants.most_s < 0.004


@pytest.mark.parametrize("wait_s", [0.0, -1.0, math.nan, math.inf, 1.01 * MOST_S, 5.0])
def test_who_asked_for_no_room_waited_for_memory_or_says_nonsense_teaches_nothing(wait_s: float) -> None:
    grants = waits(0)
    before = grants.most_s
    for _ in range(50):
        grants.observe(wait_s)
    assert grants.most_s == before


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50))
def test_the_window_stays_within_its_bounds_whatever_workers_say(told: list[float]) -> None:
    grants = GrantWait()
    for wait_s in told:
        grants.observe(wait_s)
    assert LEAST_S <= window_s(grants.most_s) <= MOST_S


# -- admission ---------------------------------------------------------------------------------------------------------


def policy_of(*prefills: WorkerLoad, fixed_s: float | None = None) -> Admission:
    policy = Admission(Bounds(1_000, 1_000, 10**9, fixed_s))
    policy.observe([*prefills, WorkerLoad("d0", False, True, math.inf, 0, 0, 0.0, 1_000, 1_000_000, 0)], 0.0)
    return policy


def lane(name: str, grant_s: float = 0.0) -> WorkerLoad:
    return WorkerLoad(name, True, False, RATE, 0, 0, 0.0, 64, 100_000, 0, grant_s=grant_s)


def turn(tenant: Tenant = OPEN, band: int = 0) -> Turn:
    return Turn(tenant, band, 1_000, 0.0, "interactive", 2.0, 0.1, 0.1, 600.0, 1, 1_000, 100)


def second_release_s(policy: Admission) -> float:
    """When the second of two prompts is let go, where the first has its lane from 0 to 0.2 s."""
    for call in (turn(), turn()):
        assert policy.arrive(call, 0.0) is None
    return next(ms / 1e3 for ms in range(201) if policy.due(ms / 1e3)[0])


@pytest.mark.parametrize(
    ("grant_s", "fixed_s", "before_s"),
    [
        (0.0, None, LEAST_S),  # it does both, or nobody has waited yet
        (0.02, None, LEAST_S + 0.02),
        (5.0, None, MOST_S),
        (0.02, 0.005, 0.005),
        (0.0, 0.05, 0.05),
    ],
)
def test_a_lane_gets_its_next_prompt_its_window_before_it_has_none_left(
    grant_s: float, fixed_s: float | None, before_s: float
) -> None:
    assert second_release_s(policy_of(lane("p0", grant_s), fixed_s=fixed_s)) == pytest.approx(0.2 - before_s, abs=0.001)


def test_a_worker_that_does_both_has_no_more_than_it_had_beside_one_that_ships() -> None:
    policy = policy_of(lane("both"), lane("ships", 0.03))
    for _ in range(4):
        assert policy.arrive(turn(), 0.0) is None
    released_ms = [ms for ms in range(201) if policy.due(ms / 1e3)[0]]
    assert released_ms == pytest.approx([160, 190], abs=1), "for the one that ships, then for the other one"


def test_order_is_kept_however_wide_the_window_is() -> None:
    policy = policy_of(lane("p0", MOST_S))
    low, high, other = turn(), turn(band=5), turn(Tenant("other", weight=1.0))
    for call in (turn(), turn(), low, high, other):
        assert policy.arrive(call, 0.0) is None
    order = [call for ms in range(1_000) for call in policy.due(ms / 1e3)[0]]
    assert order[0] is high
    assert set(order) >= {low, other}
    assert order.index(other) < order.index(low), "who has taken less goes first within a priority"


# -- on modelled GPUs --------------------------------------------------------------------------------------------------


def in_slo(fixed_s: float | None) -> float:
    """Of some seconds of chat on a pair with an 8B; share of calls."""
    engine = EngineConfig(block_size=64, max_num_seqs=256, max_num_batched_tokens=512, prefix_cache=False)
    prompts, answers = Lengths(500, 2_100, lognormal=True), Lengths(60, 200, lognormal=True)
    rows = takewhile(lambda row: row.at_s < 8.0, synthetic(instants(Constant(70.0), 3), prompts, answers, 3))
    simulation = Simulation(
        Deployment(Layout(1, 1), measured=False, engine=engine),
        Mix((SLO("chat", ttft_ms=500.0, tpot_ms=20.0),)),
        warm_up_s=2.0,
        bounds=replace(BOUNDS, window_s=fixed_s),
    )
    [measure] = simulation.run(rows).classes
    assert measure.attained.mean is not None
    return measure.attained.mean


def test_a_pair_serves_more_than_with_the_least_window_and_as_much_as_with_a_wide_one() -> None:
    least, learned, wide = (in_slo(fixed_s) for fixed_s in (LEAST_S, None, 0.05))
    assert learned > least + 0.02
    assert learned > wide - 0.01


# -- live --------------------------------------------------------------------------------------------------------------


async def test_a_prefill_worker_s_word_on_a_handoff_is_what_is_learned_from() -> None:
    run = Run()
    await run.settle()
    run.say("p0", 0)
    run.end("p0", worker_pb2.OUTCOME_HANDED_OFF, stats=worker_pb2.SeqStats(reserve_wait_ms=12.0))
    await run.settle()
    assert run.prefill.grants_ms == [12.0]
    assert [decode.grants_ms for decode in run.decodes] == [[], []]
    run.task.cancel()
