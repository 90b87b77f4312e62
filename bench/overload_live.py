"""Overload through a real router: front end, gRPC and Sessions in this process, over workers whose service times are scripted.

Workers are of role `both`: prompts one after the other at TOKENS_PER_S, then steps of a + b x batch for all sequences. They are
slow on purpose, some tens of calls a second in all, so that the machine is idle and what is measured is the policy.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import grpc
import grpc.aio

from baton.config import ModelConfig, RouterConfig
from baton.ids import new_epoch
from baton.model_files import load_model_files
from baton.v1 import serving_pb2, serving_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION
from bench.overload import INTERACTIVE, Traffic, mean_tokens, percentiles
from bench.overload_fleet import Job
from router.front_end import FrontEnd

NUM_WORKERS = 3
TOKENS_PER_S = 4_000.0
STEP_S, STEP_S_PER_SEQ = 0.02, 0.0005
PROMPT_TOKENS, PROMPT_SIGMA, MAX_PROMPT_TOKENS = 400, 0.8, 2_000  # 0.14 s each on average
OUTPUT_TOKENS = 32
BLOCK_TOKENS = 16
PHASE_S = 20.0  # per load; the first SETTLE_S of each are left out
SETTLE_S = 5.0

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Sequence:
    seq: int
    num_tokens: int  # of the prompt
    max_tokens: int
    index: int = 0


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """One engine as a timetable. Serves one router."""

    def __init__(self, name: str) -> None:
        self.address = ""
        self._name = name
        self._epoch = new_epoch()
        self._queue: deque[_Sequence] = deque()  # the first one is being computed
        self._running: dict[int, _Sequence] = {}
        self._outbox: asyncio.Queue[worker_pb2.SessionEvent] = asyncio.Queue()
        self._num_computed = self._num_prompts = 0
        self._came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_open(self) -> int:
        return len(self._queue) + len(self._running)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._tasks = [asyncio.create_task(self._prefill()), asyncio.create_task(self._decode())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._server.stop(None)

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        await anext(aiter(requests))
        yield worker_pb2.SessionEvent(
            opened=worker_pb2.Opened(
                worker_id=self._name,
                epoch=self._epoch,
                role=worker_pb2.ROLE_BOTH,
                model="scripted",
                fingerprint="f" * 32,
                max_model_len=8_192,
                num_blocks=20_000,
                block_size=BLOCK_TOKENS,
                max_num_seqs=256,
                load=self._load(),
                protocol_version=PROTOCOL_VERSION,
            )
        )
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                yield await self._outbox.get()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[worker_pb2.SessionRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "submit":
                asked = request.submit.request
                self._queue.append(_Sequence(asked.seq, len(asked.token_ids), asked.sampling.max_tokens))
                self._came.set()
            elif kind == "cancel":
                self._cancel(request.cancel.seq)
            elif kind == "heartbeat":
                reply = worker_pb2.HeartbeatReply(sent_ns=request.heartbeat.sent_ns, load=self._load())
                self._outbox.put_nowait(worker_pb2.SessionEvent(heartbeat=reply))

    def _cancel(self, seq: int) -> None:
        queued = next((sequence for sequence in self._queue if sequence.seq == seq), None)
        if queued is not None and queued is not self._queue[0]:
            self._queue.remove(queued)
        elif queued is not None:
            queued.max_tokens = 0  # the chunk under way is not cut
        elif self._running.pop(seq, None) is None:
            return
        ended = worker_pb2.Ended(seq=seq, outcome=worker_pb2.OUTCOME_CANCELLED)
        self._outbox.put_nowait(worker_pb2.SessionEvent(ended=ended))

    async def _prefill(self) -> None:
        while True:
            while not self._queue:
                self._came.clear()
                await self._came.wait()
            sequence = self._queue[0]
            await asyncio.sleep(sequence.num_tokens / TOKENS_PER_S)
            self._queue.popleft()
            self._num_computed += sequence.num_tokens
            self._num_prompts += 1
            if sequence.max_tokens:
                self._running[sequence.seq] = sequence
                self._say([sequence])

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(STEP_S + STEP_S_PER_SEQ * len(self._running))
            batch = [sequence for sequence in self._running.values() if sequence.index]
            if batch:
                self._say(batch)

    def _say(self, batch: list[_Sequence]) -> None:
        """One token of each."""
        step = worker_pb2.Step()
        for sequence in batch:
            step.seq.append(sequence.seq)
            step.index.append(sequence.index)
            step.token.append(300 + sequence.index % 100)
            sequence.index += 1
            is_last = sequence.index == sequence.max_tokens
            step.flags.append(serving_pb2.FINISH_REASON_LENGTH if is_last else 0)
            if is_last:
                del self._running[sequence.seq]
                stats = worker_pb2.SeqStats(computed_tokens=sequence.num_tokens)
                step.ended.append(worker_pb2.Ended(seq=sequence.seq, outcome=worker_pb2.OUTCOME_FINISHED, stats=stats))
        step.load.CopyFrom(self._load())
        self._outbox.put_nowait(worker_pb2.SessionEvent(step=step))

    def _load(self) -> worker_pb2.Load:
        # Rates are tokens by busy time, steps times their length: here a step computes one prompt.
        mean_s = self._num_computed / TOKENS_PER_S / max(1, self._num_prompts)
        return worker_pb2.Load(
            role=worker_pb2.ROLE_BOTH,
            num_running=len(self._running),
            num_waiting=len(self._queue),
            waiting_tokens=sum(sequence.num_tokens for sequence in self._queue),
            prompt_tokens_computed=self._num_computed,
            num_steps=self._num_prompts,
            step_ms=1e3 * mean_s,
            free_blocks=20_000,
        )


@dataclass(slots=True)
class Heard:
    """What one client saw."""

    job: Job
    status: str = ""  # "" = a whole answer
    retry_after_s: float = 0.0
    ended_s: float = 0.0  # since its arrival
    token_s: list[float] = field(default_factory=list)

    @property
    def met(self) -> bool:
        if self.status or not self.token_s:
            return False
        tpot_s = (self.token_s[-1] - self.token_s[0]) / max(1, len(self.token_s) - 1)
        return self.token_s[0] <= self.job.slo.ttft_ms / 1e3 and tpot_s <= self.job.slo.tpot_ms / 1e3


async def _call(stub: serving_pb2_grpc.ServingStub, job: Job) -> Heard:
    heard = Heard(job)
    request = serving_pb2.GenerateRequest(
        token_ids=serving_pb2.TokenIds(
            ids=[3 + (job.prompt_tokens + place) % 200 for place in range(job.prompt_tokens)]
        ),
        sampling=serving_pb2.Sampling(max_tokens=job.output_tokens, ignore_eos=True),
    )
    begun_s = time.monotonic()
    try:
        async for event in stub.Generate(request):  # type: ignore[attr-defined]  # the stub of the channel's kind
            if event.HasField("chunk"):
                heard.token_s.append(time.monotonic() - begun_s)
    except grpc.aio.AioRpcError as error:
        heard.status = error.code().name
        trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
        heard.retry_after_s = float(dict(trailers).get("retry-after", 0.0))
    heard.ended_s = time.monotonic() - begun_s
    return heard


async def _phase(stub: serving_pb2_grpc.ServingStub, calls_per_s: float, seed: int) -> list[Heard]:
    """Open loop for PHASE_S; returns once every call has ended."""
    traffic = Traffic(
        calls_per_s,
        prompt_tokens=PROMPT_TOKENS,
        prompt_sigma=PROMPT_SIGMA,
        output_tokens=OUTPUT_TOKENS,
        until_s=PHASE_S,
    )
    begun_s, tasks = time.monotonic(), []
    for job in traffic.jobs(seed):
        await asyncio.sleep(max(0.0, begun_s + job.at_s - time.monotonic()))
        short = replace(job, prompt_tokens=min(job.prompt_tokens, MAX_PROMPT_TOKENS), output_tokens=OUTPUT_TOKENS)
        tasks.append(asyncio.create_task(_call(stub, short)))
    return await asyncio.gather(*tasks)


def _summary(heard: list[Heard]) -> dict[str, object]:
    counted = [each for each in heard if each.job.at_s >= SETTLE_S]
    accepted = [each for each in counted if each.status != "RESOURCE_EXHAUSTED"]
    refused = [each for each in counted if each.status == "RESOURCE_EXHAUSTED"]
    num_met = sum(each.met for each in accepted)
    return {
        "num_calls": len(counted),
        "num_accepted": len(accepted),
        "attainment": num_met / max(1, len(accepted)),
        "goodput_per_s": num_met / (PHASE_S - SETTLE_S),
        "ttft_s": percentiles([each.token_s[0] for each in accepted if each.token_s]),
        "refused_in_s": percentiles([each.ended_s for each in refused]),
        "retry_after_s": percentiles([each.retry_after_s for each in refused]),
        "statuses": dict(Counter(each.status or "OK" for each in counted)),
    }


async def _measure(model: str) -> dict[str, object]:
    workers = [ScriptedWorker(f"both-{number}") for number in range(NUM_WORKERS)]
    for worker in workers:
        await worker.start()
    config = RouterConfig(http_port=0, grpc_port=0, max_inflight=4_096, model=ModelConfig(path=model))
    front_end = FrontEnd(config, load_model_files(model), [worker.address for worker in workers])
    await front_end.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}")
    stub = serving_pb2_grpc.ServingStub(channel)
    capacity = NUM_WORKERS * TOKENS_PER_S / mean_tokens(PROMPT_TOKENS, PROMPT_SIGMA, MAX_PROMPT_TOKENS)
    try:
        while front_end.fleet.unready_reason():  # noqa: ASYNC110  # nothing says when
            await asyncio.sleep(0.05)
        by_load: dict[str, Mapping[str, object]] = {}
        for load in (0.5, 0.9, 3.0, 0.5):
            name = f"{load:g}" if f"{load:g}" not in by_load else f"{load:g} after"
            by_load[name] = _summary(await _phase(stub, load * capacity, seed=round(10 * load)))
        left = {"calls": front_end.calls.num_inflight, "on_workers": sum(worker.num_open for worker in workers)}
        return {
            "capacity_calls_per_s": capacity,
            "slo": asdict(INTERACTIVE),
            "by_load": by_load,
            "left_behind": left,
        }
    finally:
        await channel.close(None)
        await front_end.stop()
        for worker in workers:
            await worker.stop()


def measure(model: str = "smollm2") -> dict[str, object]:
    """About two minutes. `model`: whose tokenizer the router loads."""
    return asyncio.run(_measure(model))
