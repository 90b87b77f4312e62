"""The load of a soak: closed-loop clients, some of which leave, hurry or hang up; every answer is judged.

A judged call has one terminal event and no more, in time; its tokens are those of the reference, as far as they came; no fault
of a worker ends one that was accepted: it fails only where its client left or was in a hurry. `judge` is pure, so that tests can
show it what must not pass. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from baton.v1 import serving_pb2, serving_pb2_grpc

OK = grpc.StatusCode.OK
LATE_S = 5.0  # past its deadline by this much, a call hangs; less is what two busy cores do to clocks
HURRY_S = (0.02, 0.5)  # deadlines that strike in any stage of a call
SHED_S = 3.0  # class interactive's target of 2 s, in which a call may wait for its turn, and what busy cores add
THINK_S = 0.02  # mean pause of a client between two calls


class Kind(enum.Enum):
    """What the client does; the weights below are shares."""

    PLAIN = "plain"
    CANCEL = "cancel"  # leaves after some tokens
    ABORT = "abort"  # the same through the Abort call
    HURRY = "hurry"  # a deadline that is likely to strike
    HANG_UP = "hang up"  # breaks its HTTP connection


SHARES = {Kind.PLAIN: 78, Kind.CANCEL: 10, Kind.ABORT: 2, Kind.HURRY: 6, Kind.HANG_UP: 4}


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt and the answer that must come."""

    token_ids: Sequence[int]
    sampling: serving_pb2.Sampling
    answer: Sequence[int]


@dataclass(slots=True)
class Seen:
    """What came of a call. `code` None = this client cancelled it before it ended."""

    tokens: list[int] = field(default_factory=list)
    done: serving_pb2.Done | None = None
    error: serving_pb2.ErrorDetail | None = None
    code: grpc.StatusCode | None = None
    took_s: float = 0.0
    pause_s: float = 0.0  # the longest between two tokens
    _last_s: float = 0.0
    broken: str = ""  # the stream contradicted its protocol

    def take(self, response: serving_pb2.GenerateResponse) -> None:
        kind = response.WhichOneof("event")
        if self.done is not None or self.error is not None:
            self.broken = f"{kind} after the terminal event"
        elif kind == "chunk":
            if response.chunk.token_ids and response.chunk.index != len(self.tokens):
                self.broken = f"index {response.chunk.index} where {len(self.tokens)} tokens had come"
            now_s = time.monotonic()
            if self.tokens:
                self.pause_s = max(self.pause_s, now_s - self._last_s)
            self._last_s = now_s
            self.tokens += response.chunk.token_ids
        elif kind == "done":
            self.done = response.done
        else:
            self.error = response.error

    @property
    def finished(self) -> bool:
        return self.done is not None

    @property
    def handed_over(self) -> bool:
        """Whether it finished on another worker than the one that prefilled it."""
        if self.done is None or len(self.tokens) < 2:
            return False
        return self.done.timings.prefill_worker != self.done.timings.decode_worker


def judge(kind: Kind, asked: Asked, seen: Seen, timeout_s: float) -> str:
    """What is wrong with what came of a call; "" = nothing."""
    if seen.broken:
        return seen.broken
    if seen.tokens != list(asked.answer[: len(seen.tokens)]):
        right = sum(1 for _ in _common(seen.tokens, asked.answer))
        return f"wrong output: token {right} of {len(seen.tokens)}"
    if seen.took_s > timeout_s + LATE_S:
        return f"ended {seen.took_s - timeout_s:.1f} s after its deadline"
    if seen.code is None:
        return "" if kind in (Kind.CANCEL, Kind.HANG_UP) else "it ended as cancelled, and nobody had cancelled it"
    if seen.code is OK:
        return _judge_finished(asked, seen)
    if kind is Kind.HURRY and seen.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ""  # also without an event: the client's own clock may be the first to notice
    if seen.error is None:
        return f"status {seen.code.name} without an error event"
    if kind is Kind.ABORT and seen.error.code == "cancelled":
        return ""
    if seen.error.code == "overloaded" and not seen.tokens and seen.took_s < SHED_S:
        return ""  # it was never accepted: its target could not be met
    return f"failed with {seen.error.code} after {len(seen.tokens)} tokens: {seen.error.message}"


def _judge_finished(asked: Asked, seen: Seen) -> str:
    if seen.done is None or seen.error is not None:
        return "status OK without done"
    if len(seen.tokens) != len(asked.answer):
        return f"{len(seen.tokens)} tokens of {len(asked.answer)} passed for the whole answer"
    return ""


def _common(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """The longest common start."""
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]


@dataclass(slots=True)
class Tally:
    num_calls: Counter[Kind] = field(default_factory=Counter)
    num_finished: int = 0
    num_handoffs: int = 0
    num_wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by code, of calls that failed as they may
    pauses_s: list[float] = field(default_factory=list)  # the longest of each finished call
    findings: list[str] = field(default_factory=list)

    def add(self, kind: Kind, asked: Asked, seen: Seen, timeout_s: float, label: str) -> None:
        self.num_calls[kind] += 1
        self.num_finished += seen.finished
        self.num_handoffs += seen.handed_over
        if seen.finished:
            self.pauses_s.append(seen.pause_s)
        if seen.error is not None:
            self.errors[seen.error.code] += 1
        if finding := judge(kind, asked, seen, timeout_s):
            self.num_wrong += finding.startswith("wrong output")
            self.findings.append(f"call {label} ({kind.value}): {finding}")


class Load:
    """Clients that run until `close`; `pause` lets calls in flight end. `asked(index)` gives the index-th call."""

    def __init__(
        self, ports: tuple[int, int], asked: Callable[[int], Asked], seed: int, num_clients: int, timeout_s: float
    ) -> None:
        """`ports`: gRPC, HTTP. `timeout_s`: what the router gives a call that brings no deadline."""
        self.tally = Tally()
        self._grpc_port, self._http_port = ports
        self._asked = asked
        self._rng = random.Random(f"{seed}/load")
        self._timeout_s = timeout_s
        self._next_index = 0
        self._num_inflight = 0
        self._gate = asyncio.Event()
        self._idle = asyncio.Event()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}")
        self._stub = serving_pb2_grpc.ServingStub(self._channel)
        self._clients = [asyncio.create_task(self._client(), name=f"client {n}") for n in range(num_clients)]

    def resume(self) -> None:
        self._gate.set()

    async def pause(self) -> None:
        """Return once no call is in flight."""
        self._gate.clear()
        while self._num_inflight:
            self._idle.clear()
            await self._idle.wait()

    async def close(self) -> None:
        for client in self._clients:
            client.cancel()
        outcomes = await asyncio.gather(*self._clients, return_exceptions=True)
        self.tally.findings += (
            f"a client failed: {outcome!r}" for outcome in outcomes if isinstance(outcome, Exception)
        )
        await self._channel.close(None)

    async def plain(self) -> Seen:
        """One call of the plain kind, at once."""
        return await self._call(Kind.PLAIN)

    async def _client(self) -> None:
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / THINK_S))
            await self._gate.wait()
            self._num_inflight += 1
            try:
                kind = self._rng.choices(list(SHARES), list(SHARES.values()))[0]
                await self._call(kind)
            finally:
                self._num_inflight -= 1
                if not self._num_inflight:
                    self._idle.set()

    async def _call(self, kind: Kind) -> Seen:
        index, self._next_index = self._next_index, self._next_index + 1
        asked = self._asked(index)
        started_s = time.monotonic()
        timeout_s = self._rng.uniform(*HURRY_S) if kind is Kind.HURRY else self._timeout_s
        if kind is Kind.HANG_UP:
            seen = await self._hang_up(asked)
        else:
            seen = await self._generate(kind, asked, f"soak-{index}", timeout_s)
        seen.took_s = time.monotonic() - started_s
        self.tally.add(kind, asked, seen, timeout_s, str(index))
        return seen

    async def _generate(self, kind: Kind, asked: Asked, request_id: str, timeout_s: float) -> Seen:
        request = serving_pb2.GenerateRequest(sampling=asked.sampling, request_id=request_id)
        request.token_ids.ids.extend(asked.token_ids)
        by_router = kind is Kind.HURRY and self._rng.random() < 0.5
        metadata = (("x-request-timeout-ms", f"{timeout_s * 1e3:.0f}"),) if by_router else ()
        limit_s = timeout_s if kind is Kind.HURRY and not by_router else None
        stream = self._stub.Generate(request, timeout=limit_s, metadata=metadata)
        leaves_after = self._rng.randrange(len(asked.answer)) if kind in (Kind.CANCEL, Kind.ABORT) else None  # tokens
        leaving: list[asyncio.Task[None]] = []
        if leaves_after == 0:  # before the first token, some moments after asking
            leaving.append(asyncio.create_task(self._leave(kind, stream, request_id, self._rng.uniform(0, 0.05))))
        seen = Seen()
        try:
            async for response in stream:
                seen.take(response)
                if leaves_after is not None and len(seen.tokens) >= leaves_after and not leaving:
                    leaving.append(asyncio.create_task(self._leave(kind, stream, request_id)))
            seen.code = await stream.code()
        except grpc.aio.AioRpcError as error:
            seen.code = error.code()
        except asyncio.CancelledError:
            # grpc.aio raises this also where the server ended the call as CANCELLED; then nobody has cancelled this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            seen.code = grpc.StatusCode.CANCELLED if seen.error is not None else None
        await asyncio.gather(*leaving)
        return seen

    async def _leave(self, kind: Kind, stream: grpc.aio.Call, request_id: str, delay_s: float = 0.0) -> None:
        await asyncio.sleep(delay_s)
        if kind is Kind.CANCEL:
            stream.cancel()
        else:
            with contextlib.suppress(grpc.aio.AioRpcError):  # NOT_FOUND: it has ended meanwhile
                await self._stub.Abort(serving_pb2.AbortRequest(request_id=request_id), timeout=self._timeout_s)

    async def _hang_up(self, asked: Asked) -> Seen:
        """Ask over HTTP, read for a while, reset the connection."""
        body = {"prompt": list(asked.token_ids), "max_tokens": len(asked.answer), "temperature": 0, "stream": True}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(data)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(self._rng.uniform(0, 0.3)):
                await reader.readexactly(self._rng.randrange(1, 2_000))
        writer.transport.abort()
        return Seen()
