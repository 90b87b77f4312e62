"""The fallback to local prefill: which verdicts bring it about, which take it back, and that it does not flap."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from router.controller.autoscaler.acts import LocalPrefill, Proposal
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.disaggregation import (
    CONFIRMATIONS,
    DWELL_PERIODS,
    FRESH_PERIODS,
    PERIOD_S,
    WHOLE_PROMPTS,
    Difference,
    Disaggregation,
    FallingBack,
    Verdict,
)
from router.controller.autoscaler.scaler import Times
from tests.controller.live_rig import fleet

APART_TOKENS = 64
TICK_S = 10.0


def verdict(at_s: float, mean: float, half: float = 0.005) -> Verdict:
    return Verdict(at_s, "apart", {}, Difference(mean, mean - half, mean + half), None, rate=10.0, num_calls=4_000)


class World:
    """A fleet whose routers obey at once."""

    def __init__(self, obeys: bool = True) -> None:
        self.now_s = 0.0
        self.limit = APART_TOKENS
        self.newest: Verdict | None = None
        self.changes: list[tuple[float, int]] = []
        self.policy = Disaggregation(lambda: self.newest, APART_TOKENS)
        self._obeys = obeys

    def tick(self) -> Proposal | None:
        self.now_s += TICK_S
        proposals = self.policy.look(fleet(local_prefill_tokens=self.limit, now_s=self.now_s))
        if not proposals:
            return None
        [proposal] = proposals
        assert isinstance(proposal.act, LocalPrefill)
        self.changes.append((self.now_s, proposal.act.max_tokens))
        if self._obeys:
            self.limit = proposal.act.max_tokens
        return proposal

    def period(self, mean: float, half: float = 0.005) -> None:
        """One verdict, and the ticks until the next one."""
        self.newest = verdict(self.now_s, mean, half)
        for _ in range(round(PERIOD_S / TICK_S)):
            self.tick()


def test_it_falls_back_when_local_prefill_is_better_for_sure_twice_in_a_row_and_says_why() -> None:
    world = World()
    world.period(+0.05)
    assert world.changes == []
    world.newest = verdict(world.now_s, +0.05)
    proposal = world.tick()
    assert proposal is not None
    assert proposal.act == LocalPrefill(WHOLE_PROMPTS)
    assert "does not pay on this traffic: 5.0 points more calls meet their targets" in proposal.reason
    assert proposal.inputs["num_verdicts"] == CONFIRMATIONS


def test_it_comes_back_when_disaggregation_pays_again() -> None:
    world = World()
    for _ in range(3):
        world.period(+0.05)
    assert world.limit == WHOLE_PROMPTS
    for _ in range(3):
        world.period(-0.05)
    assert world.limit == APART_TOKENS
    assert [tokens for _, tokens in world.changes] == [WHOLE_PROMPTS, APART_TOKENS]


def test_what_is_not_certain_or_not_worth_a_point_changes_nothing_either_way() -> None:
    for start in (+0.05, -0.05):
        world = World()
        for _ in range(3):
            world.period(start)
        before = list(world.changes)
        for mean, half in ((+0.02, 0.03), (-0.02, 0.03), (+0.009, 0.001), (-0.009, 0.001)) * 3:
            world.period(mean, half)
        assert world.changes == before


def test_traffic_that_swings_with_each_verdict_never_makes_it_flap() -> None:
    world = World()
    for number in range(60):
        world.period(+0.05 if number % 2 else -0.05)
    assert world.changes == []


@pytest.mark.parametrize("seed", range(5))
def test_whatever_verdicts_say_changes_are_a_dwell_time_apart(seed: int) -> None:
    world, rng = World(), random.Random(seed)
    for _ in range(200):
        world.period(rng.choice((-0.05, 0.0, +0.05)))
    gaps = [after - before for (before, _), (after, _) in zip(world.changes, world.changes[1:], strict=False)]
    assert world.changes, "it does act"
    assert min(gaps) >= DWELL_PERIODS * PERIOD_S
    assert all(one != other for (_, one), (_, other) in zip(world.changes, world.changes[1:], strict=False))


def test_a_proposal_stands_until_it_is_done() -> None:
    world = World(obeys=False)
    for _ in range(2):
        world.period(+0.05)
    assert len(world.changes) == round(PERIOD_S / TICK_S)
    assert {tokens for _, tokens in world.changes} == {WHOLE_PROMPTS}


def test_a_change_by_somebody_else_is_left_alone_for_a_dwell_time() -> None:
    world = World()
    for _ in range(2):
        world.period(-0.05)
    world.limit = 4_096
    began_s = world.now_s
    for _ in range(3):
        world.period(-0.05)
    assert [tokens for _, tokens in world.changes] == [APART_TOKENS]
    assert world.changes[0][0] - began_s >= DWELL_PERIODS * PERIOD_S


def test_an_old_verdict_one_from_the_future_and_none_decide_nothing() -> None:
    for at_s in (-FRESH_PERIODS * PERIOD_S - 1.0, 1e6):
        world = World()
        for number in range(4):
            world.newest = verdict(at_s - number / 10, +0.05)
            assert world.tick() is None
    assert World().tick() is None


def test_one_verdict_counts_once_however_often_it_is_looked_at() -> None:
    world = World()
    world.newest = verdict(0.0, +0.05)
    for _ in range(60):
        assert world.tick() is None


def test_it_is_one_more_lever_beside_the_autoscaler_s_own() -> None:
    newest = [verdict(0.0, +0.05)]
    scaler = FallingBack(Autoscaler(), Disaggregation(lambda: newest[-1], APART_TOKENS))
    scaler.measured(Times(tick_s=5.0))
    alone = Autoscaler(Times(tick_s=5.0))
    for now_s in (10.0, 20.0):
        newest.append(verdict(now_s, +0.05))
        facts = fleet(local_prefill_tokens=APART_TOKENS, now_s=now_s)
        proposals = scaler.look(facts)
        own = [proposal for proposal in proposals if not isinstance(proposal.act, LocalPrefill)]
        assert own == list(alone.look(facts))
    assert proposals[-1].act == LocalPrefill(WHOLE_PROMPTS)


def test_a_verdict_on_what_was_before_the_last_change_confirms_nothing() -> None:
    world = World()
    for _ in range(CONFIRMATIONS):
        world.period(0.05)
    assert world.limit == WHOLE_PROMPTS
    changed_s = world.changes[-1][0]
    world.now_s += DWELL_PERIODS * PERIOD_S
    for at_s in (changed_s - 100.0, changed_s + 100.0):  # the first is of traffic that was still apart
        world.newest = replace(verdict(at_s, -0.05), lasts_s=2_000.0)
        world.tick()
    assert world.limit == WHOLE_PROMPTS
    world.newest = verdict(world.now_s, -0.05)
    world.tick()
    assert world.limit == APART_TOKENS
