"""One worker as seen through its Session: the client side of worker.proto, used by routers and by the controller.

States, in the order of a worker's life:
    connecting  no stream yet, or `Opened` has not come; backs off and tries again for ever
    ready       `Opened` came; heartbeats go out and something comes back at least every `heartbeat_s * missed_heartbeats`
    draining    ready, but the worker takes no new sequence
    lost        the stream broke or fell silent; every sequence open here was told so; next state is connecting
    closed      this object was told to stop

Invariants: a sequence attached here gets either its own end or `WorkerGone`, never silence. Another epoch is another worker:
nothing survives a reconnect. Runs on the event loop; sending never blocks (the outbox is drained by one task).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from baton import clock
from baton.errors import WorkerLost
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust, why_failed
from baton.request import FinishReason, Logprobs, Request
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION, error_from_pb, request_to_pb
from router.events import HandoffLost, Listener, SequenceEnded, SequenceRefused, WorkerGone
from router.prefix_index import PrefixIndex, PrefixRoot, WorkerPrefixes

log = get_log("router.session")

MIN_BACKOFF_S = 0.1  # first retry: a restarting gRPC server answers within one heartbeat (0.5 s, DESIGN section 5)
# Until `Opened` comes. A worker that only starts is not lost, and a router that meets a thousand at once is slow itself.
CONNECT_S = 10.0
MAX_BACKOFF_S = 2.0  # a worker that returns is seen within the 5 s of the peer-restart cases
MAX_MESSAGE_BYTES = 64 << 20  # a Step with 20 logprobs for 64 sequences is under 1 MiB; a Request of 1M ids is 5 MiB

NO_LOGPROBS: Mapping[int, Logprobs] = {}

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a reconnect is a new connection, never a shared half-dead one
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Who opens Sessions: a router (or the controller), its epoch and what it shows to workers."""

    router_id: str
    router_epoch: int
    trust: PeerTrust = PLAIN
    tokenizer_hash: str = ""  # of who makes ids of text and text of ids; "" = it does not


@dataclass(frozen=True, slots=True)
class Liveness:
    """When a silent worker counts as dead. Defaults: DESIGN section 5."""

    heartbeat_s: float = 0.5
    missed_heartbeats: int = 3

    @property
    def silence_s(self) -> float:
        return self.heartbeat_s * self.missed_heartbeats


@dataclass(slots=True)
class WorkerView:
    """What a worker last said of itself. Replaced whole at every `Opened`."""

    opened: worker_pb2.Opened
    load: worker_pb2.Load
    load_s: float  # when that came, on the monotonic clock
    prefixes: WorkerPrefixes
    links: dict[str, worker_pb2.LinkStatus] = field(default_factory=dict)  # by peer worker_id
    kv: worker_pb2.KvStatus | None = None  # None before the first reply, or where nobody asks


def _follow_alone(root: PrefixRoot, num_blocks: int) -> WorkerPrefixes:
    """In an index of its own, for who has no other worker to compare it with."""
    return PrefixIndex(max(1, num_blocks), 1).follow(0, root, num_blocks)


def _ignore(load: worker_pb2.Load) -> None:
    """For who places nothing."""


class SessionLost(Exception):
    """The stream is of no more use; `str()` is the reason."""


class WorkerSession:
    """Keeps one Session open to the worker at `address`. `on_change` is called after every change of state or links, `on_load`
    with every report of load, the first of a Session included; `follow` says where the prefix cache of a new Session is noted.

    With `want_kv` each heartbeat asks what the KV plane does, and the prefix cache is not followed: for operators, who place
    nothing; routers have no use for the one and need the other.
    """

    def __init__(
        self,
        worker_id: str,
        address: str,
        identity: SessionIdentity,
        liveness: Liveness,
        on_change: Callable[[], None],
        *,
        on_load: Callable[[worker_pb2.Load], None] = _ignore,
        follow: Callable[[PrefixRoot, int], WorkerPrefixes] = _follow_alone,
        want_kv: bool = False,
    ) -> None:
        self.worker_id = worker_id  # "" until the worker says its name (a static list knows addresses only)
        self.address = address
        self.view: WorkerView | None = None  # None unless a Session is open
        self.reason = "not connected yet"  # why there is no view
        self._identity = identity
        self._liveness = liveness
        self._on_change = on_change
        self._note_load = on_load
        self._follow = follow
        self._want_kv = want_kv
        self._listeners: dict[int, Listener] = {}
        self._outbox: asyncio.Queue[worker_pb2.SessionRequest | None] = (
            asyncio.Queue()
        )  # None ends the stream's requests
        self._finds: dict[int, asyncio.Future[worker_pb2.Found]] = {}  # questions that wait for their answers
        self.idle_heartbeat_s = liveness.heartbeat_s  # while no sequence of ours is there; the usual pace at least
        self._busy = asyncio.Event()  # a sequence has come while it slept for longer
        self._heard_s = 0.0
        self._task: asyncio.Task[None] | None = None

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"session {self.address}")

    async def close(self, reason: str = "the worker left the fleet") -> None:
        """Close the stream; sequences still open here are told `WorkerGone`."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._lose(reason)

    @property
    def state(self) -> str:
        """connecting | ready | draining | flipping, as a router may use it: calls go to ready ones only."""
        if self.view is None:
            return "connecting"
        if self.view.load.next_role:
            return "flipping"
        return "draining" if self.view.load.draining else "ready"

    @property
    def epoch(self) -> int:
        """The worker's, 0 while there is no Session."""
        return self.view.opened.epoch if self.view else 0

    async def _run(self) -> None:
        backoff_s = MIN_BACKOFF_S
        while True:
            try:
                await self._one_stream()
            except (SessionLost, grpc.aio.AioRpcError) as error:
                reason = why_failed(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            except Exception as error:  # RPC boundary: a message that makes no sense must not end the reconnecting
                log.exception("session_failed", worker=self.worker_id, address=self.address)
                reason = f"its messages cannot be understood ({type(error).__name__})"
            if _being_cancelled():  # by `close`, at the moment when the stream ended: its error took the cancel's place
                raise asyncio.CancelledError
            was_open = self.view is not None
            if was_open:
                log.warning("worker_lost", worker=self.worker_id, address=self.address, epoch=self.epoch, reason=reason)
            elif reason != self.reason:  # said once, not at every attempt
                log.warning("worker_unreachable", worker=self.worker_id, address=self.address, reason=reason)
            self._lose(reason)
            backoff_s = MIN_BACKOFF_S if was_open else min(2 * backoff_s, MAX_BACKOFF_S)
            # Jitter of a half keeps routers from returning in step.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))

    async def _one_stream(self) -> None:
        """Serve one stream until it ends. Raises SessionLost or AioRpcError, never returns otherwise."""
        self._outbox = asyncio.Queue()
        async with self._identity.trust.channel(self.address, Part.WORKER, CHANNEL_OPTIONS) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            call = stub.Session(self._requests())
            self._heard_s = clock.now_s()
            beat = asyncio.create_task(self._beat(call.cancel), name=f"heartbeat {self.address}")
            try:
                async for event in call:
                    self._heard_s = clock.now_s()
                    self._dispatch(event)
                raise SessionLost("the worker closed the Session")
            except asyncio.CancelledError:
                if _being_cancelled():
                    raise
                raise SessionLost(self._silence()) from None  # the silence watch cancelled the call
            finally:
                beat.cancel()
                call.cancel()
                self._outbox.put_nowait(None)  # grpc reads the requests of a call that is over until they end

    async def _requests(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(
            open=worker_pb2.Open(
                router_id=self._identity.router_id,
                router_epoch=self._identity.router_epoch,
                protocol_version=PROTOCOL_VERSION,
            )
        )
        outbox = self._outbox
        while (request := await outbox.get()) is not None:
            yield request

    async def _beat(self, cancel_call: Callable[[], bool]) -> None:
        """Send heartbeats; cancel the call and return once the worker has been silent too long.

        Time in which our own loop stood still is not the worker's silence: what it said meanwhile is not read yet.
        """
        missed = self._liveness.missed_heartbeats
        while True:
            pause_s = self._liveness.heartbeat_s if self._listeners else self.idle_heartbeat_s
            if clock.now_s() - self._heard_s >= (missed * pause_s if self.view else CONNECT_S):
                cancel_call()
                return
            beat = worker_pb2.Heartbeat(
                sent_ns=int(1e9 * clock.now_s()), want_kv=self._want_kv, next_ms=int(1e3 * pause_s)
            )
            self._send(worker_pb2.SessionRequest(heartbeat=beat))
            before_s = clock.now_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._busy.wait()
            self._busy.clear()
            slept_s = clock.now_s() - before_s
            if slept_s > 2 * pause_s:
                self._heard_s += slept_s

    def _silence(self) -> str:
        if self.view is None:
            return f"it did not open the Session within {CONNECT_S:g} s"
        return f"no answer to {self._liveness.missed_heartbeats} heartbeats of {self._liveness.heartbeat_s:g} s"

    def _lose(self, reason: str) -> None:
        changed = self.view is not None or self.reason != reason
        self.view = None
        self.reason = reason
        for answer in self._finds.values():
            if not answer.done():
                answer.set_exception(WorkerLost(f"worker {self.worker_id} was lost: {reason}"))
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.put(WorkerGone(self.worker_id, reason))
        if changed:  # thousands that cannot be reached say so once
            self._on_change()

    # -- out ---------------------------------------------------------------------------------------------------------

    def attach(self, seq: int, listener: Listener) -> None:
        """Tell `listener` all that this worker says of `seq`, until `detach`."""
        if self.view is None:
            listener.put(WorkerGone(self.worker_id, self.reason))
            return
        if not self._listeners and self.idle_heartbeat_s > self._liveness.heartbeat_s:
            self._heard_s = clock.now_s()  # from now on silence counts
            self._busy.set()
        self._listeners[seq] = listener

    def detach(self, seq: int) -> None:
        self._listeners.pop(seq, None)

    @property
    def num_attached(self) -> int:
        return len(self._listeners)

    def submit(
        self,
        request: Request,
        decode: worker_pb2.Peer | None,
        ttl_ms: int,
        pull_from: worker_pb2.Peer | None = None,
        pull_blocks: int = 0,
    ) -> None:
        """Give the worker a sequence; `decode` None = prefill and decode both here. Attach first."""
        submit = worker_pb2.Submit(
            request=request_to_pb(request),
            decode=decode,
            ttl_ms=max(1, ttl_ms),
            pull_from=pull_from,
            pull_blocks=pull_blocks,
        )
        self._send(worker_pb2.SessionRequest(submit=submit))

    def cancel(self, seq: int, *, park: bool = False) -> None:
        """`park`: of a resumable call; the worker keeps what it knows of it."""
        self._send(worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(seq=seq, park=park)))

    async def find(self, key: bytes, offset: int) -> worker_pb2.Found:
        """Claim a resumable call: one page of what the worker keeps of it. Raises: WorkerLost."""
        if self.view is None:
            raise WorkerLost(f"worker {self.worker_id} is not connected: {self.reason}")
        answer: asyncio.Future[worker_pb2.Found] = asyncio.get_running_loop().create_future()
        number = id(answer)  # it lives until it is answered
        self._finds[number] = answer
        self._send(worker_pb2.SessionRequest(find=worker_pb2.Find(find=number, key=key, offset=offset)))
        try:
            return await answer
        finally:
            self._finds.pop(number, None)

    def forget(self, key: bytes) -> None:
        """Let the worker end what it runs of a resumable call, and keep nothing."""
        self._send(worker_pb2.SessionRequest(forget=worker_pb2.Forget(key=key)))

    def reroute(self, seq: int, decode: worker_pb2.Peer, serial: int) -> None:
        """Let a prefill worker hand a sequence that it still holds over to another decode worker."""
        self._send(worker_pb2.SessionRequest(reroute=worker_pb2.Reroute(seq=seq, decode=decode, serial=serial)))

    def set_role(self, role: worker_pb2.Role.ValueType) -> None:
        self._send(worker_pb2.SessionRequest(set_role=worker_pb2.SetRole(role=role)))

    def drain(self, draining: bool) -> None:
        self._send(worker_pb2.SessionRequest(drain=worker_pb2.Drain(draining=draining)))

    def tune(self, tune: worker_pb2.Tune) -> None:
        """Change limits of the worker's engine; its load reports show them, or it refuses."""
        self._send(worker_pb2.SessionRequest(tune=tune))

    def set_peers(self, decode: Sequence[worker_pb2.Peer]) -> None:
        """Name the decode workers this router may ask the worker to hand over to."""
        self._send(worker_pb2.SessionRequest(peers=worker_pb2.Peers(decode=decode)))

    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.worker_id, epoch=self.epoch, address=self.address)

    def _send(self, message: worker_pb2.SessionRequest) -> None:
        self._outbox.put_nowait(message)

    # -- in ----------------------------------------------------------------------------------------------------------

    def _dispatch(self, event: worker_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("message")
        if kind == "step":
            self._on_step(event.step)
        elif kind == "opened":
            self._on_opened(event.opened)
        elif kind == "ended":
            self._on_ended(event.ended)
        elif kind == "refused":
            if listener := self._listeners.pop(event.refused.seq, None):
                listener.put(SequenceRefused(self.worker_id, error_from_pb(event.refused.error)))
        elif kind == "handoff_lost":
            if listener := self._listeners.get(event.handoff_lost.seq):
                lost = event.handoff_lost
                listener.put(HandoffLost(error_from_pb(lost.error), lost.reroute))
        elif kind == "heartbeat":
            self._on_load(event.heartbeat.load)
            if self.view is not None and event.heartbeat.HasField("kv"):
                self.view.kv = event.heartbeat.kv
        elif kind == "load":
            self._on_load(event.load)
        elif kind == "cache_delta" and self.view is not None and not self._want_kv:
            delta = event.cache_delta
            self.view.prefixes.apply(delta.generation, delta.added, delta.removed, reset=delta.reset)
        elif kind == "found":
            if (answer := self._finds.get(event.found.find)) and not answer.done():
                answer.set_result(event.found)
        elif kind == "links":
            self._on_links(event.links.links)

    def _on_opened(self, opened: worker_pb2.Opened) -> None:
        if opened.protocol_version != PROTOCOL_VERSION:
            raise SessionLost(f"it speaks protocol version {opened.protocol_version}, this router {PROTOCOL_VERSION}")
        if self.worker_id and opened.worker_id != self.worker_id:
            raise SessionLost(f"another worker, {opened.worker_id!r}, answers at {self.address}")
        ours, theirs = self._identity.tokenizer_hash, opened.tokenizer_hash
        if ours and theirs and ours != theirs:
            raise SessionLost(f"its tokenizer is another one ({theirs[:16]}) than this router's ({ours[:16]})")
        self.worker_id = opened.worker_id
        root = PrefixRoot(opened.fingerprint, opened.kv_dtype, opened.block_size)
        _make_plain(opened.load)
        self.view = WorkerView(opened, opened.load, clock.now_s(), self._follow(root, opened.num_blocks))
        self._note_load(opened.load)
        log.info(
            "worker_ready",
            worker=opened.worker_id,
            address=self.address,
            epoch=opened.epoch,
            role=worker_pb2.Role.Name(opened.role),
        )
        self._on_links(opened.links)

    def _on_links(self, links: Sequence[worker_pb2.LinkStatus]) -> None:
        if self.view is not None:
            self.view.links = {status.peer.worker_id: status for status in links}
            self._on_change()

    def _on_load(self, load: worker_pb2.Load) -> None:
        if self.view is None:
            return
        _make_plain(load)
        before, self.view.load, self.view.load_s = self.view.load, load, clock.now_s()
        changed = load.role != before.role or load.draining != before.draining or load.next_role != before.next_role
        self._note_load(load)
        if changed:
            self._on_change()

    def _on_step(self, step: worker_pb2.Step) -> None:
        """The hot path: one message per engine step, one call per token."""
        now_s = clock.now_s()
        listeners, worker_id = self._listeners, self.worker_id
        logprobs = {entry.entry: _logprobs(entry) for entry in step.logprobs} if step.logprobs else NO_LOGPROBS
        rows = zip(step.seq[:], step.index[:], step.token[:], step.flags[:], strict=True)  # of lists: half the price
        for entry, (seq, index, token_id, flags) in enumerate(rows):
            if (listener := listeners.get(seq)) is not None:
                listener.on_token(worker_id, index, token_id, flags, logprobs.get(entry), now_s)
        for ended in step.ended:
            self._on_ended(ended)
        if step.HasField("load"):
            self._on_load(step.load)

    def _on_ended(self, ended: worker_pb2.Ended) -> None:
        if listener := self._listeners.pop(ended.seq, None):
            listener.put(
                SequenceEnded(
                    worker=self.worker_id,
                    outcome=ended.outcome,
                    finish=FinishReason(ended.finish_reason),
                    error=error_from_pb(ended.error) if ended.HasField("error") else None,
                    stats=ended.stats,
                    reroute=ended.reroute,
                )
            )


def _being_cancelled() -> bool:
    """Whether this task, and not just a call it awaits, was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _make_plain(load: worker_pb2.Load) -> None:
    """Take a step time that is no time for one not measured: averages over workers never lose a NaN again."""
    if not 0.0 <= load.step_ms < math.inf:
        load.step_ms = 0.0


def _logprobs(entry: worker_pb2.TokenLogprobs) -> Logprobs:
    return Logprobs(entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs))
