"""One process of a library's pair: a pool of real bytes, and the library behind a small Protocol. One thread of ours.

The pool is laid out as Baton's, [layer][component][block][bytes of a run]; a paged transfer is one descriptor for each run, a
contiguous one has adjacent runs merged.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np

from bench.child import Failed
from bench.peers.messages import (
    Arrived,
    Expect,
    Meet,
    PeerDigest,
    PeerDigestIs,
    PeerDone,
    PeerStart,
    PeerStarted,
    Table,
    Write,
    Written,
)

WAIT_S = 60.0
Pool = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]  # [L, components, N, run bytes]


class PeerFailed(Exception):
    """The library cannot do what it was asked; its own words."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from an address here to one there."""

    source: int
    target: int
    nbytes: int


class Library(Protocol):
    """One end of a pair. `expect` and `arrived` are the receiver's, the others but `hello` the sender's."""

    def hello(self) -> bytes: ...
    def meet(self, hello: bytes) -> None: ...

    def prepare(self, transfers: Sequence[Sequence[Copy]]) -> None:
        """Make whatever the library can reuse: not timed."""
        ...

    def write(self) -> None:
        """Move what was prepared, all transfers at once, and wait until the library says that they are done."""
        ...

    def expect(self, num_transfers: int) -> None: ...

    def arrived(self) -> bool:
        """Whether the library knows of every transfer that was expected; True where it does not tell a receiver."""
        ...


class PeerProcess:
    def __init__(self, start: PeerStart, other: Connection, make: Callable[[PeerStart, Pool], Library]) -> None:
        layout = start.layout
        shape = (layout.num_layers, layout.num_components, start.num_blocks, layout.run_bytes)
        self._pool: Pool = np.zeros(shape, dtype=np.uint8)
        self._pool[:] = 0  # first touch
        if start.seed is not None:
            random = np.random.Generator(np.random.SFC64(start.seed))
            for layer in self._pool:
                layer[:] = np.frombuffer(random.bytes(layer.nbytes), dtype=np.uint8).reshape(layer.shape)
        self._other = other
        self._other_address = 0
        self._library = make(start, self._pool)

    def started(self) -> PeerStarted:
        return PeerStarted(self._library.hello(), self._pool.ctypes.data)

    def answer(self, question: object, parent: Connection) -> None:
        match question:
            case Meet(other):
                self._library.meet(other.hello)
                self._other_address = other.address
                parent.send(PeerDone())
            case Expect(tables):
                self._expect(tables, parent)
            case Write(source, target):
                parent.send(self._write(source, target))
            case PeerDigest(tables):
                parent.send(PeerDigestIs(self._digest(tables)))

    def _write(self, source: Sequence[Table], target: Sequence[Table]) -> Written:
        transfers = [
            list(merge_adjacent(self._copies(ours, theirs))) for ours, theirs in zip(source, target, strict=True)
        ]
        self._library.prepare(transfers)
        started_s = time.perf_counter()
        self._library.write()
        if not self._other.poll(WAIT_S):
            raise PeerFailed(f"the receiver did not have every byte after {WAIT_S:g} s")
        self._other.recv()
        return Written(time.perf_counter() - started_s)

    def _copies(self, source: Table, target: Table) -> Iterator[Copy]:
        run_bytes = self._pool.shape[-1]
        plane_bytes = self._pool[0, 0].nbytes
        for plane in range(self._pool.shape[0] * self._pool.shape[1]):
            for ours, theirs in zip(source, target, strict=True):
                yield Copy(
                    self._pool.ctypes.data + plane * plane_bytes + ours * run_bytes,
                    self._other_address + plane * plane_bytes + theirs * run_bytes,
                    run_bytes,
                )

    def _expect(self, tables: Sequence[Table], parent: Connection) -> None:
        """The sender's bytes are random: a run has arrived when its last word is not zero any more."""
        block_ids = [block for table in tables for block in table]
        self._pool[:, :, block_ids] = 0
        self._library.expect(len(tables))
        last_words = self._pool.view(np.uint64)[..., -1]
        parent.send(PeerDone())
        ends_s = time.perf_counter() + WAIT_S
        while time.perf_counter() < ends_s:
            if self._library.arrived() and last_words[:, :, block_ids].all():
                self._other.send(Arrived())
                return

    def _digest(self, tables: Sequence[Table]) -> str:
        digest = hashlib.sha256()
        for table in tables:
            for layer in self._pool:
                for component in layer:
                    digest.update(component[list(table)])
        return digest.hexdigest()


def merge_adjacent(copies: Iterator[Copy]) -> Iterator[Copy]:
    """Join copies that continue each other on both sides."""
    last = next(copies)
    for copy in copies:
        if (last.source + last.nbytes, last.target + last.nbytes) == (copy.source, copy.target):
            last = Copy(last.source, last.target, last.nbytes + copy.nbytes)
        else:
            yield last
            last = copy
    yield last


def serve(make: Callable[[PeerStart, Pool], Library]) -> None:
    """The `main` of a library's module."""
    parent, other = (Connection(int(fd)) for fd in sys.argv[1:3])
    try:
        process = PeerProcess(parent.recv(), other, make)
        parent.send(process.started())
        while True:
            process.answer(parent.recv(), parent)
    except PeerFailed as error:
        parent.send(Failed(str(error)))
    except (EOFError, OSError):
        return  # the bench is gone
