"""A broken sequence goes on elsewhere: no token lost, repeated or changed, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton.errors import Internal, Overloaded, TransferFailed, Unavailable
from baton.model_files import ModelFiles
from baton.v1 import control_pb2, worker_pb2
from router.detokenizer import TextStream
from router.retry_budget import RetryBudget
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker

ANSWER = list(range(300, 310))


@asynccontextmanager
async def two_pairs(files: ModelFiles, **settings: object) -> AsyncIterator[Rig]:
    """p0, p1, d0, d1; each prefill worker is linked to each decode worker."""
    prefills = [await StubWorker(f"p{i}", worker_pb2.ROLE_PREFILL).start() for i in range(2)]
    decodes = [await StubWorker(f"d{i}", worker_pb2.ROLE_DECODE).start() for i in range(2)]
    for prefill in prefills:
        prefill.peers = {decode.worker_id: decode for decode in decodes}
    async with running_rig(files, [*prefills, *decodes], **settings) as rig:  # type: ignore[arg-type]
        await until(lambda: all(len(p.told_peers) == 2 for p in prefills), "prefill workers know both decode workers")
        yield rig


def pause(workers: list[StubWorker], index: int) -> None:
    for worker in workers:
        worker.script.decode_gate.clear()
        worker.script.pause_at = index


async def owner(workers: list[StubWorker]) -> StubWorker:
    """The one that decodes, once there is one."""
    await until(lambda: any(worker.num_open for worker in workers), "somebody decodes")
    await asyncio.sleep(0.05)  # what was said before the pause arrives
    return next(worker for worker in workers if worker.num_open)


@pytest.mark.parametrize("index", [1, 2, 5, 9])
async def test_a_stream_outlives_its_decode_worker_whenever_it_dies(files: ModelFiles, index: int) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        pause(decodes, index)
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        dying = await owner(decodes)
        for worker in decodes:
            worker.script.decode_gate.set()
        await dying.kill()
        answer = await call
        await rig.idle()
        next_answer = await rig.generate(request(max_tokens=10))
    assert answer.status is None
    assert answer.token_ids == ANSWER
    assert answer.done is not None
    assert (answer.done.usage.prompt_tokens, answer.done.usage.completion_tokens) == (3, 10)
    assert answer.done.timings.decode_worker != dying.worker_id
    assert next_answer.token_ids == ANSWER


async def test_a_stream_goes_on_elsewhere_when_its_worker_is_to_start_anew_at_an_address_that_nobody_knows_yet(
    files: ModelFiles,
) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        pause(decodes, 5)
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        leaving = await owner(decodes)
        for worker in decodes:
            worker.script.decode_gate.set()
        records = [control_pb2.WorkerRecord(worker_id=w.worker_id, role=w.role, address=w.address) for w in rig.workers]
        for record in records:
            if record.worker_id == leaving.worker_id:
                record.address, record.state = "", "starting"
        rig.front_end.fleet.apply(records)
        answer = await call
    assert answer.status is None
    assert answer.token_ids == ANSWER


async def test_the_next_worker_is_told_what_was_sent_and_the_same_limit_and_seed(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        pause(decodes, 5)
        call = asyncio.create_task(rig.generate(request(max_tokens=10, seed=7, temperature=0.5)))
        dying = await owner(decodes)
        for worker in decodes:
            worker.script.decode_gate.set()
        await dying.kill()
        await call
        first, second = sorted(
            (submit for worker in rig.workers for submit in worker.submits), key=lambda submit: submit.request.seq
        )
    assert second.request.token_ids == [*first.request.token_ids, 300, 301, 302, 303, 304]
    assert (first.request.num_output_tokens, second.request.num_output_tokens) == (0, 5)
    assert second.request.sampling == first.request.sampling


async def test_a_stream_outlives_several_deaths_in_a_row(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        decodes = rig.workers[2:]
        decodes[0].script.fail_after = (3, Unavailable("it goes away"))
        decodes[1].script.fail_after = (6, Unavailable("it goes away, too"))
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        await until(lambda: sum(len(worker.submits) for worker in rig.workers) >= 3, "it was moved twice")
        for worker in decodes:
            worker.script.fail_after = None
        answer = await call
        await rig.idle()
    assert answer.status is None
    assert answer.token_ids == ANSWER


async def test_a_worker_that_was_born_again_is_avoided_no_more(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        sequences, fleet = rig.front_end.calls._sequences, rig.front_end.fleet
        d0 = rig.workers[2]
        epoch = fleet.epoch_of("d0")
        assert epoch
        assert sequences._to_avoid({"d0": epoch, "p1": fleet.epoch_of("p1")}) == {"d0", "p1"}
        await d0.kill()
        await until(lambda: fleet.epoch_of("d0") == 0, "its loss is noticed")
        assert sequences._to_avoid({"d0": epoch}) == {"d0"}, "nobody knows what comes"
        rig.workers.append(
            await StubWorker("d0", worker_pb2.ROLE_DECODE, port=int(d0.address.rpartition(":")[2])).start()
        )
        await until(lambda: fleet.epoch_of("d0") not in (0, epoch), "its successor is connected")
        assert sequences._to_avoid({"d0": epoch}) == frozenset()


async def test_a_hole_in_the_tokens_is_filled_by_another_worker(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        rig.workers[2].script.skip_index = rig.workers[3].script.skip_index = 4
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        await until(lambda: any(worker.adopted for worker in rig.workers), "somebody decodes")
        for worker in rig.workers[2:]:
            worker.script.skip_index = None
        answer = await call
        await rig.idle()
    assert answer.token_ids == ANSWER


async def test_prefill_ships_again_where_only_decode_is_lost(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        for prefill in rig.workers[:2]:
            prefill.script.hold_handoff = TransferFailed("the link broke")
        answer = await rig.generate(request(max_tokens=10))
        await rig.idle()
        submits = [submit for worker in rig.workers for submit in worker.submits]
        reroutes = [reroute for worker in rig.workers for reroute in worker.reroutes]
    assert answer.token_ids == ANSWER
    assert len(submits) == len(reroutes) == 1
    assert reroutes[0].decode.worker_id != submits[0].decode.worker_id
    assert answer.done is not None
    assert answer.done.timings.decode_worker == reroutes[0].decode.worker_id


async def test_a_decode_worker_lost_while_prefill_computes_costs_nothing(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        for prefill in rig.workers[:2]:
            prefill.script.prefill_gate.clear()
            prefill.script.hold_handoff = TransferFailed("it is gone")
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        await until(lambda: any(worker.submits for worker in rig.workers), "it was submitted")
        (submit,) = (submit for worker in rig.workers for submit in worker.submits)
        dying = next(worker for worker in rig.workers if worker.worker_id == submit.decode.worker_id)
        await dying.kill()
        await until(lambda: any(worker.reroutes for worker in rig.workers), "prefill was told another one")
        for prefill in rig.workers[:2]:
            prefill.script.prefill_gate.set()
        answer = await call
        await rig.idle()
    assert answer.token_ids == ANSWER
    assert sum(len(worker.submits) for worker in rig.workers) == 1


async def test_without_another_decode_worker_the_held_kv_is_given_up_and_the_stream_goes_on(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        rig.prefill.script.hold_handoff = TransferFailed("the link broke")
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        await until(lambda: bool(rig.prefill.cancels), "the held sequence is cancelled")
        rig.prefill.script.hold_handoff = None
        answer = await call
        await rig.idle()
    assert answer.token_ids == ANSWER


@pytest.mark.parametrize("error", [Internal("defect"), Overloaded("its queue is full", retry_after_s=1.0)])
async def test_what_one_worker_cannot_do_another_one_may(files: ModelFiles, error: Exception) -> None:
    async with two_pairs(files) as rig:
        rig.workers[0].script.refuse = error  # type: ignore[assignment]
        answers = [await rig.generate(request(max_tokens=10)) for _ in range(3)]
        await rig.idle()
    assert [answer.token_ids for answer in answers] == [ANSWER] * 3


async def test_a_request_that_fails_everywhere_ends_with_the_workers_error(files: ModelFiles) -> None:
    async with two_pairs(files) as rig:
        for prefill in rig.workers[:2]:
            prefill.script.fail_prefill = Internal("it kills every engine")
        answer = await rig.generate(request(max_tokens=10))
        await rig.idle()
        num_submits = sum(len(worker.submits) for worker in rig.workers)
    assert answer.error is not None
    assert answer.error.code == "internal"
    assert num_submits == 2


async def test_only_the_model_that_made_the_sent_tokens_goes_on(files: ModelFiles) -> None:
    """A rolling upgrade: the rest of the old cohort dies, the new one must not finish its sentences."""
    old = await StubWorker("old", fingerprint="a" * 32).start()
    new = await StubWorker("new", fingerprint="b" * 32).start()
    async with running_rig(files, [old, new], unavailable_wait_s=0.5) as rig:
        await until(lambda: all(e.session.view is not None for e in rig.front_end.fleet.endpoints), "both are there")
        pause([old, new], 3)
        call = asyncio.create_task(rig.generate(request(max_tokens=10)))
        dying = await owner([old, new])
        await dying.kill()
        answer = await call
    assert answer.token_ids == [300, 301, 302]
    assert answer.error is not None
    assert answer.error.code == "unavailable"


def test_the_retry_budget_covers_two_deaths_and_then_what_finishes_pays_for() -> None:
    budget = RetryBudget(max_inflight=4)
    assert [budget.take(0.0) for _ in range(9)] == [True] * 8 + [False]
    for _ in range(5):
        budget.finished()
    assert [budget.take(0.0) for _ in range(2)] == [True, False]
    assert [budget.take(0.1) for _ in range(2)] == [True, False]
    assert [budget.take(1_000.0) for _ in range(9)] == [True] * 8 + [False]


async def test_an_empty_budget_ends_a_broken_stream_with_an_error(files: ModelFiles) -> None:
    async with two_pairs(files, max_inflight=1) as rig:
        for decode in rig.workers[2:]:
            decode.script.fail_after = (1, Unavailable("it fails all it gets"))
        answers = [await rig.generate(request(max_tokens=10)) for _ in range(2)]
        await rig.idle()
    assert all(answer.error is not None and answer.error.code == "unavailable" for answer in answers)
    assert sum(len(worker.submits) for worker in rig.workers) < 2 * 5


async def test_a_defect_of_our_own_ends_its_call_with_internal_and_nobody_elses(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> TextStream:
        raise ValueError("a defect")

    async with running_rig(files) as rig:
        with monkeypatch.context() as patched:
            patched.setattr("router.call.TextStream", broken)
            answer = await rig.generate(request(max_tokens=10), timeout=20.0)
            reply = await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 10})
        await rig.idle()
        next_answer = await rig.generate(request(max_tokens=10))
    assert answer.error is not None
    assert answer.error.code == "internal"
    assert reply.status_code == 500
    assert next_answer.token_ids == ANSWER


async def test_a_look_at_the_fleet_that_fails_is_not_the_last_one(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_rig(files) as rig:
        looks: list[float] = []

        def broken(now_s: float) -> None:
            looks.append(now_s)
            raise ValueError("a defect")

        monkeypatch.setattr(rig.front_end.fleet, "tick", broken)
        await until(lambda: len(looks) >= 3, "it is looked at again")
