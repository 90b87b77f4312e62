"""Real workers over gRPC: turn 2 of a chat computes its new message only, and the rest flows back from the decode worker.

The scripted runner verifies every byte of KV that it reads, so equal answers mean equal KV.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from baton.v1 import worker_pb2
from engine.scripted_runner import answer
from tests.worker.scripted_worker import LAYOUT, ScriptedWorker, running, until, worker_config
from tests.worker.session_client import SessionClient, request

EPOCH = 0xF1
S = LAYOUT.block_size
PROMPT = [(13 * i) % 900 + 20 for i in range(100)]  # 6 whole blocks
NUM_ANSWER = 60  # with the prompt: 9 whole blocks computed
MESSAGE = [(17 * i) % 900 + 20 for i in range(40)]
ON_PREFILL, ON_DECODE = 6, 9


class Trio:
    """A prefill and two decode workers, and a router's session to each."""

    def __init__(self, workers: Sequence[ScriptedWorker], sessions: Sequence[SessionClient]) -> None:
        self.prefill, self.decode, self.other = workers
        self.at_prefill, self.at_decode, self.at_other = sessions
        self._num_seqs = 0

    async def turn(
        self, prompt: Sequence[int], num_tokens: int, decode: ScriptedWorker, *, pull_from: ScriptedWorker | None = None
    ) -> tuple[list[int], worker_pb2.SeqStats]:
        """One call to its end: the answer, and what the prefill worker counted."""
        self._num_seqs += 1
        seq = EPOCH << 32 | self._num_seqs
        last = self.at_decode if decode is self.decode else self.at_other
        self.at_prefill.submit(
            request(seq, prompt, num_tokens, ignore_eos=True),
            decode.peer,
            pull_from=pull_from.peer if pull_from is not None else None,
            pull_blocks=ON_DECODE,
        )
        await self.at_prefill.until(lambda: seq in self.at_prefill.ended)
        ended = self.at_prefill.ended[seq]
        assert ended.outcome == worker_pb2.OUTCOME_HANDED_OFF, ended
        await last.until(lambda: seq in last.ended)
        tokens = self.at_prefill.tokens[seq] | last.tokens[seq]
        return [tokens[index] for index in range(num_tokens)], ended.stats

    async def first_turn(self) -> list[int]:
        """Leave a conversation behind; returns its text."""
        said, _ = await self.turn(PROMPT, NUM_ANSWER, self.decode)
        text = [*PROMPT, *said]
        await self.idle()
        return text

    async def idle(self) -> None:
        for session in (self.at_prefill, self.at_decode, self.at_other):
            await session.until(lambda session=session: is_idle(session.load))  # type: ignore[misc]

    def faults(self) -> list[str]:
        return [fault for worker in (self.prefill, self.decode, self.other) for fault in worker.runner.faults]


def is_idle(load: worker_pb2.Load) -> bool:
    gauges = (load.num_running, load.num_waiting, load.active_blocks, load.reserved_blocks)
    return not any((*gauges, load.num_tickets, load.num_leases, load.slots_in_use))


@contextlib.asynccontextmanager
async def trio(num_decode_blocks: int = 256) -> AsyncIterator[Trio]:
    workers = [
        ScriptedWorker(worker_config("prefill", "prefill")),
        ScriptedWorker(worker_config("decode", "decode"), num_decode_blocks),
        ScriptedWorker(worker_config("other", "decode")),
    ]
    async with running(*workers), contextlib.AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(SessionClient(worker.server.address, EPOCH)) for worker in workers]
        sessions[0].send(peers=worker_pb2.Peers(decode=[worker.peer for worker in workers[1:]]))
        await sessions[0].until(lambda: [link.state for link in sessions[0].links.values()] == ["ready", "ready"])
        yield Trio(workers, sessions)


def reference(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return answer(prompt, request(1, prompt, num_tokens).sampling, num_tokens)


async def test_turn_two_computes_its_new_message_and_pulls_the_answer_of_turn_one() -> None:
    async with trio() as rig:
        text = await rig.first_turn()
        sent_before = rig.at_decode.load.kv_bytes_sent
        computed_before = rig.at_prefill.load.prompt_tokens_computed
        prompt = [*text, *MESSAGE]
        said, stats = await rig.turn(prompt, 8, rig.decode, pull_from=rig.decode)
        assert said == reference(prompt, 8)
        await rig.idle()
        uncached = len(prompt) - ON_DECODE * S
        assert stats.computed_tokens == rig.at_prefill.load.prompt_tokens_computed - computed_before == uncached
        num_bytes = (ON_DECODE - ON_PREFILL) * LAYOUT.block_bytes
        assert stats.pulled_bytes == rig.at_decode.load.kv_bytes_sent - sent_before == num_bytes
        assert stats.pulled_blocks == ON_DECODE - ON_PREFILL
        assert stats.kv_blocks == -(-len(prompt) // S) - ON_DECODE, "decode is sent what it lacks"
        assert not rig.faults()


async def test_another_worker_goes_on_with_the_conversation_and_the_holder_only_lends() -> None:
    async with trio() as rig:
        prompt = [*await rig.first_turn(), *MESSAGE]
        said, stats = await rig.turn(prompt, 8, rig.other, pull_from=rig.decode)
        assert said == reference(prompt, 8)
        assert stats.pulled_blocks == ON_DECODE - ON_PREFILL
        assert stats.kv_blocks == -(-len(prompt) // S), "the new decode worker had nothing"
        await rig.idle()
        assert not rig.faults()


async def test_a_holder_that_has_given_the_memory_to_others_is_no_loss() -> None:
    async with trio(num_decode_blocks=12) as rig:
        prompt = [*await rig.first_turn(), *MESSAGE]
        await rig.turn([*reversed(PROMPT), *PROMPT[:50]], 40, rig.decode)
        said, stats = await rig.turn(prompt, 8, rig.other, pull_from=rig.decode)
        assert said == reference(prompt, 8)
        assert stats.pulled_blocks == 0
        assert stats.computed_tokens == len(prompt) - ON_PREFILL * S
        await rig.idle()
        assert not rig.faults()


async def test_a_holder_that_is_gone_is_no_loss() -> None:
    async with trio() as rig:
        prompt = [*await rig.first_turn(), *MESSAGE]
        rig.decode.server.stop()
        said, stats = await rig.turn(prompt, 8, rig.other, pull_from=rig.decode)
        assert said == reference(prompt, 8)
        assert stats.pulled_blocks == 0
        await until(lambda: is_idle(rig.at_prefill.load))
        assert not rig.faults()


async def test_a_holder_that_nobody_knows_is_no_loss() -> None:
    async with trio() as rig:
        prompt = [*await rig.first_turn(), *MESSAGE]
        stranger = worker_pb2.Peer(worker_id="stranger", epoch=5, address="127.0.0.1:1")
        seq = EPOCH << 32 | 77
        rig.at_prefill.submit(request(seq, prompt, 4, ignore_eos=True), rig.other.peer, pull_from=stranger)
        await rig.at_other.until(lambda: seq in rig.at_other.ended)
        tokens = rig.at_prefill.tokens[seq] | rig.at_other.tokens[seq]
        assert [tokens[index] for index in range(4)] == reference(prompt, 4)


async def test_calls_that_are_cancelled_while_they_pull_leave_nothing() -> None:
    async with trio() as rig:
        text = await rig.first_turn()
        for n in range(100, 140):
            seq = EPOCH << 32 | n
            rig.at_prefill.submit(
                request(seq, [*text, n], 4, ignore_eos=True), rig.other.peer, pull_from=rig.decode.peer, pull_blocks=9
            )
            for session in (rig.at_prefill, rig.at_other):
                session.send(cancel=worker_pb2.Cancel(seq=seq))
        await rig.at_prefill.until(lambda: len(rig.at_prefill.ended) == 41)
        await rig.idle()
        prompt = [*text, *MESSAGE]
        said, _ = await rig.turn(prompt, 8, rig.other, pull_from=rig.decode)
        assert said == reference(prompt, 8)
        assert not rig.faults()


async def test_forty_conversations_go_on_at_once() -> None:
    async with trio() as rig:
        text = await rig.first_turn()
        seqs = {EPOCH << 32 | 100 + n: [*text, *MESSAGE[:n]] for n in range(1, 41)}
        for seq, prompt in seqs.items():
            rig.at_prefill.submit(
                request(seq, prompt, 4, ignore_eos=True),
                rig.decode.peer,
                pull_from=rig.decode.peer,
                pull_blocks=ON_DECODE,
            )
        await rig.at_decode.until(lambda: len(rig.at_decode.ended) == 41)
        for seq, prompt in seqs.items():
            tokens = rig.at_prefill.tokens[seq] | rig.at_decode.tokens[seq]
            assert [tokens[index] for index in range(4)] == reference(prompt, 4)
        await rig.idle()
        assert not rig.faults()
