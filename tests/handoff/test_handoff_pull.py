"""KV flows back: what a decode worker caches is pulled and not computed; whatever fails, the prompt is computed instead.

Turn 1 of a chat leaves the prompt's blocks on both workers and the answer's on decode. Turn 2 says all of it again and more.
The scripted model verifies every byte of KV that it reads, so a block that came from the wrong place fails the call.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.v1 import kv_pb2
from engine.block_pool import Hold
from kv_transfer.events import Committed, Shipped
from tests.handoff.handoff_calls import CANCELLED, Call, Rig, random_prompt
from tests.handoff.handoff_links import cut
from tests.handoff.handoff_rig import Cluster, RigConfig, RigWorker
from worker.links import State

S = RigConfig().block_size
NUM_PROMPT, NUM_ANSWER, NUM_NEW = 34, 30, 10  # tokens
ON_PREFILL, ON_DECODE = 8, 15  # whole blocks of turn 1 that each worker has computed or received
NUM_TOKENS = NUM_PROMPT + NUM_ANSWER + NUM_NEW  # of turn 2's prompt
SEEDS = range(12)
CANCEL_S = 1.0  # DESIGN section 5: the cancel path frees within 1 s


class Chat(Rig):
    """A cluster after one turn."""

    def __init__(self, seed: int, config: RigConfig | None = None) -> None:
        super().__init__(seed, Cluster(seed, config))
        prompt, answer = random_prompt(self.rng, NUM_PROMPT), random_prompt(self.rng, NUM_ANSWER)
        self.router.submit(prompt, NUM_ANSWER, script=answer)
        self.finish_all()
        self.text = (*prompt, *answer)
        self._computed_before = self.prefill.local_engine.load().prompt_tokens_computed
        self._sent_before = self.decode.core.load().bytes_sent

    @property
    def prefill(self) -> RigWorker:
        return self.cluster.workers["prefill-0"]

    @property
    def decode(self) -> RigWorker:
        return self.cluster.workers["decode-0"]

    def second(self, **changes: object) -> Call:
        """Submit turn 2, the decode worker being known to cache turn 1."""
        arguments: dict[str, object] = {"pull_from": "decode-0", "pull_blocks": ON_DECODE} | changes
        prompt = (*self.text, *random_prompt(self.rng, NUM_NEW))
        return self.router.submit(prompt, 5, script=random_prompt(self.rng, 5), **arguments)  # type: ignore[arg-type]

    @property
    def num_computed(self) -> int:
        """Prompt tokens that the prefill worker has computed since turn 1."""
        return self.prefill.local_engine.load().prompt_tokens_computed - self._computed_before

    @property
    def num_blocks_back(self) -> float:
        """Blocks that decode has sent; in the rig's order of turns some twice (a frame may come before its ticket)."""
        num_bytes = self.decode.core.load().bytes_sent - self._sent_before
        return num_bytes / self.cluster.config.layout.block_bytes


def num_pulled(call: Call) -> int:
    """Blocks that its prefill worker says it has pulled."""
    assert call.prefill is not None
    return call.prefill.stats.pulled_blocks


def is_receiving(chat: Chat) -> bool:
    return chat.prefill.core.load().num_incoming > 0


def unread(worker: RigWorker, kind: str) -> bool:
    return any(
        message is not None and message.HasField(kind)  # type: ignore[arg-type]
        for end in worker.links.ends.values()
        for message in end.inbox
    )


MOMENTS: dict[str, Callable[[Chat], bool]] = {
    "room made": lambda chat: any(result.rooms for result in chat.prefill.results),
    "pull under way": lambda chat: unread(chat.decode, "pull"),
    "pinned": lambda chat: any(result.pinned for result in chat.decode.results),
    "answer under way": lambda chat: unread(chat.prefill, "pull_answer"),
    "grant under way": lambda chat: unread(chat.decode, "pull_grant"),
    "frames under way": is_receiving,
    "shipped": lambda chat: any(isinstance(event, Shipped) for event in chat.decode.kv_events),
    "commit under way": lambda chat: unread(chat.prefill, "pull_commit"),
    "committed": lambda chat: any(isinstance(event, Committed) for event in chat.prefill.kv_events),
    "done under way": lambda chat: unread(chat.decode, "pull_done"),
}


def chat_at(moment: str, seed: int, *, decode: str = "decode-0") -> tuple[Chat, Call]:
    """A chat whose turn 2 is pulling from decode-0; the event has happened, and its handler has not run yet."""
    chat = Chat(seed, RigConfig(num_decode=2))
    chat.cluster.run_for(1.0)  # every link is ready
    call = chat.second(decode=decode)
    assert chat.cluster.run_until(lambda: MOMENTS[moment](chat) or call.is_over, 5.0)  # over: passed in a nested turn
    return chat, call


@pytest.mark.parametrize("seed", SEEDS)
def test_turn_two_computes_only_what_nobody_has_and_moves_only_what_prefill_lacks(seed: int) -> None:
    chat = Chat(seed)
    call = chat.second()
    chat.finish_all()
    assert chat.num_computed == NUM_TOKENS - ON_DECODE * S
    assert call.prefill is not None
    stats = call.prefill.stats
    assert stats.pulled_blocks == ON_DECODE - ON_PREFILL <= chat.num_blocks_back
    assert stats.pulled_bytes == stats.pulled_blocks * chat.cluster.config.layout.block_bytes
    assert (stats.cached_tokens, stats.computed_tokens) == (ON_DECODE * S, chat.num_computed)
    assert stats.kv_blocks == -(-NUM_TOKENS // S) - ON_DECODE, "decode gets only what it lacks"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_holder_need_not_be_the_worker_that_decodes(seed: int) -> None:
    chat = Chat(seed, RigConfig(num_decode=2))
    chat.cluster.run_for(1.0)
    call = chat.second(decode="decode-1")
    chat.finish_all()
    assert chat.num_computed == NUM_TOKENS - ON_DECODE * S
    assert num_pulled(call) == ON_DECODE - ON_PREFILL


def test_one_token_is_pulled_for_although_nothing_is_handed_over() -> None:
    chat = Chat(0)
    chat.router.submit((*chat.text, 5), 1, pull_from="decode-0", pull_blocks=ON_DECODE)
    chat.finish_all()
    assert chat.num_computed == len(chat.text) + 1 - ON_DECODE * S


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lost_frame_is_sent_again(seed: int) -> None:
    chat, _ = chat_at("grant under way", seed)
    chat.cluster.network.drop_next_data_frame = True
    chat.finish_all()
    assert chat.num_computed == NUM_TOKENS - ON_DECODE * S
    assert chat.num_blocks_back > ON_DECODE - ON_PREFILL


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_evicted_at_the_end_of_the_chain_is_computed(seed: int) -> None:
    chat = Chat(seed, RigConfig(decode_blocks=20))
    chat.router.submit(random_prompt(chat.rng, 24), 3, local=True, script=(5, 6, 8))
    chat.finish_all()
    call = chat.second()
    chat.finish_all()
    assert 0 < num_pulled(call) < ON_DECODE - ON_PREFILL
    assert chat.num_computed == NUM_TOKENS - (ON_PREFILL + num_pulled(call)) * S


def evict_all(worker: RigWorker) -> None:
    """As if other prompts had taken the whole pool, and gone."""
    pool = worker.local_engine._pool
    pool.release(pool.allocate(pool.num_available, Hold.ACTIVE), Hold.ACTIVE)


@pytest.mark.parametrize("moment", ["room made", "pull under way", "pinned", "frames under way"])
def test_a_holder_that_evicts_all_else_in_the_middle_sends_what_it_promised_or_nothing(moment: str) -> None:
    for seed in SEEDS:
        chat, call = chat_at(moment, seed, decode="decode-1")
        evict_all(chat.decode)
        chat.finish_all()
        promised = ON_DECODE - ON_PREFILL if moment in ("pinned", "frames under way") else 0
        assert num_pulled(call) == promised, f"seed {seed}"
        assert chat.num_computed == NUM_TOKENS - (ON_PREFILL + promised) * S


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_in_the_middle_leaves_nothing_held_on_either_side(moment: str) -> None:
    for seed in range(15):
        chat, call = chat_at(moment, seed)
        chat.router.cancel(call)
        cancelled_s = chat.cluster.clock.now_s
        chat.drain()
        assert chat.cluster.clock.now_s - cancelled_s < CANCEL_S, f"seed {seed}"
        assert call.outcome == CANCELLED or call.is_finished
    chat.second()
    chat.finish_all()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_holder_that_dies_in_the_middle_costs_a_computation_and_no_more(moment: str) -> None:
    for seed in range(5):
        chat, call = chat_at(moment, seed, decode="decode-1")
        chat.cluster.kill("decode-0")
        chat.drain()
        assert call.is_finished, f"seed {seed}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_broken_link_in_the_middle_leaves_nothing_held_on_either_side(moment: str) -> None:
    for seed in range(5):
        chat, _ = chat_at(moment, seed)
        cut(next(end for end in chat.prefill.links.ends.values() if end.peer_id == "decode-0"), chat.rng)
        chat.drain()
        ready = lambda: all(end.state is State.READY for end in chat.prefill.links.ends.values())  # noqa: B023, E731
        assert chat.cluster.run_until(ready, 10.0)
        chat.second()
        chat.drain()
        assert chat.calls[-1].is_finished, f"seed {seed}"


@pytest.mark.parametrize("side", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_that_stands_still_in_the_middle_holds_blocks_no_longer_than_its_lease(moment: str, side: str) -> None:
    for seed in range(4):
        chat, call = chat_at(moment, seed, decode="decode-1")
        chat.cluster.workers[side].stop()
        other = chat.decode if side == "prefill-0" else chat.prefill
        freed = lambda: other.local_engine.load().reserved_blocks == 0  # noqa: B023, E731
        assert chat.cluster.run_until(freed, RigConfig().lease_s + 1.0), f"seed {seed}"
        chat.cluster.workers[side].resume()
        chat.drain()
        assert side == "prefill-0" or call.is_finished, f"seed {seed}"


def test_a_pull_that_takes_too_long_is_given_up_and_the_prompt_computed() -> None:
    chat = Chat(0)
    call = chat.second()
    assert chat.cluster.run_until(lambda: unread(chat.decode, "pull"), 5.0)
    for end in chat.decode.links.ends.values():
        end.inbox = type(end.inbox)(m for m in end.inbox if m is None or not m.HasField("pull"))  # lost, the link stays
    chat.finish_all()
    assert call.is_finished
    assert chat.num_computed == NUM_TOKENS - ON_PREFILL * S


def test_a_draining_holder_still_lends_so_that_what_leaves_it_is_not_computed_again() -> None:
    chat = Chat(0, RigConfig(num_decode=2))
    chat.cluster.run_for(1.0)
    chat.decode.draining = True
    chat.second(decode="decode-1")
    chat.finish_all()
    assert chat.num_blocks_back > 0


def test_blocks_of_another_precision_are_not_lent() -> None:
    chat = Chat(0)
    chat.prefill.local_engine._cache._kv_dtype = "float8_e4m3"  # as if its pool held that: every hash is another
    chat.second()
    chat.finish_all()
    assert chat.num_blocks_back == 0
    assert chat.num_computed == NUM_TOKENS


@pytest.mark.parametrize(
    "message",
    [
        {"pull_answer": kv_pb2.PullAnswer(generation=1, num_blocks=10_000)},
        {"pull_answer": kv_pb2.PullAnswer(generation=9, num_blocks=1)},
        {"pull_commit": kv_pb2.Commit(generation=1, num_frames=1, nbytes=1)},
        {"pull_commit": kv_pb2.Commit(generation=9, num_frames=1, nbytes=1)},
    ],
    ids=["more than asked for", "of another pull", "before its time", "of another pull's commit"],
)
@pytest.mark.parametrize("moment", ["room made", "pull under way", "answer under way", "frames under way"])
def test_a_holder_that_says_nonsense_gets_nothing_published(moment: str, message: dict[str, object]) -> None:
    for seed in range(5):
        chat, call = chat_at(moment, seed)
        forged = kv_pb2.LinkMessage(**message)  # type: ignore[arg-type]
        for part in (forged.pull_answer, forged.pull_commit):
            part.seq = call.seq
        forged = kv_pb2.LinkMessage(**{name: getattr(forged, name) for name in message})
        link = next(key for key, end in chat.decode.links.ends.items() if end.state is State.READY)
        chat.decode.links.send(link, forged)
        chat.drain()
        assert call.is_finished, f"seed {seed}"
