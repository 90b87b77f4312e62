"""A cluster in one thread: workers whose three threads are mailboxes, and a seeded scheduler that picks who runs next.

    router ──session──▶ loop ──commands──▶ engine      Each arrow is a FIFO mailbox, as in worker/host.py.
           ◀──events──  loop ◀──results─── engine      A `turn` empties one step's worth of one of them: an engine
                        loop ──commands──▶ KV plane    step, a poll of the KV plane, one message of the loop, a tick.
    peer   ◀───link───▶ loop ◀──events──── KV plane    Whatever order of turns the seed picks can happen in production,
           ◀────────────frames───────────▶ KV plane    including turns of others in the middle of an engine step.

Everything else is real: PrefillRole, DecodeRole, LocalEngine, PlaneCore, the loopback wire and its faults. The model is
ScriptedRunner, which knows what every byte of KV must be. The clock is virtual and moves when the scheduler says so.

While it runs the rig watches what must never happen: KV moved into or out of a free block, a write to memory after it was
freed (free blocks are poisoned), a ticket adopted twice, a token of a call whose Cancel was read, a pool that does not add
up. `violations` collects all of it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from baton.config import EngineConfig, KVTransferConfig
from baton.errors import BatonError, Internal, InvalidRequest, Unavailable
from baton.kv_layout import KVLayout
from baton.request import Request, Role, SampledToken
from baton.tracing import NO_TRACER
from baton.v1 import kv_pb2, worker_pb2
from baton.wire import request_from_pb
from decode_worker.decode_role import DecodeRole
from engine.engine import LocalEngine
from engine.ports import Batch, StepResult
from engine.scripted_runner import POISON, ScriptedKVCache, ScriptedRunner
from kv_transfer.core import PlaneCore
from kv_transfer.events import Committed, KVEvent, PairLost, PairReady
from kv_transfer.frame import HEADER_BYTES, Kind, read_header
from kv_transfer.loopback import Faults, LoopbackNetwork, _Lane
from prefill_worker.prefill_role import PrefillRole
from tests.handoff.handoff_links import RigLinks
from worker.host import TICK_S, EngineCommands
from worker.parked import ParkedCalls
from worker.role import PullSource

EOS = 7  # arbitrary; answers are hashes modulo a vocabulary of 1,000, so it also ends one answer in a hundred by chance
KV_TIMER_S = TICK_S  # coarser than kv_transfer.core.TIMER_PERIOD_S: as if the KV thread slept for its IDLE_WAIT_S
IDLE_S = 0.05  # virtual time that passes when nobody has anything to do: the period of ticks and timers


@dataclass(frozen=True, slots=True)
class RigConfig:
    """Small enough that a call takes a few turns, large enough that everything is cut into pieces."""

    num_prefill: int = 1
    num_decode: int = 1
    block_size: int = 4
    prefill_blocks: int = 64
    decode_blocks: int = 64
    chunk_tokens: int = 16
    step_tokens: int = 32
    max_num_seqs: int = 8
    prefix_cache: bool = True
    num_layers: int = 2
    blocks_per_frame: int = 2
    num_slots: int = 2
    max_queued: int = 64
    heartbeat_s: float = 0.5
    lease_s: float = 5.0
    transfer_timeout_s: float = 10.0
    mode: str = "auto"  # of the KV plane; only a staged one is watched block by block
    faults: Faults = field(default_factory=Faults)

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.num_layers, num_kv_heads=1, head_dim=2, dtype="float32", block_size=self.block_size)

    @property
    def frame_bytes(self) -> int:
        return HEADER_BYTES + self.blocks_per_frame * self.layout.block_bytes


class Clock:
    now_s = 1_000.0

    def now(self) -> float:
        return self.now_s


class RigNetwork(LoopbackNetwork):
    """A LoopbackNetwork that says whether somebody has mail, so that the scheduler need not poll for it."""

    on_send: Callable[[bytes], None] | None = None  # the adversary listens
    drop_next_data_frame = False  # set by a test

    def send(self, address: bytes, lane: _Lane, data: bytes, now_s: float) -> None:
        if self.on_send is not None:
            self.on_send(data)
        header = read_header(memoryview(data))
        if self.drop_next_data_frame and header is not None and header.kind is not Kind.PROBE:
            self.drop_next_data_frame = False
            return
        super().send(address, lane, data, now_s)

    def has_mail(self, address: bytes, now_s: float) -> bool:
        inbox = self._inboxes.get(address, [])
        return bool(inbox) and inbox[0].due_s <= now_s


@dataclass(frozen=True, slots=True)
class TokenOut:
    token: SampledToken


@dataclass(frozen=True, slots=True)
class EndedOut:
    message: worker_pb2.Ended


@dataclass(frozen=True, slots=True)
class RefusedOut:
    seq: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class LostOut:
    seq: int
    error: BatonError


SessionOut = TokenOut | EndedOut | RefusedOut | LostOut


class RigSessions:
    """Implements worker.role.SessionPort: everything goes to one mailbox, in order."""

    def __init__(self, worker: RigWorker, routers: set[int]) -> None:
        self.routers = routers
        self.outbox: deque[SessionOut] = deque()
        self._worker = worker

    def has_router(self, seq: int) -> bool:
        return seq >> 32 in self.routers

    def token(self, token: SampledToken) -> None:
        if self._worker.cancelled_until_s.get(token.seq, 0.0) > self._worker.now_s():
            self._worker.violation(f"seq {token.seq:#x} goes on after its Cancel was read")
        self._put(token.seq, TokenOut(token))

    def ended(self, message: worker_pb2.Ended) -> None:
        self._put(message.seq, EndedOut(message))

    def refused(self, seq: int, error: BatonError) -> None:
        self._put(seq, RefusedOut(seq, error))

    def handoff_lost(self, seq: int, error: BatonError, reroute: int) -> None:
        self._put(seq, LostOut(seq, error))

    def _put(self, seq: int, event: SessionOut) -> None:
        if self.has_router(seq):
            self.outbox.append(event)


class RigEngineCommands(EngineCommands):
    """The host's own engine mailbox; notes a ticket that is adopted twice."""

    def __init__(self, worker: RigWorker) -> None:
        super().__init__(worker.engine_inbox.append, ParkedCalls(max_bytes=1 << 20))
        self._worker = worker
        self._reserved: set[int] = set()

    def reserve(self, request: Request) -> None:
        self._reserved.add(request.seq)
        super().reserve(request)

    def adopt(self, seq: int, first_token: int) -> None:
        if seq not in self._reserved:
            self._worker.violation(f"seq {seq:#x} was adopted without a reservation, or twice")
        self._reserved.discard(seq)
        super().adopt(seq, first_token)


class RigKVCommands:
    """Implements worker.role.KVPort and worker.links.DataPath: commands wait for the KV plane's turn."""

    def __init__(self, core: PlaneCore) -> None:
        self._core = core
        self.inbox: deque[Callable[[], None]] = deque()

    def connect(
        self,
        peer: str,
        peer_epoch: int,
        address: bytes,
        pair_nonce: int,
        frame_bytes: int,
        num_slots: int,
        peer_dtype: str = "",
    ) -> None:
        self.inbox.append(partial(self._core.connect, peer, peer_epoch, address, pair_nonce, frame_bytes, num_slots))

    def disconnect(self, peer: str) -> None:
        self.inbox.append(partial(self._core.disconnect, peer))

    def open_outgoing(
        self, peer: str, seq: int, epoch: int, generation: int, num_leading_blocks: int, num_blocks: int, lease_s: float
    ) -> None:
        self.inbox.append(
            partial(self._core.open_outgoing, peer, seq, epoch, generation, num_leading_blocks, num_blocks, lease_s)
        )

    def ship(self, seq: int, block_ids: Sequence[int], num_ready_blocks: int, last: bool) -> None:
        self.inbox.append(partial(self._core.ship, seq, tuple(block_ids), num_ready_blocks, last))

    def resend(self, seq: int, frames: Sequence[int]) -> None:
        self.inbox.append(partial(self._core.resend, seq, tuple(frames)))

    def close_outgoing(self, seq: int, reason: str = "") -> None:
        self.inbox.append(partial(self._core.close_outgoing, seq, reason))

    def open_incoming(
        self, peer: str, seq: int, generation: int, block_ids: Sequence[int], num_leading_blocks: int, ttl_s: float
    ) -> None:
        self.inbox.append(
            partial(self._core.open_incoming, peer, seq, generation, tuple(block_ids), num_leading_blocks, ttl_s)
        )

    def commit_incoming(self, seq: int, generation: int, num_frames: int, nbytes: int) -> None:
        self.inbox.append(partial(self._core.commit_incoming, seq, generation, num_frames, nbytes))

    def close_incoming(self, seq: int) -> None:
        self.inbox.append(partial(self._core.close_incoming, seq))


class WatchedStore:
    """The KV plane's view of the engine's memory; notes every access to a block that is nobody's."""

    def __init__(self, cache: ScriptedKVCache, worker: RigWorker) -> None:
        self.layout = cache.layout
        self.num_blocks = cache.num_blocks
        self.memory = cache.memory
        self._cache = cache
        self._worker = worker

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        self._check("reads", block_ids)
        return self._cache.gather(block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        self._check("writes", block_ids)
        return self._cache.scatter(block_ids, layer_start, num_layers, data)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        self._check("clears", block_ids)
        self._cache.clear(block_ids, layer_start, num_layers)

    def _check(self, verb: str, block_ids: Sequence[int]) -> None:
        pool = self._worker.local_engine._pool
        loose = sorted(block for block in block_ids if pool._holder(block) is None)
        if loose:
            self._worker.violation(f"the KV plane {verb} blocks that nobody holds: {loose}")


class RigWorker:
    """One worker process. Implements worker.role.Ports and worker.links.LinkListener, as worker/host.py does."""

    def __init__(self, cluster: Cluster, worker_id: str, role: Role, num_blocks: int) -> None:
        config = cluster.config
        self.cluster = cluster
        self.worker_id = worker_id
        self.role = role
        self.draining = False
        self.epoch = cluster.rng.getrandbits(63) + 1
        self.alive = True
        kv_config = KVTransferConfig(
            transport="loopback",
            frame_bytes=config.frame_bytes,
            num_slots=config.num_slots,
            lease_s=config.lease_s,
            transfer_timeout_s=config.transfer_timeout_s,
            mode=config.mode,
        )
        self.runner = ScriptedRunner(config.layout, num_blocks, before_run=self._before_run)
        self.runner.script = cluster.script
        self.local_engine = LocalEngine(
            EngineConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.step_tokens,
                chunk_tokens=config.chunk_tokens,
                prefix_cache=config.prefix_cache,
            ),
            self.runner,
            fingerprint="scripted",
            eos_token_ids=[EOS],
            max_model_len=100_000,
            clock_s=cluster.clock.now,
            check_integrity=True,
        )
        self.transport_name = f"{worker_id}/{self.epoch:x}"
        self._wire = cluster.network.transport(self.transport_name)
        self.address = self._wire.address
        self.core = PlaneCore(
            WatchedStore(self.runner.kv_cache, self),
            kv_config,
            self.epoch,
            self._on_plane_event,
            self._wire,
            self.now_s(),
        )
        # The mailboxes.
        self.engine_inbox: deque[Callable[[LocalEngine, float], None]] = deque()
        self.results: deque[StepResult] = deque()
        self.kv_events: deque[KVEvent] = deque()
        self.session_inbox: deque[worker_pb2.SessionRequest] = deque()
        self.lost_routers: deque[int] = deque()
        # The ports.
        self.tracer = NO_TRACER
        self.engine = RigEngineCommands(self)
        self.kv = RigKVCommands(self.core)
        self.sessions = RigSessions(self, cluster.routers)
        self.links = RigLinks(
            self,
            self.kv,
            self,
            cluster.rng,
            frame_bytes=config.frame_bytes,
            num_slots=config.num_slots,
            silence_limit_s=config.lease_s,
            hello_timeout_s=kv_config.hello_timeout_s + 1.0,
        )
        # The roles.
        self.step_tokens = config.step_tokens
        self.prefill = PrefillRole(
            self,
            block_size=config.block_size,
            lease_s=config.lease_s,
            transfer_timeout_s=config.transfer_timeout_s,
            max_resends=kv_config.max_resends,
            max_queued=config.max_queued,
        )
        self.decode = DecodeRole(
            self,
            lease_s=config.lease_s,
            transfer_timeout_s=config.transfer_timeout_s,
            max_queued=config.max_queued,
        )
        self.roles = (self.prefill, self.decode)
        # What the rig remembers to look for violations, and for tests that ask about order.
        self.in_step = False
        self.has_slow_engine = False  # set by a test: a step begins only when everybody else has nothing to do
        self.has_slow_kv = False  # the same of the KV thread
        self.has_slow_sessions = False  # what routers say is read some 50 turns late, a few frames' time
        self.is_stopped = False  # see stop()
        self.committed: list[Committed] = []
        self.poisoned: set[int] = set()
        self.cancelled_until_s: dict[int, float] = {}  # by seq; after a lease it may be another call's
        self.fail_seqs: set[int] = set()  # the model raises for these
        self._kv_busy = True
        self._next_tick_s = self._next_ping_s = self._next_kv_timer_s = self.now_s()
        self._poison_free_blocks()

    def stop(self) -> None:
        """No thread runs until `resume`, as after SIGSTOP."""
        self.is_stopped = self.cluster.had_stops = True

    def resume(self) -> None:
        self.is_stopped = False

    def violation(self, what: str) -> None:
        self.cluster.violations.append(f"{self.worker_id}: {what}")

    # --- Ports ---

    def now_s(self) -> float:
        return self.cluster.clock.now_s

    def refusal(self, kind: Role) -> BatonError | None:
        if self.draining:
            return Unavailable(f"worker {self.worker_id} is draining", retry_after_s=1.0)
        if self.role not in (kind, Role.BOTH):
            return Unavailable(f"worker {self.worker_id} has another role")
        return None

    # --- turns: who may run, and what a turn does ---

    def turns(self) -> list[Callable[[], None]]:
        """What could run now. The same turn may be offered again and again until its mailbox is empty."""
        now_s = self.now_s()
        ready: list[Callable[[], None]] = []
        if self.is_stopped:
            return ready
        if not self.has_slow_engine and self.wants_engine:
            ready.append(self.engine_turn)
        if not self.has_slow_kv and self.wants_kv:
            ready.append(self.kv_turn)
        if self.results:
            ready.append(self.result_turn)
        if self.kv_events:
            ready.append(self.kv_event_turn)
        if (self.session_inbox or self.lost_routers) and not (
            self.has_slow_sessions and self.cluster.rng.random() < 0.98
        ):
            ready.append(self.session_turn)
        if self.links.unread():
            ready.append(self.link_turn)
        if now_s >= self._next_tick_s:
            ready.append(self.tick_turn)
        return ready

    @property
    def wants_engine(self) -> bool:
        return not self.in_step and not self.is_stopped and bool(self.engine_inbox or self.local_engine.has_work())

    @property
    def wants_kv(self) -> bool:
        now_s = self.now_s()
        has_mail = self.cluster.network.has_mail(self.address, now_s)
        busy = self._kv_busy or bool(self.kv.inbox) or now_s >= self._next_kv_timer_s or has_mail
        return busy and not self.is_stopped

    @property
    def is_busy(self) -> bool:
        """Whether any mailbox holds something, or somebody would do something without being asked."""
        boxes = (self.engine_inbox, self.kv.inbox, self.results, self.kv_events, self.session_inbox, self.lost_routers)
        unread = any(boxes) or bool(self.sessions.outbox) or bool(self.links.unread())
        return unread or self._kv_busy or self.local_engine.has_work()

    def engine_turn(self) -> None:
        """worker/engine_thread.py: all commands, then one step if there is work."""
        self.check_poison()
        while self.engine_inbox:
            self.engine_inbox.popleft()(self.local_engine, self.now_s())
        if self.local_engine.has_work():
            self.in_step = True
            self.results.append(self.local_engine.step(self.now_s()))
            self.in_step = False
        self._poison_free_blocks()

    def kv_turn(self) -> None:
        """kv_transfer/plane.py: poll, then the commands that wait."""
        now_s = self.now_s()
        if now_s >= self._next_kv_timer_s:
            self._next_kv_timer_s = now_s + KV_TIMER_S
        self._kv_busy = self.core.poll(now_s) or bool(self.kv.inbox)
        while self.kv.inbox:
            self.kv.inbox.popleft()()

    def result_turn(self) -> None:
        result = self.results.popleft()
        for role in self.roles:
            role.on_step(result)

    def kv_event_turn(self) -> None:
        event = self.kv_events.popleft()
        if isinstance(event, PairReady):
            self.links.on_pair_ready(event.peer, event.pair_nonce)
        elif isinstance(event, PairLost):
            self.links.on_pair_lost(event.peer, event.pair_nonce, self.now_s())
        else:
            for role in self.roles:
                role.on_kv(event)

    def session_turn(self) -> None:
        if self.lost_routers and not self.session_inbox:
            for role in self.roles:
                role.on_router_lost(self.lost_routers[0])
            self.lost_routers.popleft()
            return
        request = self.session_inbox.popleft()
        if request.HasField("submit"):
            self._on_submit(request.submit)
        elif request.HasField("reroute"):
            self._on_reroute(request.reroute)
        else:
            self.cancelled_until_s[request.cancel.seq] = self.now_s() + self.cluster.config.lease_s
            for role in self.roles:
                role.on_cancel(request.cancel.seq)

    def _on_submit(self, submit: worker_pb2.Submit) -> None:
        """As WorkerHost._on_submit."""
        seq = submit.request.seq
        try:
            request = request_from_pb(submit.request)
            deadline_s = self.now_s() + submit.ttl_ms / 1_000
            if not submit.HasField("decode"):
                self.decode.on_submit(request, "", deadline_s)
                return
            decode_peer = self._link_to(submit.decode) if request.num_tokens_left > 1 else ""
            self.prefill.on_submit(request, decode_peer, deadline_s, self._pull_source(submit))
        except BatonError as error:
            self.sessions.refused(seq, error)

    def _on_reroute(self, reroute: worker_pb2.Reroute) -> None:
        """As WorkerHost._on_reroute."""
        try:
            peer = self._link_to(reroute.decode)
        except BatonError as error:
            if any(role.can_reroute(reroute.seq) for role in self.roles):
                self.sessions.handoff_lost(reroute.seq, error, reroute.serial)
            return
        for role in self.roles:
            role.on_reroute(reroute.seq, peer, reroute.serial)

    def _pull_source(self, submit: worker_pb2.Submit) -> PullSource | None:
        if not submit.HasField("pull_from"):
            return None
        try:
            return PullSource(self._link_to(submit.pull_from), submit.pull_blocks)
        except BatonError:
            return None

    def _link_to(self, peer: worker_pb2.Peer) -> str:
        return self.links.open(self.cluster.find(peer.worker_id, peer.epoch), self.now_s())

    def link_turn(self) -> None:
        self.links.read_one(self.now_s())

    def tick_turn(self) -> None:
        now_s = self.now_s()
        self._next_tick_s = now_s + TICK_S
        for role in self.roles:
            role.on_tick()
        if now_s >= self._next_ping_s:
            self._next_ping_s = now_s + self.cluster.config.heartbeat_s
            self.links.ping(now_s)

    # --- LinkListener ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> None:
        self.cluster.on_wire(self, peer, message)
        try:
            for role in self.roles:
                if role.on_link(peer, message):
                    break
        except InvalidRequest:
            pass  # as WorkerHost.on_link: a peer's bad message is logged, not believed

    def on_link_ready(self, peer: str) -> None:
        for role in self.roles:
            role.on_link_ready(peer)

    def on_link_lost(self, peer: str, error: BatonError) -> None:
        for role in self.roles:
            role.on_link_lost(peer, error)

    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]:
        return [ticket for role in self.roles for ticket in role.live_tickets(peer)]

    # --- what the rig watches ---

    def _before_run(self, batch: Batch) -> None:
        """The model computes: meanwhile the other two threads, and the rest of the cluster, go on."""
        self.cluster.interleave()
        if any(entry.seq in self.fail_seqs for entry in batch.entries):
            raise Internal("the model failed, as the test asked")

    def _on_plane_event(self, event: KVEvent) -> None:
        if isinstance(event, Committed):
            if any((c.seq, c.generation) == (event.seq, event.generation) for c in self.committed):
                self.violation(f"ticket {event.seq:#x}/{event.generation} was committed twice")
            self.committed.append(event)
        self.kv_events.append(event)

    def check_poison(self) -> None:
        """Blocks that were free since they were poisoned must still hold the poison."""
        blocks = sorted(self.poisoned.intersection(self.local_engine.free_block_ids()))
        if blocks and (self.runner.kv_cache.slots[:, :, blocks] != POISON).any():
            self.violation("something wrote to a free block")

    def _poison_free_blocks(self) -> None:
        self.poisoned = set(self.local_engine.free_block_ids())
        self.runner.kv_cache.poison(sorted(self.poisoned))

    def check_quiet(self) -> list[str]:
        """What is left over although nothing is under way."""
        load, kv = self.local_engine.load(), self.core.load()
        gauges = {
            "active blocks": load.active_blocks,
            "reserved blocks": load.reserved_blocks,
            "running sequences": load.num_running,
            "waiting sequences": load.num_waiting,
            "lost blocks": self.runner.kv_cache.num_blocks - load.free_blocks - load.cached_blocks,
            "open prefills": self.prefill.num_open(),
            "open decodes": self.decode.num_open(),
            "outgoing transfers": kv.num_outgoing,
            "incoming transfers": kv.num_incoming,
            "send slots": kv.slots_in_use,
            "quarantined slots": kv.quarantined_slots,
        }
        return [f"{self.worker_id}: {count} {name}" for name, count in gauges.items() if count]


class Cluster:
    """Workers, wire, clock and scheduler. `routers` are the epochs that have a session everywhere."""

    def __init__(self, seed: int, config: RigConfig | None = None) -> None:
        self.config = config or RigConfig()
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.network = RigNetwork(self.config.faults)
        self.routers: set[int] = set()
        self.script: dict[int, Sequence[int]] = {}
        self.violations: list[str] = []
        self.had_stops = (
            False  # whether a worker ever was stopped: then deadlines are not kept, only the router's own are
        )
        self.extra_turns: Callable[[], list[Callable[[], None]]] = list  # the router's and the adversary's
        self.on_wire: Callable[[RigWorker, str, kv_pb2.LinkMessage], None] = lambda worker, peer, message: None
        self.workers: dict[str, RigWorker] = {}
        self._depth = 0
        for n in range(self.config.num_prefill):
            self.start(f"prefill-{n}", Role.PREFILL, self.config.prefill_blocks)
        for n in range(self.config.num_decode):
            self.start(f"decode-{n}", Role.DECODE, self.config.decode_blocks)

    # --- workers ---

    def start(self, worker_id: str, role: Role, num_blocks: int) -> RigWorker:
        """Start a worker and link every prefill worker with every decode worker, as `Peers` makes them do."""
        worker = self.workers[worker_id] = RigWorker(self, worker_id, role, num_blocks)
        for prefill in self.of_role(Role.PREFILL):
            for decode in self.of_role(Role.DECODE):
                if worker in (prefill, decode) and prefill is not decode:
                    prefill.links.open(decode, self.clock.now_s)
        return worker

    def kill(self, worker_id: str) -> None:
        """The process dies: its mailboxes are gone, peers see streams end, its transport leaves the wire."""
        dead = self.workers.pop(worker_id)
        dead.alive = False
        self.network.remove(dead.address)
        for end in dead.links.ends.values():
            if end.other is not None and not end.broken:
                end.other.inbox.append(None)
            end.broken = True
            if end.other is not None:
                end.other.broken = True
        for other in self.workers.values():
            other.links.forget(dead.worker_id, dead.epoch)
        self.violations += [f"{worker_id}: {fault}" for fault in dead.runner.faults]

    def restart(self, worker_id: str) -> RigWorker:
        """Die and come back with a new epoch."""
        old = self.workers[worker_id]
        self.kill(worker_id)
        return self.start(worker_id, old.role, old.runner.kv_cache.num_blocks)

    def of_role(self, role: Role) -> list[RigWorker]:
        return [worker for worker in self.workers.values() if worker.role in (role, Role.BOTH)]

    def find(self, worker_id: str, epoch: int) -> RigWorker:
        worker = self.workers.get(worker_id)
        if worker is None or worker.epoch != epoch:
            raise Unavailable(f"link to {worker_id} is down: it has restarted")
        return worker

    # --- the scheduler ---

    def turn(self) -> bool:
        """One turn of somebody, or a little time; False where only time can pass."""
        ready = [turn for worker in self.workers.values() for turn in worker.turns()] + self.extra_turns()
        if not ready:
            ready = [w.kv_turn for w in self.workers.values() if w.has_slow_kv and w.wants_kv]
        if not ready:
            self.clock.now_s += IDLE_S
            ready = [w.engine_turn for w in self.workers.values() if w.has_slow_engine and w.wants_engine]
        if not ready:
            return False
        if self._depth == 0 and self.rng.random() < 0.05:  # arbitrary: a few milliseconds pass between turns
            self.clock.now_s += 0.01 * self.rng.random()
        self.rng.choice(ready)()
        return True

    def interleave(self) -> None:
        """Let others run in the middle of an engine step."""
        if self._depth > 2 or self.rng.random() < 0.7:
            return
        self._depth += 1
        for _ in range(self.rng.randint(1, 4)):
            self.turn()
        self._depth -= 1

    def run_turns(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.turn()

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Turn until `condition` holds, for at most `limit_s` virtual seconds; whether it held."""
        stop_s = self.clock.now_s + limit_s
        while not condition():
            if self.clock.now_s > stop_s:
                return False
            self.turn()
        return True

    def run_for(self, duration_s: float) -> None:
        self.run_until(lambda: False, duration_s)

    def is_quiet(self) -> bool:
        """Nothing is under way, and nothing is left over."""
        return not any(worker.is_busy for worker in self.workers.values()) and not self.leftovers()

    def leftovers(self) -> list[str]:
        return [left for worker in self.workers.values() for left in worker.check_quiet()]

    def all_violations(self) -> list[str]:
        faults = [f"{worker.worker_id}: {fault}" for worker in self.workers.values() for fault in worker.runner.faults]
        return self.violations + faults
