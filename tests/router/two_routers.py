"""Two routers over the same workers, of which one goes on with what the other one began."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from baton.config import RouterConfig
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2, serving_pb2_grpc
from router.front_end import FrontEnd
from tests.router.parking_worker import start_parking_pair
from tests.router.router_rig import Answer, Rig, request, running_rig, until


def resumable(request_id: str = "r1", **sampling: object) -> serving_pb2.GenerateRequest:
    made = request("hello", **sampling)
    made.request_id, made.resumable = request_id, True
    return made


async def read(call: AsyncIterator[serving_pb2.GenerateResponse], num_tokens: int = 1 << 30) -> Answer:
    """So many tokens of a stream, or all of it."""
    answer = Answer()
    try:
        async for response in call:
            if response.HasField("chunk"):
                answer.chunks.append(response.chunk)
                answer.text += response.chunk.text
                answer.token_ids += response.chunk.token_ids
                if len(answer.token_ids) >= num_tokens:
                    break
            elif response.HasField("done"):
                answer.done = response.done
            else:
                answer.error = response.error
    except grpc.aio.AioRpcError as error:
        answer.status = error
    return answer


class TwoRouters(Rig):
    """The rig's router and another one over the same workers."""

    other: FrontEnd
    other_stub: serving_pb2_grpc.ServingAsyncStub
    num_broken = 0

    async def broken(self, made: serving_pb2.GenerateRequest, num_tokens: int) -> Answer:
        """Read a part, leave, and wait until the router has noticed."""
        decode = self.decode
        decode.script.pause_at = num_tokens
        decode.script.decode_gate.clear()
        call = self.stub.Generate(made)
        answer = await read(aiter(call), num_tokens)
        call.cancel()
        await self.idle()
        decode.script.pause_at = None
        decode.script.decode_gate.set()
        return answer

    async def resume(self, request_id: str = "r1", *next_index: int, **fields: object) -> Answer:
        message = serving_pb2.ResumeRequest(request_id=request_id, next_index=next_index, **fields)  # type: ignore[arg-type]
        return await read(aiter(self.other_stub.Resume(message)))


@asynccontextmanager
async def two_routers(files: ModelFiles, **settings: Any) -> AsyncIterator[TwoRouters]:
    workers = await start_parking_pair()
    async with running_rig(files, workers, **settings) as first:
        rig = TwoRouters(first.front_end, workers, first.channel)
        config = RouterConfig(http_port=0, grpc_port=0, heartbeat_s=0.1, **settings)
        rig.other = FrontEnd(config, files, [worker.address for worker in workers])
        await rig.other.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.other.grpc_port}") as channel:
            rig.other_stub = serving_pb2_grpc.ServingStub(channel)
            await until(lambda: not rig.other.fleet.unready_reason(), "the other router is ready")
            yield rig
        await rig.other.stop()
        await rig.http.aclose()
