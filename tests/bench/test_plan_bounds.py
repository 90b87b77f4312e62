"""The bound of what disaggregation can gain: nothing where steps cost what is in them, something where each costs on its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from bench.plan_bounds import bound_of
from engine.timing.batch import Batch


@dataclass(frozen=True)
class Linear:
    """Seconds of a step: so much, 10 us for a prompt token and 50 us for a decode."""

    fixed_s: float

    def step_s(self, batch: Batch) -> float:
        return self.fixed_s + 10e-6 * batch.num_prefill_tokens + 50e-6 * batch.num_decodes

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        return num_steps * self.step_s(Batch((), num_decodes, context_tokens))


def test_steps_that_cost_what_is_in_them_gain_nothing_from_two_pools() -> None:
    bound = bound_of(Linear(0.0), 0.015)
    assert bound.apart == pytest.approx(bound.together, rel=0.02)


def test_a_fixed_cost_per_step_is_paid_by_fewer_steps_in_two_pools() -> None:
    bound = bound_of(Linear(0.003), 0.015)
    assert bound.apart > 1.05 * bound.together


def test_decodes_are_as_many_as_the_target_leaves_time_for() -> None:
    """(15 - 3) ms / 50 us = 240 sequences, of 200 tokens at 15 ms each: 80 calls/s."""
    assert bound_of(Linear(0.003), 0.015).decodes == pytest.approx(80.0, rel=0.01)
