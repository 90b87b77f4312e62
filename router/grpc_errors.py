"""How a BatonError leaves a gRPC server: status, message, and the details that client libraries decode.

Trailing metadata: `grpc-status-details-bin` (ErrorInfo always; BadRequest where a field is at fault; RetryInfo where trying
again can help) and, for shells, `retry-after` in whole seconds.
"""

from __future__ import annotations

import math

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from baton import clock
from baton.errors import BatonError
from baton.v1 import rpc_status_pb2, serving_pb2

DOMAIN = "baton"
# Clients refuse trailers over 8 KiB. The message is in them three times, once at up to 12 bytes per character (percent-encoded).
MAX_MESSAGE_CHARS = 300
_GOOGLE = "type.googleapis.com/google.rpc."


def status_message(error: BatonError) -> str:
    """What the status says; the whole message is in the stream's error event."""
    return error.message[:MAX_MESSAGE_CHARS]


def status_code(error: BatonError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_code]


def error_detail(error: BatonError) -> serving_pb2.ErrorDetail:
    """The event that precedes the status of a stream."""
    return serving_pb2.ErrorDetail(
        code=error.code,
        message=error.message,
        field=error.field,
        retryable=error.retryable,
        retry_after_s=clock.real_s(error.retry_after_s),
    )


def trailing_metadata(error: BatonError) -> tuple[tuple[str, str | bytes], ...]:
    metadata: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", _status(error).SerializeToString())]
    if error.retry_after_s:
        metadata.append(("retry-after", str(math.ceil(clock.real_s(error.retry_after_s)))))
    return tuple(metadata)


def _status(error: BatonError) -> rpc_status_pb2.RpcStatus:
    details = [_packed("ErrorInfo", rpc_status_pb2.RpcErrorInfo(reason=error.code.upper(), domain=DOMAIN,
                                                               metadata={"field": error.field}))]  # fmt: skip
    if error.field:
        violation = rpc_status_pb2.RpcBadRequest.FieldViolation(field=error.field, description=status_message(error))
        details.append(_packed("BadRequest", rpc_status_pb2.RpcBadRequest(field_violations=[violation])))
    if error.retry_after_s:
        pause_s = clock.real_s(error.retry_after_s)
        delay = Duration(nanos=round(pause_s % 1 * 1e9), seconds=int(pause_s))
        details.append(_packed("RetryInfo", rpc_status_pb2.RpcRetryInfo(retry_delay=delay)))
    return rpc_status_pb2.RpcStatus(code=status_code(error).value[0], message=status_message(error), details=details)


def _packed(name: str, message: Message) -> Any:
    """Not Any.Pack, which would write our own type's name."""
    return Any(type_url=_GOOGLE + name, value=message.SerializeToString())
