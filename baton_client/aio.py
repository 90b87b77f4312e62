"""The client for asyncio: the same calls as `blocking`, awaited. Belongs to the event loop it was made in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client.bulk import Bulk
from baton_client.connection import OPTIONS, Connection, Prompt, to_connection, to_request
from baton_client.errors import CallFailed, from_rpc_error
from baton_client.progress import Progress
from baton_client.retry import RetryBudget, RetryPolicy


class AsyncClient:
    """`target`: a Connection, or a target with no TLS. Close it, or use it as a context."""

    def __init__(self, target: str | Connection, *, api_key: str = "", retry: RetryPolicy | None = None) -> None:
        self._connection = to_connection(target, api_key)
        self._policy = retry or RetryPolicy()
        self._budget = RetryBudget(self._policy)
        credentials = self._connection.credentials
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(self._connection.target, options=OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(self._connection.target, credentials, options=OPTIONS)
        self.stub = serving_pb2_grpc.ServingStub(self._channel)

    def generate(
        self,
        prompt: Prompt | serving_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        resumable: bool = True,
        **sampling: object,
    ) -> AsyncAnswer:
        """Start a call when its answer is first read. `sampling`: fields of serving.proto's Sampling."""
        request = to_request(prompt, resumable, sampling)
        return AsyncAnswer(self.stub, self._progress(request, timeout_s), self._connection.metadata)

    def bulk(self, *, max_flush_ms: int = 20, max_calls: int = 256) -> Bulk:
        """Many calls over one stream, at the price of up to `max_flush_ms` on each token; at most `max_calls` at a time."""
        return Bulk(self.stub, self._connection.metadata, self._progress, max_flush_ms, max_calls)

    def _progress(self, request: serving_pb2.GenerateRequest, timeout_s: float | None) -> Progress:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        return Progress(request, deadline_s, self._policy, self._budget)

    async def close(self) -> None:
        await self._channel.close(None)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self.close()


class AsyncAnswer:
    """The chunks of one call, to be read once. `close` ends a call in mid-stream."""

    def __init__(
        self, stub: serving_pb2_grpc.ServingAsyncStub, progress: Progress, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._stub = stub
        self._progress = progress
        self._metadata = metadata
        self._chunks = self._run()

    @property
    def done(self) -> serving_pb2.Done | None:
        """Finish reasons, usage and timings; None until the last chunk was read."""
        return self._progress.done

    @property
    def request_id(self) -> str:
        return self._progress.request.request_id

    def __aiter__(self) -> AsyncIterator[serving_pb2.Chunk]:
        return self._chunks

    async def text(self) -> str:
        """Read to the end; the text of choice 0. Raises: CallFailed."""
        return "".join([chunk.text async for chunk in self if chunk.choice == 0])

    async def close(self) -> None:
        """End the call. It stays resumable for its window."""
        await self._chunks.aclose()

    async def _run(self) -> AsyncGenerator[serving_pb2.Chunk, None]:
        progress = self._progress
        while progress.done is None:
            failed = CallFailed("UNAVAILABLE", "the stream ended without an end")
            call = self._call()
            try:
                async for response in call:
                    if response.HasField("chunk"):
                        if progress.take(response.chunk):
                            yield response.chunk
                    elif response.HasField("done"):
                        progress.finish(response.done)
            except grpc.aio.AioRpcError as error:
                failed = from_rpc_error(error)
            finally:
                call.cancel()
            if progress.done is None:
                await asyncio.sleep(progress.delay_s(failed))

    def _call(self) -> grpc.aio.UnaryStreamCall[Any, serving_pb2.GenerateResponse]:
        message = self._progress.next_message()
        if isinstance(message, serving_pb2.ResumeRequest):
            return self._stub.Resume(message, timeout=self._progress.timeout_s, metadata=self._metadata)
        return self._stub.Generate(message, timeout=self._progress.timeout_s, metadata=self._metadata)
