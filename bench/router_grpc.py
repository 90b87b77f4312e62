"""What a token costs the router over gRPC: Generate a message each, gathered, and the bulk Session.

    python -m bench.router_grpc [--json PATH]       3 minutes

The router, its stub fleet and what is switched on are those of `baton bench router`; the clients are grpc.aio in this process, so
only the router's CPU time is a figure, never a latency. Each mode is measured with few and with many streams of 40 tokens/s;
the difference of the two is what a token costs, and whatever does not grow with tokens cancels out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc.aio
from rich.console import Console
from rich.table import Table

from baton.request import FinishReason
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.router_bench_messages import class_name
from bench.router_bench_rig import Features, Rig, running_rig
from bench.router_bench_target import HOST
from router.detokenizer import TextStream, TokenTable
from router.gather import Gatherer
from router.grpc_messages import groups_to_reply

FEW, MANY = 40, 240  # streams; more than that and per-token messages outrun a Python client
SETTLE_S = 1.5  # until every stream is past its first tokens
WINDOW_S = 6.0
MAX_TOKENS = 1_000  # outlasts every window at 40 tokens/s, and no deadline
CALLS_PER_SESSION = 120
NUM_OWN_STEPS = 400


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    bulk: bool
    max_flush_ms: int


@dataclass(frozen=True, slots=True)
class Figure:
    mode: str
    us_per_token: float  # of router CPU
    messages_per_token: float


@dataclass(slots=True)
class Counts:
    tokens: int = 0
    messages: int = 0


MODES = (
    Mode("Generate", False, 0),
    Mode("Generate, 20 ms", False, 20),
    Mode("Generate, 100 ms", False, 100),
    Mode("Session, per step", True, 0),
    Mode("Session, 20 ms", True, 20),
    Mode("Session, 100 ms", True, 100),
)


async def generate(stub: serving_pb2_grpc.ServingAsyncStub, key: str, mode: Mode, counts: Counts) -> None:
    async for response in stub.Generate(_request(mode.max_flush_ms), metadata=_metadata(key)):
        counts.messages += 1
        counts.tokens += len(response.chunk.token_ids)


async def session(
    stub: serving_pb2_grpc.ServingAsyncStub, key: str, mode: Mode, counts: Counts, num_calls: int
) -> None:
    async def messages() -> AsyncIterator[serving_pb2.SessionCall]:
        yield serving_pb2.SessionCall(open=serving_pb2.OpenSession(max_flush_ms=mode.max_flush_ms))
        for number in range(num_calls):
            yield serving_pb2.SessionCall(start=serving_pb2.StartCall(call=number, generate=_request(0)))
        await asyncio.Event().wait()

    async for reply in stub.Session(messages(), metadata=_metadata(key)):
        counts.messages += 1
        counts.tokens += len(reply.token_ids)


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"), ("x-slo-class", class_name(0)))


def _request(max_flush_ms: int) -> serving_pb2.GenerateRequest:
    return serving_pb2.GenerateRequest(
        token_ids=serving_pb2.TokenIds(ids=range(1_000, 1_032)),
        sampling=serving_pb2.Sampling(max_tokens=MAX_TOKENS),
        max_flush_ms=max_flush_ms,
    )


async def watch(rig: Rig, mode: Mode, num_streams: int) -> tuple[float, Counts]:
    """CPU seconds of the router, and what came, in one window."""
    counts = Counts()
    async with grpc.aio.insecure_channel(f"{HOST}:{rig.grpc_port}") as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        if mode.bulk:
            sizes = [CALLS_PER_SESSION] * (num_streams // CALLS_PER_SESSION) + [num_streams % CALLS_PER_SESSION]
            loads = [session(stub, rig.keys[i], mode, counts, size) for i, size in enumerate(sizes) if size]
        else:
            loads = [generate(stub, rig.keys[i], mode, counts) for i in range(num_streams)]
        tasks = [asyncio.create_task(load) for load in loads]
        await asyncio.sleep(SETTLE_S)
        for task in tasks:
            if task.done():
                task.result()  # which tells why
        cpu_s, before = rig.cpu_s(), Counts(counts.tokens, counts.messages)
        await asyncio.sleep(WINDOW_S)
        cpu_s = rig.cpu_s() - cpu_s
        seen = Counts(counts.tokens - before.tokens, counts.messages - before.messages)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(rig.settle)
    return cpu_s, seen


async def measure(rig: Rig, mode: Mode) -> Figure:
    few_s, few = await watch(rig, mode, FEW)
    many_s, many = await watch(rig, mode, MANY)
    num_tokens = many.tokens - few.tokens
    return Figure(mode.name, 1e6 * (many_s - few_s) / num_tokens, many.messages / many.tokens)


def own_us(tokens_per_group: int) -> float:
    """What Session itself does per token: gather, pack, serialise; without gRPC's write. CPU microseconds, best of five."""
    table = TokenTable([b" word"] * 512, {})
    best_s = math.inf
    for _ in range(5):
        gatherer = Gatherer(1 << 30, lambda: None)
        sinks = [gatherer.audience(number).choice(0, TextStream(table)) for number in range(CALLS_PER_SESSION)]
        began_s = time.process_time()
        for index in range(NUM_OWN_STEPS):
            for sink in sinks:
                sink.token(index, index % 512, FinishReason.NONE, None)
            if index % tokens_per_group == 0:
                groups_to_reply(gatherer.take(), table).SerializeToString()
        best_s = min(best_s, time.process_time() - began_s)
    return 1e6 * best_s / (NUM_OWN_STEPS * CALLS_PER_SESSION)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.router_grpc")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table("gRPC", "router CPU us/token", "messages/token")
    with running_rig(Features(num_endpoints=8)) as rig:
        figures = [asyncio.run(measure(rig, mode)) for mode in MODES]
    for figure in figures:
        table.add_row(figure.mode, f"{figure.us_per_token:.1f}", f"{figure.messages_per_token:.3f}")
    Console().print(table)
    Console().print(f"of it Session's own, a token in each group: {own_us(1):.2f} us; four: {own_us(4):.2f} us")
    if options.json:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
