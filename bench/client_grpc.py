"""Calls to Baton's own gRPC API. Prompts travel as token ids; answers are counted by their token ids.

One channel for all calls. A stream that ends without `done` or `error` is truncated, whatever its status says.
Leaving early cancels the RPC. Runs on the caller's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import grpc

from baton.errors import Overloaded
from baton.timings import Timings
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.client import CallFailed, CallShed, Finish, TargetInfo, Tokens
from bench.workload import PlannedCall

if TYPE_CHECKING:
    from baton.v1.serving_pb2_grpc import ServingAsyncStub

CONNECT_TIMEOUT_S = 10.0  # as over HTTP


class GrpcClient:
    def __init__(self, address: str, *, model: str = "", ignore_eos: bool = True, slo_class: str = "") -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub: ServingAsyncStub = serving_pb2_grpc.ServingStub(self._channel)
        self._model = model
        self._ignore_eos = ignore_eos
        self._slo = serving_pb2.Slo(class_name=slo_class)

    async def prepare(self) -> TargetInfo:
        try:
            info = await self._stub.GetModelInfo(serving_pb2.GetModelInfoRequest(), timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise status_failed(error) from error
        return TargetInfo(
            model=info.model,
            prompt_form="token ids, exact lengths (gRPC)",
            vocab_size=info.vocab_size,
            max_model_len=min(info.max_model_len, info.max_prompt_tokens or info.max_model_len),
        )

    async def stream(self, call: PlannedCall) -> AsyncGenerator[Tokens | Finish, None]:
        rpc = self._stub.Generate(self._encode(call))
        try:
            finish: Finish | None = None
            async for response in rpc:
                match response.WhichOneof("event"):
                    case "chunk" if response.chunk.token_ids:
                        yield Tokens(len(response.chunk.token_ids))
                    case "done":
                        finish = finish_of(response.done)
                    case "error":
                        raise error_failed(response.error)
            if finish is None:
                raise CallFailed("truncated", "the stream ended without done or error")
            yield finish
        except grpc.aio.AioRpcError as error:
            raise status_failed(error) from error
        except asyncio.CancelledError:
            # grpc.aio raises this too where the SERVER ended the call as CANCELLED; then nobody has cancelled this task.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise CallFailed("grpc_CANCELLED", "the server cancelled the call") from None
        finally:
            rpc.cancel()  # no effect on a finished call

    async def close(self) -> None:
        await self._channel.close(grace=None)

    def _encode(self, call: PlannedCall) -> serving_pb2.GenerateRequest:
        return serving_pb2.GenerateRequest(
            model=self._model,
            token_ids=serving_pb2.TokenIds(ids=call.token_ids),
            sampling=serving_pb2.Sampling(max_tokens=call.max_tokens, seed=call.seed, ignore_eos=self._ignore_eos),
            slo=self._slo,
            request_id=f"bench-{call.index}",
        )


def status_failed(error: grpc.aio.AioRpcError) -> CallFailed:
    return CallFailed(f"grpc_{error.code().name}", error.details() or "")


def error_failed(error: serving_pb2.ErrorDetail) -> CallFailed:
    kind = f"error_{error.code}"
    if error.code == Overloaded.code:
        return CallShed(kind, error.message, error.retry_after_s)
    return CallFailed(kind, error.message)


def finish_of(done: serving_pb2.Done) -> Finish:
    """Read the end of an answer.

    Raises:
        CallFailed: it is no answer: cancelled by the server, or empty.
    """
    if done.finish_reason == serving_pb2.FINISH_REASON_CANCELLED:
        raise CallFailed("finish_cancelled", "the server cancelled the answer")
    if done.usage.completion_tokens == 0:
        raise CallFailed("empty", "the answer has no tokens")
    timings = done.timings
    return Finish(
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached_tokens=done.usage.cached_tokens,
        timings=Timings(
            queue_ms=timings.queue_ms,
            prefill_ms=timings.prefill_ms,
            handoff_gap_ms=timings.handoff_gap_ms,
            ttft_ms=timings.ttft_ms,
            tpot_ms=timings.tpot_ms,
            kv_bytes=timings.kv_bytes,
            kv_transfer_ms=timings.kv_transfer_ms,
            transport=timings.transport,
            prefill_worker=timings.prefill_worker,
            decode_worker=timings.decode_worker,
        )
        if done.HasField("timings")
        else None,
    )
