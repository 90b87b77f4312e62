"""Sessions: one bidirectional stream per router, one message per engine step.

Each router has a bounded outbox (bytes and age); a router that does not keep up loses its Session, and with it its
sequences, so that it cannot hold this worker's memory or delay other routers. A sequence lives and dies with the stream it
came on: when a router opens again, it has given its old calls up. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from baton.request import SampledToken
from baton.v1 import worker_pb2
from baton.wire import error_to_pb
from worker.parked import ParkedCalls

log = get_log("worker.sessions")

ABOUT_THE_WORKER = ("opened", "load", "heartbeat", "links", "cache_delta")  # fields of SessionEvent


class RouterSession:
    """What this worker owes to one router."""

    def __init__(self, router_id: str, router_epoch: int, *, max_bytes: int, max_age_s: float) -> None:
        self.router_id = router_id
        self.router_epoch = router_epoch
        self.last_heard_s = clock.now_s()
        self.extra_silence_s = 0.0  # beyond the usual limit, of a router that said it would send fewer heartbeats
        self.drop_reason = ""
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._greeting: Iterator[worker_pb2.SessionEvent] = iter(())
        self._outbox: deque[tuple[float, int, worker_pb2.SessionEvent]] = deque()
        self.num_bytes = 0  # not taken by gRPC yet
        self._wake = asyncio.Event()
        self._closed_event = asyncio.Event()
        self._step: worker_pb2.Step | None = None

    def token(self, token: SampledToken) -> None:
        """Add to the step under way; `flush` sends it."""
        if self._step is None:
            self._step = worker_pb2.Step()
        step = self._step
        if token.logprobs is not None:
            step.logprobs.add(
                entry=len(step.seq),
                logprob=token.logprobs.logprob,
                top_ids=token.logprobs.top_ids,
                top_logprobs=token.logprobs.top_logprobs,
            )
        step.seq.append(token.seq)
        step.index.append(token.index)
        step.token.append(token.token)
        step.flags.append(int(token.finish))

    def ended(self, message: worker_pb2.Ended) -> None:
        if self._step is None:
            self._step = worker_pb2.Step()
        self._step.ended.append(message)

    def refused(self, seq: int, error: BatonError) -> None:
        self.send(worker_pb2.SessionEvent(refused=worker_pb2.Refused(seq=seq, error=error_to_pb(error))))

    def handoff_lost(self, seq: int, error: BatonError, reroute: int) -> None:
        lost = worker_pb2.HandoffLost(seq=seq, error=error_to_pb(error), reroute=reroute)
        self.send(worker_pb2.SessionEvent(handoff_lost=lost))

    @property
    def has_unsent(self) -> bool:
        return self._step is not None

    @property
    def owes(self) -> bool:
        """It has not read yet something about its calls; how the worker is, it hears again and again."""
        return any(event.WhichOneof("message") not in ABOUT_THE_WORKER for _, _, event in self._outbox)

    @property
    def is_closed(self) -> bool:
        return self._closed_event.is_set()

    def flush(self, step: int, load: worker_pb2.Load) -> None:
        """Send what the step under way has gathered, if anything."""
        if self._step is not None:
            self._step.step = max(0, step)
            self._step.load.CopyFrom(load)
            self.send(worker_pb2.SessionEvent(step=self._step))
            self._step = None

    def greet(self, events: Iterator[worker_pb2.SessionEvent]) -> None:
        """What follows the first message, before all else. Made as it is written, so it takes no room in the outbox."""
        self._greeting = events

    def send(self, event: worker_pb2.SessionEvent) -> None:
        if self.is_closed:
            return
        size = event.ByteSize()
        self._outbox.append((clock.now_s(), size, event))
        self.num_bytes += size
        self._wake.set()
        if self.num_bytes > self._max_bytes:
            self.close(f"outbox over {self._max_bytes} bytes")

    def check_age(self, now_s: float) -> None:
        if self._outbox and now_s - self._outbox[0][0] > self._max_age_s:
            self.close(f"outbox {self._max_age_s:g} s behind")

    def close(self, reason: str) -> None:
        if not self.is_closed:
            self.drop_reason = reason
            self._wake.set()
            self._closed_event.set()

    async def wait_closed(self) -> None:
        await self._closed_event.wait()

    async def events(self) -> AsyncIterator[worker_pb2.SessionEvent]:
        """What to write to the stream; ends when the session is closed."""
        while not self.is_closed:
            while self._outbox and not self.is_closed:
                _, size, event = self._outbox[0]
                yield event
                self._outbox.popleft()
                self.num_bytes -= size
                for greeting in self._greeting:
                    if self.is_closed:
                        return
                    yield greeting
            self._wake.clear()
            if not self._outbox and not self.is_closed:
                await self._wake.wait()


class Sessions:
    """All routers of this worker. Implements worker.role.SessionPort."""

    def __init__(
        self, *, max_bytes: int, max_age_s: float, on_lost: Callable[[int], None], parked: ParkedCalls
    ) -> None:
        self._parked = parked
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._on_lost = on_lost
        self._by_epoch: dict[int, RouterSession] = {}
        self._muted_seq: int | None = None

    @contextmanager
    def muted(self, seq: int) -> Iterator[None]:
        """Tell its router nothing of how a sequence ends in this block."""
        self._muted_seq = seq
        try:
            yield
        finally:
            self._muted_seq = None

    def open(self, router_id: str, router_epoch: int) -> RouterSession:
        """A router that opens again ends its old stream, and what it had submitted on it."""
        old = self._by_epoch.get(router_epoch)
        if old is not None:
            old.close("replaced by a newer stream of the same router")
            self.closed(old)
        session = RouterSession(router_id, router_epoch, max_bytes=self._max_bytes, max_age_s=self._max_age_s)
        self._by_epoch[router_epoch] = session
        log.info("session_opened", router=router_id, router_epoch=f"{router_epoch:08x}")
        return session

    def closed(self, session: RouterSession) -> None:
        """The stream has ended, whoever ended it. Idempotent."""
        if self._by_epoch.get(session.router_epoch) is not session:
            return
        del self._by_epoch[session.router_epoch]
        log.info("session_closed", router=session.router_id, reason=session.drop_reason)
        self._on_lost(session.router_epoch)

    def forgive(self, stall_s: float) -> None:
        """Do not count time in which our own loop stood still as silence."""
        for session in self._by_epoch.values():
            session.last_heard_s += stall_s

    def check(self, now_s: float, silence_limit_s: float) -> None:
        """Close sessions of routers that are silent or too slow."""
        for session in list(self._by_epoch.values()):
            session.check_age(now_s)
            limit_s = silence_limit_s + session.extra_silence_s
            if now_s - session.last_heard_s > limit_s:
                session.close(f"no heartbeat for {limit_s:g} s")

    def close_all(self, reason: str) -> None:
        for session in list(self._by_epoch.values()):
            session.close(reason)

    def has_unsent(self) -> bool:
        return any(session.has_unsent for session in self._by_epoch.values())

    def outbox_bytes(self) -> int:
        """What routers have not read yet."""
        return sum(session.num_bytes for session in self._by_epoch.values())

    def owe(self) -> bool:
        """Some router has yet to read of a call."""
        return any(session.owes for session in self._by_epoch.values())

    def flush(self, step: int, load: worker_pb2.Load) -> None:
        for session in self._by_epoch.values():
            session.flush(step, load)

    def broadcast(self, event: worker_pb2.SessionEvent) -> None:
        for session in list(self._by_epoch.values()):
            session.send(event)

    # --- SessionPort ---

    def has_router(self, seq: int) -> bool:
        return seq >> 32 in self._by_epoch

    def token(self, token: SampledToken) -> None:
        self._parked.token(token)
        session = self._by_epoch.get(token.seq >> 32)
        if session is not None:
            session.token(token)

    def ended(self, message: worker_pb2.Ended) -> None:
        self._parked.ended(message.seq, clock.now_s())
        if message.seq == self._muted_seq:
            return
        session = self._by_epoch.get(message.seq >> 32)
        if session is not None:
            session.ended(message)

    def refused(self, seq: int, error: BatonError) -> None:
        self._parked.forget_seq(seq)
        session = self._by_epoch.get(seq >> 32)
        if session is not None:
            session.refused(seq, error)

    def handoff_lost(self, seq: int, error: BatonError, reroute: int) -> None:
        session = self._by_epoch.get(seq >> 32)
        if session is not None:
            session.handoff_lost(seq, error, reroute)
