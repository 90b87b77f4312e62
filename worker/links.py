"""Links: one control stream per pair and direction, from the worker that prefills to the one that decodes.

    1 CONNECTING  Hello each way (gRPC), then the KV plane proves the data path with probe frames
    2 READY       both ends said LinkReady; messages flow, pings renew tickets
    3 LOST        stream, data path or pings ended, or the peer does not read (link_outbox.py): transfers are closed, roles
                  are told, the opener tries again
    4 REFUSED     the two do not fit (`hello.py` names the field); not tried again while the peer's epoch stays

A link's key is ">id/epoch" on the opener's side and "<id/epoch" on the other: a restarted peer is another peer, and two
workers that send both ways have two links. KV bytes never ride here. Runs on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from baton import clock
from baton.errors import BatonError, Internal, PeerRefused, Unavailable, WorkerLost
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust, why_failed
from baton.v1 import kv_pb2, kv_pb2_grpc, worker_pb2
from worker.hello import Refusal, check_hello, check_transport, refusal_by_peer
from worker.link_outbox import MAX_OUTBOX_BYTES, LinkOutbox

log = get_log("worker.links")

# Reconnecting: quick at first, since a restarted peer's port answers within a second; then once per lease.
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0


def peer_epoch(key: str) -> int:
    """Of the worker at the other end of the link that has this key."""
    return int(key.rpartition("/")[2], 16)


def peer_worker(key: str) -> str:
    """The name of that worker; "" of no link."""
    return key[1:].rpartition("/")[0]


class State(enum.StrEnum):
    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"


class DataPath(Protocol):
    """The part of the KV plane that links drive."""

    def connect(
        self,
        peer: str,
        peer_epoch: int,
        address: bytes,
        pair_nonce: int,
        frame_bytes: int,
        num_slots: int,
        peer_dtype: str = "",
    ) -> None: ...
    def disconnect(self, peer: str) -> None: ...


class LinkListener(Protocol):
    """Who hears about links: the host."""

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> None: ...
    def on_link_ready(self, peer: str) -> None: ...
    def on_link_lost(self, peer: str, error: BatonError) -> None: ...
    def live_tickets(self, peer: str) -> list[kv_pb2.LiveTicket]: ...


@dataclass(slots=True)
class PeerLink:
    """One direction between two workers."""

    key: str
    peer: worker_pb2.Peer
    opener: bool
    nonce: int
    state: State = State.CONNECTING
    transport: str = ""
    reason: str = ""
    error: BatonError | None = None
    refusal: Refusal | None = None
    peer_requires_rdma: bool = False
    path_ready: bool = False
    peer_ready: bool = False
    last_heard_s: float = field(default_factory=clock.now_s)
    outbox: LinkOutbox = field(default_factory=LinkOutbox)

    def send(self, **message: object) -> None:
        self.outbox.put(kv_pb2.LinkMessage(**message))  # type: ignore[arg-type]

    def refuse(self, refusal: Refusal) -> PeerRefused:
        """Note why the two do not fit; the stream ends with the error returned."""
        self.refusal, self.error = refusal, refusal.error
        return refusal.error

    def status(self) -> worker_pb2.LinkStatus:
        status = worker_pb2.LinkStatus(
            peer=self.peer, state=str(self.state), transport=self.transport, reason=self.reason
        )
        if self.refusal is not None:
            status.field, status.mine, status.yours = self.refusal.field, self.refusal.mine, self.refusal.yours
        return status

    def why_it_ended(self) -> BatonError:
        """Whoever notices the end first, the writer or a reader, says the same."""
        if self.error is None and self.outbox.overflowed.is_set():
            return WorkerLost(
                f"{self.peer.worker_id} does not read its link: more than {self.outbox.max_bytes} bytes wait for it"
            )
        return self.error or WorkerLost(f"link {'to' if self.opener else 'from'} {self.peer.worker_id} ended")

    def note_failure(self, failure: Exception) -> None:
        """Keep why the stream ended, unless a reason is known already."""
        if isinstance(failure, grpc.aio.AioRpcError):
            error: BatonError = WorkerLost(f"link to {self.peer.worker_id} failed: {why_failed(failure)}")
        else:  # a defect of a role: it ends this stream and its transfers, not the worker
            log.exception("link_failed", failure, peer=self.key)
            error = Internal("a message of the link could not be handled")
        self.error = self.error or error


class Links(kv_pb2_grpc.KvLinkServicer):
    """All links of one worker. Implements worker.role.LinkPort.

    Args:
        hello: this worker's Hello, but for the nonce.
    """

    def __init__(
        self,
        hello: kv_pb2.Hello,
        path: DataPath,
        listener: LinkListener,
        *,
        ping_s: float,
        silence_limit_s: float,
        hello_timeout_s: float,
        max_outbox_bytes: int = MAX_OUTBOX_BYTES,
        trust: PeerTrust = PLAIN,
    ) -> None:
        self._hello = hello
        self._trust = trust
        self._path = path
        self._listener = listener
        self._ping_s = ping_s
        self._silence_limit_s = silence_limit_s
        self._hello_timeout_s = hello_timeout_s
        self._max_outbox_bytes = max_outbox_bytes
        self._links: dict[str, PeerLink] = {}
        self._openers: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[int, dict[str, worker_pb2.Peer]] = {}  # by router epoch, then by key

    # --- LinkPort ---

    def send(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        link = self._links.get(peer)
        return link is not None and link.state is State.READY and link.outbox.put(message)

    def transport(self, peer: str) -> str:
        link = self._links.get(peer)
        return link.transport if link is not None else ""

    # --- which links there should be ---

    @staticmethod
    def key_of(peer: worker_pb2.Peer) -> str:
        return f">{peer.worker_id}/{peer.epoch:016x}"

    def want(self, router_epoch: int, peers: list[worker_pb2.Peer]) -> None:
        """Keep a link open to each of these; forget others once they are lost and no router wants them."""
        self._wanted[router_epoch] = {self.key_of(peer): peer for peer in peers}
        self._forget_refused()
        for key in self._wanted[router_epoch]:
            self._ensure(key)

    def forget_router(self, router_epoch: int) -> None:
        self._wanted.pop(router_epoch, None)
        self._forget_refused()

    def open(self, peer: worker_pb2.Peer, router_epoch: int) -> str:
        """The key of the link to `peer`, started now if there is none; that router wants it from now on.

        Raises:
            PeerRefused: the two do not fit.
            Unavailable: the link is down and being retried.
        """
        key = self.key_of(peer)
        self._wanted.setdefault(router_epoch, {}).setdefault(key, peer)
        self._ensure(key)
        link = self._links.get(key)
        if link is not None and link.state is State.REFUSED and link.error is not None:
            raise link.error
        if link is not None and link.state is State.LOST:
            raise Unavailable(f"link to {peer.worker_id} is down: {link.reason}", retry_after_s=1.0)
        return key

    def _ensure(self, key: str) -> None:
        link = self._links.get(key)
        if key not in self._openers and (link is None or link.state is not State.REFUSED):
            task = asyncio.create_task(self._keep_open(key), name=f"link {key}")
            self._openers[key] = task
            task.add_done_callback(lambda _: self._openers.pop(key))

    def _wish(self, key: str) -> worker_pb2.Peer | None:
        """The peer behind `key`, if some router wants a link to it."""
        return next((peers[key] for peers in self._wanted.values() if key in peers), None)

    def _forget_refused(self) -> None:
        for key, link in list(self._links.items()):
            if link.state is State.REFUSED and self._wish(key) is None:
                del self._links[key]

    async def _keep_open(self, key: str) -> None:
        """Open the link, and again when it is lost, as long as it is wanted."""
        backoff_s = FIRST_BACKOFF_S
        while (peer := self._wish(key)) is not None:
            link = self._link(key, peer, opener=True, nonce=secrets.randbits(63) or 1)
            self._links[key] = link
            started_s = clock.now_s()
            await self._run_opener(link)
            if link.state is State.REFUSED:
                return
            if clock.now_s() - started_s > MAX_BACKOFF_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        self._links.pop(key, None)

    # --- the two ends of a stream ---

    def _link(self, key: str, peer: worker_pb2.Peer, *, opener: bool, nonce: int) -> PeerLink:
        return PeerLink(key, peer, opener=opener, nonce=nonce, outbox=LinkOutbox(self._max_outbox_bytes))

    async def _run_opener(self, link: PeerLink) -> None:
        """Run one stream to its end; the link is lost, and says why, on return."""
        hello = kv_pb2.Hello()
        hello.CopyFrom(self._hello)
        hello.pair_nonce = link.nonce
        link.send(hello=hello)
        async with self._trust.channel(link.peer.address, Part.WORKER) as channel:
            call = kv_pb2_grpc.KvLinkStub(channel).Link(link.outbox.messages())
            try:
                await self._serve(link, aiter(call))
            finally:
                call.cancel()

    async def Link(
        self,
        request_iterator: AsyncIterator[kv_pb2.LinkMessage],
        context: grpc.aio.ServicerContext[kv_pb2.LinkMessage, kv_pb2.LinkMessage],
    ) -> AsyncIterator[kv_pb2.LinkMessage]:
        await self._trust.admit(context, Part.WORKER)
        requests = aiter(request_iterator)
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be hello")
        hello = first.hello
        refusal = check_hello(self._hello, hello, opener=False)
        if refusal is not None:
            log.warning("peer_refused", peer=hello.worker_id, field=refusal.field)
            yield kv_pb2.LinkMessage(hello_refused=refusal.to_pb())
            return
        peer = worker_pb2.Peer(worker_id=hello.worker_id, epoch=hello.epoch)
        key = f"<{hello.worker_id}/{hello.epoch:016x}"
        self._lose_older(hello.worker_id, keep=key)
        old = self._links.get(key)
        if old is not None:
            self._lose(old, WorkerLost(f"{hello.worker_id} opened a newer link"))
        link = self._link(key, peer, opener=False, nonce=hello.pair_nonce)
        self._links[key] = link
        answer = kv_pb2.Hello()
        answer.CopyFrom(self._hello)
        answer.pair_nonce = link.nonce
        link.send(hello=answer)
        self._connect(link, hello)
        serving = asyncio.create_task(self._serve(link, requests), name=f"link {key}")
        try:
            async for message in link.outbox.messages():
                yield message
        finally:
            self._lose(link, link.why_it_ended())
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _serve(self, link: PeerLink, messages: AsyncIterator[kv_pb2.LinkMessage]) -> None:
        """Read one stream, ping its other end, until it ends or falls silent; then the link is lost."""
        parts = (self._ping(link), self._read(link, messages), link.outbox.overflowed.wait())
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception):
                    link.note_failure(outcome)
            self._lose(link, link.why_it_ended())

    async def _read(self, link: PeerLink, messages: AsyncIterator[kv_pb2.LinkMessage]) -> None:
        async for message in messages:
            link.last_heard_s = clock.now_s()
            if not self._on_message(link, message):
                return

    async def _ping(self, link: PeerLink) -> None:
        """Ping until the peer is silent for too long; time in which our own loop stood still does not count."""
        while True:
            before_s = clock.now_s()
            await asyncio.sleep(self._ping_s)
            now_s = clock.now_s()
            if now_s - before_s > 2 * self._ping_s:
                link.last_heard_s += now_s - before_s
            if link.state is State.CONNECTING and now_s - link.last_heard_s > self._hello_timeout_s:
                link.error = WorkerLost(f"{link.peer.worker_id} did not complete the handshake in time")
                return
            if now_s - link.last_heard_s > self._silence_limit_s or link.state is State.LOST:
                link.error = link.error or WorkerLost(
                    f"{link.peer.worker_id} was silent on its link for {self._silence_limit_s:g} s"
                )
                return
            live = self._listener.live_tickets(link.key) if link.state is State.READY else []
            link.send(ping=kv_pb2.LinkPing(sent_ns=int(1e9 * clock.now_s()), live=live))

    def _on_message(self, link: PeerLink, message: kv_pb2.LinkMessage) -> bool:
        """Handle one message; False ends the stream."""
        kind = message.WhichOneof("message")
        if link.state in (State.LOST, State.REFUSED):
            return False
        if kind == "hello" and link.opener and link.state is State.CONNECTING:
            refusal = check_hello(self._hello, message.hello, opener=True)
            if refusal is not None:
                link.refuse(refusal)
                return False
            if message.hello.epoch != link.peer.epoch:
                link.error = WorkerLost(f"{link.peer.worker_id} has restarted: its epoch differs", field="epoch")
                return False
            self._connect(link, message.hello)
        elif kind == "hello_refused":
            link.refuse(refusal_by_peer(message.hello_refused))
            return False
        elif kind == "ready":
            link.peer_ready = True
            self._check_ready(link)
        elif kind == "ping":
            link.send(pong=kv_pb2.LinkPong(sent_ns=message.ping.sent_ns))
            self._listener.on_link(link.key, message)
        elif kind != "pong" and link.state is State.READY:
            self._listener.on_link(link.key, message)
        return True

    def _connect(self, link: PeerLink, theirs: kv_pb2.Hello) -> None:
        link.peer_requires_rdma = theirs.require_rdma
        self._path.connect(
            link.key,
            theirs.epoch,
            theirs.ucx_address,
            link.nonce,
            min(theirs.frame_bytes, self._hello.frame_bytes),
            min(theirs.num_slots, self._hello.num_slots),
            theirs.layout.dtype,
        )

    # --- what the KV plane says of a pair ---

    def on_pair_ready(self, peer: str, nonce: int, transport: str) -> None:
        link = self._links.get(peer)
        if link is not None and link.nonce == nonce and link.state is State.CONNECTING:
            link.path_ready = True
            link.transport = transport
            refusal = check_transport(self._hello, link.peer_requires_rdma, transport)
            if refusal is not None:
                link.send(hello_refused=refusal.to_pb())
                self._lose(link, link.refuse(refusal))
                return
            link.send(ready=kv_pb2.LinkReady(transport=transport))
            self._check_ready(link)

    def on_pair_lost(self, peer: str, nonce: int, reason: str) -> None:
        link = self._links.get(peer)
        if link is not None and link.nonce == nonce:
            self._lose(link, WorkerLost(f"data path to {link.peer.worker_id} lost: {reason}"))

    def _check_ready(self, link: PeerLink) -> None:
        if link.path_ready and link.peer_ready and link.state is State.CONNECTING:
            link.state = State.READY
            log.info("link_ready", peer=link.key, transport=link.transport)
            self._listener.on_link_ready(link.key)

    # --- ends ---

    def _lose(self, link: PeerLink, error: BatonError) -> None:
        """Close the data path, tell the roles; idempotent. The opener's link stays, to say why it is lost."""
        if link.state in (State.LOST, State.REFUSED):
            return
        link.state = State.REFUSED if isinstance(error, PeerRefused) else State.LOST
        link.error = error
        link.reason = error.message
        link.outbox.end()
        if not link.opener and self._links.get(link.key) is link:
            del self._links[link.key]
        log.warning("link_lost", peer=link.key, reason=error.message)
        self._path.disconnect(link.key)
        self._listener.on_link_lost(link.key, error)

    def _lose_older(self, worker_id: str, *, keep: str) -> None:
        """A peer that comes with a new epoch has died; its old link may not have noticed."""
        for key, link in list(self._links.items()):
            if not link.opener and link.peer.worker_id == worker_id and key != keep:
                self._lose(link, WorkerLost(f"{worker_id} restarted"))

    async def close(self) -> None:
        self._wanted.clear()
        tasks = list(self._openers.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in list(self._links.values()):
            self._lose(link, Unavailable("this worker stops"))

    def outbox_bytes(self) -> int:
        """What peers have not read yet."""
        return sum(link.outbox.num_bytes for link in self._links.values())

    def openers(self) -> list[PeerLink]:
        """The links on which this worker sends KV; each pair is shown once, by its sender."""
        return [link for link in self._links.values() if link.opener]

    def statuses(self) -> list[worker_pb2.LinkStatus]:
        return [link.status() for link in self.openers()]
