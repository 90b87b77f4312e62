"""Links of the handoff rig: worker/links.py without gRPC, one mailbox per direction.

The same states and the same messages: Hello each way, the KV plane proves the data path, LinkReady each way, then Reserve,
Grant, Commit, Ack and pings that renew tickets. What a test adds is `cut`: the stream breaks, what is under way is lost from
some point on, and each end learns of it in its own time.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import BatonError, Unavailable, WorkerLost
from baton.v1 import kv_pb2
from worker.links import DataPath, LinkListener, State

REOPEN_S = 0.2  # worker.links.FIRST_BACKOFF_S


@dataclass(eq=False, slots=True)
class LinkEnd:
    """One end of one stream. `inbox` is what the other end has sent and this loop has not read; None = the stream's end."""

    key: str
    peer_id: str
    peer_epoch: int
    nonce: int
    opener: bool
    last_heard_s: float
    state: State = State.CONNECTING
    path_ready: bool = False
    peer_ready: bool = False
    lost_s: float = 0.0
    other: LinkEnd | None = None
    inbox: deque[kv_pb2.LinkMessage | None] = field(default_factory=deque)
    broken: bool = False  # what is sent from here on goes nowhere

    def send(self, message: kv_pb2.LinkMessage) -> None:
        if not self.broken and self.other is not None:
            self.other.inbox.append(message)


class Addressee(Protocol):
    """A worker as its peers' links see it."""

    worker_id: str
    epoch: int
    address: bytes

    @property
    def links(self) -> RigLinks: ...


class RigLinks:
    """All links of one worker. Implements worker.role.LinkPort."""

    def __init__(
        self,
        me: Addressee,
        path: DataPath,
        listener: LinkListener,
        rng: random.Random,
        *,
        frame_bytes: int,
        num_slots: int,
        silence_limit_s: float,
        hello_timeout_s: float,
    ) -> None:
        self.ends: dict[str, LinkEnd] = {}
        self._me = me
        self._path = path
        self._listener = listener
        self._rng = rng
        self._frame_bytes = frame_bytes
        self._num_slots = num_slots
        self._silence_limit_s = silence_limit_s
        self._hello_timeout_s = hello_timeout_s
        self._wanted: dict[str, Addressee] = {}

    # --- LinkPort ---

    def send(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        end = self.ends.get(peer)
        if end is None or end.state is not State.READY:
            return False
        end.send(message)
        return True

    def transport(self, peer: str) -> str:
        return "loopback" if peer in self.ends else ""

    # --- opening ---

    @staticmethod
    def key_of(peer_id: str, epoch: int) -> str:
        return f">{peer_id}/{epoch:016x}"

    def open(self, peer: Addressee, now_s: float) -> str:
        """The key of the link to `peer`, kept open from now on."""
        key = self.key_of(peer.worker_id, peer.epoch)
        end = self.ends.get(key)
        if end is not None and end.state is State.LOST:
            raise Unavailable(f"link to {peer.worker_id} is down")
        self._wanted[key] = peer
        if end is None:
            self._dial(key, peer, now_s)
        return key

    def forget(self, worker_id: str, epoch: int) -> None:
        """The peer has died for good: do not dial it again."""
        self._wanted.pop(self.key_of(worker_id, epoch), None)

    def _dial(self, key: str, peer: Addressee, now_s: float) -> None:
        mine = LinkEnd(key, peer.worker_id, peer.epoch, self._rng.getrandbits(62) + 1, True, now_s)
        self.ends[key] = mine
        peer.links.accept(self._me, mine, now_s)

    def accept(self, opener: Addressee, theirs: LinkEnd, now_s: float) -> None:
        """Hello has come: answer it and connect. An older stream of the same peer, or of its former life, is lost first."""
        key = f"<{opener.worker_id}/{opener.epoch:016x}"
        for end in list(self.ends.values()):
            if not end.opener and end.peer_id == opener.worker_id:
                self._lose(end, WorkerLost(f"{opener.worker_id} opened a newer link"), now_s)
        mine = LinkEnd(key, opener.worker_id, opener.epoch, theirs.nonce, False, now_s, other=theirs)
        self.ends[key] = theirs.other = mine
        self._connect(mine, opener.address)
        mine.send(kv_pb2.LinkMessage(hello=kv_pb2.Hello(epoch=self._me.epoch, ucx_address=self._me.address)))

    def _connect(self, end: LinkEnd, address: bytes) -> None:
        self._path.connect(end.key, end.peer_epoch, address, end.nonce, self._frame_bytes, self._num_slots)

    # --- reading ---

    def unread(self) -> list[LinkEnd]:
        return [end for end in self.ends.values() if end.inbox]

    def read_one(self, now_s: float) -> None:
        """Take the next message of one stream."""
        end = self._rng.choice(self.unread())
        message = end.inbox.popleft()
        if message is None:
            self._lose(end, WorkerLost(f"link to {end.peer_id} ended"), now_s)
        elif end.state is not State.LOST:
            end.last_heard_s = now_s
            self._on_message(end, message)

    def _on_message(self, end: LinkEnd, message: kv_pb2.LinkMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "hello":
            self._connect(end, message.hello.ucx_address)
        elif kind == "ready":
            end.peer_ready = True
            self._check_ready(end)
        elif kind == "ping":
            end.send(kv_pb2.LinkMessage(pong=kv_pb2.LinkPong(sent_ns=message.ping.sent_ns)))
            self._listener.on_link(end.key, message)
        elif kind != "pong" and end.state is State.READY:
            self._listener.on_link(end.key, message)

    def on_pair_ready(self, peer: str, nonce: int) -> None:
        end = self.ends.get(peer)
        if end is not None and end.nonce == nonce and end.state is State.CONNECTING:
            end.path_ready = True
            end.send(kv_pb2.LinkMessage(ready=kv_pb2.LinkReady(transport="loopback")))
            self._check_ready(end)

    def on_pair_lost(self, peer: str, nonce: int, now_s: float) -> None:
        end = self.ends.get(peer)
        if end is not None and end.nonce == nonce:
            self._lose(end, WorkerLost(f"data path to {end.peer_id} lost"), now_s)

    def _check_ready(self, end: LinkEnd) -> None:
        if end.path_ready and end.peer_ready and end.state is State.CONNECTING:
            end.state = State.READY
            self._listener.on_link_ready(end.key)

    # --- time ---

    def ping(self, now_s: float) -> None:
        """Every heartbeat: renew tickets, notice silence, dial again what was lost."""
        for end in list(self.ends.values()):
            if end.state is State.LOST:
                continue
            limit_s = self._hello_timeout_s if end.state is State.CONNECTING else self._silence_limit_s
            if now_s - end.last_heard_s > limit_s:
                self._lose(end, WorkerLost(f"{end.peer_id} was silent on its link for {limit_s:g} s"), now_s)
                continue
            live = self._listener.live_tickets(end.key) if end.state is State.READY else []
            end.send(kv_pb2.LinkMessage(ping=kv_pb2.LinkPing(sent_ns=int(now_s * 1e9), live=live)))
        for key, peer in self._wanted.items():
            end_or_none = self.ends.get(key)
            if end_or_none is None or (end_or_none.state is State.LOST and now_s - end_or_none.lost_s > REOPEN_S):
                self._dial(key, peer, now_s)

    # --- ends ---

    def _lose(self, end: LinkEnd, error: BatonError, now_s: float) -> None:
        if end.state is State.LOST:
            return
        end.state = State.LOST
        end.lost_s = now_s
        hang_up(end)
        self._path.disconnect(end.key)
        self._listener.on_link_lost(end.key, error)


def hang_up(end: LinkEnd) -> None:
    """Nothing more is sent from `end`; the other side reads the stream's end after what was sent before."""
    if not end.broken and end.other is not None:
        end.other.inbox.append(None)
    end.broken = True


def cut(end: LinkEnd, rng: random.Random) -> None:
    """Break a stream in both directions; each end still reads a random part of what was under way."""
    for side in (end, end.other):
        if side is not None and not side.broken:
            side.broken = True
            if side.other is not None:
                keep = rng.randint(0, len(side.other.inbox))
                while len(side.other.inbox) > keep:
                    side.other.inbox.pop()
                side.other.inbox.append(None)
