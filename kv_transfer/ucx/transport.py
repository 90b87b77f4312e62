"""The UCX worker of this process: where its channels progress, sleep and are taken down.

Order of calls, and why (measured with ucxx 0.52 / UCX 1.21, DESIGN section 6):
- endpoints have error handling, and POSIX/SYSV_ERROR_HANDLING is on, else UCX drops shared memory without a word;
- `progress_once` moves bytes but delivers no cancellation: while a channel is closing, `progress` is called instead;
- nothing moves in `wait`: what arrived there would be looked at only after the sleep.

Everything runs on the KV thread but `wake`, and `allocate`, which comes before that starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from typing import Any

from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from baton.config import KVTransferConfig
from baton.errors import ConfigError, TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.events import TransportSettings
from kv_transfer.liveness import own_identity
from kv_transfer.ucx.address import pack_address, parse_address
from kv_transfer.ucx.channel import GOODBYE_SLOT, UcxChannel
from kv_transfer.ucx.context import make_context, settings
from kv_transfer.ucx.exports import PoolExport
from kv_transfer.ucx.memory import Region, Slots, allocate
from kv_transfer.ucx.requests import PendingRequest

_log = logging.getLogger(__name__)

_GOODBYE_SPINS = 100  # progress calls given to a goodbye before the endpoint is forced shut
LIVENESS_PERIOD_S = 0.5  # how often peers on this machine are looked at; half of UCX's keepalive
SWEEP_S = 10.0  # how long a closed pair's tags are swept; its peer is told, or dead, long before
MAX_SWEPT_BYTES = 8192  # tagged messages are smaller
MAX_MOVES = 64  # progress calls that moved something in one turn: shared memory moves 8 KiB in each
CLOSING_S = 1.0  # how long a close is pressed for; requests that outlive it are looked at every LIVENESS_PERIOD_S


class UcxTransport:
    """A UCX worker and what it takes to sleep on it."""

    def __init__(self, config: KVTransferConfig) -> None:
        """Start UCX.

        Raises:
            ConfigError: no such transport or device, no RDMA where it is required, too little shared memory.
        """
        self._context = make_context(config)
        self._config = config
        self._worker = libucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self.address = pack_address(self._worker.address.tobytes(), own_identity())
        self._regions: list[Region] = []  # allocated for block pools
        self._slots: dict[int, deque[Slots]] = {}  # of closed channels, by size, for the next ones
        self._open: list[UcxChannel] = []
        self._closing: list[UcxChannel] = []
        self._closing_until_s = 0.0
        self._retired: list[tuple[float, list[int]]] = []  # tags of closed pairs, and until when they are swept
        self._swept: list[tuple[Any, Array[Any]]] = []  # requests and the bytes they write
        self._now_s = 0.0
        self._next_look_s = 0.0
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._event_lock = threading.Lock()  # wake() may come while close() gives the fd back
        self._closed = False
        self._epoll = select.epoll()
        self._epoll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
        self._epoll.register(self._event_fd, select.EPOLLIN)

    def allocate(self, nbytes: int) -> memoryview:
        memory, region = allocate(self._context, nbytes)
        self._regions.append(region)
        return memory

    def borrow_slots(self, nbytes: int) -> Slots:
        """Memory for a ring or for send slots, from a closed channel where there is one.

        It never serves anything else: what a peer of a closed pair still writes lands in frames, where a checksum fails.

        Raises:
            TransferFailed: there is not enough; the pair is lost, others keep theirs.
        """
        free = self._slots.get(nbytes)
        if free:
            return free.popleft()
        try:
            return allocate(self._context, nbytes)
        except ConfigError as error:
            raise TransferFailed(f"no memory for frames: {error.message}") from error

    def give_back(self, slots: Slots) -> None:
        self._slots.setdefault(len(slots[0]), deque()).append(slots)

    def export_pool(self, store: BlockStore) -> PoolExport | None:
        """None where the pool does not lie in memory of this transport."""
        memory = store.memory
        for region in self._regions:
            if memory is not None and region.holds(memory.address, memory.nbytes):
                return PoolExport(region, memory, store.num_blocks)
        return None

    def settings(self) -> TransportSettings:
        return settings(self._context, self._config)

    def open_channel(
        self, peer_address: bytes, nonce: int, outgoing_lane: int, frame_bytes: int, num_slots: int
    ) -> UcxChannel:
        if num_slots > GOODBYE_SLOT:
            raise TransferFailed(f"num_slots is {num_slots}; the limit is {GOODBYE_SLOT}")
        try:
            ucx_address, process = parse_address(peer_address)
            endpoint = self._worker.create_endpoint_from_worker_address(ucx_address, True)
            channel = UcxChannel(self, endpoint, process, nonce, outgoing_lane, frame_bytes, num_slots)
        except (libucxx.UCXError, MemoryError, OSError) as error:
            raise TransferFailed(f"no data path: {error}") from error
        self._open.append(channel)
        return channel

    def progress(self, now_s: float) -> bool:
        self._now_s = now_s
        look = now_s >= self._next_look_s
        if look:
            self._next_look_s = now_s + LIVENESS_PERIOD_S
            for channel in self._open:
                channel.check_peer()
            self._sweep(now_s)
        if self._closing and (look or now_s < self._closing_until_s):
            self._worker.progress()
            self._closing = [channel for channel in self._closing if not channel.release()]
            return True
        for num_moves in range(MAX_MOVES):
            if not self._worker.progress_once():
                return num_moves > 0
        return True

    def wait(self, timeout_s: float) -> None:
        if self._worker.arm():  # not where something came since the last progress
            self._epoll.poll(timeout_s)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)

    def wake(self) -> None:
        with self._event_lock:
            if not self._closed:
                os.eventfd_write(self._event_fd, 1)

    def close(self) -> None:
        with self._event_lock:
            self._closed = True
            os.close(self._event_fd)
        self._epoll.close()
        self._closing = [channel for channel in self._closing if not channel.release()]
        if self._closing:
            _log.error("kv slots still quarantined at stop channels=%d", len(self._closing))
        self._slots.clear()
        del self._worker, self._context  # UCX is shut down by their destructors

    def flush(self, request: PendingRequest) -> None:
        """Give a last message the chance to leave."""
        for _ in range(_GOODBYE_SPINS):
            if request.completed:
                return
            self._worker.progress_once()

    def retire(self, channel: UcxChannel) -> None:
        """Progress a closed channel until no peer can write to it."""
        self._open.remove(channel)
        self._closing.append(channel)
        self._closing_until_s = self._now_s + CLOSING_S
        self._retired.append((self._now_s + SWEEP_S, channel.incoming_tags()))
        self._worker.progress()

    def _sweep(self, now_s: float) -> None:
        """Take messages to closed pairs out of the unexpected queue."""
        self._retired = [(until_s, tags) for until_s, tags in self._retired if now_s < until_s]
        self._swept = [(request, data) for request, data in self._swept if not request.completed]
        for tag in (libucxx.UCXXTag(tag) for _, tags in self._retired for tag in tags):
            probe = self._worker.tag_probe(tag)
            if probe.matched and probe.length <= MAX_SWEPT_BYTES:
                data = Array(bytearray(max(1, probe.length)))
                message = self._worker.tag_probe(tag, remove=True)
                self._swept.append((self._worker.tag_recv_with_handle(data, message), data))
