"""One of the two processes of `baton bench kv`: a pool with real bytes and a production KV plane, and nothing else of a worker.

Three threads: the main one answers the bench; the KV thread is the plane's; a third reads the peer's control pipe, which stands
for the Link of two workers. Whatever the plane reports is passed on from the KV thread at once:

    sender    ship ... Shipped -> Commit ───────> commit_incoming ... Committed -> Ack   receiver
              close_outgoing <──────────── Ack <────────────────────────────────────┘

so ship -> Ack holds everything that a handoff waits for, but for gRPC.
"""

from __future__ import annotations

import gc
import hashlib
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from baton.errors import BatonError
from bench.child import Failed
from bench.kv_messages import (
    Accept,
    Ack,
    Acked,
    Commit,
    Connect,
    Connected,
    Decode,
    Decoded,
    Digest,
    DigestIs,
    Done,
    Missing,
    Paced,
    Question,
    Ship,
    ShipPaced,
    Start,
    Started,
    Transfer,
    Usage,
    UsageIs,
)
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
from kv_transfer.plane import KVPlane, make_transport

if TYPE_CHECKING:
    from bench.kv_decode import DecodeLoad
    from engine.torch_kv_cache import TorchKVCache

PEER = "peer"
GENERATION = 1
WAIT_S = 60.0  # for anything the peer has to do; a bench on a loaded machine is slow, not broken


class WorkerFailed(Exception):
    """This worker cannot do what it was asked; becomes the answer."""


def build(start: Start, on_event: Callable[[KVEvent], None]) -> tuple[TorchKVCache, KVPlane]:
    """Transport, pool and plane, in the order in which a worker makes them."""
    from engine.torch_kv_cache import TorchKVCache  # loads torch

    transport = make_transport(start.config, f"{start.epoch:016x}")
    store = TorchKVCache(
        start.layout, start.num_blocks, transport.allocate(start.num_blocks * start.layout.block_bytes)
    )
    return store, KVPlane(store, start.config, start.epoch, on_event, transport)


class KVWorker:
    """Owns pool and plane; after `stop`, which frees both, nothing may be asked."""

    def __init__(self, start: Start, peer: Connection) -> None:
        self._layout = start.layout
        self._config = start.config
        self._peer = peer
        self._peer_epoch = 0
        self._events: queue.SimpleQueue[KVEvent | tuple[Ack, float]] = queue.SimpleQueue()
        self._store, self._plane = build(start, self._on_event)
        shape = (start.layout.num_layers, start.layout.num_components, start.num_blocks, start.layout.run_bytes)
        self._bytes = np.frombuffer(self._store.memory.view(), dtype=np.uint8).reshape(shape)
        if start.seed is not None:
            fill(self._bytes, start.seed)
        self._plane.start()
        threading.Thread(target=self._read_peer, name="bench-link", daemon=True).start()

    def answer(self, question: Question) -> object:
        match question:
            case Connect():
                return self._connect(question)
            case Accept(transfers):
                return self._accept(transfers)
            case Ship(transfers):
                return self._ship(transfers)
            case ShipPaced():
                return self._ship_paced(question)
            case Digest(transfers):
                return DigestIs(self._digest(transfers))
            case Decode(duration_s):
                return Decoded(self._decode_load.run(duration_s))
            case Usage():
                return UsageIs(cpu_s())
        raise WorkerFailed(f"not a question: {question}")

    @property
    def address(self) -> bytes:
        return self._plane.address

    def stop(self) -> None:
        """UCX lives as long as any view of its memory, so none may be left."""
        self._plane.stop()
        del self._bytes, self._store, self._plane
        gc.collect()

    @cached_property
    def _decode_load(self) -> DecodeLoad:
        from bench.kv_decode import DecodeLoad  # loads torch

        return DecodeLoad()

    def _connect(self, message: Connect) -> Connected:
        self._peer_epoch = message.peer_epoch
        config = self._config
        self._plane.connect(
            PEER, message.peer_epoch, message.address, message.nonce, config.frame_bytes, config.num_slots
        )
        while True:
            match self._next():
                case PairReady(_, message.nonce, transport):
                    return Connected(transport, self._plane.peers()[PEER].mode)
                case PairLost(_, message.nonce, reason):
                    raise WorkerFailed(f"no pair: {reason}")

    def _accept(self, transfers: tuple[Transfer, ...]) -> Done:
        for transfer in transfers:
            self._store.clear(transfer.block_ids, 0, self._layout.num_layers)
            self._plane.open_incoming(PEER, transfer.seq, GENERATION, transfer.block_ids, 0, WAIT_S)
        return Done()

    def _ship(self, transfers: tuple[Transfer, ...]) -> Acked:
        for transfer in transfers:
            self._open_outgoing(transfer)
        started_s = time.perf_counter()
        for transfer in transfers:
            self._plane.ship(transfer.seq, transfer.block_ids, len(transfer.block_ids), last=True)
        acked_s = self._await_acks({transfer.seq for transfer in transfers})
        commit_s = tuple(acked_s[transfer.seq] - started_s for transfer in transfers)
        return Acked(commit_s, max(commit_s))

    def _ship_paced(self, message: ShipPaced) -> Paced:
        transfer, num_blocks = message.transfer, len(message.transfer.block_ids)
        self._open_outgoing(transfer)
        before = self._plane.load().bytes_sent
        chunk_ends = [*range(message.chunk_blocks, num_blocks, message.chunk_blocks), num_blocks]
        due_s, num_late = time.perf_counter(), 0
        for i, num_ready in enumerate(chunk_ends):
            due_s += message.chunk_s
            time.sleep(max(0.0, due_s - time.perf_counter()))  # the prefill computes
            load = self._plane.load()
            earlier = (chunk_ends[i - 1] if i else 0) * self._layout.block_bytes
            num_late += load.slots_in_use > 0 or load.bytes_sent - before < earlier
            ended_s = time.perf_counter()
            self._plane.ship(transfer.seq, transfer.block_ids, num_ready, last=num_ready == num_blocks)
        acked_s = self._await_acks({transfer.seq})[transfer.seq]
        return Paced(acked_s - ended_s, len(chunk_ends), num_late)

    def _open_outgoing(self, transfer: Transfer) -> None:
        num_blocks = len(transfer.block_ids)
        self._plane.open_outgoing(PEER, transfer.seq, self._peer_epoch, GENERATION, 0, num_blocks, WAIT_S)

    def _await_acks(self, seqs: set[int]) -> dict[int, float]:
        """When each Ack came, once the plane has let go of all of them."""
        acked_s: dict[int, float] = {}
        left = set(seqs)
        while left:
            match self._next():
                case Ack(seq), float(at_s):
                    acked_s[seq] = at_s
                    self._plane.close_outgoing(seq)
                case OutgoingClosed(seq, reason) if seq in left:
                    if seq not in acked_s:
                        raise WorkerFailed(f"transfer {seq} failed: {reason}")
                    left.remove(seq)
                case PairLost(_, _, reason):
                    raise WorkerFailed(f"the pair was lost: {reason}")
        return acked_s

    def _next(self) -> KVEvent | tuple[Ack, float]:
        try:
            return self._events.get(timeout=WAIT_S)
        except queue.Empty:
            raise WorkerFailed(f"nothing happened for {WAIT_S:g} s") from None

    def _digest(self, transfers: tuple[Transfer, ...]) -> str:
        """Of the transfers' blocks in wire order, read by numpy and not by the code under test."""
        digest = hashlib.sha256()
        for transfer in transfers:
            block_ids = list(transfer.block_ids)
            for layer in self._bytes:
                for component in layer:
                    digest.update(component[block_ids])
        return digest.hexdigest()

    def _on_event(self, event: KVEvent) -> None:
        """On the KV thread."""
        match event:
            case Shipped(seq, num_frames, nbytes):
                self._peer.send(Commit(seq, num_frames, nbytes))
            case Committed(seq):
                self._peer.send(Ack(seq))
            case Incomplete(seq, _, frames):
                self._peer.send(Missing(seq, frames))
            case IncomingClosed(seq, reason) if reason:
                print(f"bench kv: incoming transfer {seq} closed: {reason}", file=sys.stderr)
            case _:
                self._events.put(event)

    def _read_peer(self) -> None:
        """The link's thread."""
        while True:
            try:
                message = self._peer.recv()
            except (EOFError, OSError):
                return  # the peer ended; the plane notices by itself
            match message:
                case Commit(seq, num_frames, nbytes):
                    self._plane.commit_incoming(seq, GENERATION, num_frames, nbytes)
                case Missing(seq, frames):
                    self._plane.resend(seq, frames)
                case Ack():
                    self._events.put((message, time.perf_counter()))


def fill(pool: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], seed: int) -> None:
    """Bytes that no two blocks share, layer by layer: the whole at once would need as much memory again."""
    random = np.random.Generator(np.random.SFC64(seed))
    for layer in pool:
        layer[:] = np.frombuffer(random.bytes(layer.nbytes), dtype=np.uint8).reshape(layer.shape)


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parent, peer = (Connection(int(fd)) for fd in sys.argv[1:3])
    try:
        start = parent.recv()
        try:
            worker = KVWorker(start, peer)
        except BatonError as error:
            parent.send(Failed(error.message))
            return
        parent.send(Started(worker.address))
        serve(parent, worker)
    except (EOFError, OSError):
        return  # the bench is gone


def serve(parent: Connection, worker: KVWorker) -> None:
    try:
        while True:
            question = parent.recv()
            try:
                parent.send(worker.answer(question))
            except WorkerFailed as error:
                parent.send(Failed(str(error)))
    finally:
        worker.stop()


if __name__ == "__main__":
    main()
