"""What routers learn of a worker's prefix cache: all of it, in small messages, and every change after it."""

from __future__ import annotations

import pytest

from baton.hashing import block_hashes, root_hash
from baton.v1 import worker_pb2
from engine.scripted_runner import answer
from tests.worker.scripted_worker import LAYOUT, SPEC, ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request
from worker import cache_report
from worker.cache_report import PAGE_HASHES, CacheReport

GRPC_DEFAULT_BYTES = 4 << 20  # grpc.max_receive_message_length, where nobody sets it
EPOCH = 0xCA


def hashes(start: int, count: int) -> list[bytes]:
    return [n.to_bytes(16, "big") for n in range(start, start + count)]


def test_a_large_cache_is_told_in_pages_that_pass_grpc_by_default() -> None:
    report = CacheReport()
    everything = hashes(0, 2 * PAGE_HASHES + 5)
    list(report.change(everything, ()))
    pages = list(report.whole())
    assert len(pages) == 3
    assert all(page.ByteSize() < GRPC_DEFAULT_BYTES / 2 for page in pages)
    assert [page.reset for page in pages] == [True, False, False]
    assert {page.generation for page in pages} == {1}
    assert sorted(block_hash for page in pages for block_hash in page.added) == everything


def test_a_large_change_is_told_in_pages_of_one_generation() -> None:
    report = CacheReport()
    list(report.change(hashes(0, PAGE_HASHES + 1), ()))
    pages = list(report.change(hashes(PAGE_HASHES + 1, 3), hashes(0, PAGE_HASHES + 1)))
    assert [(page.generation, page.reset, len(page.added), len(page.removed)) for page in pages] == [
        (2, False, 3, PAGE_HASHES),
        (2, False, 0, 1),
    ]


def test_an_empty_cache_is_said_to_be_empty() -> None:
    (page,) = CacheReport().whole()
    assert page == worker_pb2.CacheDelta(reset=True)


def test_the_whole_is_that_of_the_moment_it_was_asked_for() -> None:
    report = CacheReport()
    list(report.change(hashes(0, 2), ()))
    pages = report.whole()
    list(report.change((), hashes(0, 2)))
    assert len(next(pages).added) == 2


async def test_routers_that_come_early_and_late_know_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_report, "PAGE_HASHES", 3)
    worker = ScriptedWorker(worker_config("w", "both"))
    prompt = [(7 * i) % 900 for i in range(100)]
    call = request(EPOCH << 32 | 1, prompt, 60, ignore_eos=True)
    text = [*prompt, *answer(prompt, call.sampling, 60)]
    expected = set(block_hashes(root_hash(SPEC.fingerprint, LAYOUT.dtype), text[:-1], LAYOUT.block_size))
    async with running(worker), SessionClient(worker.server.address, EPOCH) as early:
        early.submit(call)
        await early.until(lambda: call.seq in early.ended)
        await early.until(lambda: early.cached == expected)
        async with SessionClient(worker.server.address, EPOCH + 1) as late:
            await late.until(lambda: late.cached == expected)
            assert late.num_cache_deltas == -(-len(expected) // 3)
            assert late.opened is not None
            assert late.opened.kv_dtype == LAYOUT.dtype
            assert late.opened.kv_block_bytes == LAYOUT.block_bytes
