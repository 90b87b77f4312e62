"""A router in the test's own event loop, over stub workers, with clients for both of its APIs."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from baton.config import RouterConfig
from baton.model_files import ModelFiles, load_model_files
from baton.v1 import serving_pb2, serving_pb2_grpc
from router.front_end import FrontEnd
from tests.router.stub_worker import StubWorker, start_pair

POLL_S = 10.0  # how long a test waits for what must come; generous, never asserted


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition without assuming how long it takes."""
    deadline_s = time.monotonic() + POLL_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {POLL_S} s: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    """A finished Generate stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chunks: list[serving_pb2.Chunk] = field(default_factory=list)
    done: serving_pb2.Done | None = None
    error: serving_pb2.ErrorDetail | None = None
    status: grpc.aio.AioRpcError | None = None


class Rig:
    def __init__(self, front_end: FrontEnd, workers: Sequence[StubWorker], channel: grpc.aio.Channel) -> None:
        self.front_end = front_end
        self.workers = list(workers)
        self.channel = channel
        self.stub = serving_pb2_grpc.ServingStub(channel)
        self.base_url = f"http://127.0.0.1:{front_end.http_port}"
        self.http = httpx.AsyncClient(base_url=self.base_url, timeout=30.0)

    @property
    def prefill(self) -> StubWorker:
        return self.workers[0]

    @property
    def decode(self) -> StubWorker:
        return self.workers[-1]

    async def generate(self, request: serving_pb2.GenerateRequest, **options: object) -> Answer:
        """Read a whole answer, whatever its end."""
        answer = Answer()
        try:
            async for response in self.stub.Generate(request, **options):  # type: ignore[arg-type]
                kind = response.WhichOneof("event")
                if kind == "chunk":
                    answer.chunks.append(response.chunk)
                    answer.text += response.chunk.text
                    answer.token_ids += response.chunk.token_ids
                elif kind == "done":
                    assert answer.done is None
                    answer.done = response.done
                else:
                    assert answer.error is None
                    answer.error = response.error
        except grpc.aio.AioRpcError as error:
            answer.status = error
        return answer

    async def post(self, path: str, body: Mapping[str, object]) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, body: Mapping[str, object]) -> list[dict[str, Any]]:
        """The JSON of every server-sent event; [DONE] as {"done": True}."""
        events: list[dict[str, Any]] = []
        async with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = line.removeprefix("data: ")
                    events.append({"done": True} if data == "[DONE]" else json.loads(data))
        return events

    async def idle(self) -> None:
        """Every count of work is back at 0, here and on the workers."""
        fleet = self.front_end.fleet
        await until(lambda: self.front_end.calls.num_inflight == 0, "no call in flight")
        await until(lambda: not any(endpoint.num_inflight for endpoint in fleet.endpoints), "no hold on an endpoint")
        await until(lambda: not any(e.session.num_attached for e in fleet.endpoints), "no inbox attached")
        await until(lambda: not any(worker.num_open for worker in self.workers), "no sequence on a worker")


def request(prompt: str = "hello", **sampling: object) -> serving_pb2.GenerateRequest:
    return serving_pb2.GenerateRequest(prompt=prompt, sampling=serving_pb2.Sampling(**sampling))  # type: ignore[arg-type]


def tiny_files(model_dir: Path) -> ModelFiles:
    return load_model_files(str(model_dir))


@asynccontextmanager
async def running_rig(
    files: ModelFiles, workers: Sequence[StubWorker] | None = None, *, wait_ready: bool = True, **settings: object
) -> AsyncIterator[Rig]:
    """A router over `workers` (default: one prefill, one decode); everything is stopped at the end."""
    if workers is None:
        workers = await start_pair()
    base = RouterConfig(http_port=0, grpc_port=0, heartbeat_s=0.1, unavailable_wait_s=5.0)
    config = dataclasses.replace(base, **settings)  # type: ignore[arg-type]
    front_end = FrontEnd(config, files, [worker.address for worker in workers])
    await front_end.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}")
    rig = Rig(front_end, workers, channel)
    try:
        if wait_ready:
            await until(lambda: not front_end.fleet.unready_reason(), "the router is ready")
        yield rig
    finally:
        await rig.http.aclose()
        await channel.close(None)
        await front_end.stop()
        for worker in rig.workers:
            await worker.kill()
