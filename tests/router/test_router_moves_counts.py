"""What is counted of a sequence that was moved or resumed, and calls of several answers whose leader's worker dies."""

from __future__ import annotations

import asyncio

import pytest

from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from router.ledger import tpot_ms
from router.sequence import SequenceReport
from tests.router.router_rig import Answer, Rig, request, until
from tests.router.stub_worker import StubWorker
from tests.router.test_router_moves import ANSWER, owner, pause, two_pairs


def by_choice(answer: Answer) -> dict[int, list[int]]:
    """Token ids in the order they came, whose indexes must be without a gap or a repeat."""
    got: dict[int, list[int]] = {}
    for chunk in answer.chunks:
        tokens = got.setdefault(chunk.choice, [])
        assert not chunk.token_ids or chunk.index == len(tokens)
        tokens += chunk.token_ids
    return got


async def killed(rig: Rig, worker: StubWorker) -> None:
    for other in rig.workers:
        other.script.prefill_gate.set()
        other.script.decode_gate.set()
    await worker.kill()


@pytest.mark.parametrize("began", [False, True])
async def test_several_answers_are_whole_though_the_leaders_prefill_worker_dies(files: ModelFiles, began: bool) -> None:
    """Before its first token the others still wait for it; behind it they have begun on the very worker that dies."""
    async with two_pairs(files) as rig:
        prefills, decodes = rig.workers[:2], rig.workers[2:]
        if began:
            pause(decodes, 3)
        else:
            for worker in prefills:
                worker.script.prefill_gate.clear()
        call = asyncio.create_task(rig.generate(request(max_tokens=10, n=3, seed=1)))
        dying = await owner(decodes if began else prefills)
        if began:
            await until(lambda: sum(worker.num_open for worker in decodes) == 3, "all three run")
        await killed(rig, dying)
        answer = await call
        await rig.idle()
    assert answer.status is None
    assert by_choice(answer) == {0: ANSWER, 1: ANSWER, 2: ANSWER}
    assert answer.done is not None
    assert answer.done.usage == serving_pb2.Usage(prompt_tokens=3, completion_tokens=30)
    assert len(answer.done.choices) == 3


async def test_cached_tokens_are_those_of_the_prompt_though_what_was_sent_is_found_in_a_cache_too(
    files: ModelFiles,
) -> None:
    prompt = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen " * 2
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        await asyncio.gather(*(rig.generate(request(prompt, max_tokens=2)) for _ in range(4)))
        cached = (await rig.generate(request(prompt, max_tokens=2))).done
        assert cached is not None
        assert cached.usage.cached_tokens > 0
        pause(decodes, 5)
        call = asyncio.create_task(rig.generate(request(prompt, max_tokens=10)))
        await killed(rig, await owner(decodes))
        done = (await call).done
    assert done is not None
    assert done.usage.cached_tokens == cached.usage.cached_tokens
    assert done.usage.prompt_tokens == cached.usage.prompt_tokens


@pytest.mark.parametrize("index", [1, 4])
async def test_logprobs_around_a_death_are_one_per_token_and_the_right_ones(files: ModelFiles, index: int) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        pause(decodes, index)
        call = asyncio.create_task(rig.generate(request(max_tokens=8, logprobs=2)))
        await killed(rig, await owner(decodes))
        answer = await call
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
    assert [entry.token_id for entry in entries] == ANSWER[:8]
    assert [entry.logprob for entry in entries] == [-0.25 * number for number in range(1, 9)]


async def test_a_stop_string_across_the_death_ends_the_answer_and_shows_nothing_of_itself(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        whole = await rig.generate(request(max_tokens=10))
        texts = [chunk.text for chunk in whole.chunks]
        stop = texts[3][-1:] + texts[4] + texts[5][:1]
        made = request(max_tokens=10)
        made.stop.append(stop)
        undisturbed = await rig.generate(made)
        pause(decodes, 4)
        call = asyncio.create_task(rig.generate(made))
        await killed(rig, await owner(decodes))
        answer = await call
        await rig.idle()
    assert answer.done is not None
    assert answer.done.choices[0].stop_match == stop
    assert answer.text == undisturbed.text == whole.text[: whole.text.index(stop)]
    assert answer.token_ids == undisturbed.token_ids


async def test_times_of_a_moved_stream_are_those_its_client_saw(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        pause(decodes, 1)
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        dying = await owner(decodes)
        await asyncio.sleep(0.3)
        await killed(rig, dying)
        done = (await call).done
    assert done is not None
    assert done.timings.handoff_gap_ms >= 300, "the pause between the first two tokens is part of it"
    assert done.timings.ttft_ms < done.timings.handoff_gap_ms
    assert done.timings.tpot_ms >= 300 / 9


def test_the_time_per_token_of_a_resumed_call_is_that_of_the_tokens_it_made() -> None:
    report = SequenceReport(token_ids=list(range(100)), first_token_s=1.0, last_token_s=1.4, gaps_s=[0.1] * 4)
    assert tpot_ms(report) == pytest.approx(100.0)
    assert tpot_ms(SequenceReport(token_ids=[1, 2, 3])) == 0.0
