"""What a worker keeps of resumable calls: which tokens, for whom, how long, and how much of it."""

from __future__ import annotations

import dataclasses
import time
from array import array

import pytest

from baton.request import FinishReason, Logprobs, Request, Resumption, SampledToken, SamplingParams
from baton.v1 import worker_pb2
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient
from worker.host import EngineCommands
from worker.parked import CLAIM_S, ENTRY_BYTES, PAGE_BYTES, ParkedCalls

KEY = b"k" * 16
A, B = 0xA << 32, 0xB << 32  # seqs of two routers


def resumable(seq: int, *, key: bytes = KEY, generation: int = 0, max_tokens: int = 8, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    request = Request(seq, (10, 11, 12), sampling, resumption=Resumption(key, 5.0, b"state", generation))
    return dataclasses.replace(request, **fields)  # type: ignore[arg-type]


def said(seq: int, *token_ids: int, first_index: int = 0) -> list[SampledToken]:
    return [SampledToken(seq, index, token_id) for index, token_id in enumerate(token_ids, first_index)]


def told(parked: ParkedCalls, now_s: float = 0.0, router: int = 0xC, key: bytes = KEY) -> worker_pb2.ParkedCall:
    """All pages."""
    data = b""
    while True:
        found = parked.find(worker_pb2.Find(find=1, key=key, offset=len(data)), router, now_s)
        assert not found.claimed
        data += found.data
        if len(data) == found.total_bytes:
            return worker_pb2.ParkedCall.FromString(data)


def test_a_call_is_told_with_its_request_tokens_logprobs_and_what_is_left_of_its_time() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1), deadline_s=60.0)
    first, second = said(A | 1, 7, 8)
    parked.token(dataclasses.replace(first, logprobs=Logprobs(-1.0, (7, 9), (-1.0, -2.0))))
    parked.token(dataclasses.replace(second, finish=FinishReason.STOP))
    (sequence,) = told(parked, now_s=20.0).sequences
    assert list(sequence.tokens) == [7, 8]
    assert [(entry.entry, list(entry.top_ids)) for entry in sequence.logprobs] == [(0, [7, 9])]
    assert sequence.finish_reason == FinishReason.STOP
    assert sequence.ttl_ms == 40_000
    assert sequence.request.resumption.router_state == b"state"


def test_a_ticket_that_is_given_up_is_kept_no_longer_than_its_window() -> None:
    """Nobody tells the router of its end, so nobody tells the journal."""
    parked = ParkedCalls(1 << 20)
    engine = EngineCommands(lambda _: None, parked)
    engine.reserve(resumable(A | 1))
    assert parked.running(KEY) == [A | 1]
    engine.drop(A | 1)
    assert parked.running(KEY) == []
    parked.expire(time.monotonic() + 6.0)
    assert (len(parked), parked.num_bytes) == (0, 0)


def test_requests_that_are_not_resumable_leave_nothing() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1, resumption=None))
    parked.token(said(A | 1, 7)[0])
    parked.ended(A | 1, 0.0)
    assert (len(parked), parked.num_bytes) == (0, 0)


def test_a_token_said_twice_or_out_of_order_is_kept_once() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1))
    zero, one, two = said(A | 1, 7, 8, 9)
    for token in (zero, zero, two, one, one, two):
        parked.token(token)
    assert list(told(parked).sequences[0].tokens) == [7, 8, 9]


def test_a_decode_worker_keeps_the_token_that_prefill_said() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1))
    parked.adopted(A | 1, 7)
    for token in said(A | 1, 8, 9, first_index=1):
        parked.token(token)
    assert list(told(parked).sequences[0].tokens) == [7, 8, 9]


def test_what_is_kept_goes_when_its_window_is_over_and_what_runs_does_not() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1))
    parked.open(resumable(B | 1, key=b"other"))
    parked.router_lost(0xA, 10.0)
    parked.expire(14.9)
    assert len(parked) == 2
    parked.expire(15.5)
    assert not told(parked).sequences
    assert parked.running(b"other") == [B | 1]


def test_a_later_attempt_replaces_an_earlier_one_once_it_has_a_token() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1))
    for token in said(A | 1, 7, 8):
        parked.token(token)
    parked.ended(A | 1, 0.0)
    later = resumable(B | 1, generation=1, token_ids=(10, 11, 12, 7), num_output_tokens=1)
    parked.open(later)
    assert len(parked) == 2
    parked.token(said(B | 1, 5, first_index=1)[0])
    (sequence,) = told(parked).sequences
    assert (sequence.request.seq, list(sequence.tokens)) == (B | 1, [5])


def test_of_several_answers_to_one_prompt_each_is_kept() -> None:
    parked = ParkedCalls(1 << 20)
    for choice in range(3):
        parked.open(resumable(A | choice, sampling=SamplingParams(max_tokens=8, sample_index=choice)))
        parked.token(said(A | choice, 7 + choice)[0])
    assert sorted(list(sequence.tokens) for sequence in told(parked).sequences) == [[7], [8], [9]]


def test_one_router_at_a_time_gets_a_call() -> None:
    parked = ParkedCalls(1 << 20)
    parked.open(resumable(A | 1))
    parked.ended(A | 1, 0.0)
    ask = worker_pb2.Find(find=1, key=KEY)
    assert parked.find(ask, 0xC, 0.0).total_bytes
    assert parked.find(ask, 0xD, 0.1).claimed
    assert parked.find(ask, 0xC, 0.1).total_bytes, "who has the claim may ask again"
    assert parked.find(ask, 0xD, 0.1 + CLAIM_S).total_bytes, "claims run out"
    parked.router_lost(0xD, 0.2)
    assert parked.find(ask, 0xC, 0.2).total_bytes, "a claim goes with its router"


def test_a_call_too_large_for_one_message_is_told_in_pages_that_fit_together() -> None:
    parked = ParkedCalls(64 << 20)
    parked.open(resumable(A | 1, token_ids=tuple(range(300, 300_300))))
    parked.token(said(A | 1, 7)[0])
    first = parked.find(worker_pb2.Find(find=1, key=KEY), 0xC, 0.0)
    parked.token(said(A | 1, 8, first_index=1)[0])  # what comes between pages does not tear them apart
    (sequence,) = told(parked).sequences
    assert len(first.data) == PAGE_BYTES < first.total_bytes
    assert len(sequence.request.token_ids) == 300_000


def test_room_is_made_by_what_was_kept_longest_and_never_exceeded() -> None:
    parked = ParkedCalls(4 * (ENTRY_BYTES + 64))
    for number in range(4):
        parked.open(resumable(A | number, key=bytes([number])))
    parked.ended(A | 2, 1.0)
    parked.ended(A | 1, 2.0)
    parked.open(resumable(B | 1, key=b"new"))
    assert not told(parked, key=bytes([2])).sequences
    for number in (0, 1, 3):
        assert told(parked, key=bytes([number])).sequences
    parked.open(resumable(B | 2, key=b"x", token_ids=tuple(array("I", range(20_000)))))
    assert parked.num_bytes <= 4 * (ENTRY_BYTES + 64)
    assert not told(parked, key=b"x").sequences, "one that has no room goes itself"
    for number in range(4):
        parked.forget(bytes([number]))
    parked.forget(b"new")
    assert (len(parked), parked.num_bytes) == (0, 0)


class Finder(SessionClient):
    """A router that asks for parked calls."""

    def __init__(self, address: str, router_epoch: int) -> None:
        super().__init__(address, router_epoch)
        self.found: list[worker_pb2.Found] = []

    def _on_event(self, event: worker_pb2.SessionEvent) -> None:
        if event.WhichOneof("message") == "found":
            self.found.append(event.found)
        super()._on_event(event)

    async def __aenter__(self) -> Finder:
        await super().__aenter__()
        return self

    async def find(self, key: bytes) -> worker_pb2.ParkedCall:
        self.found.clear()
        self.send(find=worker_pb2.Find(find=1, key=key))
        await self.until(lambda: bool(self.found))
        assert not self.found[0].claimed
        return worker_pb2.ParkedCall.FromString(self.found[0].data)


@pytest.mark.parametrize("how", ["lost", "parked", "cancelled", "live", "forgotten"])
async def test_workers_keep_a_call_whose_router_is_lost_or_parks_it_and_end_one_that_still_runs(how: str) -> None:
    prefill = ScriptedWorker(worker_config("p0", "prefill"))
    decode = ScriptedWorker(worker_config("d0", "decode"))
    decode.runner.before_run = lambda _: time.sleep(0.005)  # the answer must not be over before anything happens to it
    async with (
        running(prefill, decode),
        Finder(prefill.server.address, 0xC) as at_p,
        Finder(decode.server.address, 0xC) as at_d,
    ):
        seq = A | 1
        async with SessionClient(prefill.server.address, 0xA) as p, SessionClient(decode.server.address, 0xA) as d:
            p.submit(resumable(seq, max_tokens=1_000), decode.peer)
            await d.until(lambda: len(d.tokens.get(seq, {})) > 3)
            if how in ("parked", "cancelled"):
                for client in (p, d):
                    client.send(cancel=worker_pb2.Cancel(seq=seq, park=how == "parked"))
                await d.until(lambda: seq in d.ended)
            if how == "forgotten":
                for finder in (at_p, at_d):
                    finder.send(forget=worker_pb2.Forget(key=KEY))
            if how in ("live", "forgotten"):
                found = await at_d.find(KEY)
                await d.until(lambda: seq in d.ended)
                assert d.ended[seq].error.code == "cancelled"
            heard = list(d.tokens[seq].values())
        if how != "live":
            found = await at_d.find(KEY)
        if how in ("cancelled", "forgotten"):
            assert not found.sequences
            return
        (sequence,) = found.sequences
        (first,) = (await at_p.find(KEY)).sequences
        assert list(sequence.tokens)[1 : 1 + len(heard)] == heard, "it has all that the router heard"
        assert list(first.tokens) == list(sequence.tokens)[:1]
        await at_d.until(lambda: at_d.load.active_blocks == at_d.load.reserved_blocks == 0)
