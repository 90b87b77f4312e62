"""A ticket names a seq, an epoch, a generation and blocks; whatever does not fit is an error, never text of another prompt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from baton.v1 import kv_pb2
from kv_transfer.frame import FrameHeader, Kind
from kv_transfer.pair import Pair, PairState
from tests.handoff.handoff_adversary import Adversary, OldFrame, changed_prompt, send_frame
from tests.handoff.handoff_calls import FAILED, REFUSED, Call, Rig, random_prompt
from tests.handoff.handoff_rig import Cluster, RigConfig, RigWorker
from worker.links import State

SECRET = (4, 4, 7, 1)  # what another prompt said


def pair_of(prefill: RigWorker) -> Pair:
    return next(pair for pair in prefill.core._pairs.values() if pair.peer.startswith(">"))


def link_of(prefill: RigWorker) -> str:
    return next(key for key, end in prefill.links.ends.items() if end.opener and end.state is State.READY)


class Forger:
    """A rig with a link that is ready, and a past to forge from: one call that was answered and recorded."""

    def __init__(self, seed: int) -> None:
        self.rig = Rig(seed, Cluster(seed))
        self.cluster = self.rig.cluster
        self.prefill, self.decode = self.cluster.workers["prefill-0"], self.cluster.workers["decode-0"]
        self.past = Adversary(self.cluster)
        self.prompt = (*SECRET, *random_prompt(self.rig.rng, 36))
        self.answered = self.rig.router.submit(self.prompt, 5)
        self.rig.finish_all()
        self.past.recording = False

    def commit(self, **changes: int) -> kv_pb2.Commit:
        forged = kv_pb2.Commit()
        forged.CopyFrom(self.past.commits[0])
        for name, value in changes.items():
            setattr(forged, name, value)
        return forged

    def send_commit(self, commit: kv_pb2.Commit) -> None:
        assert self.prefill.links.send(link_of(self.prefill), kv_pb2.LinkMessage(commit=commit))

    def send_frames(self, change: Callable[[FrameHeader], FrameHeader] = lambda header: header) -> int:
        """Send every recorded frame, changed; returns how many."""
        for frame in self.past.frames:
            assert self.cluster.run_until(
                lambda frame=frame: send_frame(  # type: ignore[misc]
                    pair_of(self.prefill), OldFrame(change(frame.header), frame.payload), self.cluster.clock.now_s
                ),
                limit_s=5.0,
            )
        self.cluster.run_for(0.5)
        return len(self.past.frames)

    def num_dropped(self) -> int:
        return self.decode.core.load().frames_dropped

    def plain_call_works(self) -> None:
        call = self.rig.router.submit(random_prompt(self.rig.rng, 40), 5)
        self.rig.drain()
        assert call.is_finished


@pytest.mark.parametrize("seed", range(5))
def test_a_ticket_of_an_unknown_seq_is_refused(seed: int) -> None:
    forger = Forger(seed)
    num_sent = forger.send_frames(lambda header: replace(header, seq=999))
    assert forger.num_dropped() == num_sent
    forger.send_commit(forger.commit(seq=999))
    forger.rig.drain()
    assert forger.decode.local_engine.load().num_admitted == 1
    forger.plain_call_works()


@pytest.mark.parametrize("seed", range(5))
def test_a_consumed_ticket_is_refused(seed: int) -> None:
    forger = Forger(seed)
    num_sent = forger.send_frames()
    assert forger.num_dropped() == num_sent
    forger.send_commit(forger.commit())
    forger.rig.drain()
    assert forger.decode.local_engine.load().num_admitted == 1
    forger.plain_call_works()


@pytest.mark.parametrize(
    "change",
    [
        lambda header: replace(header, block_start=1_000),
        lambda header: replace(header, block_start=0xFFFF_FFFF),
        lambda header: replace(header, num_blocks=10_000),
        lambda header: replace(header, layer_start=2),
        lambda header: replace(header, num_layers=0xFFFF_FFFF),
        lambda header: replace(header, index=0xFFFF_FFFF),
        lambda header: replace(header, epoch=header.epoch ^ 1),
        lambda header: replace(header, generation=header.generation + 1_000),
        lambda header: replace(header, payload_crc=header.payload_crc ^ 1, kind=Kind.PROBE),
    ],
    ids=["past ticket", "past pool", "too many blocks", "layer", "layers", "index", "epoch", "generation", "probe"],
)
def test_frames_that_do_not_fit_the_open_ticket_are_dropped_and_the_call_is_whole(
    change: Callable[[FrameHeader], FrameHeader],
) -> None:
    forger = Forger(0)
    forger.prefill.has_slow_engine = True  # so that there is time to forge while the ticket is open
    call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5)
    forger.cluster.run_until(lambda: bool(forger.prefill.core.load().num_outgoing), limit_s=5.0)
    generation = forger.decode.decode._last_generation

    def forge(header: FrameHeader) -> FrameHeader:
        return change(replace(header, seq=call.seq, generation=generation))

    dropped = forger.num_dropped()
    assert send_frame(
        pair_of(forger.prefill), OldFrame(forge(forger.past.frames[0].header), forger.past.frames[0].payload), 0.0
    )
    forger.rig.drain()
    assert forger.num_dropped() == dropped + 1
    assert call.is_finished


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"generation": 77}, {"num_frames": 1}, {"nbytes": 8}])
def test_a_commit_that_does_not_fit_ends_the_call_or_changes_nothing(changes: dict[str, int]) -> None:
    for seed in range(10):
        forger = Forger(seed)
        call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5)
        forger.cluster.run_until(lambda f=forger: bool(f.prefill.core.load().num_outgoing), limit_s=5.0)  # type: ignore[misc]
        generation = forger.decode.decode._last_generation
        forger.send_commit(forger.commit(**{"seq": call.seq, "generation": generation, **changes}))
        forger.rig.drain()
        assert call.is_finished or call.outcome == FAILED
        forger.plain_call_works()


@pytest.mark.parametrize("num_blocks", [0, 9, 11, 1_000])
def test_a_grant_for_another_number_of_blocks_fails_the_call(num_blocks: int) -> None:
    forger = Forger(0)
    call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5)

    def grant() -> kv_pb2.Ticket | None:
        messages = [m for end in forger.prefill.links.ends.values() for m in end.inbox if m is not None]
        return next((m.grant.ticket for m in messages if m.HasField("grant")), None)

    forger.cluster.run_until(lambda: grant() is not None, limit_s=5.0)
    ticket = grant()
    assert ticket is not None
    ticket.num_blocks = num_blocks
    forger.rig.drain()
    assert (call.outcome, call.prefill and call.prefill.error_code) == (FAILED, "transfer_failed")
    forger.plain_call_works()


def test_an_expired_ticket_fails_the_call_on_both_sides() -> None:
    forger = Forger(0)
    forger.prefill.has_slow_engine = True
    call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5)
    forger.cluster.run_until(lambda: bool(forger.prefill.core.load().num_outgoing), limit_s=5.0)
    forger.prefill.stop()
    forger.cluster.run_for(RigConfig().lease_s + 1.0)
    assert not forger.decode.check_quiet()
    forger.prefill.resume()
    forger.rig.drain()
    assert call.outcome == FAILED
    assert forger.cluster.run_until(lambda: pair_is_ready(forger.prefill), limit_s=30.0)
    forger.plain_call_works()


def pair_is_ready(prefill: RigWorker) -> bool:
    ready = any(end.state is State.READY for end in prefill.links.ends.values())
    return ready and any(pair.state is PairState.READY for pair in prefill.core._pairs.values())


def test_a_lost_frame_is_asked_for_again() -> None:
    forger = Forger(0)
    cluster = forger.cluster
    cluster.network.drop_next_data_frame = True
    call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5)
    forger.rig.drain()
    assert call.is_finished
    assert not cluster.network.drop_next_data_frame


# The same seq again


def submit_again(rig: Rig, first: Call, prefill: str) -> list[str]:
    """Submit an open call's seq with another prompt, past the router; what the worker says of it, field or error code."""
    worker = rig.cluster.workers[prefill]
    said: list[str] = []
    worker.sessions.refused = lambda seq, error: said.append(error.field)  # type: ignore[method-assign]
    worker.sessions.ended = lambda message: said.append(message.error.code)  # type: ignore[method-assign]
    worker.sessions.handoff_lost = lambda seq, error, reroute: said.append(error.code)  # type: ignore[method-assign]
    request = replace(first.request, token_ids=changed_prompt(rig.rng, first.request.token_ids))
    worker.prefill.on_submit(request, link_of(worker), first.deadline_s)
    rig.cluster.run_until(lambda: bool(said), limit_s=5.0)
    del worker.sessions.refused, worker.sessions.ended, worker.sessions.handoff_lost
    return said


@pytest.mark.parametrize("seed", range(20))
def test_a_seq_that_is_open_is_refused_and_the_first_call_is_untouched(seed: int) -> None:
    rig = Rig(seed, Cluster(seed))
    first = rig.router.submit(random_prompt(rig.rng, 40), 8)
    prefill = rig.cluster.workers["prefill-0"]
    rig.cluster.run_until(lambda: prefill.prefill.num_leases() == 1, limit_s=5.0)
    assert submit_again(rig, first, "prefill-0") == ["seq"]
    rig.finish_all()


@pytest.mark.parametrize("seed", range(20))
def test_decode_refuses_a_seq_that_another_prefill_worker_has_open_there(seed: int) -> None:
    rig = Rig(seed, Cluster(seed, RigConfig(num_prefill=2)))
    rig.cluster.run_for(1.0)
    first = rig.router.submit(random_prompt(rig.rng, 40), 20)
    decode = rig.cluster.workers["decode-0"]
    rig.cluster.run_until(lambda: decode.decode.num_open() == 1, limit_s=5.0)
    assert submit_again(rig, first, "prefill-1") == ["unavailable"]
    rig.cluster.workers["prefill-1"].sessions.routers = set()  # it has nothing to say to the first one's router
    rig.finish_all()


@pytest.mark.parametrize("max_tokens", [1, 4])
def test_a_seq_used_again_at_once_is_refused_while_results_of_the_first_may_be_under_way(max_tokens: int) -> None:
    for seed in range(60):
        rig = Rig(seed, Cluster(seed, RigConfig(prefix_cache=False)))
        prefill = rig.cluster.workers["prefill-0"]
        first = rig.router.submit(random_prompt(rig.rng, 20), max_tokens)
        rig.cluster.run_until(lambda p=prefill: any(result.prefilled for result in p.results), limit_s=5.0)  # type: ignore[misc]
        rig.router.cancel(first)
        rig.cluster.run_until(lambda call=first: call.is_over, limit_s=5.0)  # type: ignore[misc]
        again = rig.router.submit(changed_prompt(rig.rng, first.request.token_ids), max_tokens, seq=first.seq)
        rig.drain()
        assert again.outcome == REFUSED
        assert not again.tokens


@pytest.mark.parametrize("restarted", [(), ("prefill-0",), ("decode-0",), ("prefill-0", "decode-0")])
def test_a_seq_reused_after_its_end_or_a_restart_gets_its_own_answer(restarted: tuple[str, ...]) -> None:
    for seed in range(20):
        forger = Forger(seed)
        for worker_id in restarted:
            forger.cluster.restart(worker_id)
        forger.cluster.run_for(RigConfig().lease_s + 1.0)
        call = forger.rig.router.submit(changed_prompt(forger.rig.rng, forger.prompt), 5, seq=forger.answered.seq)
        forger.rig.finish_all()
        assert call.is_finished
