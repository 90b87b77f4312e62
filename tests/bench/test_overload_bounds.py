"""What the router's admission promises under overload, on a small simulated fleet: seconds of CPU for minutes of load."""

from __future__ import annotations

import pytest

from baton.slo import DEFAULT_CLASSES
from bench import overload
from bench.overload import Fairness, Overload, Traffic
from bench.overload_fleet import Fleet, Job, Shape
from router.admission import Bounds
from router.tenants import OPEN

LOADS = (0.9, 1.2, 3.0)
SMALL = Shape(num_prefill=2, num_decode=1)


@pytest.fixture(scope="module", params=["prefill", "decode"])
def pressed(request: pytest.FixtureRequest) -> Overload:
    if request.param == "prefill":
        return overload.overload(SMALL, Traffic(overload.prefill_capacity(SMALL)), LOADS)
    shape, traffic = overload.decode_bound()
    return overload.overload(shape, traffic, LOADS)


def test_accepted_calls_keep_their_targets_at_three_times_the_capacity(pressed: Overload) -> None:
    assert pressed.attainment_loss <= 0.05
    assert pressed.by_load["3"].num_calls > 2.5 * pressed.by_load["0.9"].num_calls


def test_goodput_does_not_collapse(pressed: Overload) -> None:
    assert pressed.goodput_share >= 0.9


def test_a_minute_of_overload_is_over_five_seconds_after_its_end(pressed: Overload) -> None:
    assert pressed.recovery_s < 5.0


def test_below_capacity_hardly_anybody_is_turned_away(pressed: Overload) -> None:
    usual = pressed.by_load["0.9"]
    assert usual.num_accepted >= 0.97 * usual.num_calls


@pytest.fixture(scope="module", params=["equal weights", "weights 7 and 3", "four others"])
def beside(request: pytest.FixtureRequest) -> Fairness:
    if request.param == "equal weights":
        return overload.fairness(0.35, 1.8, until_s=60.0)
    if request.param == "weights 7 and 3":
        return overload.fairness(0.7, 1.5, weights=(7.0, 3.0), until_s=60.0)
    return overload.fairness(0.14, 2.0, num_others=4, until_s=60.0)


def test_a_tenant_within_its_share_hardly_notices_others_that_ask_for_more_than_there_is(beside: Fairness) -> None:
    assert beside.victim_load + beside.others_load > 2.0
    assert beside.p95_rise <= 0.2
    assert beside.num_shed <= 2


def test_o2_clients_that_give_up_leave_nothing_behind_and_cost_the_others_little() -> None:
    """Clients that each wait 2 s and do not say so, for a minute, against a fleet that starts five calls a second."""
    shape = Shape(num_prefill=1, num_decode=1, tokens_per_s=2_000.0, prompt_s=0.0)

    def served(calls_per_s: int) -> tuple[float, Fleet]:
        fleet = Fleet(shape, Bounds(10_000, 1_024, 10**9, 0.02))
        jobs = (Job(k / calls_per_s, OPEN, DEFAULT_CLASSES[0], 400, 10, leaves_s=2.0) for k in range(60 * calls_per_s))
        outcomes = fleet.run(jobs)
        return sum(o.end_s is not None and not o.abandoned for o in outcomes) / 60, fleet

    once, _ = served(5)
    thrice, fleet = served(15)
    assert thrice >= 0.8 * once
    assert fleet.num_busy == 0
    assert (fleet.admission.num_seqs, len(fleet.admission.queue), fleet.admission.queue.tokens) == (0, 0, 0.0)


def test_running_it_again_gives_the_same_figures() -> None:
    traffic = Traffic(20.0, until_s=20.0)
    assert overload.summary(overload.run([traffic], SMALL), 0, 20) == overload.summary(
        overload.run([traffic], SMALL), 0, 20
    )
