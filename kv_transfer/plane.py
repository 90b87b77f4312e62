"""The KV thread of a worker: the one owner of the transport, the pairs and their memory.

Commands may come from any thread; they are queued and carried out in order on the KV thread. Events go out through
`on_event`, called on the KV thread; it must not block and must not raise. What each command is answered with is in core.py.

The thread never spins for long: after SPINS polls that moved nothing it sleeps until bytes, a command or IDLE_WAIT_S.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from baton import clock
from baton.config import KVTransferConfig
from baton.errors import ConfigError
from kv_transfer.block_store import BlockStore
from kv_transfer.channel import Transport
from kv_transfer.core import PlaneCore
from kv_transfer.events import KVEvent, KVLoad
from kv_transfer.kv_views import wire_views
from kv_transfer.loopback import PROCESS_NETWORK
from kv_transfer.pair import PairStatus, WireView
from kv_transfer.transfer_plan import check_frame_bytes

_log = logging.getLogger(__name__)

MODES = ("auto", "direct", "staged")
SPINS = 200  # empty polls before a sleep; fewer lose TCP wake-ups for 100 ms (measured: DESIGN section 6)
IDLE_WAIT_S = 0.05  # the longest sleep; bounds the delay of a deadline
DRAIN_S = 5.0  # how long stop() waits for peers to let go of quarantined slots
PUBLISH_PERIOD_S = 0.02  # of load() and peers() while busy


def make_transport(config: KVTransferConfig, name: str) -> Transport:
    """The transport that the configuration names.

    Raises:
        ConfigError: unknown name or mode, no RDMA where it is required, or too little shared memory.
    """
    if config.mode not in MODES:
        raise ConfigError(f"mode is {config.mode!r}; known: {', '.join(MODES)}", field="kv.mode")
    if config.transport == "loopback":
        return PROCESS_NETWORK.transport(name)
    if config.transport == "ucx":
        from kv_transfer.ucx import UcxTransport  # loads UCX: only in processes that use it

        return UcxTransport(config)
    raise ConfigError(f"transport is {config.transport!r}; known: ucx, loopback", field="kv.transport")


class KVPlane:
    """A PlaneCore on a thread of its own. Satisfies worker.role.KVPort."""

    def __init__(
        self,
        store: BlockStore,
        config: KVTransferConfig,
        epoch: int,
        on_event: Callable[[KVEvent], None],
        transport: Transport | None = None,
        on_fatal: Callable[[Exception], None] | None = None,
    ) -> None:
        """Make the transport at once, so that a wrong configuration is known before anything starts.

        `on_fatal` is called on the KV thread, once, when the thread ends by a defect that losing every pair did not heal.

        Raises:
            ConfigError: see make_transport; frames that are too small for the store's blocks.
        """
        check_frame_bytes(store.layout, config.frame_bytes)
        self._transport = transport or make_transport(config, f"{epoch:016x}")
        self.settings = self._transport.settings()
        self._views = wire_views(store)
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._core = PlaneCore(store, config, epoch, self._deliver, self._transport, clock.now_s())
        self._commands: deque[Callable[[], None]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="baton-kv", daemon=True)
        self._load = self._core.load()
        self._peers = self._core.peers()
        self._published_s = 0.0
        self._stale = False  # whether something happened since

    @property
    def address(self) -> bytes:
        """What a peer's `connect` needs to reach this plane."""
        return self._transport.address

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Lose every pair, free everything and join the thread. Idempotent."""
        self._stopping.set()
        self._transport.wake()
        if self._thread.ident is not None:
            self._thread.join()

    def load(self) -> KVLoad:
        """Gauges and totals; not older than the last event, at most PUBLISH_PERIOD_S old while busy, exact when idle."""
        return self._load

    def peers(self) -> dict[str, PairStatus]:
        """The pairs that are set up or being set up, by peer. Lost ones are gone from here."""
        return self._peers

    def connect(
        self,
        peer: str,
        peer_epoch: int,
        address: bytes,
        pair_nonce: int,
        frame_bytes: int,
        num_slots: int,
        peer_dtype: str = "",
        wire: WireView | None = None,
    ) -> None:
        """See PlaneCore.connect; a peer that keeps KV in another dtype, "" = in ours, is sent that one.

        `wire`: for a pair that moves something else than our KV.
        """
        wire = wire or self._views.get(peer_dtype)
        self._post(partial(self._core.connect, peer, peer_epoch, address, pair_nonce, frame_bytes, num_slots, wire))

    def disconnect(self, peer: str) -> None:
        self._post(partial(self._core.disconnect, peer))

    def open_outgoing(
        self, peer: str, seq: int, epoch: int, generation: int, num_leading_blocks: int, num_blocks: int, lease_s: float
    ) -> None:
        self._post(
            partial(self._core.open_outgoing, peer, seq, epoch, generation, num_leading_blocks, num_blocks, lease_s)
        )

    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool) -> None:
        self._post(partial(self._core.ship, seq, tuple(block_ids), num_ready_blocks, last))

    def resend(self, seq: int, frames: Sequence[int]) -> None:
        self._post(partial(self._core.resend, seq, tuple(frames)))

    def close_outgoing(self, seq: int, reason: str = "") -> None:
        self._post(partial(self._core.close_outgoing, seq, reason))

    def open_incoming(
        self, peer: str, seq: int, generation: int, block_ids: Sequence[int], num_leading_blocks: int, ttl_s: float
    ) -> None:
        self._post(
            partial(self._core.open_incoming, peer, seq, generation, tuple(block_ids), num_leading_blocks, ttl_s)
        )

    def commit_incoming(self, seq: int, generation: int, num_frames: int, nbytes: int) -> None:
        self._post(partial(self._core.commit_incoming, seq, generation, num_frames, nbytes))

    def close_incoming(self, seq: int) -> None:
        self._post(partial(self._core.close_incoming, seq))

    def _post(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._transport.wake()

    def _run(self) -> None:
        try:
            self._turn_until_stopped()
            self._shut_down()
        except Exception as error:  # noqa: BLE001  a thread that died in silence would wedge the worker
            _log.exception("the KV thread ends")
            if self._on_fatal is not None:
                self._on_fatal(error)

    def _turn_until_stopped(self) -> None:
        spins = 0
        while not self._stopping.is_set():
            try:
                if self._turn():
                    spins = 0
                    continue
                spins += 1
                os.sched_yield()  # the other end may wait for this very core
                if spins >= SPINS:
                    self._transport.wait(IDLE_WAIT_S)
                    spins = 0
            except Exception:  # noqa: BLE001  a defect must not leave peers and roles waiting: end every transfer, say so, go on
                _log.exception("the KV thread failed; every pair is lost")
                self._core.lose_all("internal error of the KV plane")
                self._core.deliver_events()
                self._stopping.wait(IDLE_WAIT_S)  # a defect that lasts must not fill the log

    def _turn(self) -> bool:
        """Receive, carry out what is queued, advance; whether anything happened. The order matters: see core.receive."""
        now_s = clock.now_s()
        busy = self._core.receive(now_s) or bool(self._commands)
        while self._commands:
            self._commands.popleft()()
        busy |= self._core.advance()
        self._stale |= busy
        if self._stale and (not busy or now_s - self._published_s >= PUBLISH_PERIOD_S):
            self._publish(now_s)
        return busy

    def _deliver(self, event: KVEvent) -> None:
        self._publish(clock.now_s())
        self._on_event(event)

    def _publish(self, now_s: float) -> None:
        self._load = self._core.load()
        self._peers = self._core.peers()
        self._published_s = now_s
        self._stale = False

    def _shut_down(self) -> None:
        self._core.lose_all("the worker stops")
        self._core.deliver_events()
        give_up_s = clock.now_s() + DRAIN_S
        while self._core.num_closing and clock.now_s() < give_up_s:
            self._core.poll(clock.now_s())
        self._publish(clock.now_s())
        self._transport.close()
