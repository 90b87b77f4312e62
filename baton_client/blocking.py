"""The client for threads: calls block, answers are iterators. One Client may be used by many threads."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from types import TracebackType

import grpc

from baton.v1 import serving_pb2, serving_pb2_grpc
from baton_client.connection import OPTIONS, Connection, Prompt, to_connection, to_request
from baton_client.errors import CallFailed, from_rpc_error
from baton_client.progress import Progress
from baton_client.retry import RetryBudget, RetryPolicy


class Client:
    """`target`: a Connection, or a target with no TLS. Close it, or use it as a context."""

    def __init__(self, target: str | Connection, *, api_key: str = "", retry: RetryPolicy | None = None) -> None:
        self._connection = to_connection(target, api_key)
        self._policy = retry or RetryPolicy()
        self._budget = RetryBudget(self._policy)
        credentials = self._connection.credentials
        if credentials is None:
            self._channel = grpc.insecure_channel(self._connection.target, options=OPTIONS)
        else:
            self._channel = grpc.secure_channel(self._connection.target, credentials, options=OPTIONS)
        self.stub = serving_pb2_grpc.ServingStub(self._channel)

    def generate(
        self,
        prompt: Prompt | serving_pb2.GenerateRequest,
        *,
        timeout_s: float | None = None,
        resumable: bool = True,
        **sampling: object,
    ) -> Answer:
        """Start a call when its answer is first read. `sampling`: fields of serving.proto's Sampling."""
        request = to_request(prompt, resumable, sampling)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        progress = Progress(request, deadline_s, self._policy, self._budget)
        return Answer(self.stub, progress, self._connection.metadata)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


class Answer:
    """The chunks of one call, to be read once. Leaving it unread costs nothing; `close` ends a call in mid-stream."""

    def __init__(
        self, stub: serving_pb2_grpc.ServingStub, progress: Progress, metadata: tuple[tuple[str, str], ...]
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

    def __iter__(self) -> Iterator[serving_pb2.Chunk]:
        return self._chunks

    def text(self) -> str:
        """Read to the end; the text of choice 0. Raises: CallFailed."""
        return "".join(chunk.text for chunk in self if chunk.choice == 0)

    def close(self) -> None:
        """End the call. It stays resumable for its window."""
        self._chunks.close()

    def _run(self) -> Generator[serving_pb2.Chunk, None, None]:
        progress = self._progress
        while progress.done is None:
            failed = CallFailed("UNAVAILABLE", "the stream ended without an end")
            call = self._call()
            try:
                for response in call:
                    if response.HasField("chunk"):
                        if progress.take(response.chunk):
                            yield response.chunk
                    elif response.HasField("done"):
                        progress.finish(response.done)
            except grpc.RpcError as error:
                failed = from_rpc_error(error)
            finally:
                call.cancel()  # type: ignore[no-untyped-call]
            if progress.done is None:
                time.sleep(progress.delay_s(failed))

    def _call(self) -> grpc.CallIterator[serving_pb2.GenerateResponse]:
        message = self._progress.next_message()
        if isinstance(message, serving_pb2.ResumeRequest):
            return self._stub.Resume(message, timeout=self._progress.timeout_s, metadata=self._metadata)
        return self._stub.Generate(message, timeout=self._progress.timeout_s, metadata=self._metadata)
