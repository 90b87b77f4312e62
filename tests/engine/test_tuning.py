"""Limits that change while an engine runs: in force from the next step, and nobody loses what it has."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import EngineConfig
from baton.errors import InvalidRequest
from engine.tuning import Tuning
from tests.engine.engine_rig import Rig, expected, make_request
from tests.engine.test_scheduler import Loop

MOST = Tuning(8, 64, 32)


@pytest.mark.parametrize(
    ("tuning", "field", "limit"),
    [
        (Tuning(0, 64, 32), "max_num_seqs", "1 to 8"),
        (Tuning(9, 64, 32), "max_num_seqs", "1 to 8"),
        (Tuning(8, 0, 32), "max_num_batched_tokens", "1 to 64"),
        (Tuning(8, 65, 32), "max_num_batched_tokens", "1 to 64"),
        (Tuning(8, 64, 0), "chunk_tokens", "1 to 32"),
        (Tuning(8, 64, 33), "chunk_tokens", "1 to 32"),
        (Tuning(8, 16, 32), "chunk_tokens", "max_num_batched_tokens = 16"),
        (Tuning(8, 7, 7), "max_num_batched_tokens", "at least 8"),
    ],
)
def test_a_tuning_that_does_not_fit_the_engine_names_the_field_and_its_limit(
    tuning: Tuning, field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest, match=limit) as refused:
        tuning.check(MOST)
    assert refused.value.field == field


def test_what_an_engine_was_started_with_is_always_allowed() -> None:
    for config in (EngineConfig(), EngineConfig(max_num_seqs=64, max_num_batched_tokens=32, chunk_tokens=8)):
        Tuning.of(config).check(Tuning.of(config))


def test_a_smaller_chunk_and_budget_hold_from_the_next_step() -> None:
    loop = Loop(max_num_batched_tokens=64, chunk_tokens=32)
    loop.add(1, 100)
    loop.add(2, 100)
    loop.step()
    assert loop.shape == [(1, 0, 32), (2, 0, 32)]
    loop.scheduler.tune(Tuning(64, 20, 16))
    loop.step()
    assert loop.shape == [(1, 32, 16), (2, 32, 4)]
    loop.scheduler.tune(Tuning(64, 64, 32))
    loop.step()
    assert loop.shape == [(1, 48, 32), (2, 36, 32)]


def test_sequences_beyond_a_lowered_max_num_seqs_finish_and_nobody_starts_before() -> None:
    loop = Loop(max_num_seqs=4)
    for seq in (1, 2, 3, 4, 5):
        loop.add(seq, 8, max_tokens=3 + seq)
    loop.step()
    loop.scheduler.tune(Tuning(2, 64, 32))
    seen = []
    while loop.scheduler.has_work():
        plan = loop.step()
        assert not plan.preempted
        seen.append([seq for seq, _, _ in loop.shape])
    assert seen[:3] == [[1, 2, 3, 4]] * 3
    assert seen[3:6] == [[2, 3, 4], [3, 4], [4, 5]]


def test_a_budget_below_the_running_sequences_slows_none_of_them() -> None:
    loop = Loop(max_num_seqs=8, max_num_batched_tokens=64, chunk_tokens=32)
    for seq in range(1, 7):
        loop.add(seq, 4, max_tokens=10)
    loop.step()
    loop.add(7, 20)
    loop.scheduler.tune(Tuning(3, 3, 3))
    loop.step()
    assert [seq for seq, _, _ in loop.shape] == [1, 2, 3, 4, 5, 6]


def test_a_preempted_sequence_comes_back_although_max_num_seqs_was_lowered() -> None:
    loop = Loop(num_blocks=7, max_num_seqs=4)
    for seq, max_tokens in ((1, 40), (2, 20), (3, 40)):
        loop.add(seq, 16, max_tokens)
    loop.step()
    loop.scheduler.tune(Tuning(1, 64, 32))
    preempted, beside = [], []
    while loop.scheduler.has_work():
        plan = loop.step()
        preempted += plan.preempted
        beside += [(seq, loop.scheduler.runs(1)) for seq in plan.admitted]
    assert set(preempted) == {3}
    assert beside[0] == (3, True)


@settings(deadline=None, max_examples=15)  # an example takes 0.1 s
@given(
    tunings=st.lists(
        st.builds(lambda seqs, more, chunk: Tuning(seqs, seqs + more, min(chunk, seqs + more)),
                  st.integers(1, 8), st.integers(0, 56), st.integers(1, 32)), min_size=1, max_size=20),
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=12),
)  # fmt: skip
def test_whatever_the_limits_do_meanwhile_every_answer_is_the_same(tunings: list[Tuning], prompts: list[int]) -> None:
    rig = Rig(config=EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, chunk_tokens=32))
    requests = [make_request(seq, length) for seq, length in enumerate(prompts, start=1)]
    for request in requests:
        rig.engine.add(request, 0.0)
    for tuning in tunings:
        tuning.check(MOST)
        rig.engine.tune(tuning)
        assert rig.engine.load().tuning == tuning
        if rig.engine.has_work():
            rig.step()
    rig.run()
    for request in requests:
        assert rig.output(request.seq) == expected(request)[0]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 8), st.integers(1, 64))
def test_as_many_steps_are_skipped_under_new_limits_as_would_be_made(seqs: int, budget: int) -> None:
    loop = Loop(max_num_seqs=8, max_num_batched_tokens=64, chunk_tokens=32)
    for seq in (1, 2, 3, 4):
        loop.add(seq, 8, max_tokens=5 + seq)
    loop.step()
    loop.add(9, 30)
    loop.scheduler.tune(Tuning(seqs, budget, min(budget, 32)))
    for _ in range(loop.scheduler.steps_until_event()):
        loop.step()
        assert [num_tokens for _, _, num_tokens in loop.shape] == [1] * len(loop.shape)
        assert 9 not in [seq for seq, _, _ in loop.shape]
