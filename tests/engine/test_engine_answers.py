"""One engine: answers at every edge, stops, continuation, usage, bad input and a model that fails."""

from __future__ import annotations

import pytest

from baton.config import EngineConfig
from baton.errors import InvalidRequest, Overloaded, TransferFailed, Unavailable
from baton.request import FinishReason, Request, SamplingParams
from engine.ports import Batch
from engine.scripted_runner import answer
from tests.engine.engine_rig import EDGE_LENGTHS, EOS, Rig, draw_tokens, expected, make_request


def finish_of(rig: Rig, seq: int) -> FinishReason:
    assert rig.ended[seq].error is None
    assert rig.tokens[seq][-1].finish is rig.ended[seq].finish
    return rig.ended[seq].finish


# --- answers ---


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk_tokens", [1, 16, 64, 512])
def test_every_edge_length_equals_the_reference_alone_and_at_once(prefix_cache: bool, chunk_tokens: int) -> None:
    config = EngineConfig(chunk_tokens=chunk_tokens, prefix_cache=prefix_cache)
    for batches in ([[n] for n in EDGE_LENGTHS], [list(EDGE_LENGTHS)]):
        rig = Rig(config=config, num_blocks=128)
        for batch in batches:
            requests = [make_request(1_000 * len(batch) + length, length, max_tokens=20) for length in batch]
            for request in requests:
                rig.engine.add(request, 0.0)
            rig.run()
            for request in requests:
                assert (rig.output(request.seq), finish_of(rig, request.seq)) == expected(request)
            assert rig.is_idle()


def test_a_repeated_phrase_is_answered_from_the_cache_without_changing_the_answer() -> None:
    phrase = draw_tokens(1, 8)
    rig = Rig()
    for seq in (1, 2):
        request = make_request(seq, phrase * 60)
        rig.engine.add(request, 0.0)
        rig.run()
        assert rig.output(seq) == expected(request)[0]
    assert rig.ended[2].stats.num_cached_tokens == 464  # (480 - 1) // 16 blocks


def test_a_conversation_finds_its_generated_blocks_again() -> None:
    rig = Rig()
    first = make_request(1, 20, max_tokens=30)
    rig.engine.add(first, 0.0)
    rig.run()
    second = make_request(2, [*first.token_ids, *rig.output(1), *draw_tokens(3, 5)])
    rig.engine.add(second, 0.0)
    rig.run()
    assert rig.output(2) == expected(second)[0]
    assert rig.ended[2].stats.num_cached_tokens == 48  # 49 of 50 tokens were computed: three whole blocks


# --- usage (public case U1) ---


def test_cached_and_computed_tokens_add_up_to_the_prompt() -> None:
    rig = Rig()
    prompt = draw_tokens(5, 100)
    for seq, num_cached in ((1, 0), (2, 96), (3, 96)):
        rig.engine.add(make_request(seq, prompt), 0.0)
        rig.run()
        stats = rig.ended[seq].stats
        assert (stats.num_cached_tokens, stats.num_computed_tokens) == (num_cached, 100 - num_cached)
    load = rig.engine.load()
    assert (load.prompt_tokens_computed, load.prompt_tokens_cached) == (108, 192)
    assert (load.output_tokens, load.num_admitted) == (24, 3)
    assert rig.runner.num_tokens_run == 108 + 3 * 7  # the last token of an answer is never computed


def test_without_the_cache_every_token_is_computed() -> None:
    rig = Rig(config=EngineConfig(prefix_cache=False))
    for seq in (1, 2):
        rig.engine.add(make_request(seq, 100), 0.0)
        rig.run()
        assert rig.ended[seq].stats.num_computed_tokens == 100
    assert rig.engine.load().cached_blocks == 0
    assert rig.cached_hashes == set()


def test_times_are_queue_then_prefill_to_the_end_of_the_first_token_s_step() -> None:
    ticks = iter(float(n) for n in range(1_000))
    rig = Rig(config=EngineConfig(chunk_tokens=64), clock_s=lambda: next(ticks))  # each run lasts 1 s
    rig.engine.add(make_request(1, 100, max_tokens=2), 10.0)
    for now_s in (12.0, 13.0, 14.0):
        rig.step(now_s)
    stats = rig.ended[1].stats
    assert (stats.queue_ms, stats.prefill_ms) == (2_000.0, 2_000.0)
    assert rig.engine.load().step_ms == 1_000.0


def test_what_steps_computed_and_took_is_counted_for_whoever_models_their_time() -> None:
    ticks = iter(float(n) for n in range(1_000))
    rig = Rig(config=EngineConfig(chunk_tokens=64), clock_s=lambda: next(ticks))
    rig.engine.add(make_request(1, 100, max_tokens=3), 0.0)
    rig.run()
    load = rig.engine.load()
    assert (load.num_steps, load.busy_s) == (4, 4.0)  # chunks of 64 and 36, two decodes
    assert load.step_tokens == 100 + 2
    assert load.prompt_pairs == 100 * 101 / 2, "chunks add up to the whole prompt's triangle"
    assert load.context_tokens == 101 + 102


def test_steps_with_prompts_are_also_counted_on_their_own_with_the_decodes_that_they_hold() -> None:
    ticks = iter(float(n) for n in range(1_000))
    rig = Rig(config=EngineConfig(chunk_tokens=64), clock_s=lambda: next(ticks))
    rig.engine.add(make_request(1, 20, max_tokens=4), 0.0)
    rig.step()
    rig.engine.add(make_request(2, 100, max_tokens=2), 0.0)
    rig.run()
    load = rig.engine.load()
    assert (load.num_prompt_steps, load.prompt_steps_busy_s) == (3, 3.0)  # 20; 64 and 36, each beside a decode
    assert load.prompt_steps_tokens == 20 + 100 + 2
    assert load.prompt_steps_context_tokens == 21 + 22
    assert (load.num_steps, load.step_tokens) == (4, 20 + 100 + 2 + 2)


# --- stops ---


def test_eos_ends_an_answer_and_ignore_eos_does_not() -> None:
    rig = Rig(script={1: [5, EOS, 6, 7], 2: [5, EOS, 6, 7]})
    rig.engine.add(make_request(1, 10, max_tokens=4, ignore_eos=False), 0.0)
    rig.engine.add(make_request(2, 10, max_tokens=4, ignore_eos=True), 0.0)
    rig.run()
    assert (rig.output(1), finish_of(rig, 1)) == ([5, EOS], FinishReason.STOP)
    assert (rig.output(2), finish_of(rig, 2)) == ([5, EOS, 6, 7], FinishReason.LENGTH)


def test_stop_token_ids_end_an_answer_even_where_eos_is_ignored() -> None:
    rig = Rig(script={1: [5, 9, 6]})
    rig.engine.add(make_request(1, 10, stop_token_ids=(9,)), 0.0)
    rig.run()
    assert (rig.output(1), finish_of(rig, 1)) == ([5, 9], FinishReason.STOP)


def test_nothing_stops_before_min_tokens() -> None:
    rig = Rig(script={1: [EOS, 9, EOS, EOS, 7]})
    rig.engine.add(make_request(1, 10, ignore_eos=False, min_tokens=4, stop_token_ids=(9,)), 0.0)
    rig.run()
    assert (rig.output(1), finish_of(rig, 1)) == ([EOS, 9, EOS, EOS], FinishReason.STOP)


def test_a_limit_of_one_gives_one_token() -> None:
    rig = Rig()
    rig.engine.add(make_request(1, 33, max_tokens=1), 0.0)
    rig.run()
    assert len(rig.output(1)) == 1
    assert finish_of(rig, 1) is FinishReason.LENGTH


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    rig = Rig(script={1: [5, EOS]})
    rig.engine.add(make_request(1, 10, max_tokens=2, ignore_eos=False), 0.0)
    rig.run()
    assert finish_of(rig, 1) is FinishReason.STOP


def test_an_answer_ends_at_the_model_s_length() -> None:
    rig = Rig(max_model_len=40)
    rig.engine.add(make_request(1, 30, max_tokens=100), 0.0)
    rig.run()
    assert len(rig.output(1)) == 10
    assert finish_of(rig, 1) is FinishReason.LENGTH


def test_an_answer_ends_at_the_pool_s_length() -> None:
    rig = Rig(num_blocks=4)
    rig.engine.add(make_request(1, 60, max_tokens=100), 0.0)
    rig.run()
    assert len(rig.output(1)) == 5  # 64 slots and one last token that needs none
    assert rig.output(1) == answer(draw_tokens(1, 60), SamplingParams(max_tokens=5, temperature=0.0), 5)


# --- continuation ---


@pytest.mark.parametrize("num_sent", [1, 5, 16, 19])
def test_a_continued_answer_is_the_rest_of_the_undisturbed_one(num_sent: int) -> None:
    whole = make_request(1, 45, max_tokens=20, temperature=0.8)
    tokens, _ = expected(whole)
    rest = Request(2, (*whole.token_ids, *tokens[:num_sent]), whole.sampling, num_output_tokens=num_sent)
    rig = Rig()
    rig.engine.add(rest, 0.0)
    rig.run()
    assert rig.output(2) == tokens[num_sent:]
    assert rig.tokens[2][0].index == num_sent
    assert finish_of(rig, 2) is FinishReason.LENGTH


def test_min_tokens_counts_what_was_already_sent() -> None:
    rig = Rig(script={1: [0, 0, 0, EOS, 7]})
    request = make_request(1, 12, max_tokens=6, num_output_tokens=3, ignore_eos=False, min_tokens=4)
    rig.engine.add(request, 0.0)
    rig.run()
    assert [(token.index, token.token) for token in rig.tokens[1]] == [(3, EOS)]


# --- prefill only ---


def test_a_prefill_tells_each_chunk_then_its_first_token_and_holds_its_blocks() -> None:
    rig = Rig()
    request = make_request(1, 150)
    rig.engine.add(request, 0.0, prefill_only=True)
    rig.run()
    assert [chunk.num_computed_tokens for chunk in rig.chunks[1]] == [64, 128, 150]
    assert len({chunk.block_ids for chunk in rig.chunks[1]}) == 1
    assert len(rig.chunks[1][0].block_ids) == 10
    assert rig.prefilled[1].first.token == expected(request)[0][0]
    assert rig.prefilled[1].first.finish is FinishReason.NONE
    assert rig.tokens == {}
    assert rig.ended == {}
    assert (rig.engine.load().active_blocks, rig.engine.load().num_running) == (10, 0)
    rig.engine.drop(1)
    assert rig.is_idle()


@pytest.mark.parametrize(
    ("request_", "finish"),
    [
        (make_request(1, 20, ignore_eos=False), FinishReason.STOP),
        (make_request(1, 20, stop_token_ids=(EOS,)), FinishReason.STOP),
        (make_request(1, 20, max_tokens=1), FinishReason.LENGTH),
        (make_request(1, 20, ignore_eos=True), FinishReason.NONE),
        (make_request(1, 20, ignore_eos=False, min_tokens=2), FinishReason.NONE),
    ],
)
def test_a_first_token_that_ends_the_answer_says_so_and_is_held_like_any(
    request_: Request, finish: FinishReason
) -> None:
    rig = Rig(script={1: [EOS]})
    rig.engine.add(request_, 0.0, prefill_only=True)
    rig.run()
    assert rig.prefilled[1].first.finish is finish
    assert rig.ended == {}
    assert rig.engine.load().active_blocks == 2
    rig.engine.drop(1)
    assert rig.is_idle()


def test_a_prefill_with_a_cached_prefix_says_how_much() -> None:
    rig = Rig()
    for seq in (1, 2):
        rig.engine.add(make_request(seq, draw_tokens(9, 100)), 0.0, prefill_only=True)
        rig.run()
    assert [chunk.num_computed_tokens for chunk in rig.chunks[2]] == [100]
    assert rig.chunks[2][0].num_cached_tokens == 96
    assert rig.prefilled[2].stats.num_cached_tokens == 96
    assert rig.engine.load().active_blocks == 8  # six shared, and a last one each


# --- bad input ---


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(1, (), SamplingParams(max_tokens=1)), "token_ids"),
        (make_request(1, 65), "token_ids"),
        (make_request(1, 8, max_tokens=0), "max_tokens"),
        (make_request(1, 8, max_tokens=-1), "max_tokens"),
        (make_request(1, 8, max_tokens=3, num_output_tokens=3), "max_tokens"),
    ],
)
@pytest.mark.parametrize("how", ["add", "prefill", "reserve"])
def test_what_can_never_be_served_ends_at_once_and_alone(request_: Request, field: str, how: str) -> None:
    rig = Rig(num_blocks=4)
    if how == "reserve":
        rig.engine.reserve(request_, 0.0)
    else:
        rig.engine.add(request_, 0.0, prefill_only=how == "prefill")
    good = make_request(2, 8)
    rig.engine.add(good, 0.0)
    rig.run()
    error = rig.ended[1].error
    assert isinstance(error, InvalidRequest)
    assert error.field == field
    assert "limit" in error.message
    assert rig.output(2) == expected(good)[0]
    assert rig.is_idle()


@pytest.mark.parametrize(("num_tokens", "is_served"), [(511, True), (512, True), (513, False)])
def test_the_pool_s_limit_is_exact(num_tokens: int, is_served: bool) -> None:
    rig = Rig(num_blocks=32, max_model_len=2_048)
    rig.engine.add(make_request(1, num_tokens, max_tokens=1), 0.0)
    rig.run()
    error = rig.ended[1].error
    assert (error is None) is is_served
    assert is_served or "512" in str(error)


def test_more_than_the_queue_holds_is_refused_as_overload() -> None:
    rig = Rig(config=EngineConfig(max_queued_seqs=2))
    for seq in (1, 2, 3):
        rig.engine.add(make_request(seq, 8), 0.0)
    rig.run()
    assert isinstance(rig.ended[3].error, Overloaded)
    assert rig.ended[1].error is rig.ended[2].error is None


def test_a_seq_that_is_already_here_is_left_alone() -> None:
    rig = Rig()
    request = make_request(1, 40)
    rig.engine.add(request, 0.0)
    rig.step()
    rig.engine.add(request, 0.0)
    rig.engine.reserve(request, 0.0)
    rig.engine.adopt(1, 5, 0.0)
    rig.run()
    assert rig.output(1) == expected(request)[0]
    assert rig.is_idle()


def test_adopting_what_was_never_granted_ends_it_with_an_error() -> None:
    rig = Rig(num_blocks=4)
    rig.engine.adopt(1, 5, 0.0)
    rig.engine.add(make_request(9, 60), 0.0, prefill_only=True)
    rig.run()
    rig.engine.reserve(make_request(2, 20), 0.0)
    rig.engine.adopt(2, 5, 0.0)
    rig.run()
    assert isinstance(rig.ended[1].error, TransferFailed)
    assert isinstance(rig.ended[2].error, TransferFailed)
    assert rig.engine.load().num_waiting == 0


# --- a model that fails ---


def fail_on(*seqs: int, error: Exception) -> Rig:
    def before_run(batch: Batch) -> None:
        if any(entry.seq in seqs for entry in batch.entries):
            raise error

    return Rig(before_run=before_run)


def test_a_sequence_that_breaks_the_model_fails_alone() -> None:
    rig = fail_on(2, error=ValueError("a prompt is quoted here"))
    requests = {seq: make_request(seq, 40) for seq in (1, 2, 3)}
    for request in requests.values():
        rig.engine.add(request, 0.0)
    rig.run()
    error = rig.ended[2].error
    assert error is not None
    assert (error.code, "quoted" in error.message) == ("internal", False)
    for seq in (1, 3):
        assert rig.output(seq) == expected(requests[seq])[0]
    assert rig.is_idle()


def test_a_batch_that_is_too_big_for_memory_is_computed_in_parts() -> None:
    def before_run(batch: Batch) -> None:
        if len(batch.entries) > 1:
            raise MemoryError

    rig = Rig(before_run=before_run)
    requests = [make_request(seq, 40) for seq in (1, 2)]
    for request in requests:
        rig.engine.add(request, 0.0)
    rig.run()
    assert [rig.output(request.seq) for request in requests] == [expected(request)[0] for request in requests]


@pytest.mark.parametrize("prefill_only", [True, False])
def test_out_of_memory_is_unavailable_and_frees_everything(prefill_only: bool) -> None:
    """What a prefill-only sequence has is freed by drop alone: a transfer may be reading its earlier chunks."""
    rig = fail_on(1, error=MemoryError())
    rig.engine.add(make_request(1, 100), 0.0, prefill_only=prefill_only)
    rig.run()
    assert isinstance(rig.ended[1].error, Unavailable)
    assert rig.engine.load().active_blocks == (7 if prefill_only else 0)
    rig.engine.drop(1)
    assert rig.is_idle()
    good = make_request(2, 100)
    rig.engine.add(good, 0.0)
    rig.run()
    assert rig.output(2) == expected(good)[0]


def test_a_runner_that_answers_too_little_is_a_defect_of_that_batch_only() -> None:
    rig = Rig()
    run = rig.runner.run
    rig.runner.run = lambda batch: run(batch)[:-1]  # type: ignore[method-assign]
    rig.engine.add(make_request(1, 8), 0.0)
    rig.run()
    rig.runner.run = run  # type: ignore[method-assign]
    rig.engine.add(make_request(2, 8), 0.0)
    rig.run()
    assert rig.ended[1].error is not None
    assert rig.ended[2].error is None
    assert rig.is_idle()
