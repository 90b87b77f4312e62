"""A sender and a receiver process with their pair, as the benches drive them. Owns both processes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Self

from baton.config import KVTransferConfig
from baton.kv_layout import KVLayout
from bench.child import Child, ChildError, Pipe
from bench.kv_messages import (
    Accept,
    Acked,
    Connect,
    Connected,
    Decode,
    Decoded,
    Digest,
    DigestIs,
    Done,
    Paced,
    Ship,
    ShipPaced,
    Start,
    Started,
    Transfer,
    Usage,
    UsageIs,
)
from bench.kv_plan import Sample

ANSWER_S = 90.0  # a worker gives up after 60 s by itself
SENDER_EPOCH, RECEIVER_EPOCH = 1, 2
LONG_S = 60.0  # leases and timeouts: what is measured is speed, on a machine that may be loaded

Table = tuple[int, ...]  # block ids of one transfer


class KVPair:
    def __init__(self, layout: KVLayout, num_blocks: int, ucx_tls: str, mode: str, *, seed: int = 1) -> None:
        """Start both processes. Raises: ChildError: one of them cannot."""
        config = KVTransferConfig(
            ucx_tls=ucx_tls, mode=mode, lease_s=LONG_S, transfer_timeout_s=LONG_S, hello_timeout_s=LONG_S / 2
        )
        sender_end, receiver_end = Pipe()
        self.sender = Child("sender", "bench.kv_worker", [sender_end])
        self.receiver = Child("receiver", "bench.kv_worker", [receiver_end])
        try:
            self.sender.tell(Start(layout, num_blocks, SENDER_EPOCH, seed, config))
            self.receiver.tell(Start(layout, num_blocks, RECEIVER_EPOCH, None, config))
            self._sender_address = self.sender.hear(Started, ANSWER_S).address
            self._receiver_address = self.receiver.hear(Started, ANSWER_S).address
        except BaseException:
            self.close()
            raise
        self._seqs = count(1)
        self._nonces = count(1)

    def connect(self) -> Connected:
        """Make a fresh pair, in place of the one before."""
        nonce = next(self._nonces)
        self.receiver.tell(Connect(SENDER_EPOCH, self._sender_address, nonce))
        self.sender.tell(Connect(RECEIVER_EPOCH, self._receiver_address, nonce))
        self.receiver.hear(Connected, ANSWER_S)
        return self.sender.hear(Connected, ANSWER_S)

    def transfer(self, source: Sequence[Table], target: Sequence[Table]) -> Sample:
        """Move all tables at once and compare every byte.

        Raises:
            ChildError: a transfer failed, or the receiver's blocks are not what was sent.
        """
        sent, received = self.accept(source, target)
        before = self.cpu_s()
        acked = self.sender.ask(Ship(sent), Acked, ANSWER_S)
        after = self.cpu_s()
        self.compare(sent, received)
        return Sample(acked.wall_s, acked.commit_s, after[0] - before[0], after[1] - before[1])

    def accept(
        self, source: Sequence[Table], target: Sequence[Table]
    ) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """Open tickets; returns what the sender is to ship and what the receiver will have."""
        seqs = [next(self._seqs) for _ in source]
        sent = tuple(Transfer(seq, table) for seq, table in zip(seqs, source, strict=True))
        received = tuple(Transfer(seq, table) for seq, table in zip(seqs, target, strict=True))
        self.receiver.ask(Accept(received), Done, ANSWER_S)
        return sent, received

    def ship_paced(self, transfer: Transfer, chunk_blocks: int, chunk_s: float) -> Paced:
        return self.sender.ask(ShipPaced(transfer, chunk_blocks, chunk_s), Paced, ANSWER_S)

    def begin_decoding(self, duration_s: float) -> None:
        """Until `end_decoding` the receiver answers nothing else; transfers opened before go on."""
        self.receiver.tell(Decode(duration_s))

    def end_decoding(self) -> tuple[float, ...]:
        return self.receiver.hear(Decoded, ANSWER_S).step_s

    def cpu_s(self) -> tuple[float, float]:
        sender, receiver = (child.ask(Usage(), UsageIs, ANSWER_S) for child in (self.sender, self.receiver))
        return sender.cpu_s, receiver.cpu_s

    def compare(self, sent: tuple[Transfer, ...], received: tuple[Transfer, ...]) -> None:
        """Raises: ChildError: some bytes differ."""
        self.sender.tell(Digest(sent))
        self.receiver.tell(Digest(received))
        if self.sender.hear(DigestIs, ANSWER_S) != self.receiver.hear(DigestIs, ANSWER_S):
            raise ChildError("the receiver's blocks are not what was sent")

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
