"""Every error that crosses a boundary of Baton, and how each boundary says it.

    BatonError
    ├── InvalidRequest(field, limit)     the caller's fault        INVALID_ARGUMENT    400
    ├── Unauthenticated(field)           no key, or an unknown one UNAUTHENTICATED     401
    ├── NotFound                         no such model, id, path   NOT_FOUND           404
    ├── AlreadyExists                    such a call runs already  ALREADY_EXISTS      409
    ├── Overloaded(retry_after_s)        capacity                  RESOURCE_EXHAUSTED  429
    ├── DeadlineExceeded                 the call's time is over   DEADLINE_EXCEEDED   504
    ├── Cancelled                        the caller left           CANCELLED           499
    ├── Unavailable(retry_after_s)       nobody can serve it now   UNAVAILABLE         503
    │   ├── WorkerLost                   a worker died             UNAVAILABLE         503
    │   └── TransferFailed               KV did not arrive         UNAVAILABLE         503
    ├── PeerRefused(field)               a pair does not fit       FAILED_PRECONDITION 503
    ├── ConfigError(field)               start-up: one clear line  FAILED_PRECONDITION 500
    └── Internal                         a defect of ours          INTERNAL            500

`retryable` says whether the same call may succeed elsewhere or later. Messages never contain prompts, output or secrets.
"""

from __future__ import annotations

from typing import Any, ClassVar


class BatonError(Exception):
    """The root. `str(error)` is the message that a client may see."""

    code: ClassVar[str] = "internal"
    grpc_code: ClassVar[str] = "INTERNAL"  # the name of a grpc.StatusCode; errors need no grpc
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, between processes of one bench: kinds differ in what their constructors ask for."""
        return _again, (type(self), self.message), self.__dict__


def _again(kind: type[BatonError], message: str) -> BatonError:
    return kind.__new__(kind, message)


class InvalidRequest(BatonError):
    """Names the field and its limit; no work was done."""

    code = "invalid_request"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message, field=field)


class Unauthenticated(BatonError):
    """The caller named no API key, or one that is not in the file."""

    code = "unauthenticated"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class NotFound(BatonError):
    code = "not_found"
    grpc_code = "NOT_FOUND"
    http_status = 404


class AlreadyExists(BatonError):
    code = "already_exists"
    grpc_code = "ALREADY_EXISTS"
    http_status = 409


class Overloaded(BatonError):
    """A bounded queue or pool is full; `retry_after_s` is an honest estimate."""

    code = "overloaded"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class DeadlineExceeded(BatonError):
    code = "deadline_exceeded"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(BatonError):
    code = "cancelled"
    grpc_code = "CANCELLED"
    http_status = 499  # nginx's "client closed request"; no client is left to read it


class Unavailable(BatonError):
    code = "unavailable"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class WorkerLost(Unavailable):
    code = "worker_lost"


class TransferFailed(Unavailable):
    code = "transfer_failed"


class PeerRefused(BatonError):
    """Two workers do not fit together; `field` is the first thing that differs."""

    code = "peer_refused"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503


class ConfigError(BatonError):
    code = "config_error"
    grpc_code = "FAILED_PRECONDITION"


class Internal(BatonError):
    code = "internal"


_BY_CODE: dict[str, type[BatonError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest, Unauthenticated, NotFound, AlreadyExists, Overloaded, DeadlineExceeded, Cancelled, Unavailable,
        WorkerLost, TransferFailed, PeerRefused, ConfigError, Internal,
    )
}  # fmt: skip


# Codes of what nobody but a call's caller is to blame for: no class's target was missed, and no span failed.
CALLERS_OWN = frozenset(kind.code for kind in (InvalidRequest, NotFound, AlreadyExists, Cancelled))


def error_from_code(code: str, message: str, field: str = "", retry_after_s: float = 0.0) -> BatonError:
    """Rebuild the error that a peer sent; an unknown code becomes Internal."""
    kind = _BY_CODE.get(code, Internal)
    if kind is InvalidRequest:
        return InvalidRequest(message, field=field)
    return kind(message, field=field, retry_after_s=retry_after_s)
