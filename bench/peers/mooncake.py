"""Mooncake's transfer engine over TCP, in batches of at most 512 descriptors.

Its write returns when the sender's sockets have taken the bytes and tells the receiver nothing, so the receiver looks at its own
blocks until all have arrived and then answers. Needs mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda where there
is no CUDA; both link to libibverbs.so.1 even for TCP (Debian: libibverbs1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.peers.messages import PeerStart
from bench.peers.process import Copy, Library, PeerFailed, Pool, serve

MAX_BATCH = 512  # descriptors; larger batches fail over TCP
HOST = "127.0.0.1"


class Mooncake:
    def __init__(self, start: PeerStart, pool: Pool) -> None:
        """Raises: PeerFailed: it is not installed, or does not start."""
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise PeerFailed(f"mooncake cannot be imported: {error}") from error
        self._engine: Any = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise PeerFailed("Mooncake's engine does not start over TCP")
        if self._engine.register_memory(pool.ctypes.data, pool.nbytes):
            raise PeerFailed("Mooncake does not register the pool")
        self._other = ""
        self._batches: list[Sequence[Copy]] = []

    def hello(self) -> bytes:
        return f"{HOST}:{self._engine.get_rpc_port()}".encode()

    def meet(self, hello: bytes) -> None:
        self._other = hello.decode()

    def prepare(self, transfers: Sequence[Sequence[Copy]]) -> None:
        self._batches = [
            copies[first : first + MAX_BATCH] for copies in transfers for first in range(0, len(copies), MAX_BATCH)
        ]

    def write(self) -> None:
        for batch in self._batches:
            sources, targets = [copy.source for copy in batch], [copy.target for copy in batch]
            if self._engine.batch_transfer_sync_write(self._other, sources, targets, [copy.nbytes for copy in batch]):
                raise PeerFailed("a Mooncake batch failed")

    def expect(self, num_transfers: int) -> None:
        """Nothing to prepare."""

    def arrived(self) -> bool:
        return True


def make(start: PeerStart, pool: Pool) -> Library:
    return Mooncake(start, pool)


if __name__ == "__main__":
    serve(make)
