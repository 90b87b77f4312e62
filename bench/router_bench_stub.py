"""A whole fleet without engines in one process: workers that speak worker.proto, and the controller that names them.

Every worker has a port of its own, since a Session does not say whom it is for. A prefill worker says the first token of what
it is given at once and hands over by a method call; a decode worker says one token of each of its sequences per step, in one
Step message, as engines do, and reports the blocks that fill up. Other endpoints answer heartbeats and say that they are busy.
Each token's instant is noted just before its message goes to gRPC (CLOCK_MONOTONIC, which all processes share). One event
loop; runs as a bench.child.Child.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import numpy as np
import uvloop
from numpy.typing import NDArray

from baton import grpc_wakeups
from baton.hashing import HASH_BYTES
from baton.ids import new_epoch
from baton.keepalive import SERVER_OPTIONS
from baton.v1 import control_pb2, control_pb2_grpc, serving_pb2, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION
from bench.child import Failed
from bench.router_bench_load import EVENT, NO_NUMBER
from bench.router_bench_messages import (
    VOCABULARY,
    CountSessions,
    EndLog,
    Sessions,
    SetStep,
    StartLog,
    StubDone,
    StubFleet,
    StubStarted,
    class_name,
)

BLOCK_TOKENS = 16  # DESIGN section 5
MAX_MODEL_LEN = 8_192
MAX_NUM_SEQS = 512
OWN_POOL_BLOCKS = 1 << 19  # of those that take the traffic: room for all of it, so that none goes to the busy ones
BUSY_STEP_MS = 200.0  # of an endpoint that others keep busy: no forecast prefers it
BUSY_WAITING_TOKENS = 1_000_000
PAGE_HASHES = 32_768  # worker/cache_report.py
TOKENS = np.array(VOCABULARY, np.uint32)
LENGTH = int(serving_pb2.FINISH_REASON_LENGTH)

Array = NDArray[np.uint32]
RequestIterator = AsyncIterator[worker_pb2.SessionRequest]
Context = grpc.aio.ServicerContext[worker_pb2.SessionRequest, worker_pb2.SessionEvent]


class TokenLog:
    """Which token went out when; nothing is kept while it is off."""

    def __init__(self) -> None:
        self.on = False
        self._parts: list[tuple[int, Array, Array]] = []

    def start(self) -> None:
        self.on = True
        self._parts = []

    def note(self, numbers: Array, indices: Array) -> None:
        if self.on:
            self._parts.append((time.monotonic_ns(), numbers, indices))

    def end(self) -> NDArray[np.void]:
        self.on = False
        events = np.zeros(sum(len(numbers) for _, numbers, _ in self._parts), EVENT)
        at = 0
        for sent_ns, numbers, indices in self._parts:
            part = events[at : at + len(numbers)]
            part["number"], part["index"], part["sent_ns"] = numbers, indices, sent_ns
            at += len(numbers)
        self._parts = []
        return events


@dataclass(slots=True)
class Saying:
    """A message for a router, and the tokens in it."""

    event: worker_pb2.SessionEvent
    numbers: Array | None = None
    indices: Array | None = None


def _no_sequences() -> NDArray[np.uint64]:
    return np.zeros((0, 4), np.uint64)


@dataclass(slots=True)
class Running:
    """Sequences that decode for one router, as columns: seq, request number, index of the last token said, and of its last."""

    rows: NDArray[np.uint64] = field(default_factory=_no_sequences)  # [B, 4]
    new: list[tuple[int, int, int, int]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows) + len(self.new)

    def take_in(self) -> list[int]:
        """Let new sequences in and cancelled ones out; the seqs of those that were here to be cancelled."""
        if self.new:
            self.rows = np.concatenate([self.rows, np.array(self.new, np.uint64)])
            self.new.clear()
        if not self.cancelled:
            return []
        gone = np.isin(self.rows[:, 0], np.array(self.cancelled, np.uint64))
        ended: list[int] = self.rows[gone, 0].tolist()
        self.rows = self.rows[~gone]
        self.cancelled.clear()
        return ended


class RouterStream:
    """What a worker owes to one router."""

    def __init__(self, context: Context, log: TokenLog) -> None:
        self.running = Running()
        self.has_room = asyncio.Event()
        self.has_room.set()
        self._context = context
        self._log = log
        self._outbox: deque[Saying] = deque()
        self._filled = asyncio.Event()

    def say(self, saying: Saying) -> None:
        self._outbox.append(saying)
        self.has_room.clear()
        self._filled.set()

    async def write(self) -> None:
        """Give gRPC one message after another; it returns from each when the transport has room."""
        while True:
            while self._outbox:
                saying = self._outbox.popleft()
                if saying.numbers is not None and saying.indices is not None:
                    self._log.note(saying.numbers, saying.indices)
                await self._context.write(saying.event)
            self.has_room.set()
            self._filled.clear()
            await self._filled.wait()


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """One worker."""

    def __init__(
        self, worker_id: str, role: worker_pb2.Role.ValueType, fleet: Fleet, cached: bytes, *, busy: bool
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.epoch = new_epoch()
        self.address = ""
        self.routers: dict[int, RouterStream] = {}  # by router epoch
        self._fleet = fleet
        self._cached = cached  # the hashes of its prefix cache, back to back
        self._busy = busy
        self._num_blocks = fleet.blocks_each if busy else OWN_POOL_BLOCKS
        self._peers: Sequence[worker_pb2.Peer] = ()
        self._num_steps = 0
        self._num_tokens = 0
        self._generation = 0
        self._stepping: asyncio.Task[None] | None = None
        self._first: list[tuple[RouterStream, worker_pb2.Submit]] = []  # prompts whose first token is due
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))
        )

    @property
    def num_running(self) -> int:
        return sum(len(router.running) for router in self.routers.values())

    async def start(self) -> None:
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    # -- one Session -------------------------------------------------------------------------------------------------

    async def Session(self, requests: RequestIterator, context: Context) -> None:  # type: ignore[override]  # writes by itself
        router, epoch, writer = RouterStream(context, self._fleet.log), 0, None
        try:
            async for request in requests:
                if writer is not None:
                    self._on_request(router, request)
                    continue
                epoch = request.open.router_epoch  # it comes first
                self.routers[epoch] = router
                self._greet(router)
                writer = asyncio.create_task(router.write())
        finally:
            if writer is not None:
                writer.cancel()
                router.has_room.set()  # for whoever waits to step
                if self.routers[epoch] is router:  # and not the stream that came after it
                    del self.routers[epoch]

    def _greet(self, router: RouterStream) -> None:
        router.say(Saying(worker_pb2.SessionEvent(opened=self._opened())))
        for delta in self._whole_cache():
            router.say(Saying(worker_pb2.SessionEvent(cache_delta=delta)))

    def _on_request(self, router: RouterStream, request: worker_pb2.SessionRequest) -> None:
        kind = request.WhichOneof("message")
        if kind == "heartbeat":
            reply = worker_pb2.HeartbeatReply(sent_ns=request.heartbeat.sent_ns, load=self._load())
            router.say(Saying(worker_pb2.SessionEvent(heartbeat=reply)))
        elif kind == "submit":
            if not self._first:
                asyncio.get_running_loop().call_soon(self._say_first)
            self._first.append((router, request.submit))
        elif kind == "cancel":
            self._cancel(request.cancel.seq)
        elif kind == "peers":
            self._peers = request.peers.decode
            links = worker_pb2.Links(links=self._links())
            router.say(Saying(worker_pb2.SessionEvent(links=links)))

    def _opened(self) -> worker_pb2.Opened:
        return worker_pb2.Opened(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model="stub",
            fingerprint="f" * 32,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=self._num_blocks,
            block_size=BLOCK_TOKENS,
            max_num_seqs=MAX_NUM_SEQS,
            load=self._load(),
            links=self._links(),
            protocol_version=PROTOCOL_VERSION,
            kv_dtype="float32",
            kv_block_bytes=1 << 20,
        )

    def _links(self) -> Iterator[worker_pb2.LinkStatus]:
        for peer in self._peers:
            yield worker_pb2.LinkStatus(peer=peer, state="ready", transport="loopback")

    def _load(self) -> worker_pb2.Load:
        pool = self._num_blocks
        active = pool * 97 // 100 if self._busy else min(pool, self.num_running)
        return worker_pb2.Load(
            role=self.role,
            num_running=MAX_NUM_SEQS if self._busy else self.num_running,
            waiting_tokens=BUSY_WAITING_TOKENS if self._busy else 0,
            active_blocks=active,
            cached_blocks=min(self._fleet.blocks_each, pool - active),
            num_steps=self._num_steps,
            output_tokens=self._num_tokens,
            step_ms=BUSY_STEP_MS if self._busy else 1e3 * self._fleet.step_s,
        )

    def _whole_cache(self) -> Iterator[worker_pb2.CacheDelta]:
        hashes = _hashes(self._cached)
        for start in range(0, max(1, len(hashes)), PAGE_HASHES):
            yield worker_pb2.CacheDelta(
                generation=self._generation, added=hashes[start : start + PAGE_HASHES], reset=start == 0
            )

    # -- sequences ---------------------------------------------------------------------------------------------------

    def _say_first(self) -> None:
        """The first tokens of all prompts that came in one turn of the loop: one Step for each router."""
        by_router: dict[int, list[worker_pb2.Submit]] = {}
        routers = {id(router): router for router, _ in self._first}
        for router, submit in self._first:
            by_router.setdefault(id(router), []).append(submit)
        self._first.clear()
        for key, submits in by_router.items():
            self._say_first_to(routers[key], submits)

    def _cancel(self, seq: int) -> None:
        """Both workers of a sequence are told, in any order; the one that it came to first ends it wherever it is now."""
        self._first = [(other, submit) for other, submit in self._first if submit.request.seq != seq]
        if holder := self._fleet.holders.pop(seq, None):
            holder.running.cancelled.append(seq)

    def _say_first_to(self, router: RouterStream, submits: list[worker_pb2.Submit]) -> None:
        step = worker_pb2.Step(step=self._num_steps)
        for submit in submits:
            request = submit.request
            index, last = request.num_output_tokens, request.sampling.max_tokens - 1
            step.seq.append(request.seq)
            step.index.append(index)
            step.token.append(int(TOKENS[index % len(TOKENS)]))
            step.flags.append(LENGTH if index >= last else 0)
            stats = worker_pb2.SeqStats(computed_tokens=len(request.token_ids), transport="loopback", kv_blocks=1)
            if index >= last:
                step.ended.add(seq=request.seq, outcome=worker_pb2.OUTCOME_FINISHED, finish_reason=LENGTH, stats=stats)
                continue
            if submit.HasField("decode"):
                step.ended.add(seq=request.seq, outcome=worker_pb2.OUTCOME_HANDED_OFF, stats=stats)
            row = (request.seq, number_of(request.request_id), index, last)
            taker = self._fleet.by_id[submit.decode.worker_id] if submit.HasField("decode") else self
            taker.adopt(request.seq >> 32, row)
        numbers = np.array([number_of(submit.request.request_id) for submit in submits], np.uint32)
        router.say(Saying(worker_pb2.SessionEvent(step=step), numbers, np.array(step.index, np.uint32)))

    def adopt(self, router_epoch: int, row: tuple[int, int, int, int]) -> None:
        """Decode gets a sequence; its router sees the next token here."""
        if router := self.routers.get(router_epoch):
            router.running.new.append(row)
            self._fleet.holders[row[0]] = router
            if self._stepping is None:
                self._stepping = asyncio.create_task(self._step_while_needed())

    async def _step_while_needed(self) -> None:
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while self.num_running:
            if self._fleet.step_s:
                next_s = max(next_s + self._fleet.step_s, loop.time())
                await asyncio.sleep(next_s - loop.time())
            else:
                await asyncio.gather(*(router.has_room.wait() for router in self.routers.values()))
            for router in self.routers.values():
                self._step(router)
        self._stepping = None

    def _step(self, router: RouterStream) -> None:
        """One token of everything that runs for this router."""
        running = router.running
        cancelled = running.take_in()
        rows = running.rows
        if not len(rows) and not cancelled:
            return
        rows[:, 2] += 1
        seqs, numbers, indices = rows[:, 0], rows[:, 1].astype(np.uint32), rows[:, 2].astype(np.uint32)
        finished = rows[:, 2] >= rows[:, 3]
        self._num_steps += 1
        self._num_tokens += len(rows)
        step = worker_pb2.Step(
            step=self._num_steps,
            seq=seqs.tolist(),
            index=indices.tolist(),
            token=TOKENS[(indices + numbers) % len(TOKENS)].tolist(),
            flags=np.where(finished, LENGTH, 0).tolist(),
            load=self._load(),
        )
        for seq in seqs[finished].tolist():
            self._fleet.holders.pop(seq, None)
            step.ended.add(seq=seq, outcome=worker_pb2.OUTCOME_FINISHED, finish_reason=LENGTH)
        for seq in cancelled:
            step.ended.add(seq=seq, outcome=worker_pb2.OUTCOME_CANCELLED)
        running.rows = rows[~finished]
        router.say(Saying(worker_pb2.SessionEvent(step=step), numbers, indices))
        self._report_filled(int(np.count_nonzero(indices % BLOCK_TOKENS == 0)))

    def _report_filled(self, num_blocks: int) -> None:
        """Blocks that became full are cached from now on, and as many old ones are forgotten."""
        if not num_blocks or not self._cached:
            return
        added = os.urandom(HASH_BYTES * num_blocks)
        removed, self._cached = self._cached[: len(added)], self._cached[len(added) :] + added
        self._generation += 1
        delta = worker_pb2.CacheDelta(generation=self._generation, added=_hashes(added), removed=_hashes(removed))
        for router in self.routers.values():
            router.say(Saying(worker_pb2.SessionEvent(cache_delta=delta)))


def _hashes(packed: bytes) -> list[bytes]:
    return [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]


def number_of(request_id: str) -> int:
    """What the load generator wrote into x-request-id; NO_NUMBER where it was somebody else."""
    try:
        return int(request_id, 16) & NO_NUMBER
    except ValueError:
        return NO_NUMBER


class Fleet(control_pb2_grpc.ControlServicer):
    """All workers, and the controller that tells routers of them."""

    def __init__(self, wanted: StubFleet) -> None:
        self.step_s = wanted.step_s
        self.blocks_each = wanted.blocks_each  # cached by each worker
        self.log = TokenLog()
        self.holders: dict[int, RouterStream] = {}  # of running sequences
        roles = [worker_pb2.ROLE_PREFILL] * wanted.num_prefill + [worker_pb2.ROLE_DECODE] * wanted.num_decode
        roles += [worker_pb2.ROLE_PREFILL, worker_pb2.ROLE_DECODE] * ((wanted.num_other + 1) // 2)
        num_own = wanted.num_prefill + wanted.num_decode
        self.workers = [
            StubWorker(f"w{i:04d}", role, self, os.urandom(HASH_BYTES * wanted.blocks_each), busy=i >= num_own)
            for i, role in enumerate(roles[: num_own + wanted.num_other])
        ]
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        self._classes = [
            control_pb2.SloClass(name=class_name(i), ttft_ms=60_000, tpot_ms=1_000, percentile=0.95, weight=1.0)
            for i in range(wanted.num_classes)
        ]
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *SERVER_OPTIONS))

    async def start(self) -> str:
        """Returns the controller's address."""
        for worker in self.workers:
            await worker.start()
        control_pb2_grpc.add_ControlServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def Watch(
        self, request: control_pb2.WatchRequest, context: object
    ) -> AsyncIterator[control_pb2.ControlState]:
        records = [
            control_pb2.WorkerRecord(
                worker_id=worker.worker_id,
                epoch=worker.epoch,
                address=worker.address,
                role=worker.role,
                state="ready",
                fingerprint="f" * 32,
            )
            for worker in self.workers
        ]
        yield control_pb2.ControlState(workers=records, slo=control_pb2.SloSet(version=1, classes=self._classes))
        await asyncio.Event().wait()  # until the router leaves

    async def Announce(self, request: control_pb2.AnnounceRequest, context: object) -> control_pb2.AnnounceResponse:
        """Nobody here announces itself: the fleet is known."""
        return control_pb2.AnnounceResponse()

    async def Report(self, request: control_pb2.RouterReport, context: object) -> control_pb2.ReportResponse:
        return control_pb2.ReportResponse()

    async def Leave(self, request: control_pb2.LeaveRequest, context: object) -> control_pb2.LeaveResponse:
        raise AssertionError("no machine of a stub is taken down")

    async def Lenders(self, request: control_pb2.LendersRequest, context: object) -> control_pb2.LendersResponse:
        return control_pb2.LendersResponse()

    def answer(self, question: object) -> object:
        match question:
            case SetStep(step_s):
                self.step_s = step_s
            case StartLog():
                self.log.start()
            case EndLog(path):
                np.save(path, self.log.end())
            case CountSessions():
                num_open = sum(len(worker.routers) for worker in self.workers)
                return Sessions(num_open, sum(worker.num_running for worker in self.workers))
            case _:
                return Failed(f"{question} is no question for a stub fleet")
        return StubDone()


async def serve(parent: Connection) -> None:
    """Answer the bench until its pipe closes."""
    fleet = Fleet(parent.recv())
    parent.send(StubStarted(await fleet.start(), os.getpid()))
    gone = asyncio.Event()

    def on_question() -> None:
        try:
            parent.send(fleet.answer(parent.recv()))
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(parent.fileno())
            gone.set()

    asyncio.get_running_loop().add_reader(parent.fileno(), on_question)
    await gone.wait()


def main() -> None:
    grpc_wakeups.never_block()
    uvloop.run(serve(Connection(int(sys.argv[1]))))
    os._exit(0)  # a thousand gRPC servers have nothing to finish


if __name__ == "__main__":
    main()
