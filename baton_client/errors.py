"""What goes wrong with a call, as the server said it: CallFailed, made of a gRPC status and its details."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any

from baton.v1 import rpc_status_pb2, serving_pb2

_DETAILS = "grpc-status-details-bin"
# What a connection that breaks looks like, and a router that is stopping or full: the same call may succeed elsewhere or later.
_RETRYABLE = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


class CallFailed(Exception):
    """A call has ended without its answer. `str(error)` is the server's message."""

    def __init__(
        self,
        status: str,
        message: str,
        *,
        code: str = "",
        field: str = "",
        retry_after_s: float = 0.0,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status  # name of a grpc.StatusCode
        self.code = code  # the server's own word, e.g. "invalid_request"; "" = the server did not say anything
        self.field = field  # what is at fault
        self.retry_after_s = retry_after_s  # 0 = not said
        self.retryable = status in _RETRYABLE if retryable is None else retryable

    @property
    def was_said(self) -> bool:
        """The server itself ended the call; otherwise the connection did, and nobody knows how far the call came."""
        return bool(self.code)


def from_rpc_error(error: grpc.RpcError) -> CallFailed:
    """Decode what a gRPC call raised; of blocking and asyncio calls."""
    code, details = error.code(), error.details()
    # Pairs, whatever the stubs say: named ones from blocking calls, plain ones from asyncio's.
    trailers = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    info, retry_after_s = rpc_status_pb2.RpcErrorInfo(), 0.0
    for detail in _details(trailers):
        kind = detail.type_url.rpartition(".")[2]
        if kind == "ErrorInfo":
            info = rpc_status_pb2.RpcErrorInfo.FromString(detail.value)
        elif kind == "RetryInfo":
            delay = rpc_status_pb2.RpcRetryInfo.FromString(detail.value).retry_delay
            retry_after_s = delay.seconds + delay.nanos / 1e9
    return CallFailed(
        code.name,
        details or code.name,
        code=info.reason.lower(),
        field=info.metadata["field"],
        retry_after_s=retry_after_s,
    )


def from_detail(detail: serving_pb2.ErrorDetail) -> CallFailed:
    """Of a call on a bulk stream, which has no status of its own."""
    status = _STATUS.get(detail.code, "UNKNOWN")
    return CallFailed(
        status,
        detail.message,
        code=detail.code,
        field=detail.field,
        retry_after_s=detail.retry_after_s,
        retryable=detail.retryable,
    )


def _details(trailers: Iterable[tuple[str, str | bytes]]) -> Iterable[Any]:
    for key, value in trailers:
        if key == _DETAILS and isinstance(value, bytes):
            return rpc_status_pb2.RpcStatus.FromString(value).details
    return ()


_STATUS: Mapping[str, str] = {  # baton/errors.py
    "invalid_request": "INVALID_ARGUMENT",
    "not_found": "NOT_FOUND",
    "already_exists": "ALREADY_EXISTS",
    "overloaded": "RESOURCE_EXHAUSTED",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "cancelled": "CANCELLED",
    "unauthenticated": "UNAUTHENTICATED",
    "unavailable": "UNAVAILABLE",
    "worker_lost": "UNAVAILABLE",
    "transfer_failed": "UNAVAILABLE",
    "peer_refused": "FAILED_PRECONDITION",
    "internal": "INTERNAL",
}
