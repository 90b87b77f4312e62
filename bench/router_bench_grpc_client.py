"""The gRPC client of `baton bench router`: takes tokens for a while and notes when how many came. A bench.child.Child."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

import grpc
import grpc.aio
import numpy as np
import uvloop

from baton import grpc_wakeups
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.child import Failed
from bench.router_bench_messages import VOCABULARY, GrpcLoad, Taken, class_name

MAX_TOKENS = 4_000  # nobody waits for its end
PROMPT = tuple(random.Random(0).choices(VOCABULARY, k=32))


class Notes:
    """When how many tokens came."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []

    def note(self, num_tokens: int) -> None:
        self._rows.append((time.monotonic_ns(), num_tokens))

    def taken(self) -> Taken:
        rows = np.array(self._rows or [(0, 0)], np.int64)
        return Taken(rows[:, 0], rows[:, 1])


async def take(load: GrpcLoad) -> Taken:
    """Run all streams for so long, then leave them. Raises: AioRpcError: one was refused."""
    notes = Notes()
    async with grpc.aio.insecure_channel(load.address) as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        if load.kind.is_session:
            streams = [session(stub, load, notes)]
        else:
            streams = [generate(stub, load, i, notes) for i in range(len(load.keys))]
        tasks = [asyncio.create_task(stream) for stream in streams]
        done, running = await asyncio.wait(tasks, timeout=load.seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for task in done:
            task.result()
    return notes.taken()


async def generate(stub: serving_pb2_grpc.ServingAsyncStub, load: GrpcLoad, i: int, notes: Notes) -> None:
    request = call_of(load, i)
    async for response in stub.Generate(request, metadata=(("authorization", f"Bearer {load.keys[i]}"),)):
        if response.HasField("chunk"):
            notes.note(len(response.chunk.token_ids))


async def session(stub: serving_pb2_grpc.ServingAsyncStub, load: GrpcLoad, notes: Notes) -> None:
    async def calls() -> AsyncIterator[serving_pb2.SessionCall]:
        yield serving_pb2.SessionCall(open=serving_pb2.OpenSession(max_flush_ms=load.kind.max_flush_ms))
        for i in range(len(load.keys)):
            yield serving_pb2.SessionCall(start=serving_pb2.StartCall(call=i, generate=call_of(load, i)))
        await asyncio.Event().wait()  # closing this side would be a word

    async for reply in stub.Session(calls(), metadata=(("authorization", f"Bearer {load.keys[0]}"),)):
        notes.note(len(reply.token_ids))


def call_of(load: GrpcLoad, i: int) -> serving_pb2.GenerateRequest:
    return serving_pb2.GenerateRequest(
        token_ids=serving_pb2.TokenIds(ids=PROMPT),
        sampling=serving_pb2.Sampling(max_tokens=MAX_TOKENS),
        slo=serving_pb2.Slo(class_name=class_name(i % load.num_classes)),
        max_flush_ms=load.kind.max_flush_ms,
    )


def main() -> None:
    grpc_wakeups.never_block()
    parent = Connection(int(sys.argv[1]))
    try:
        parent.send(uvloop.run(take(parent.recv())))
    except grpc.aio.AioRpcError as error:
        parent.send(Failed(f"{error.code().name}: {error.details()}"))
    except (EOFError, OSError):
        return  # the bench is gone


if __name__ == "__main__":
    main()
