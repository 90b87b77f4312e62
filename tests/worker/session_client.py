"""A bare router for tests: one Session to one worker, everything it says kept in lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import grpc

from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.request import Request, SamplingParams
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION, request_to_pb

PATIENCE_S = 60.0  # generous: tests wait for behaviour, they do not time it


class SessionClient:
    def __init__(self, address: str, router_epoch: int, trust: PeerTrust = PLAIN) -> None:
        self._address = address
        self._trust = trust
        self.router_epoch = router_epoch
        self.opened: worker_pb2.Opened | None = None
        self.load = worker_pb2.Load()
        self.links: dict[str, worker_pb2.LinkStatus] = {}
        self.tokens: dict[int, dict[int, int]] = {}
        self.logprobs: dict[int, dict[int, tuple[float, list[int]]]] = {}  # seq -> index -> (logprob, top ids)
        self.ended: dict[int, worker_pb2.Ended] = {}
        self.refused: dict[int, worker_pb2.ErrorInfo] = {}
        self.lost: dict[int, worker_pb2.ErrorInfo] = {}  # handoffs
        self.cached: set[bytes] = set()
        self.cache_generation = -1
        self.num_cache_deltas = 0
        self.failure: grpc.aio.AioRpcError | None = None
        self._outbox: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> SessionClient:
        self._channel = self._trust.channel(self._address, Part.WORKER)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        await self.until(lambda: self.opened is not None)
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(None)

    def send(self, **message: object) -> None:
        self._outbox.put_nowait(worker_pb2.SessionRequest(**message))  # type: ignore[arg-type]

    def submit(
        self,
        request: Request,
        decode: worker_pb2.Peer | None = None,
        ttl_ms: int = 60_000,
        *,
        pull_from: worker_pb2.Peer | None = None,
        pull_blocks: int = 0,
    ) -> None:
        submit = worker_pb2.Submit(
            request=request_to_pb(request), decode=decode, ttl_ms=ttl_ms, pull_from=pull_from, pull_blocks=pull_blocks
        )
        self.send(submit=submit)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(condition)

    def output(self, seq: int) -> list[int]:
        """Tokens by index; a hole is an error."""
        tokens = self.tokens.get(seq, {})
        assert sorted(tokens) == list(range(len(tokens))), f"hole in {sorted(tokens)}"
        return [tokens[index] for index in range(len(tokens))]

    async def _requests(self) -> AsyncIterator[worker_pb2.SessionRequest]:
        yield worker_pb2.SessionRequest(
            open=worker_pb2.Open(router_id="test", router_epoch=self.router_epoch, protocol_version=PROTOCOL_VERSION)
        )
        while True:
            yield await self._outbox.get()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self.send(heartbeat=worker_pb2.Heartbeat(sent_ns=1))

    async def _read(self) -> None:
        call = worker_pb2_grpc.WorkerStub(self._channel).Session(self._requests())
        try:
            async for event in call:
                async with self._changed:
                    self._on_event(event)
                    self._changed.notify_all()
        except grpc.aio.AioRpcError as error:
            async with self._changed:
                self.failure = error
                self._changed.notify_all()

    def _on_event(self, event: worker_pb2.SessionEvent) -> None:
        kind = event.WhichOneof("message")
        if kind == "opened":
            self.opened = event.opened
            self.load = event.opened.load
        elif kind == "step":
            self.load = event.step.load
            for seq, index, token in zip(event.step.seq, event.step.index, event.step.token, strict=True):
                assert index not in self.tokens.setdefault(seq, {}), "a token came twice"
                self.tokens[seq][index] = token
            for entry in event.step.logprobs:
                by_index = self.logprobs.setdefault(event.step.seq[entry.entry], {})
                by_index[event.step.index[entry.entry]] = (entry.logprob, list(entry.top_ids))
            for ended in event.step.ended:
                self._on_ended(ended)
        elif kind == "ended":
            self._on_ended(event.ended)
        elif kind == "refused":
            self.refused[event.refused.seq] = event.refused.error
        elif kind == "handoff_lost":
            self.lost[event.handoff_lost.seq] = event.handoff_lost.error
        elif kind == "links":
            self.links = {link.peer.worker_id: link for link in event.links.links}
        elif kind == "cache_delta":
            self._on_cache_delta(event.cache_delta)
        elif kind == "load":
            self.load = event.load
        elif kind == "heartbeat":
            self.load = event.heartbeat.load

    def _on_cache_delta(self, delta: worker_pb2.CacheDelta) -> None:
        """Takes no reset but the first, and no gap."""
        assert delta.reset == (self.cache_generation < 0), "a reset in the middle, or none at the start"
        assert delta.reset or delta.generation - self.cache_generation in (0, 1), "a change is missing"
        assert self.cached.isdisjoint(delta.added), "a block was added twice"
        assert self.cached.issuperset(delta.removed), "a block was removed that was never added"
        self.cached = (self.cached - set(delta.removed)) | set(delta.added)
        self.cache_generation = delta.generation
        self.num_cache_deltas += 1

    def _on_ended(self, ended: worker_pb2.Ended) -> None:
        assert ended.seq not in self.ended, "a sequence ended twice on one worker"
        self.ended[ended.seq] = ended


def request(seq: int, prompt: Sequence[int], max_tokens: int, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return Request(seq=seq, token_ids=tuple(prompt), sampling=params)
