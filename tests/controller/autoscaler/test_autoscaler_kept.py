"""What an autoscaler has found out outlives its process, and what it could not have found out is not believed."""

from __future__ import annotations

import math

import pytest

from baton.request import Role
from router.controller.autoscaler.autoscaler import HOLD_AFTER_S, Autoscaler
from router.controller.autoscaler.kept import Kept, KeptPool
from router.controller.autoscaler.lessons import COUNT_FOR_S, MOST
from router.controller.autoscaler.patience import MOST_KEPT_REGRETS

POOL = KeptPool(num_regrets=2, wanted=((40.0, 3), (10.0, 2)), lesson=1.3)
KEPT = Kept({"prefill": POOL}, {"batch": 100.0})


def restored(kept: Kept, away_s: float) -> Kept:
    sizes = Autoscaler()
    sizes.restore(kept, away_s)
    return sizes.kept()


def test_a_successor_that_was_away_for_a_moment_knows_what_was_known() -> None:
    after = restored(KEPT, 5.0)
    assert after.pools["prefill"] == KeptPool(2, ((45.0, 3), (15.0, 2)), 1.3)
    assert after.pools["decode"] == KeptPool()
    assert after.counted_s == {"batch": 95.0}


def test_after_a_longer_absence_nobody_knows_what_was_enough_meanwhile() -> None:
    after = restored(KEPT, HOLD_AFTER_S + 1)
    assert after.pools["prefill"] == KeptPool(2, (), 1.3)
    assert restored(KEPT, 101.0).counted_s == {}


@pytest.mark.parametrize("away_s", [math.nan, -3.0])
def test_a_clock_that_was_set_meanwhile_costs_the_sizes_and_nothing_else(away_s: float) -> None:
    assert restored(KEPT, away_s).pools["prefill"].wanted == ()
    assert restored(KEPT, away_s).pools["prefill"].num_regrets == 2


@pytest.mark.parametrize("lesson", [math.nan, math.inf, -1.0, 0.0, 1e9])
def test_nonsense_is_bounded(lesson: float) -> None:
    wanted = ((math.nan, 3), (-1.0, 3), (math.inf, 3), (1.0, -1))
    kept = Kept({"decode": KeptPool(10**9, wanted, lesson), "poet": POOL}, {"batch": math.nan, "interactive": 1e9})
    after = restored(kept, 0.0)
    assert after.pools["decode"].num_regrets == MOST_KEPT_REGRETS
    assert after.pools["decode"].wanted == ()
    assert 1.0 <= after.pools["decode"].lesson <= MOST
    assert after.counted_s == {"interactive": COUNT_FOR_S}
    assert restored(Kept({"decode": KeptPool(-5)}, {}), 0.0).pools["decode"].num_regrets == 0


def test_roles_that_nobody_kept_begin_anew() -> None:
    assert restored(Kept(), 0.0) == Kept({role.name.lower(): KeptPool() for role in Role}, {})
