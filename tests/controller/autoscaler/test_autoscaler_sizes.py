"""Sizes follow load: up at once, down late, each pool by its own work."""

from __future__ import annotations

from baton.request import Role
from router.controller.autoscaler.acts import Create
from router.controller.autoscaler.autoscaler import Autoscaler
from tests.controller.autoscaler.fleets import carried_out, chat, facts, fleet


def sizes_after(num_ticks: int, start: tuple[int, int], rate: float, prompt: float, output: float) -> tuple[int, int]:
    scaler, now = Autoscaler(), facts(fleet(*start), chat(rate, prompt, output))
    for _ in range(num_ticks):
        now = carried_out(now, list(scaler.look(now)), 10.0)
    roles = [w.role for w in now.workers]
    return roles.count(Role.PREFILL), roles.count(Role.DECODE)


def test_a_fleet_that_is_too_small_grows_at_once() -> None:
    proposals = Autoscaler().look(facts(fleet(1, 1), chat(200.0)))
    assert [proposal.act for proposal in proposals if isinstance(proposal.act, Create)]


def test_long_prompts_want_prefill_and_long_answers_decode() -> None:
    prefill, decode = sizes_after(5, (1, 1), rate=100.0, prompt=1_000.0, output=4.0)
    assert prefill > 1
    assert decode == 1
    prefill, decode = sizes_after(5, (1, 1), rate=100.0, prompt=16.0, output=400.0)
    assert prefill == 1
    assert decode > 1
