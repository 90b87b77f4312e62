"""The UCX transport: one context and one worker per process, one endpoint per pair. The only module that imports ucxx.

Order of calls, and why (measured with ucxx 0.52 / UCX 1.21, DESIGN section 6):
- receives are posted on the endpoint: those on the worker are never cancelled when a peer dies;
- endpoints have error handling, and POSIX/SYSV_ERROR_HANDLING is on, else UCX drops shared memory without a word;
- `progress_once` moves bytes but delivers no cancellation: while a channel is closing, `progress` is called instead;
- a receive that was cancelled or abandoned in Python is still written to by UCX: slots of a closed channel are kept, and counted
  as quarantined, until each of its receives has completed.

Tags: pair nonce (folded to 48 bits) | direction (1) | credit or frame (1) | slot (14). Each tag has at most one message under
way, and its receive is posted before the message may be sent. Tagged messages are small: a frame's payload is written into the
peer's ring slot, in place where that is mapped, else by a put with a flush behind it; then its header goes as a message. So
RNDV_THRESH is inf: UCX needs no rendezvous, and only then are puts over TCP zero-copy with error handling (docs/kv_tcp.md).
The last credit slot carries the goodbye of a peer that closes while it lives: shared memory reports only death. What a peer had
under way when its pair closed lands in UCX's unexpected queue, and is swept from there for a while, or in a ring that only other
pairs will use.

Everything runs on the KV thread but `wake`. An address is UCX's, behind a magic word, a crc32c (UCX aborts the process on an
address that it cannot parse) and the identity of the process (liveness.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import ucxx
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from baton.config import KVTransferConfig
from baton.errors import ConfigError, TransferFailed
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import ChannelEvent, ChannelLost, Credit, FrameArrived, PeerPool, SendDone
from kv_transfer.events import TransportSettings
from kv_transfer.frame import CREDIT_BYTES, HEADER_BYTES, crc32c, pack_credit, unpack_credit
from kv_transfer.liveness import ProcessIdentity, own_identity
from kv_transfer.rdma import is_rdma, missing_for_rdma
from kv_transfer.ucp_memory import PendingPut, Region, RemoteRegion, allocate
from kv_transfer.ucp_query import endpoint_transports
from kv_transfer.ucx_exports import Exports, PoolExport, unpack_exports

_log = logging.getLogger(__name__)

_DEFAULT_OPTIONS = {  # kv.ucx may override them
    "KEEPALIVE_INTERVAL": "1s",  # a killed peer on shared memory is noticed in 0.64-0.80 s; UCX's own 20 s is too long
    "RNDV_THRESH": "inf",  # puts over TCP stay zero-copy: docs/kv_tcp.md
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
}
_FEATURES = (libucxx.Feature.TAG, libucxx.Feature.RMA, libucxx.Feature.WAKEUP)
MIN_SHM_BYTES = 32 << 20  # UCX's receive segments of one worker grow to some MiB; 32 leaves room for several workers
SHM_DIR = "/dev/shm"
_GOODBYE_SLOT = (1 << 14) - 1  # the last that a tag has room for
_GOODBYE_SPINS = 100  # progress calls given to a goodbye before the endpoint is forced shut
_SHM_NAMES = ("all", "shm", "sm", "mm", "posix", "sysv")
_OK, _TRUNCATED = 0, -9  # UCS_OK, UCS_ERR_MESSAGE_TRUNCATED in ucs/type/status.h
LIVENESS_PERIOD_S = 0.5  # how often peers on this machine are looked at; half of UCX's keepalive
SWEEP_S = 10.0  # how long a closed pair's tags are swept; its peer is told, or dead, long before
MAX_SWEPT_BYTES = 8192  # tagged messages are smaller
MAX_TAGGED_BYTES = (
    4096  # a frame up to this size goes as one message; a longer one's payload is put, then its header sent
)
MAX_MOVES = 64  # progress calls that moved something in one turn: shared memory moves 8 KiB in each
CLOSING_S = 1.0  # how long a close is pressed for; requests that outlive it are looked at every LIVENESS_PERIOD_S
_ADDRESS_MAGIC = b"BUC1"
_ADDRESS_HEAD = struct.Struct("<4sIIQ")  # magic, crc32c of what follows, pid, start time of the process
_ADDRESS_UNCHECKED_BYTES = 8  # magic and crc


Slots: TypeAlias = tuple[memoryview, Region]


class UcxTransport:
    """A UCX worker and what it takes to sleep on it."""

    def __init__(self, config: KVTransferConfig) -> None:
        """Start UCX.

        Raises:
            ConfigError: no such transport or device, no RDMA where it is required, too little shared memory.
        """
        if any(name in _SHM_NAMES for name in config.ucx_tls.split(",")):
            check_shared_memory(SHM_DIR)
        self._context = _make_context(config)
        if config.require_rdma:
            check_rdma(self._context.info, config)
        self._config = config
        self._worker = libucxx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
        self._worker.init_blocking_progress_mode()
        self.address = _pack_address(self._worker.address.tobytes(), own_identity())
        self._regions: list[Region] = []  # allocated for block pools
        self._slots: dict[int, deque[Slots]] = {}  # of closed channels, by size, for the next ones
        self._open: list[UcxChannel] = []
        self._closing: list[UcxChannel] = []
        self._closing_until_s = 0.0
        self._retired: list[tuple[float, list[Any]]] = []  # tags of closed pairs, and until when they are swept
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
        """
        free = self._slots.get(nbytes)
        return free.popleft() if free else allocate(self._context, nbytes)

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
        """What UCX runs with: the options that we or kv.ucx set, as UCX reports them where it does."""
        reported = self._context.config
        options = {name: reported.get(name) or value for name, value in _options(self._config).items()}
        return TransportSettings("ucx", _version(), options)

    def open_channel(
        self, peer_address: bytes, nonce: int, outgoing_lane: int, frame_bytes: int, num_slots: int
    ) -> UcxChannel:
        if num_slots > _GOODBYE_SLOT:
            raise TransferFailed(f"num_slots is {num_slots}; the limit is {_GOODBYE_SLOT}")
        try:
            ucx_address, process = _parse_address(peer_address)
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
        self._worker.progress()  # delivers the cancellations that follow a peer's death
        if self._worker.arm():
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
        if self._closing:
            _log.error("kv slots still quarantined at stop channels=%d", len(self._closing))
        self._slots.clear()
        del self._worker, self._context  # UCX is shut down by their destructors

    def flush(self, request: Any) -> None:
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
        for tag in (tag for _, tags in self._retired for tag in tags):
            probe = self._worker.tag_probe(tag)
            if probe.matched and probe.length <= MAX_SWEPT_BYTES:
                data = Array(bytearray(max(1, probe.length)))
                message = self._worker.tag_probe(tag, remove=True)
                self._swept.append((self._worker.tag_recv_with_handle(data, message), data))


class UcxChannel:
    """One endpoint, its tags and its slots."""

    def __init__(
        self,
        transport: UcxTransport,
        endpoint: Any,  # ucxx has no types
        process: ProcessIdentity,
        nonce: int,
        outgoing_lane: int,
        frame_bytes: int,
        num_slots: int,
    ) -> None:
        self.num_slots = num_slots
        self.frame_bytes = frame_bytes
        self._transport = transport
        self._endpoint = endpoint
        self._process = process if process.is_running() else None  # None: not to be seen from here
        self._base = ((nonce ^ nonce >> 48) & 0xFFFF_FFFF_FFFF) << 16
        self._outgoing = outgoing_lane
        self._ring_slots: Slots | None = transport.borrow_slots(num_slots * frame_bytes)
        self._send_slots: Slots | None = None  # own ones; None where frames are made in the peer's ring
        self._ring_memory, self._ring_region = self._ring_slots
        self._send_memory = memoryview(
            bytearray(num_slots * frame_bytes)
        )  # for the probe; `attach` brings the real one
        self._peer_ring: RemoteRegion | None = None
        self._peer_pool: RemoteRegion | None = None
        self._puts: dict[int, PendingPut] = {}  # by slot; the header follows
        self._credits = np.zeros((num_slots, CREDIT_BYTES), dtype=np.uint8)
        self._ring = [Array(self.ring_slot(slot)) for slot in range(num_slots)]
        self._frame_receives: dict[int, Any] = {}  # by slot
        self._credit_receives: dict[int, Any] = {}  # by slot
        self._sends: dict[int, Any] = {}  # by slot
        self._credit_sends: list[tuple[Any, Array[Any]]] = []  # with the bytes that UCX reads
        self._closed = False
        self._failures: list[str] = []  # why the path is lost; the first one counts
        self._goodbye = Array(bytearray(1))
        self._goodbye_receive = endpoint.tag_recv(self._goodbye, self._tag(1 - outgoing_lane, True, _GOODBYE_SLOT))
        endpoint.set_close_callback(self._failures.append, ("the peer closed or died",))  # no reference back to self

    def describe(self) -> str:
        names = endpoint_transports(self._endpoint.handle)
        return "+".join(dict.fromkeys(names))

    def ring_slot(self, slot: int) -> memoryview:
        return self._ring_memory[slot * self.frame_bytes : (slot + 1) * self.frame_bytes]

    def send_slot(self, slot: int) -> memoryview:
        return self._send_memory[slot * self.frame_bytes : (slot + 1) * self.frame_bytes]

    def exports(self, store: BlockStore | None) -> bytes:
        pool = None if store is None else self._transport.export_pool(store)
        return Exports(self._ring_region, pool).pack()

    def attach(self, exports: bytes) -> PeerPool | None:
        told = unpack_exports(exports)
        if told is None or told.ring.nbytes != self.num_slots * self.frame_bytes:
            raise TransferFailed("the peer's probe does not describe a ring of the agreed size")
        self._peer_ring = RemoteRegion(self._endpoint.handle, told.ring)
        if self._peer_ring.address is None:
            self._send_slots = self._transport.borrow_slots(self.num_slots * self.frame_bytes)
            self._send_memory = self._send_slots[0]
            return None
        self._peer_ring.prefault()
        self._send_memory = self._peer_ring.view()
        if told.pool is None:
            return None
        self._peer_pool = RemoteRegion(self._endpoint.handle, told.pool.region)
        address = self._peer_pool.address
        return None if address is None else PeerPool(told.pool.at(address), told.pool.num_blocks)

    def post_frame(self, slot: int) -> None:
        tag = self._tag(1 - self._outgoing, False, slot)
        self._frame_receives[slot] = self._endpoint.tag_recv(self._ring[slot], tag)

    def post_credit(self, slot: int) -> None:
        tag = self._tag(self._outgoing, True, slot)
        self._credit_receives[slot] = self._endpoint.tag_recv(Array(self._credits[slot]), tag)

    def send_frame(self, slot: int, nbytes: int) -> None:
        if self._peer_ring is None or nbytes <= MAX_TAGGED_BYTES:
            self._send_tagged(slot, nbytes)
        elif self._peer_ring.address is not None:  # the payload was written in place
            self._send_tagged(slot, HEADER_BYTES)
        else:
            payload = self.send_slot(slot)[HEADER_BYTES:nbytes]
            self._puts[slot] = self._peer_ring.put(payload, slot * self.frame_bytes + HEADER_BYTES)

    def _send_tagged(self, slot: int, nbytes: int) -> None:
        tag = self._tag(self._outgoing, False, slot)
        self._sends[slot] = self._endpoint.tag_send(Array(self.send_slot(slot)[:nbytes]), tag)

    def send_credit(self, credit: Credit) -> None:
        data = Array(bytearray(pack_credit(credit.turn, credit.accepted, credit.can_pull)))
        tag = self._tag(1 - self._outgoing, True, credit.slot)
        self._credit_sends.append((self._endpoint.tag_send(data, tag), data))

    def poll(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        for slot in _take_completed(self._frame_receives, self._failures):
            events.append(FrameArrived(slot))
        for slot in _take_completed(self._credit_receives, self._failures):
            answer = unpack_credit(memoryview(self._credits[slot]))
            if answer is not None:
                events.append(Credit(slot, *answer))
        for slot in _take_completed(self._sends, self._failures):
            events.append(SendDone(slot))
        self._follow_puts()
        self._credit_sends = [entry for entry in self._credit_sends if not entry[0].completed]
        if self._goodbye_receive.completed:
            self._failures.append("the peer closed the pair")
        if self._failures or not self._endpoint.alive:
            events.append(ChannelLost([*self._failures, "the UCX endpoint failed"][0]))
        return events

    def _follow_puts(self) -> None:
        """Send the header of each frame whose payload has arrived."""
        for slot in [slot for slot, put in self._puts.items() if not put.in_progress]:
            status = self._puts.pop(slot).status()
            if status == _OK:
                self._send_tagged(slot, HEADER_BYTES)
            else:
                self._failures.append(f"a UCX put failed with status {status}")

    def check_peer(self) -> None:
        if self._process is not None and not self._process.is_running():
            self._failures.append("the peer's process is gone")

    def close(self) -> None:
        """Say goodbye, cancel every request and force the endpoint shut; a dead peer does not delay it."""
        self._closed = True
        if self._endpoint.alive and not self._failures:
            tag = self._tag(self._outgoing, True, _GOODBYE_SLOT)
            self._transport.flush(self._endpoint.tag_send(Array(bytearray(1)), tag))
        self._endpoint.remove_close_callback()
        self._endpoint.close_blocking()
        self._transport.retire(self)

    @property
    def num_quarantined(self) -> int:
        """Slots of a closed channel that UCX may still read or write; 0 before close."""
        if not self._closed:
            return 0
        requests = [*self._frame_receives.values(), *self._sends.values()]
        return sum(not request.completed for request in requests) + sum(put.in_progress for put in self._puts.values())

    def release(self) -> bool:
        """Free the endpoint and the slots of a closed channel; False while UCX still uses any memory of it."""
        requests = [*self._frame_receives.values(), *self._sends.values(), *self._credit_receives.values()]
        requests += [self._goodbye_receive, *(request for request, _ in self._credit_sends)]
        if not all(request.completed for request in requests) or any(put.in_progress for put in self._puts.values()):
            return False
        for requests_by_slot in (self._frame_receives, self._sends, self._credit_receives):
            requests_by_slot.clear()
        self._credit_sends.clear()
        self._ring.clear()
        self._ring_memory = self._send_memory = memoryview(b"")
        for slots in (self._ring_slots, self._send_slots):
            if slots is not None:
                self._transport.give_back(slots)
        for region in (self._peer_pool, self._peer_ring):
            if region is not None:
                region.close()
        self._goodbye_receive = self._endpoint = self._peer_pool = self._peer_ring = None
        self._ring_slots = self._send_slots = None
        self._puts.clear()
        return True

    def incoming_tags(self) -> list[Any]:
        """Tags of all that the peer may send."""
        frames = [self._tag(1 - self._outgoing, False, slot) for slot in range(self.num_slots)]
        credits = [self._tag(self._outgoing, True, slot) for slot in range(self.num_slots)]
        return [*frames, *credits, self._tag(1 - self._outgoing, True, _GOODBYE_SLOT)]

    def _tag(self, direction: int, is_credit: bool, slot: int) -> Any:
        return libucxx.UCXXTag(self._base | direction << 15 | is_credit << 14 | slot)


def check_shared_memory(path: str) -> None:
    """Refuse a shared-memory file system without room for UCX's segments; UCX itself fails late and obscurely.

    Raises:
        ConfigError: says how much there is and what to do.
    """
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be used: {error.strerror}; set kv.ucx_tls=tcp", field="kv.ucx_tls") from error
    free_bytes = stat.f_bavail * stat.f_frsize
    if free_bytes < MIN_SHM_BYTES:
        raise ConfigError(
            f"{path} has {free_bytes >> 20} MiB free; UCX's shared memory needs {MIN_SHM_BYTES >> 20}: enlarge it "
            "(docker run --shm-size, or an emptyDir with medium: Memory) or set kv.ucx_tls=tcp",
            field="kv.ucx_tls",
        )


def check_rdma(context_info: str, config: KVTransferConfig) -> None:
    """Refuse a UCX without an RDMA transport.

    Raises:
        ConfigError: lists the transports that there are and what is missing.
    """
    names = sorted({line.split()[-1] for line in context_info.splitlines() if "resource" in line and "/" in line})
    if not any(is_rdma(name) for name in names):
        missing = "; ".join(missing_for_rdma(config)) or "its RDMA devices are down or not usable by this process"
        raise ConfigError(
            f"kv.require_rdma is set, but UCX offers only {', '.join(names)}: {missing}", field="kv.require_rdma"
        )


def _make_context(config: KVTransferConfig) -> Any:
    """Raises: ConfigError: names the option of kv.ucx that UCX refuses, or else the transports and devices."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # `import ucxx` sets variables that a CPU build of UCX lacks
    base = _options(replace(config, ucx={}))
    try:
        return _context(_options(config))
    except libucxx.UCXError as error:
        for name, value in config.ucx.items():
            if _is_refused(base | {name: value}) and not _is_refused(base):
                raise ConfigError(
                    f"kv.ucx.{name} = {value!r} is refused by UCX {_version()}: no such option, or no such value",
                    field=f"kv.ucx.{name}",
                ) from error
        raise ConfigError(
            f"UCX does not start with ucx_tls={config.ucx_tls!r} and ucx_net_devices={config.ucx_net_devices!r}: {error}",
            field="kv.ucx_tls",
        ) from error


def _options(config: KVTransferConfig) -> dict[str, str]:
    return {"TLS": config.ucx_tls, "NET_DEVICES": config.ucx_net_devices, **_DEFAULT_OPTIONS, **config.ucx}


def _context(options: Mapping[str, str]) -> Any:
    return libucxx.UCXContext(dict(options), feature_flags=_FEATURES)


def _is_refused(options: Mapping[str, str]) -> bool:
    try:
        _context(options)
    except libucxx.UCXError:
        return True
    return False


def _version() -> str:
    return ".".join(map(str, ucxx.get_ucx_version()))


def _pack_address(ucx_address: bytes, process: ProcessIdentity) -> bytes:
    rest = _ADDRESS_HEAD.pack(b"", 0, process.pid, process.start_ticks)[_ADDRESS_UNCHECKED_BYTES:] + ucx_address
    return _ADDRESS_MAGIC + crc32c(memoryview(rest)).to_bytes(4, "little") + rest


def _parse_address(address: bytes) -> tuple[Any, ProcessIdentity]:
    """Split a peer's address.

    Raises:
        TransferFailed: it is not one.
    """
    if len(address) > _ADDRESS_HEAD.size:
        magic, crc, pid, start_ticks = _ADDRESS_HEAD.unpack_from(address)
        if magic == _ADDRESS_MAGIC and crc == crc32c(memoryview(address)[_ADDRESS_UNCHECKED_BYTES:]):
            ucx_address = libucxx.UCXAddress.create_from_buffer(address[_ADDRESS_HEAD.size :])
            return ucx_address, ProcessIdentity(pid, start_ticks)
    raise TransferFailed("the peer's address is not a UCX address of this protocol")


def _take_completed(requests: dict[int, Any], failures: list[str]) -> list[int]:
    """Remove completed requests; returns the slots of those that moved a message."""
    done = [slot for slot, request in requests.items() if request.completed]
    moved: list[int] = []
    for slot in done:
        status = int(requests.pop(slot).status)
        if status in (_OK, _TRUNCATED):
            moved.append(slot)
        else:
            failures.append(f"a UCX request failed with status {status}")
    return moved
