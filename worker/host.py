"""The host: where a worker's threads, streams and roles meet. Everything here runs on the event loop.

It carries each message to the role that answers for it and nothing more: what happens to a request is in the roles
(prefill_worker/, decode_worker/), what happens to tensors is in the engine, bytes move in kv_transfer.

Both roles always exist; `role` says which of them take new work. SetRole takes effect at once on an idle worker; on a busy
one it first drains (new work is refused) and then flips. Draining lets everything that is open run to its end; a worker that
has nothing left to end says so (Load.idle). Drained with its weights loaded it is a standby: it costs a heartbeat, and serves
again with one message.

A defect of a role while it handles what a router or peer sent ends that stream. One in what the engine, the KV plane or the
clock brought leaves roles and engine out of step: the process ends, and Ray starts a fresh one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from baton import clock
from baton.config import WorkerConfig
from baton.errors import BatonError, Cancelled, InvalidRequest, Unavailable
from baton.log import get_log
from baton.peer_trust import PLAIN, PeerTrust
from baton.request import Request, Role
from baton.tracing import NO_TRACER, Tracer
from baton.v1 import control_pb2, kv_pb2, worker_pb2
from baton.wire import PROTOCOL_VERSION, error_to_pb, request_from_pb
from engine.ports import Engine, EngineLoad, StepResult
from engine.tuning import Tuning
from kv_transfer.events import KVEvent, KVLoad, PairLost, PairReady, TransportSettings
from kv_transfer.failure import FailureReason
from kv_transfer.pair import PairStatus
from worker.cache_report import CacheReport
from worker.engine_thread import Command, EngineThread
from worker.kv_view import TransferFailures, kv_status
from worker.links import DataPath, Links
from worker.load_news import LoadNews
from worker.loading import on_time
from worker.parked import ParkedCalls
from worker.role import KVPort, Ports, PullSource
from worker.role import Role as RoleProtocol
from worker.sessions import RouterSession, Sessions

log = get_log("worker.host")

TICK_S = 0.05  # deadlines and leases are seconds; 20 looks a second cost under 0.1 % of a core
# How far behind the loop may be before heartbeats it could not read are forgiven.
STALL_S = 0.5
CONTROLLER_SEQ = (
    0  # no sequence has it, since no router has the epoch 0: refusals of what was asked of the worker itself
)
# A router may not ask for more patience than that: the lease, for which what it leaves behind is kept anyway
MAX_HEARTBEAT_S = 5.0


class Plane(KVPort, DataPath, Protocol):
    """The KV plane as the host drives it; kv_transfer.plane.KVPlane is the one implementation."""

    @property
    def address(self) -> bytes: ...

    @property
    def settings(self) -> TransportSettings: ...

    def load(self) -> KVLoad: ...
    def peers(self) -> dict[str, PairStatus]: ...


class EngineCommands:
    """Implements worker.role.EnginePort by posting to the engine thread; a ticket's life is noted for its client, too."""

    def __init__(self, post: Callable[[Command], None], parked: ParkedCalls) -> None:
        self._post = post
        self._parked = parked

    def add(self, request: Request, *, prefill_only: bool) -> None:
        self._post(lambda engine, now_s: engine.add(request, now_s, prefill_only=prefill_only))

    def reserve(self, request: Request) -> None:
        self._parked.open(request)
        self._post(lambda engine, now_s: engine.reserve(request, now_s))

    def adopt(self, seq: int, first_token: int) -> None:
        self._parked.adopted(seq, first_token)
        self._post(lambda engine, now_s: engine.adopt(seq, first_token, now_s))

    def drop(self, seq: int) -> None:
        self._parked.ended(seq, clock.now_s())  # for tickets that were never adopted: no Ended tells of those
        self._post(lambda engine, _: engine.drop(seq))

    def pin(self, seq: int, hashes: Sequence[bytes]) -> None:
        self._post(lambda engine, _: engine.pin(seq, hashes))

    def unpin(self, seq: int) -> None:
        self._post(lambda engine, _: engine.unpin(seq))

    def make_room(self, request: Request, num_blocks: int) -> None:
        self._post(lambda engine, _: engine.make_room(request, num_blocks))

    def publish(self, seq: int, num_blocks: int) -> None:
        self._post(lambda engine, _: engine.publish(seq, num_blocks))


RoleBuilder = Callable[[Ports, WorkerConfig], RoleProtocol]


class WorkerHost:
    """Implements worker.role.Ports and worker.links.LinkListener.

    Args:
        identity: what routers are told in Opened (worker id, epoch, model, sizes).
        hello: what peers are told, but for the pair's nonce.
        on_fatal: the engine or a role is beyond repair; the process should end.
        lateness: see worker.loading.LoadedModel.
    """

    def __init__(
        self,
        config: WorkerConfig,
        identity: worker_pb2.Opened,
        hello: kv_pb2.Hello,
        engine: Engine,
        plane: Plane,
        build_prefill: RoleBuilder,
        build_decode: RoleBuilder,
        loop: asyncio.AbstractEventLoop,
        on_fatal: Callable[[BaseException], None],
        trust: PeerTrust = PLAIN,
        lateness: Callable[[], float] = on_time,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._config = config
        self.tracer = tracer
        self._identity = identity
        self._lateness = lateness
        self._loop = loop
        self._plane = plane
        self.epoch = identity.epoch
        self.role = Role[config.role.upper()]
        self._next_role: Role | None = None
        self._flips_at_s = 0.0  # at the earliest: from then on an emulated worker has its next role
        self.draining = False
        self._busy_s = clock.now_s()  # when something was last open here, or routers were last told of a drain
        self._engine_load = engine.load()
        self._most = self._engine_load.tuning
        self._cache_report = CacheReport()
        self._on_fatal = on_fatal
        self._thread = EngineThread(engine, loop, self._on_result, on_fatal)
        self.parked = ParkedCalls(config.parked_bytes)
        self._load_news = LoadNews()
        self.engine = EngineCommands(self._thread.post, self.parked)
        self.kv: KVPort = plane
        self._kv_failures = TransferFailures()
        self.sessions = Sessions(
            max_bytes=config.outbox_bytes,
            max_age_s=config.outbox_s,
            on_lost=self._on_router_lost,
            parked=self.parked,
        )
        self.links = Links(
            hello,
            plane,
            self,
            ping_s=config.heartbeat_s,
            silence_limit_s=config.kv.lease_s,
            hello_timeout_s=config.kv.hello_timeout_s + 1.0,  # the plane's own probe limit, and gRPC around it
            max_outbox_bytes=config.outbox_bytes,
            trust=trust,
        )
        self._prefill = build_prefill(self, config)
        self._decode = build_decode(self, config)
        self._roles: Sequence[RoleProtocol] = (self._prefill, self._decode)
        self._ticker: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()

    # --- life ---

    def start(self) -> None:
        self._thread.start()
        self._ticker = self._loop.create_task(self._tick(), name="tick")

    async def stop(self) -> None:
        """Close links and sessions, end the engine thread. Open sequences end with their streams."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.sessions.close_all("the worker stops")
        await self.links.close()
        await self._loop.run_in_executor(None, self._thread.stop)

    async def drain(self) -> None:
        """Take no new work; return once nothing is open and routers have read of every end."""
        self._set_draining(True)
        self._idle.clear()
        await self._idle.wait()

    async def _tick(self) -> None:
        silence_limit_s = self._config.heartbeat_s * (self._config.missed_heartbeats + 1)
        while True:
            before_s = clock.now_s()
            await asyncio.sleep(TICK_S)
            now_s = clock.now_s()
            if now_s - before_s < STALL_S:
                self.sessions.check(now_s, silence_limit_s)
            else:
                self.sessions.forgive(now_s - before_s)
            with self._fatal_if_it_raises():
                for role in self._roles:
                    role.on_tick()
                self.parked.expire(now_s)
                self._flush(step=0)
                self._flip_if_idle()
            if self._is_busy() or self.sessions.owe():
                self._busy_s = now_s
            else:
                self._idle.set()

    @contextlib.contextmanager
    def _fatal_if_it_raises(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the worker loop's boundary
            log.exception("worker_defect")
            self._on_fatal(error)

    # --- Ports ---

    @property
    def step_tokens(self) -> int:
        return self._engine_load.tuning.max_num_batched_tokens

    def now_s(self) -> float:
        return clock.now_s()

    def refusal(self, kind: Role) -> BatonError | None:
        if self.draining or self._next_role is not None:
            return Unavailable(f"worker {self._config.worker_id} is draining", retry_after_s=1.0)
        if self.role not in (kind, Role.BOTH):
            name = self.role.name.lower()
            return Unavailable(f"worker {self._config.worker_id} has the role {name}, not {kind.name.lower()}")
        return None

    # --- routers ---

    def open_session(self, router_id: str, router_epoch: int) -> RouterSession:
        session = self.sessions.open(router_id, router_epoch)
        opened = worker_pb2.Opened()
        opened.CopyFrom(self._identity)
        opened.role = worker_pb2.Role.ValueType(self.role)
        opened.most.CopyFrom(worker_pb2.Tune(**dataclasses.asdict(self._most)))
        opened.protocol_version = PROTOCOL_VERSION
        opened.load.CopyFrom(self.load())
        opened.links.extend(self.links.statuses())
        session.send(worker_pb2.SessionEvent(opened=opened))
        session.greet(worker_pb2.SessionEvent(cache_delta=delta) for delta in self._cache_report.whole())
        return session

    def on_session(self, session: RouterSession, request: worker_pb2.SessionRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "submit":
            self._on_submit(session, request.submit)
        elif kind == "cancel":
            if request.cancel.seq >> 32 == session.router_epoch:
                if not request.cancel.park:
                    self.parked.forget_seq(request.cancel.seq)
                self._on_cancel(request.cancel.seq)
        elif kind == "reroute":
            self._on_reroute(session, request.reroute)
        elif kind == "heartbeat":
            reply = worker_pb2.HeartbeatReply(sent_ns=request.heartbeat.sent_ns, load=self.load())
            if request.heartbeat.want_kv:
                reply.kv.CopyFrom(kv_status(self._plane.settings, self.links.openers(), self._plane.peers()))
            session.send(worker_pb2.SessionEvent(heartbeat=reply))
            slower_s = min(1e-3 * request.heartbeat.next_ms, MAX_HEARTBEAT_S) - self._config.heartbeat_s
            session.extra_silence_s = (self._config.missed_heartbeats + 1) * max(0.0, slower_s)
        elif kind == "set_role":
            self._set_role(request.set_role.role)
        elif kind == "drain":
            self._set_draining(request.drain.draining)
        elif kind == "tune":
            try:
                self._tune(request.tune)
            except InvalidRequest as error:
                session.refused(CONTROLLER_SEQ, error)
        elif kind == "find":
            self._on_find(session, request.find)
        elif kind == "forget":
            self._end_call(request.forget.key, "the call was aborted")
            self.parked.forget(request.forget.key)
        elif kind == "peers":
            self.links.want(session.router_epoch, list(request.peers.decode))
        self._flush(step=0)

    def _on_submit(self, session: RouterSession, submit: worker_pb2.Submit) -> None:
        seq = submit.request.seq
        try:
            if seq >> 32 != session.router_epoch:
                raise InvalidRequest("seq must begin with the router_epoch of its Session", field="seq")
            request = request_from_pb(submit.request)
            if self.parked.is_superseded(request):
                raise Cancelled("the call was resumed on another router")
            deadline_s = self.now_s() + submit.ttl_ms / 1_000
            self.parked.open(request, deadline_s)
            if not submit.HasField("decode"):
                self._decode.on_submit(request, "", deadline_s)
                return
            decode_peer = ""
            if request.num_tokens_left > 1:  # else the prefill's own token is all: no decode worker is needed
                decode_peer = self.links.open(submit.decode, session.router_epoch)
            self._prefill.on_submit(request, decode_peer, deadline_s, self._pull_source(submit, session.router_epoch))
        except BatonError as error:
            self.parked.forget_seq(seq)
            session.refused(seq, error)

    def _pull_source(self, submit: worker_pb2.Submit, router_epoch: int) -> PullSource | None:
        """Who caches more of the prompt. One that cannot be reached is no reason to refuse it: it is computed."""
        if not submit.HasField("pull_from"):
            return None
        try:
            return PullSource(self.links.open(submit.pull_from, router_epoch), submit.pull_blocks)
        except BatonError as error:
            log.info("pull_skipped", request_id=submit.request.request_id, code=error.code)
            return None

    def _on_cancel(self, seq: int) -> None:
        for role in self._roles:
            role.on_cancel(seq)

    def _on_reroute(self, session: RouterSession, reroute: worker_pb2.Reroute) -> None:
        if reroute.seq >> 32 != session.router_epoch:
            return
        try:
            peer = self.links.open(reroute.decode, session.router_epoch)
        except BatonError as error:
            if any(role.can_reroute(reroute.seq) for role in self._roles):  # else it has ended, and said so
                session.handoff_lost(reroute.seq, error, reroute.serial)
            return
        for role in self._roles:
            role.on_reroute(reroute.seq, peer, reroute.serial)

    def _on_find(self, session: RouterSession, find: worker_pb2.Find) -> None:
        now_s = self.now_s()
        if not find.offset and not self.parked.is_claimed(find.key, session.router_epoch, now_s):
            self._end_call(find.key, "the client resumed the call elsewhere")
        session.send(worker_pb2.SessionEvent(found=self.parked.find(find, session.router_epoch, now_s)))

    def _end_call(self, key: bytes, reason: str) -> None:
        """End what runs of a resumable call here; its router hears why, and not that a worker gave it up."""
        for seq in self.parked.running(key):
            ended = worker_pb2.Ended(
                seq=seq, outcome=worker_pb2.OUTCOME_FAILED, error=error_to_pb(Cancelled(reason))
            )  # fmt: skip
            self.sessions.ended(ended)
            with self.sessions.muted(seq):
                self._on_cancel(seq)

    def _on_router_lost(self, router_epoch: int) -> None:
        self.parked.router_lost(router_epoch, self.now_s())
        self.links.forget_router(router_epoch)
        for role in self._roles:
            role.on_router_lost(router_epoch)

    def adopt_wishes(self, answer: control_pb2.AnnounceResponse) -> None:
        """Start as the controller last wanted this worker: a restart forgets neither a flip, nor a drain, nor its tuning."""
        self._set_draining(answer.draining)
        if answer.role:
            self._set_role(answer.role)
        if answer.HasField("tuning"):
            try:
                self._tune(answer.tuning)
            except InvalidRequest as error:  # of a start with other settings
                log.warning("tuning_refused", field=error.field, reason=error.message)

    def _tune(self, wanted: worker_pb2.Tune) -> None:
        """Raises: InvalidRequest: it stays as it is."""
        tuning = Tuning(wanted.max_num_seqs, wanted.max_num_batched_tokens, wanted.chunk_tokens)
        tuning.check(self._most)
        self._thread.post(lambda engine, _: engine.tune(tuning))

    def _set_draining(self, draining: bool) -> None:
        """Every router hears it at once: what it places meanwhile is refused."""
        if draining is not self.draining:
            self.draining = draining
            self._busy_s = self.now_s()
            log.info("draining", draining=draining)
            self.sessions.broadcast(worker_pb2.SessionEvent(load=self.load()))

    def _is_busy(self) -> bool:
        return any(role.num_open() for role in self._roles)

    def _has_drained(self) -> bool:
        """Nothing has been open for a heartbeat: what a router had placed before it heard of the drain has come and was
        answered."""
        quiet_s = self.now_s() - self._busy_s  # as of the last tick, which a stall may have put off
        return self.draining and not self._is_busy() and quiet_s > self._config.heartbeat_s

    def _set_role(self, role: worker_pb2.Role.ValueType) -> None:
        try:
            wanted = Role(role)
        except ValueError:
            log.warning("unknown_role", role=role)
            return
        before, self._next_role = self._next_role, wanted if wanted is not self.role else None
        if self._next_role is not before:
            self._flips_at_s = self.now_s() + self._config.emulation.flip_s
        self._flip_if_idle()
        if self._next_role is not None:  # it drains first
            self.sessions.broadcast(worker_pb2.SessionEvent(load=self.load()))

    def _flip_if_idle(self) -> None:
        if self._next_role is None:
            return
        now_s = self.now_s()
        if self._is_busy():
            self._flips_at_s = now_s + self._config.emulation.flip_s
        if self._is_busy() or now_s < self._flips_at_s:
            return
        log.info("role_changed", before=self.role.name.lower(), after=self._next_role.name.lower())
        self.role = self._next_role
        self._next_role = None
        self.sessions.broadcast(worker_pb2.SessionEvent(load=self.load()))

    # --- the engine ---

    def _on_result(self, result: StepResult, load: EngineLoad) -> None:
        with self._fatal_if_it_raises():
            before, self._engine_load = self._engine_load, load
            if load.tuning != before.tuning:
                log.info("tuned", **dataclasses.asdict(load.tuning))
                self.sessions.broadcast(worker_pb2.SessionEvent(load=self.load()))
            for role in self._roles:
                role.on_step(result)
            if result.cache_added or result.cache_removed:
                for delta in self._cache_report.change(result.cache_added, result.cache_removed):
                    self.sessions.broadcast(worker_pb2.SessionEvent(cache_delta=delta))
            self._flush(result.step)

    def _flush(self, step: int) -> None:
        if self.sessions.has_unsent():
            self.sessions.flush(step, self.load())
        if self._load_news.is_news(self._waiting_tokens()):
            self.sessions.broadcast(worker_pb2.SessionEvent(load=self.load()))

    def _waiting_tokens(self) -> int:
        return self._engine_load.waiting_tokens + sum(tokens for role in self._roles for tokens in role.queued_tokens())

    # --- the KV plane ---

    def on_kv(self, event: KVEvent) -> None:
        with self._fatal_if_it_raises():
            self._kv_failures.note(event)
            if isinstance(event, PairReady):
                self.links.on_pair_ready(event.peer, event.pair_nonce, event.transport)
            elif isinstance(event, PairLost):
                self.links.on_pair_lost(event.peer, event.pair_nonce, event.reason)
            else:
                for role in self._roles:
                    role.on_kv(event)
            self._flush(step=0)

    # --- LinkListener ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> None:
        try:
            for role in self._roles:
                if role.on_link(peer, message):
                    break
        except InvalidRequest as error:
            log.warning("bad_link_message", peer=peer, field=error.field)
        self._flush(step=0)

    def on_link_ready(self, peer: str) -> None:
        for role in self._roles:
            role.on_link_ready(peer)
        self._publish_links()

    def on_link_lost(self, peer: str, error: BatonError) -> None:
        for role in self._roles:
            role.on_link_lost(peer, error)
        self._flush(step=0)
        self._publish_links()

    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]:
        return [ticket for role in self._roles for ticket in role.live_tickets(peer)]

    def _publish_links(self) -> None:
        links = worker_pb2.Links(links=self.links.statuses())
        self.sessions.broadcast(worker_pb2.SessionEvent(links=links))

    # --- gauges ---

    def _transfer_failures(self) -> dict[str, int]:
        refused = sum(role.num_refused_commits for role in self._roles)
        return self._kv_failures.totals() | ({FailureReason.REFUSED_COMMIT: refused} if refused else {})

    def load(self) -> worker_pb2.Load:
        engine = self._engine_load
        kv = self._plane.load()
        queued_tokens = [tokens for role in self._roles for tokens in role.queued_tokens()]
        failures = self._transfer_failures()
        return worker_pb2.Load(
            role=worker_pb2.Role.ValueType(self.role),
            draining=self.draining or self._next_role is not None,
            num_running=engine.num_running,
            num_waiting=engine.num_waiting + len(queued_tokens),
            waiting_tokens=engine.waiting_tokens + sum(queued_tokens),
            active_blocks=engine.active_blocks,
            reserved_blocks=engine.reserved_blocks,
            cached_blocks=engine.cached_blocks,
            free_blocks=engine.free_blocks,
            num_steps=engine.num_steps,
            num_preemptions=engine.num_preemptions,
            prompt_tokens_computed=engine.prompt_tokens_computed,
            prompt_tokens_cached=engine.prompt_tokens_cached,
            output_tokens=engine.output_tokens,
            step_ms=engine.step_ms,
            busy_s=engine.busy_s,
            step_tokens=engine.step_tokens,
            context_tokens=engine.context_tokens,
            prompt_pairs=engine.prompt_pairs,
            num_prompt_steps=engine.num_prompt_steps,
            prompt_steps_busy_s=engine.prompt_steps_busy_s,
            prompt_steps_tokens=engine.prompt_steps_tokens,
            prompt_steps_context_tokens=engine.prompt_steps_context_tokens,
            age_s=self._thread.silent_s,
            num_tickets=kv.num_incoming,
            num_leases=kv.num_outgoing,
            slots_in_use=kv.slots_in_use,
            num_slots=kv.num_slots,
            kv_bytes_sent=kv.bytes_sent,
            kv_bytes_received=kv.bytes_received,
            kv_transfers_failed=sum(failures.values()),
            kv_failures=failures,
            kv_frames_dropped=kv.frames_dropped,
            num_admitted=engine.num_admitted,
            kv_transfers_expired=kv.transfers_expired,
            quarantined_slots=kv.quarantined_slots,
            session_outbox_bytes=self.sessions.outbox_bytes(),
            link_outbox_bytes=self.links.outbox_bytes(),
            p99_lateness=self._lateness(),
            max_num_seqs=engine.tuning.max_num_seqs,
            max_num_batched_tokens=engine.tuning.max_num_batched_tokens,
            chunk_tokens=engine.tuning.chunk_tokens,
            next_role=worker_pb2.Role.ValueType(self._next_role or 0),
            idle=self._has_drained(),
        )
