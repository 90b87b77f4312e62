"""Clients that call one after the other, and what became of each call: every token of every answer is known.

    async with Caller(stub, patience_s).calls(8) as calls:
        ...                                         # whatever is done to the cluster meanwhile
    calls.check(at_least=20)

Workers are emulated GPUs, whose tokens are a function of the prompt (engine/emulated_runner.py).
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import grpc.aio
import httpx

from baton.request import SamplingParams
from baton.v1 import serving_pb2, serving_pb2_grpc
from engine.emulated_runner import emulated_answer
from router.front_end import FrontEnd
from tests.integration.cluster_rig import collect
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Called:
    """One call to its end, on the client's clock."""

    number: int
    ended_s: float
    ttft_s: float
    tpot_s: float
    wrong: str  # "": every token that it must have, and no other
    decode_worker: str


@dataclass
class Calls:
    """What became of the calls of a while, as they ended."""

    done: list[Called] = field(default_factory=list)

    def check(self, at_least: int = 1) -> None:
        wrong = [f"call {call.number}: {call.wrong}" for call in self.done if call.wrong]
        assert not wrong, wrong[:5]
        assert len(self.done) >= at_least

    def worked(self, worker_id: str) -> bool:
        """Some of them were decoded there."""
        return any(call.decode_worker == worker_id for call in self.done)

    def goodput(self, ttft_s: float, tpot_s: float, num_calls: int = 20) -> float:
        """The share of calls that met both targets, of the worst `num_calls` in a row."""
        met = [not call.wrong and call.ttft_s <= ttft_s and call.tpot_s <= tpot_s for call in self.done]
        starts = range(max(1, len(met) - num_calls + 1))
        return min(sum(met[i : i + num_calls]) / len(met[i : i + num_calls]) for i in starts)


async def num_moved(router: FrontEnd) -> int:
    """Sequences that went on elsewhere because a worker was lost."""
    async with httpx.AsyncClient() as client:
        page = (await client.get(f"http://127.0.0.1:{router.http_port}/metrics")).text
    return sum(int(float(found)) for found in re.findall(r"^baton_request_retries_total\{.*\} (\S+)$", page, re.M))


@dataclass
class Caller:
    """Of one router. `patience_s`: for each call."""

    stub: serving_pb2_grpc.ServingAsyncStub
    patience_s: float
    _numbers: count[int] = field(default_factory=count)

    @asynccontextmanager
    async def calls(self, num_clients: int, num_tokens: int) -> AsyncIterator[Calls]:
        """Clients that call one after the other while the block runs; those under way at its end are seen to theirs."""
        calls, ended = Calls(), asyncio.Event()

        async def client() -> None:
            while not ended.is_set():
                await self._call(next(self._numbers), num_tokens, calls)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_clients):
                group.create_task(client())
            try:
                yield calls
            finally:
                ended.set()

    async def _call(self, number: int, num_tokens: int, calls: Calls) -> None:
        prompt = [(31 * i + 7 * number) % 400 + 20 for i in range(100 + number % 50)]
        sampling = serving_pb2.Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        request = serving_pb2.GenerateRequest(sampling=sampling, token_ids=serving_pb2.TokenIds(ids=prompt))
        began_s, chunks_s = time.monotonic(), list[float]()

        async def noted() -> AsyncIterator[serving_pb2.GenerateResponse]:
            async for response in self.stub.Generate(request, timeout=self.patience_s):
                chunks_s.append(time.monotonic())
                yield response

        answer = await collect(noted())
        greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        wrong = ""
        if answer.code is not grpc.StatusCode.OK:
            wrong = f"{answer.code.name} {answer.details}"
        elif answer.tokens != emulated_answer(prompt, greedy, num_tokens, VOCAB_SIZE, (EOS_TOKEN_ID,)):
            wrong = "other tokens than it must have"
        ended_s = time.monotonic()
        first_s = chunks_s[0] if chunks_s else ended_s
        timings = answer.done.timings if answer.done else serving_pb2.Timings()
        calls.done.append(
            Called(
                number,
                ended_s,
                ttft_s=first_s - began_s,
                tpot_s=(ended_s - first_s) / (num_tokens - 1),
                wrong=wrong,
                decode_worker=timings.decode_worker,
            )
        )
