"""Sequences leave a worker that drains, flips or is ended: what runs goes on, and what moves finds its KV again."""

from __future__ import annotations

import asyncio
import threading
import time

import grpc
import pytest

from baton.request import Request, SamplingParams
from baton.v1 import worker_pb2
from engine.ports import Batch
from engine.scripted_runner import answer
from tests.worker.scripted_worker import LAYOUT, ScriptedWorker, running, until, worker_config
from tests.worker.session_client import SessionClient, request

EPOCH = 0xD1
S = LAYOUT.block_size
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
PROMPT = [(13 * i) % 900 + 20 for i in range(100)]
STEP_S = 0.002  # so that a long answer is still running when the test looks
CHUNK_S = 0.04  # and a long prompt is still computed when a worker has been stopped


def seq(n: int) -> int:
    return EPOCH << 32 | n


def slow(_: Batch) -> None:
    time.sleep(STEP_S)


def slow_chunks(_: Batch) -> None:
    time.sleep(CHUNK_S)


def slow_worker(worker_id: str, role: str) -> ScriptedWorker:
    worker = ScriptedWorker(worker_config(worker_id, role))
    worker.runner.before_run = slow
    return worker


async def drain(worker: ScriptedWorker, hurry: threading.Event, grace_s: float) -> bool:
    return await asyncio.to_thread(worker.server.drain, hurry, grace_s)


async def test_a_drained_worker_ends_when_its_last_sequence_does_and_takes_no_new_one() -> None:
    worker = slow_worker("w", "both")
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        for n in range(4):
            router.submit(request(seq(n), PROMPT, 60, ignore_eos=True))
        await router.until(lambda: len(router.tokens) == 4)
        draining = asyncio.create_task(drain(worker, threading.Event(), 60.0))
        await router.until(lambda: router.load.draining)
        router.submit(request(seq(9), PROMPT, 3))
        await router.until(lambda: seq(9) in router.refused)
        assert router.refused[seq(9)].code == "unavailable"
        assert await draining
        await router.until(lambda: len(router.ended) == 4)
        assert [router.output(seq(n)) for n in range(4)] == [answer(PROMPT, GREEDY, 60)] * 4


async def test_what_is_left_after_the_grace_ends_as_unavailable() -> None:
    worker = slow_worker("w", "both")
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), PROMPT, 1_900, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        assert not await drain(worker, threading.Event(), 0.2)
        await asyncio.to_thread(worker.server.stop)
        await router.until(lambda: router.failure is not None)
        assert router.failure is not None
        assert router.failure.code() is grpc.StatusCode.UNAVAILABLE
        assert router.output(seq(1)) == answer(PROMPT, GREEDY, len(router.tokens[seq(1)]))


async def test_who_is_in_a_hurry_waits_for_nothing() -> None:
    worker = slow_worker("w", "both")
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), PROMPT, 1_900, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        hurry = threading.Event()
        draining = asyncio.create_task(drain(worker, hurry, 3_600.0))
        await router.until(lambda: router.load.draining)
        hurry.set()
        assert not await draining


async def test_a_draining_prefill_worker_leaves_only_when_its_last_block_is_acknowledged() -> None:
    prefill, decode = slow_worker("p", "prefill"), slow_worker("d", "decode")
    async with (
        running(prefill, decode),
        SessionClient(prefill.server.address, EPOCH) as at_prefill,
        SessionClient(decode.server.address, EPOCH) as at_decode,
    ):
        for n in range(8):
            at_prefill.submit(request(seq(n), [*PROMPT, n + 20], 30, ignore_eos=True), decode.peer)
        await until(lambda: prefill.server._host._prefill.num_open() + len(at_prefill.ended) == 8)
        assert at_prefill.ended.keys() < {seq(n) for n in range(8)}, "too quick: there is nothing to wait for"
        assert await drain(prefill, threading.Event(), 60.0)
        await at_prefill.until(lambda: len(at_prefill.ended) == 8)
        assert {e.outcome for e in at_prefill.ended.values()} == {worker_pb2.OUTCOME_HANDED_OFF}
        await asyncio.to_thread(prefill.server.stop)  # and nobody misses it
        await at_decode.until(lambda: len(at_decode.ended) == 8)
        for n in range(8):
            tokens = at_prefill.tokens[seq(n)] | at_decode.tokens[seq(n)]
            assert [tokens[i] for i in range(30)] == answer([*PROMPT, n + 20], GREEDY, 30)


async def test_a_worker_flips_when_the_last_sequence_of_its_old_role_has_ended() -> None:
    worker = slow_worker("w", "both")
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), PROMPT, 60, ignore_eos=True))
        await router.until(lambda: bool(router.tokens))
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_PREFILL))
        await router.until(lambda: router.load.draining)
        assert router.load.role == worker_pb2.ROLE_BOTH
        router.submit(request(seq(2), PROMPT, 3))
        await router.until(lambda: seq(2) in router.refused)
        await router.until(lambda: router.load.role == worker_pb2.ROLE_PREFILL)
        assert not router.load.draining
        assert router.output(seq(1)) == answer(PROMPT, GREEDY, 60)


async def test_a_sequence_cancelled_on_a_draining_worker_goes_on_elsewhere_with_its_kv_pulled_from_there() -> None:
    prefill, old, new = (
        ScriptedWorker(worker_config("p", "prefill")),
        slow_worker("old", "decode"),
        ScriptedWorker(worker_config("new", "decode")),
    )
    async with (
        running(prefill, old, new),
        SessionClient(prefill.server.address, EPOCH) as at_prefill,
        SessionClient(old.server.address, EPOCH) as at_old,
        SessionClient(new.server.address, EPOCH) as at_new,
    ):
        at_prefill.submit(request(seq(1), PROMPT, 300, ignore_eos=True), old.peer)
        await at_old.until(lambda: len(at_old.tokens.get(seq(1), {})) >= 100)
        at_old.send(drain=worker_pb2.Drain(draining=True))
        at_old.send(cancel=worker_pb2.Cancel(seq=seq(1)))
        await at_old.until(lambda: seq(1) in at_old.ended)
        sent = at_prefill.tokens[seq(1)] | at_old.tokens[seq(1)]
        output = [sent[index] for index in range(len(sent))]
        rest = Request(
            seq(2), (*PROMPT, *output), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True), len(output)
        )
        computed = len(rest.token_ids) - 1  # the last token sent is not computed yet
        at_prefill.submit(rest, new.peer, pull_from=old.peer, pull_blocks=computed // S)
        await at_prefill.until(lambda: seq(2) in at_prefill.ended)
        stats = at_prefill.ended[seq(2)].stats
        on_prefill = len(PROMPT) // S
        assert stats.pulled_blocks == computed // S - on_prefill
        assert stats.computed_tokens == len(rest.token_ids) - computed // S * S
        await at_new.until(lambda: seq(2) in at_new.ended)
        tokens = dict(enumerate(output)) | at_prefill.tokens[seq(2)] | at_new.tokens[seq(2)]
        assert [tokens[i] for i in range(300)] == answer(PROMPT, GREEDY, 300)
        assert await drain(old, threading.Event(), 60.0)
        await until(lambda: not (prefill.runner.faults or old.runner.faults or new.runner.faults))


@pytest.mark.parametrize("tells", ["the prefill worker", "the router"])
async def test_a_decode_worker_that_goes_in_mid_transfer_is_replaced_and_nothing_is_computed_twice(tells: str) -> None:
    prefill, old, new = (
        slow_worker("p", "prefill"),
        ScriptedWorker(worker_config("old", "decode")),
        ScriptedWorker(worker_config("new", "decode")),
    )
    prefill.runner.before_run = slow_chunks
    long_prompt = [(13 * i) % 900 + 20 for i in range(1_500)]  # 24 chunks: it is still being computed when decode goes
    async with (
        running(prefill, old, new),
        SessionClient(prefill.server.address, EPOCH) as at_prefill,
        SessionClient(new.server.address, EPOCH) as at_new,
    ):
        async with SessionClient(old.server.address, EPOCH):
            at_prefill.send(peers=worker_pb2.Peers(decode=[old.peer, new.peer]))
            at_prefill.submit(request(seq(1), long_prompt, 5, ignore_eos=True), old.peer)
            await until(lambda: old.server._host.load().kv_bytes_received > 0)
        assert prefill.runner.num_tokens_run < len(long_prompt)
        await asyncio.to_thread(old.server.stop)
        if tells == "the prefill worker":
            await at_prefill.until(lambda: seq(1) in at_prefill.lost)
        at_prefill.send(reroute=worker_pb2.Reroute(seq=seq(1), decode=new.peer, serial=1))
        await at_prefill.until(lambda: seq(1) in at_prefill.ended)
        ended = at_prefill.ended[seq(1)]
        assert (ended.outcome, ended.stats.computed_tokens) == (worker_pb2.OUTCOME_HANDED_OFF, len(long_prompt))
        await at_new.until(lambda: seq(1) in at_new.ended)
        tokens = at_prefill.tokens[seq(1)] | at_new.tokens[seq(1)]
        assert [tokens[i] for i in range(5)] == answer(long_prompt, GREEDY, 5)
        assert prefill.runner.num_tokens_run == len(long_prompt)
        assert new.runner.faults == []


async def test_a_worker_whose_every_step_fails_says_so_to_each_call_and_stays() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))

    def fail(_: Batch) -> None:
        raise RuntimeError("the model fails, as the test asked")

    worker.runner.before_run = fail
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        for n in range(3):
            router.submit(request(seq(n), PROMPT, 3))
        await router.until(lambda: len(router.ended) == 3)
        assert {ended.error.code for ended in router.ended.values()} == {"internal"}
        worker.runner.before_run = None
        router.submit(request(seq(9), PROMPT, 3, ignore_eos=True))
        await router.until(lambda: seq(9) in router.ended)
        assert router.output(seq(9)) == answer(PROMPT, GREEDY, 3)
        assert worker.fatal == []
