"""Seeded defects of the handoff, each of which the property test must find: the proof that its silence means something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.v1 import kv_pb2
from decode_worker.decode import Decode
from decode_worker.decode_role import DecodeRole
from engine.block_exchange import BlockExchange
from engine.ports import Reservation
from engine.prefix_cache import PrefixCache
from kv_transfer import receiver as receiver_module
from kv_transfer.events import Committed
from kv_transfer.frame import FrameHeader, Kind
from kv_transfer.receiver import Receiver
from prefill_worker.prefill import Prefill
from prefill_worker.prefill_role import PrefillRole
from tests.handoff.handoff_adversary import changed_prompt
from tests.handoff.handoff_calls import random_prompt
from tests.handoff.handoff_chats import Chats
from tests.handoff.handoff_storm import Scenario
from worker import block_lender, block_puller
from worker.block_lender import BlockLender
from worker.block_puller import BlockPuller
from worker.tombstones import Tombstones

NUM_SEEDS = 100  # each defect below is found within 25 by the scenario that looks for it

Patch = pytest.MonkeyPatch


def prefill_skips_a_free(patch: Patch) -> None:
    def forget(self: PrefillRole, prefill: Prefill) -> None:
        del self._open[prefill.request.seq]

    patch.setattr(PrefillRole, "_forget", forget)


def decode_skips_a_free(patch: Patch) -> None:
    def forget(self: DecodeRole, decode: Decode) -> None:
        del self._open[decode.request.seq]

    patch.setattr(DecodeRole, "_forget", forget)


def a_generation_is_reused(patch: Patch) -> None:
    grant = DecodeRole._grant

    def regrant(self: DecodeRole, decode: Decode, reservation: Reservation) -> None:
        self._last_generation = 0
        grant(self, decode, reservation)

    patch.setattr(DecodeRole, "_grant", regrant)


def decode_adopts_before_every_byte_is_there(patch: Patch) -> None:
    def commit(self: Receiver, seq: int, generation: int, num_frames: int, nbytes: int, now_s: float) -> None:
        if self._tickets.pop(seq, None) is not None:
            self._emit(Committed(seq, generation, nbytes))

    patch.setattr(Receiver, "commit", commit)


def decode_adopts_before_every_byte_is_verified(patch: Patch) -> None:
    def write(self: Receiver, ticket: receiver_module._Ticket, header: FrameHeader, payload: memoryview) -> bool:
        block_ids = ticket.block_ids[header.block_start : header.block_start + header.num_blocks]
        if header.kind is Kind.PULL:
            return self._pull(block_ids, header, payload.cast("I")) is not None
        self._store.scatter(block_ids, header.layer_start, header.num_layers, payload)
        return True

    patch.setattr(Receiver, "_write", write)


def _receiver_sees(patch: Patch, change: Callable[[Receiver, FrameHeader], FrameHeader]) -> None:
    take = Receiver._take

    def take_changed(self: Receiver, header: FrameHeader, frame: memoryview, now_s: float) -> bool:
        return take(self, change(self, header), frame, now_s)

    patch.setattr(Receiver, "_take", take_changed)


def the_receiver_ignores_the_epoch(patch: Patch) -> None:
    _receiver_sees(patch, lambda receiver, header: replace(header, epoch=receiver._epoch))


def the_receiver_ignores_the_generation(patch: Patch) -> None:
    def of_ticket(receiver: Receiver, header: FrameHeader) -> FrameHeader:
        ticket = receiver._tickets.get(header.seq)
        return replace(header, generation=ticket.generation) if ticket else header

    _receiver_sees(patch, of_ticket)


def _decode_sees(patch: Patch, change: Callable[[DecodeRole, kv_pb2.Commit], None]) -> None:
    on_commit = DecodeRole._on_commit

    def on_changed(self: DecodeRole, peer: str, commit: kv_pb2.Commit) -> None:
        changed = kv_pb2.Commit()
        changed.CopyFrom(commit)
        change(self, changed)
        on_commit(self, peer, changed)

    patch.setattr(DecodeRole, "_on_commit", on_changed)


def commit_ignores_the_epoch(patch: Patch) -> None:
    def today(role: DecodeRole, commit: kv_pb2.Commit) -> None:
        commit.epoch = role._ports.epoch

    _decode_sees(patch, today)


def commit_ignores_the_generation(patch: Patch) -> None:
    def of_ticket(role: DecodeRole, commit: kv_pb2.Commit) -> None:
        decode = role._open.get(commit.seq)
        if decode is not None:
            commit.epoch, commit.generation = role._ports.epoch, decode.generation

    _decode_sees(patch, of_ticket)


def prefill_drops_blocks_that_the_plane_still_reads(patch: Patch) -> None:
    end = PrefillRole._end

    def end_early(self: PrefillRole, prefill: Prefill, *args: Any, **kwargs: Any) -> None:
        self._ports.engine.drop(prefill.request.seq)
        end(self, prefill, *args, **kwargs)

    patch.setattr(PrefillRole, "_end", end_early)


def decode_drops_blocks_that_the_plane_still_writes(patch: Patch) -> None:
    close = DecodeRole._close

    def close_early(self: DecodeRole, decode: Decode, *args: Any) -> None:
        self._ports.engine.drop(decode.request.seq)
        close(self, decode, *args)

    patch.setattr(DecodeRole, "_close", close_early)


def decode_acknowledges_before_every_byte_is_verified(patch: Patch) -> None:
    on_commit = DecodeRole._on_commit

    def ack_at_once(self: DecodeRole, peer: str, commit: kv_pb2.Commit) -> None:
        on_commit(self, peer, commit)
        ack = kv_pb2.Ack(seq=commit.seq, generation=commit.generation)
        self._ports.links.send(peer, kv_pb2.LinkMessage(ack=ack))

    patch.setattr(DecodeRole, "_on_commit", ack_at_once)


def the_plane_writes_after_it_said_that_a_ticket_is_closed(patch: Patch) -> None:
    close = Receiver.close

    def close_and_go_on(self: Receiver, seq: int, reason: str) -> None:
        ticket = self._tickets.get(seq)
        close(self, seq, reason)
        if ticket is not None and not reason:  # cancelled by its role
            self._tickets[seq] = ticket

    patch.setattr(Receiver, "close", close_and_go_on)


def decode_forgets_a_cancel_that_overtook_its_reserve(patch: Patch) -> None:
    on_cancel = DecodeRole.on_cancel

    def on_cancel_lost(self: DecodeRole, seq: int) -> bool:
        known = on_cancel(self, seq)
        self._cancelled = Tombstones(self._lease_s)
        return known

    patch.setattr(DecodeRole, "on_cancel", on_cancel_lost)


def prefill_forgets_that_a_seq_has_ended(patch: Patch) -> None:
    forget = PrefillRole._forget

    def forget_all(self: PrefillRole, prefill: Prefill) -> None:
        forget(self, prefill)
        self._ended = Tombstones(self._lease_s)

    patch.setattr(PrefillRole, "_forget", forget_all)


def prefill_asks_for_a_peers_blocks_while_its_own_are_not_sure(patch: Patch) -> None:
    patch.setattr(PrefillRole, "_takes_own_blocks_first", lambda self, peer: False)


def the_plane_commits_twice(patch: Patch) -> None:
    settle = Receiver._settle

    def settle_twice(self: Receiver, ticket: receiver_module._Ticket, now_s: float) -> None:
        num_before = self.num_committed
        settle(self, ticket, now_s)
        if self.num_committed > num_before:
            self._emit(Committed(ticket.seq, ticket.generation, ticket.nbytes))

    patch.setattr(Receiver, "_settle", settle_twice)


def decode_adopts_twice(patch: Patch) -> None:
    on_committed = DecodeRole._on_committed

    def on_committed_twice(self: DecodeRole, decode: Decode, event: Committed) -> None:
        on_committed(self, decode, event)
        on_committed(self, decode, event)

    patch.setattr(DecodeRole, "_on_committed", on_committed_twice)


def prefill_ends_twice(patch: Patch) -> None:
    end = PrefillRole._end

    def end_twice(self: PrefillRole, prefill: Prefill, *args: Any, **kwargs: Any) -> None:
        before = prefill.state
        end(self, prefill, *args, **kwargs)
        if prefill.request.seq in self._open:
            prefill.state = before
            end(self, prefill, *args, **kwargs)

    patch.setattr(PrefillRole, "_end", end_twice)


def hasty(scenario: Scenario) -> None:
    """A seq is used again the moment its first call is over, while a result of that one may lie unread."""
    rig, prefill = scenario.rig, scenario.cluster.workers["prefill-0"]
    first = rig.router.submit(random_prompt(rig.rng, 20), 1)
    rig.cluster.run_until(lambda: any(result.prefilled for result in prefill.results) or first.is_over, limit_s=10.0)
    rig.router.cancel(first)
    rig.cluster.run_until(lambda: first.is_over, limit_s=10.0)
    rig.router.submit(changed_prompt(rig.rng, first.request.token_ids), 1, seq=first.seq)
    rig.drain()


def a_pull_is_published_before_every_byte_is_there(patch: Patch) -> None:
    receive = BlockPuller._receive

    def publish_early(self: BlockPuller, pull: block_puller._Pull, num_blocks: int) -> None:
        receive(self, pull, num_blocks)
        self._end(pull, num_blocks)

    patch.setattr(BlockPuller, "_receive", publish_early)


def a_pull_publishes_all_it_asked_for(patch: Patch) -> None:
    publish = BlockExchange.publish

    def publish_all(self: BlockExchange, seq: int, num_blocks: int) -> None:
        publish(self, seq, 1_000 if num_blocks else 0)

    patch.setattr(BlockExchange, "publish", publish_all)


def a_pull_gives_blocks_back_that_the_plane_still_writes(patch: Patch) -> None:
    give_up = BlockPuller._give_up

    def give_up_early(self: BlockPuller, pull: block_puller._Pull) -> None:
        self._ports.engine.publish(pull.seq, 0)
        give_up(self, pull)

    patch.setattr(BlockPuller, "_give_up", give_up_early)


def a_pull_skips_a_free(patch: Patch) -> None:
    def give_up(self: BlockPuller, pull: block_puller._Pull) -> None:
        self._open.pop(pull.seq, None)
        self._tell_owner(pull)

    patch.setattr(BlockPuller, "_give_up", give_up)


def a_loan_gives_blocks_back_that_the_plane_still_reads(patch: Patch) -> None:
    ship = BlockLender._ship

    def ship_and_unpin(self: BlockLender, loan: block_lender._Loan, ticket: kv_pb2.Ticket) -> None:
        ship(self, loan, ticket)
        self._ports.engine.unpin(loan.seq)

    patch.setattr(BlockLender, "_ship", ship_and_unpin)


def a_loan_skips_a_free(patch: Patch) -> None:
    def forget(self: BlockLender, loan: block_lender._Loan) -> None:
        del self._open[loan.seq]

    patch.setattr(BlockLender, "_forget", forget)


def a_loan_is_of_other_blocks_than_asked_for(patch: Patch) -> None:
    find = PrefixCache.find

    def find_others(self: PrefixCache, hashes: Sequence[bytes]) -> list[int]:
        found = find(self, hashes)
        return found[::-1] if isinstance(hashes, tuple) else found  # a tuple: from the wire

    patch.setattr(PrefixCache, "find", find_others)


def impatient_staged(scenario: Scenario) -> None:
    """The KV plane reads through the store, which watches it; in direct mode the receiver's crc does."""
    config = replace(scenario.cluster.config, mode="staged")
    Scenario(scenario.rig.seed, config).impatient()


def first_failing_seed(tell: Callable[[Any], object], scenario: type[Scenario]) -> int | None:
    for seed in range(NUM_SEEDS):
        try:
            tell(scenario(seed))
        except Exception:  # noqa: BLE001  a defect may show as a violated property, an assertion of the product, or a crash
            return seed
    return None


@pytest.mark.parametrize(
    ("seed_defect", "tell"),
    [
        (a_pull_is_published_before_every_byte_is_there, Chats.calm),
        (a_pull_publishes_all_it_asked_for, Chats.calm),
        (a_pull_gives_blocks_back_that_the_plane_still_writes, Chats.impatient),
        (a_pull_skips_a_free, Chats.impatient),
        (a_loan_gives_blocks_back_that_the_plane_still_reads, Chats.impatient),
        (a_loan_skips_a_free, Chats.calm),
        (a_loan_is_of_other_blocks_than_asked_for, Chats.calm),
    ],
)
def test_conversations_find_a_seeded_defect_of_what_flows_back(
    seed_defect: Callable[[Patch], None], tell: Callable[[Chats], object], monkeypatch: Patch
) -> None:
    seed_defect(monkeypatch)
    found = first_failing_seed(tell, Chats)
    print(f"{seed_defect.__name__}: found by seed {found}")
    assert found is not None, f"{NUM_SEEDS} seeds do not find this defect"


@pytest.mark.parametrize(
    ("seed_defect", "tell"),
    [
        (prefill_skips_a_free, Scenario.calm),
        (decode_skips_a_free, Scenario.impatient),
        (a_generation_is_reused, Scenario.hostile),
        (decode_adopts_before_every_byte_is_there, Scenario.calm),
        (decode_adopts_before_every_byte_is_verified, Scenario.storm),
        (the_receiver_ignores_the_epoch, Scenario.hostile),
        (the_receiver_ignores_the_generation, Scenario.hostile),
        (commit_ignores_the_epoch, Scenario.hostile),
        (commit_ignores_the_generation, Scenario.hostile),
        (prefill_drops_blocks_that_the_plane_still_reads, impatient_staged),
        (decode_drops_blocks_that_the_plane_still_writes, Scenario.impatient),
        (decode_acknowledges_before_every_byte_is_verified, Scenario.storm),
        (the_plane_writes_after_it_said_that_a_ticket_is_closed, Scenario.impatient),
        (decode_forgets_a_cancel_that_overtook_its_reserve, Scenario.impatient),
        (prefill_forgets_that_a_seq_has_ended, hasty),
        (prefill_asks_for_a_peers_blocks_while_its_own_are_not_sure, lambda scenario: Scenario.ring(scenario.rig.seed)),
        (the_plane_commits_twice, Scenario.calm),
        (decode_adopts_twice, Scenario.calm),
        (prefill_ends_twice, Scenario.calm),
    ],
)
def test_the_property_test_finds_a_seeded_defect(
    seed_defect: Callable[[Patch], None], tell: Callable[[Scenario], object], monkeypatch: Patch
) -> None:
    seed_defect(monkeypatch)
    found = first_failing_seed(tell, Scenario)
    print(f"{seed_defect.__name__}: found by seed {found}")
    assert found is not None, f"{NUM_SEEDS} seeds do not find this defect"
