"""Tensor-parallel ranks for tests: a pool of each rank's heads, planes that move them, what a reference re-slice puts there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from baton.config import KVTransferConfig
from baton.kv_layout import KVLayout
from kv_transfer.channel import Transport
from kv_transfer.core import PlaneCore
from kv_transfer.events import (
    Committed,
    IncomingClosed,
    Incomplete,
    KVEvent,
    OutgoingClosed,
    PairLost,
    PairReady,
    Shipped,
)
from kv_transfer.head_plan import heads_of_rank, plan_heads
from kv_transfer.head_slices import HeadSlice
from kv_transfer.joined_tickets import JoinedLeases, JoinedTickets
from kv_transfer.kv_views import Fp8Export
from kv_transfer.pair import WireView
from tests.kv_transfer.kv_fakes import ByteStore

Bytes = NDArray[np.uint8]
POISON = 0xEE  # what memory holds that nobody wrote


class RankPool(ByteStore):
    """One rank's blocks, all poison. `kv` is its memory as [L][component][N][S][K][head_bytes]."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.data[:] = POISON
        self.kv: Bytes = self.data.reshape(kv_shape(layout, num_blocks))


def kv_shape(layout: KVLayout, num_blocks: int) -> tuple[int, int, int, int, int, int]:
    return (
        layout.num_layers, layout.num_components, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_bytes
    )  # fmt: skip


def random_kv(layout: KVLayout, num_blocks: int, seed: int) -> Bytes:
    """What a prompt of `num_blocks` blocks has, every head of it."""
    return np.random.default_rng(seed).integers(0, 256, size=kv_shape(layout, num_blocks), dtype=np.uint8)


def layout_of_rank(model: KVLayout, tp_size: int, rank: int) -> KVLayout:
    return replace(model, num_kv_heads=len(heads_of_rank(model.num_kv_heads, tp_size, rank)))


def kv_of_rank(kv: Bytes, tp_size: int, rank: int) -> Bytes:
    """The part of `kv`, which has every head of the model, that a rank holds."""
    heads = heads_of_rank(kv.shape[4], tp_size, rank)
    return kv[:, :, :, :, heads.start : heads.stop]


GENERATION = 9
SEQS_PER_PROMPT = 100  # the seq of a whole is a multiple; those of its parts follow, in the order of the moves
FIRST_EPOCH = 0x100  # of sender rank 0; each rank has its own


@dataclass
class Prompt:
    """One prompt's blocks on every rank, which need not be the same ones."""

    seq: int
    kv: Bytes  # every head of the model
    num_leading_blocks: int  # that the receiver ranks hold already
    sources: list[list[int]]  # by sender rank
    targets: list[list[int]]  # by receiver rank


@dataclass
class Rank:
    """A worker: one pool, one plane."""

    name: str
    epoch: int
    pool: RankPool
    transport: Transport
    core: PlaneCore


class TensorParallel:
    """Sender ranks and receiver ranks of one model over one transport each, driven in one thread.

    Plays the roles too: Commit, Nack and Ack go straight to the other side, the last two once the joined ticket has ended.
    """

    def __init__(
        self,
        model: KVLayout,
        tp_sizes: tuple[int, int],
        num_blocks: int,
        config: KVTransferConfig,
        make_transport: Callable[[str], Transport],
        now_s: Callable[[], float],
        receiver_dtype: str = "",
    ) -> None:
        """`receiver_dtype` is "float8_e4m3" where the receivers keep fewer bits than the model's ranks send from."""
        self.models = model, replace(model, dtype=receiver_dtype or model.dtype)
        self.tp_sizes, self.config, self.now_s = tp_sizes, config, now_s
        self.moves = plan_heads(model.num_kv_heads, *tp_sizes)
        self.senders = [self._rank("sender", 0, rank, num_blocks, make_transport) for rank in range(tp_sizes[0])]
        self.receivers = [self._rank("receiver", 1, rank, num_blocks, make_transport) for rank in range(tp_sizes[1])]
        self.lost: list[PairLost] = []
        self.num_ready = 0
        self.ends: list[Committed | IncomingClosed] = []
        self.freed: list[OutgoingClosed] = []
        self.num_resends = 0
        self.tickets = JoinedTickets(self._on_ticket_end, lambda seq: self._receiver_of(seq).core.close_incoming(seq))
        self.leases = JoinedLeases(self._on_lease_end, lambda seq: self._sender_of(seq).core.close_outgoing(seq))

    def connect(self) -> None:
        """A pair for each move, over slices of the two pools."""
        size, slots = self.config.frame_bytes, self.config.num_slots
        for nonce, move in enumerate(self.moves, start=1):
            a, b = self.senders[move.sender_rank], self.receivers[move.receiver_rank]
            out, into = HeadSlice(a.pool, move.sender_heads), HeadSlice(b.pool, move.receiver_heads)
            send = out if out.layout == into.layout else Fp8Export(out)
            a.core.connect(b.name, b.epoch, b.transport.address, nonce, size, slots, WireView(send, out))
            b.core.connect(a.name, a.epoch, a.transport.address, nonce, size, slots, WireView(into, into))
        self.run_until(lambda: self.num_ready == 2 * len(self.moves))

    def place(self, prompt: Prompt) -> None:
        """Put the prompt's KV into the sender ranks' blocks, as their prefill would."""
        for rank, (sender, blocks) in enumerate(zip(self.senders, prompt.sources, strict=True)):
            sender.pool.kv[:, :, blocks] = kv_of_rank(prompt.kv, self.tp_sizes[0], rank)

    def open(self, prompt: Prompt, patience_s: float = 5.0) -> None:
        num_blocks = prompt.kv.shape[2]
        self.tickets.open(prompt.seq, GENERATION, self.parts(prompt))
        self.leases.open(prompt.seq, GENERATION, self.parts(prompt))
        for part, move in zip(self.parts(prompt), self.moves, strict=True):
            a, b = self.senders[move.sender_rank], self.receivers[move.receiver_rank]
            leading, blocks = prompt.num_leading_blocks, prompt.targets[move.receiver_rank]
            b.core.open_incoming(a.name, part, GENERATION, blocks, leading, patience_s)
            a.core.open_outgoing(b.name, part, b.epoch, GENERATION, leading, num_blocks, patience_s)

    def ship(self, prompt: Prompt, num_ready_blocks: int) -> None:
        last = num_ready_blocks == prompt.kv.shape[2]
        for part, move in zip(self.parts(prompt), self.moves, strict=True):
            sender = self.senders[move.sender_rank]
            sender.core.ship(part, prompt.sources[move.sender_rank], num_ready_blocks, last)

    def parts(self, prompt: Prompt) -> range:
        """The seqs of the pairs' transfers."""
        return range(prompt.seq, prompt.seq + len(self.moves))

    @property
    def ranks(self) -> list[Rank]:
        return self.senders + self.receivers

    def poll(self) -> None:
        for rank in self.ranks:
            rank.core.poll(self.now_s())

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Raises AssertionError after 30 s of the clock in use."""
        give_up_s = self.now_s() + 30.0
        while not condition():
            assert self.now_s() < give_up_s, f"it never came; lost: {self.lost}"
            self.poll()

    def nbytes(self, prompt: Prompt) -> int:
        """What the receiver ranks lack of the prompt, all together."""
        num_blocks = prompt.kv.shape[2] - prompt.num_leading_blocks
        return sum(num_blocks * rank.pool.layout.block_bytes for rank in self.receivers)

    def expected(self, prompts: Sequence[Prompt], rank: int) -> Bytes:
        """A receiver rank's whole pool after prompts came: their heads where they belong, poison everywhere else."""
        kv = np.full_like(self.receivers[rank].pool.kv, POISON)
        for prompt in prompts:
            wanted = slice(prompt.num_leading_blocks, None)
            kv[:, :, prompt.targets[rank][wanted]] = kv_of_rank(prompt.kv, self.tp_sizes[1], rank)[:, :, wanted]
        return kv

    def _rank(
        self, side: str, side_index: int, rank: int, num_blocks: int, make_transport: Callable[[str], Transport]
    ) -> Rank:
        name, epoch = f"{side}{rank}", FIRST_EPOCH * (side_index + 1) + rank
        pool = RankPool(layout_of_rank(self.models[side_index], self.tp_sizes[side_index], rank), num_blocks)
        transport = make_transport(name)
        return Rank(
            name, epoch, pool, transport, PlaneCore(pool, self.config, epoch, self._on_event, transport, self.now_s())
        )

    def _sender_of(self, part: int) -> Rank:
        return self.senders[self.moves[part % SEQS_PER_PROMPT].sender_rank]

    def _receiver_of(self, part: int) -> Rank:
        return self.receivers[self.moves[part % SEQS_PER_PROMPT].receiver_rank]

    def _on_event(self, event: KVEvent) -> None:
        match event:
            case PairReady():
                self.num_ready += 1
            case PairLost():
                self.lost.append(event)
            case Shipped(part, num_frames, nbytes):
                self._receiver_of(part).core.commit_incoming(part, GENERATION, num_frames, nbytes)
            case Incomplete(part, _, missing):
                self.num_resends += 1
                self._sender_of(part).core.resend(part, missing)
            case Committed() | IncomingClosed():
                self.tickets.on_event(event)
            case OutgoingClosed():
                self.leases.on_event(event)

    def _on_ticket_end(self, end: Committed | IncomingClosed) -> None:
        self.ends.append(end)
        self.leases.close(end.seq)

    def _on_lease_end(self, end: OutgoingClosed) -> None:
        self.freed.append(end)
        self.tickets.close(end.seq)
