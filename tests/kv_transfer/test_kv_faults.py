"""Property tests: two cores, a network that loses, copies, damages, delays and reorders, and roles that cancel at any point.

A model of the two roles drives the planes as workers would (Grant, Commit, Ack and Nack pass through lists, in any order with
the frames). After every step the invariants of DESIGN section 13 that concern the KV plane are checked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer import sender
from kv_transfer.events import Committed, IncomingClosed, Incomplete, OutgoingClosed, PairLost, Shipped
from kv_transfer.loopback import Faults
from tests.kv_transfer.kv_fakes import LAYOUT, TwoCores, frame_bytes_for

NUM_BLOCKS = 64


@dataclass
class Handoff:
    """What the two roles know of one transfer."""

    seq: int
    generation: int
    source: list[int]
    sent: bytes  # of the source blocks after the leading ones, as they were at the start
    target: list[int]
    num_leading: int
    chunks: list[int]  # num_ready_blocks of each ship call
    outgoing: str | None = None  # why it closed
    incoming: str | None = None  # why it closed, or "committed"
    shipped: Shipped | None = None
    bytes_at_end: bytes = b""  # of the target blocks when the ticket ended
    cancelled: bool = False
    resends: int = 0


@dataclass
class World:
    """Two roles over two cores."""

    cores: TwoCores
    random: random.Random
    handoffs: dict[int, Handoff] = field(default_factory=dict)

    def open(self, seq: int, num_blocks: int, num_leading: int, num_chunks: int) -> None:
        start = 8 * (seq % 8)  # the blocks of a ticket are its own
        ready = sorted(self.random.sample(range(1, num_blocks + 1), min(num_chunks, num_blocks)))
        blocks, num_leading = list(range(start, start + num_blocks)), min(num_leading, num_blocks)
        sent = self.cores.store_a.blocks(blocks[num_leading:])
        handoff = Handoff(seq, seq + 100, blocks, sent, blocks, num_leading, [*ready[:-1], num_blocks])
        self.handoffs[seq] = handoff
        self.cores.store_b.data[:, :, handoff.target] = 0
        self.cores.b.open_incoming("a", seq, handoff.generation, handoff.target, handoff.num_leading, ttl_s=5.0)
        self.cores.a.open_outgoing(
            "b", seq, self.cores.EPOCH_B, handoff.generation, handoff.num_leading, num_blocks, lease_s=5.0
        )

    def ship_next(self, handoff: Handoff) -> None:
        if handoff.chunks:
            ready = handoff.chunks.pop(0)
            self.cores.a.ship(handoff.seq, handoff.source, ready, last=not handoff.chunks)

    def cancel(self, handoff: Handoff) -> None:
        handoff.cancelled = True
        self.cores.a.close_outgoing(handoff.seq)
        self.cores.b.close_incoming(handoff.seq)

    def step(self, step_s: float) -> None:
        self.cores.poll(step_s)
        events_a, events_b = self.cores.take_events()
        for event in events_a:
            match event:
                case Shipped(seq, num_frames, nbytes):
                    handoff = self.handoffs[seq]
                    assert handoff.shipped is None
                    handoff.shipped = event
                    self.cores.b.commit_incoming(seq, handoff.generation, num_frames, nbytes)
                case OutgoingClosed(seq, reason):
                    assert self.handoffs[seq].outgoing is None, "closed twice"
                    self.handoffs[seq].outgoing = reason
                    self.give_to_another_prompt(self.handoffs[seq].source)
        for event in events_b:
            match event:
                case Committed(seq, _, _):
                    self.end_ticket(self.handoffs[seq], "committed")
                    self.cores.a.close_outgoing(seq)
                case IncomingClosed(seq, reason):
                    self.end_ticket(self.handoffs[seq], reason)
                    self.cores.a.close_outgoing(seq)
                case Incomplete(seq, generation, missing):
                    handoff = self.handoffs[seq]
                    handoff.resends += 1
                    assert handoff.resends <= self.cores.config.max_resends
                    assert generation == handoff.generation
                    assert missing
                    self.cores.a.resend(seq, missing)
        self.check_closed_tickets()

    def give_to_another_prompt(self, source: list[int]) -> None:
        """What a sender lets go of changes at once: whoever still reads it must notice."""
        shape = self.cores.store_a.data[:, :, source].shape
        self.cores.store_a.data[:, :, source] = np.frombuffer(
            self.random.randbytes(math.prod(shape)), np.uint8
        ).reshape(shape)

    def end_ticket(self, handoff: Handoff, outcome: str) -> None:
        assert handoff.incoming is None, "ended twice"
        handoff.incoming = outcome
        handoff.bytes_at_end = self.cores.store_b.blocks(handoff.target)
        if outcome == "committed":
            assert self.cores.store_b.blocks(handoff.target[handoff.num_leading :]) == handoff.sent
        leading = self.cores.store_b.data[:, :, handoff.target[: handoff.num_leading]]
        assert not leading.any(), "a leading block was written"

    def check_closed_tickets(self) -> None:
        """No write lands after a ticket has ended."""
        for handoff in self.handoffs.values():
            if handoff.incoming is not None:
                assert self.cores.store_b.blocks(handoff.target) == handoff.bytes_at_end

    def all_over(self) -> bool:
        return all(h.outgoing is not None and h.incoming is not None for h in self.handoffs.values())


def run(world: World, num_handoffs: int, cancel_share: float) -> None:
    """Open, ship and cancel in random order until everything has ended, within the time that leases allow."""
    pick = world.random
    for seq in range(1, num_handoffs + 1):
        world.open(seq, pick.randint(1, 8), pick.randint(0, 3), pick.randint(1, 3))
    limit_s = world.cores.now_s + 60.0
    while not world.all_over():
        assert world.cores.now_s < limit_s, "something never ended"
        for handoff in world.handoffs.values():
            if handoff.outgoing is None and pick.random() < 0.3:
                world.ship_next(handoff)
            if handoff.incoming is None and pick.random() < cancel_share:
                world.cancel(handoff)
        world.step(pick.choice([0.0, 0.001, 0.05]))
    for _ in range(100):  # late copies
        world.step(0.05)
    assert world.cores.a.load().num_outgoing == world.cores.b.load().num_incoming == 0


@pytest.fixture(autouse=True, scope="module")
def _small_frames_in_direct_mode() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sender, "PULL_BYTES", 2 * LAYOUT.block_bytes)
        yield


MODES = st.sampled_from(["staged", "direct"])
RATES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 2**32),
    delay_s=st.sampled_from([0.0, 0.02]),
    jitter_s=st.sampled_from([0.0, 0.1, 1.0]),
    loss=RATES,
    corrupt=RATES,
    duplicate=RATES,
    reorder=RATES,
    credit_loss=st.sampled_from([0.0, 0.0, 0.02]),
)


@settings(max_examples=150, deadline=None)
@given(
    MODES,
    FAULTS,
    st.integers(1, 8),
    st.sampled_from([0.0, 0.0, 0.02]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.randoms(),
)
def test_whatever_the_network_does_each_transfer_ends_once_and_what_is_committed_is_exact(
    mode: str,
    faults: Faults,
    num_handoffs: int,
    cancel_share: float,
    num_slots: int,
    frame_layers: int,
    pick: random.Random,
) -> None:
    cores = TwoCores(num_slots=num_slots, frame_bytes=frame_bytes_for(frame_layers), num_blocks=NUM_BLOCKS, mode=mode)
    cores.connect()
    cores.take_events()
    cores.network.faults = faults
    world = World(cores, random.Random(pick.random()))
    run(world, num_handoffs, cancel_share)


@settings(max_examples=60, deadline=None)
@given(
    MODES,
    st.integers(0, 2**32),
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.5]),
)
def test_a_network_that_only_delays_copies_and_reorders_loses_nothing(
    mode: str, seed: int, num_handoffs: int, num_slots: int, jitter_s: float, rate: float
) -> None:
    cores = TwoCores(num_slots=num_slots, num_blocks=NUM_BLOCKS, mode=mode)
    cores.connect()
    cores.take_events()
    cores.network.faults = Faults(seed=seed, jitter_s=jitter_s, duplicate=rate, reorder=rate)
    world = World(cores, random.Random(seed))
    run(world, num_handoffs, cancel_share=0.0)
    assert {handoff.incoming for handoff in world.handoffs.values()} == {"committed"}
    assert {handoff.outgoing for handoff in world.handoffs.values()} == {""}
    cores.network.faults = Faults()
    cores.run_for(1.0)
    assert cores.a.load().slots_in_use == 0
    world.handoffs.clear()
    run(world, 3, cancel_share=0.0)  # every lane still works
    assert all(handoff.incoming == "committed" for handoff in world.handoffs.values())


@settings(max_examples=60, deadline=None)
@given(MODES, st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4))
def test_late_frames_of_a_cancelled_ticket_never_reach_the_next_ticket_of_the_same_request(
    mode: str, seed: int, num_blocks: int, num_slots: int
) -> None:
    cores = TwoCores(num_slots=num_slots, num_blocks=NUM_BLOCKS, mode=mode)
    cores.connect()
    cores.take_events()
    cores.network.faults = Faults(seed=seed, delay_s=0.01, jitter_s=0.2, duplicate=0.5, reorder=0.5)
    world = World(cores, random.Random(seed))
    world.open(1, num_blocks, 0, 1)
    first = world.handoffs[1]
    world.ship_next(first)
    for _ in range(world.random.randint(1, 20)):
        world.step(0.01)
    world.cancel(first)
    world.step(0.0)
    before = cores.store_b.data.copy()
    cores.b.open_incoming("a", 1, first.generation + 1, [50] * num_blocks, 0, ttl_s=5.0)
    for _ in range(100):
        cores.poll(0.01)
    assert (cores.store_b.data == before).all()


@settings(max_examples=40, deadline=None)
@given(MODES, st.integers(0, 2**32), st.integers(1, 6), st.sampled_from(["a", "b"]), st.integers(0, 60))
def test_the_death_of_either_side_at_any_moment_closes_everything_on_the_other(
    mode: str, seed: int, num_handoffs: int, victim: str, moment: int
) -> None:
    cores = TwoCores(num_blocks=NUM_BLOCKS, mode=mode)
    cores.connect()
    cores.take_events()
    world = World(cores, random.Random(seed))
    for seq in range(1, num_handoffs + 1):
        world.open(seq, 8, 0, 2)
    for _ in range(moment):
        for handoff in world.handoffs.values():
            world.ship_next(handoff)
        world.step(0.001)
    cores.network.remove(victim.encode())
    survivor, events = (cores.b, cores.events_b) if victim == "a" else (cores.a, cores.events_a)
    survivor.poll(cores.now_s + 0.001)
    lost = [event for event in events if isinstance(event, PairLost)]
    assert len(lost) == 1
    assert events[-1] is lost[0], "the pair is reported lost after its transfers are closed"
    load = survivor.load()
    assert (load.num_outgoing, load.num_incoming, load.slots_in_use, load.quarantined_slots) == (0, 0, 0, 0)
    before = cores.store_b.data.copy()
    for _ in range(20):
        survivor.poll(cores.now_s + 1.0)
    assert (cores.store_b.data == before).all()


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_a_damaged_frame_is_asked_for_again_and_the_transfer_is_committed_once(mode: str) -> None:
    cores = TwoCores(mode=mode)
    cores.connect()
    cores.take_events()
    world = World(cores, random.Random(0))
    world.open(1, 8, 0, 1)
    cores.network.faults = Faults(seed=5, corrupt=1.0)
    world.ship_next(world.handoffs[1])
    world.step(0.0)
    cores.network.faults = Faults()
    while not world.all_over():
        world.step(0.01)
    assert world.handoffs[1].incoming == "committed"
    assert world.handoffs[1].resends >= 1
    assert cores.b.load().frames_dropped >= 1


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(("field", "outcome"), [("loss", "expired"), ("corrupt", "damaged")])
def test_a_network_that_delivers_nothing_whole_ends_in_a_typed_failure(field: str, outcome: str, mode: str) -> None:
    cores = TwoCores(mode=mode)
    cores.connect()
    cores.take_events()
    world = World(cores, random.Random(0))
    world.open(1, 8, 0, 1)
    cores.network.faults = Faults(**{field: 1.0})  # type: ignore[arg-type]
    started_s = cores.now_s
    world.ship_next(world.handoffs[1])
    while not world.all_over():
        world.step(0.01)
    assert world.handoffs[1].incoming == outcome
    assert cores.now_s - started_s < 12.0  # max_resends pauses and one ttl
    assert not cores.store_b.data.any()
