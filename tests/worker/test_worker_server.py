"""Whole workers over real gRPC, with a scripted engine: what routers and peers see."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import pytest

from baton.request import FinishReason, SamplingParams
from baton.v1 import worker_pb2
from engine.scripted_runner import answer
from tests.worker.scripted_worker import SPEC, ScriptedWorker, running, worker_config, worker_threads
from tests.worker.session_client import SessionClient, request

EPOCH = 0xABC
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def seq(n: int) -> int:
    return EPOCH << 32 | n


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(31 * i + salt) % 900 + 20 for i in range(length)]


def no_blocks(router: SessionClient) -> bool:
    return router.load.active_blocks == router.load.reserved_blocks == 0


def no_transfers(router: SessionClient) -> bool:
    return router.load.num_leases == router.load.num_tickets == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 65, 200, 700])
async def test_a_both_worker_answers_like_the_reference(length: int) -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(length), 20, ignore_eos=True))
        await router.until(lambda: seq(1) in router.ended)
        assert router.output(seq(1)) == answer(prompt(length), GREEDY, 20)
        assert router.ended[seq(1)].outcome == worker_pb2.OUTCOME_FINISHED
        assert router.ended[seq(1)].finish_reason == FinishReason.LENGTH
        await router.until(lambda: router.load.active_blocks == 0 and router.load.reserved_blocks == 0)


async def test_prefill_hands_over_to_decode_and_the_tokens_join_without_a_seam() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):
        lengths = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700]
        for n, length in enumerate(lengths):
            prefill.submit(request(seq(n), prompt(length, n), 12, ignore_eos=True), d.peer)
        await decode.until(lambda: len(decode.ended) == len(lengths))
        await prefill.until(lambda: len(prefill.ended) == len(lengths))
        for n, length in enumerate(lengths):
            assert prefill.ended[seq(n)].outcome == worker_pb2.OUTCOME_HANDED_OFF
            assert decode.ended[seq(n)].outcome == worker_pb2.OUTCOME_FINISHED
            tokens = prefill.tokens[seq(n)] | decode.tokens[seq(n)]
            assert [tokens[i] for i in range(12)] == answer(prompt(length, n), GREEDY, 12)
            assert sorted(prefill.tokens[seq(n)]) == [0]
        assert p.runner.faults == d.runner.faults == []
        for router in (prefill, decode):
            await router.until(partial(no_blocks, router))
            await router.until(partial(no_transfers, router))
        assert prefill.ended[seq(12)].stats.transport == "loopback"
        assert prefill.ended[seq(12)].stats.kv_bytes == 44 * d.runner.kv_cache.layout.block_bytes


async def test_one_token_needs_no_decode_worker() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):
        prefill.submit(request(seq(1), prompt(40), 1), d.peer)
        await prefill.until(lambda: seq(1) in prefill.ended)
        assert prefill.ended[seq(1)].outcome == worker_pb2.OUTCOME_FINISHED
        assert prefill.output(seq(1)) == answer(prompt(40), GREEDY, 1)
        assert decode.load.num_admitted == 0


async def test_a_pair_that_does_not_fit_is_refused_by_the_field_and_harms_nobody() -> None:
    other = dataclasses.replace(SPEC, rope_theta=5_000.0)
    p = ScriptedWorker(worker_config("p", "prefill"))
    good = ScriptedWorker(worker_config("good", "decode"))
    bad = ScriptedWorker(worker_config("bad", "decode"), spec=other)
    async with (
        running(p, good, bad),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(good.server.address, EPOCH) as decode,
    ):
        prefill.send(peers=worker_pb2.Peers(decode=[good.peer, bad.peer]))
        await prefill.until(lambda: len(prefill.links) == 2 and prefill.links["bad"].state == "refused")
        assert "rope" in prefill.links["bad"].reason
        await prefill.until(lambda: prefill.links["good"].state == "ready")
        prefill.submit(request(seq(1), prompt(40), 4), bad.peer)
        await prefill.until(lambda: seq(1) in prefill.refused)
        assert prefill.refused[seq(1)].code == "peer_refused"
        assert prefill.refused[seq(1)].field == "rope"
        prefill.submit(request(seq(2), prompt(40), 4, ignore_eos=True), good.peer)
        await decode.until(lambda: seq(2) in decode.ended)
        assert decode.ended[seq(2)].outcome == worker_pb2.OUTCOME_FINISHED


async def test_a_peer_of_another_epoch_is_not_taken_for_the_one_meant() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    async with running(p, d), SessionClient(p.server.address, EPOCH) as prefill:
        stale = worker_pb2.Peer(worker_id="d", epoch=d.server.epoch ^ 1, address=d.server.address)
        prefill.submit(request(seq(1), prompt(40), 4), stale)
        await prefill.until(lambda: seq(1) in prefill.ended or seq(1) in prefill.refused)
        assert prefill.ended[seq(1)].error.field == "epoch"


async def test_set_role_takes_effect_on_an_idle_worker() -> None:
    worker = ScriptedWorker(worker_config("w", "prefill"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 3))
        await router.until(lambda: seq(1) in router.refused)
        assert "prefill, not decode" in router.refused[seq(1)].message
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_BOTH))
        await router.until(lambda: router.load.role == worker_pb2.ROLE_BOTH)
        router.submit(request(seq(2), prompt(20), 3, ignore_eos=True))
        await router.until(lambda: seq(2) in router.ended)
        assert router.output(seq(2)) == answer(prompt(20), GREEDY, 3)


async def test_draining_refuses_new_work_and_lets_running_work_end() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 400, ignore_eos=True))
        await router.until(lambda: len(router.tokens.get(seq(1), ())) > 3)
        router.send(drain=worker_pb2.Drain(draining=True))
        router.submit(request(seq(2), prompt(20), 3))
        await router.until(lambda: seq(2) in router.refused)
        assert router.refused[seq(2)].code == "unavailable"
        await router.until(lambda: seq(1) in router.ended)
        assert router.output(seq(1)) == answer(prompt(20), GREEDY, 400)


async def test_a_router_that_leaves_takes_its_sequences_with_it() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH + 1) as watcher:
        async with SessionClient(worker.server.address, EPOCH) as router:
            router.submit(request(seq(1), prompt(20), 1_500, ignore_eos=True))
            await router.until(lambda: len(router.tokens.get(seq(1), ())) > 3)
        await watcher.until(lambda: watcher.load.active_blocks == 0 and watcher.load.num_running == 0)


async def test_cancel_frees_blocks_in_every_stage() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):

        def started(n: int) -> bool:
            return seq(n) in prefill.tokens or n % 3 == 1

        for n in range(30):
            prefill.submit(request(seq(n), prompt(100 + n, n), 200, ignore_eos=True), d.peer)
            if n % 3:
                await prefill.until(partial(started, n))
            for router in (prefill, decode):
                router.send(cancel=worker_pb2.Cancel(seq=seq(n)))
        for router in (prefill, decode):
            await router.until(partial(no_blocks, router))
            await router.until(partial(no_transfers, router))
        prefill.submit(request(seq(99), prompt(33), 5, ignore_eos=True), d.peer)
        await decode.until(lambda: seq(99) in decode.ended)
        tokens = prefill.tokens[seq(99)] | decode.tokens[seq(99)]
        assert [tokens[i] for i in range(5)] == answer(prompt(33), GREEDY, 5)


async def test_a_foreign_token_stream_message_ends_the_stream_not_the_worker() -> None:
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.send(submit=worker_pb2.Submit(request=worker_pb2.Request(seq=seq(1))))
        await router.until(lambda: seq(1) in router.refused)
        assert router.refused[seq(1)].field == "token_ids"


async def test_stopping_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    worker = ScriptedWorker(worker_config("w", "both"))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as router:
        router.submit(request(seq(1), prompt(20), 3))
        await router.until(lambda: seq(1) in router.ended)
    assert worker_threads(before) == set()
