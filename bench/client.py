"""The seam between the load generator and whatever it loads: one Protocol, implemented for OpenAI HTTP and for Baton's gRPC.

`stream` yields Tokens as they arrive and ends with exactly one Finish. Anything else is an exception: CallFailed names a kind
that is counted in the report. A stream that just stops is CallFailed("truncated"), never a short success.
Closing the iterator early is how a client leaves: the implementation must then end the call on the wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from baton.timings import Timings
from bench.workload import PlannedCall


@dataclass(frozen=True, slots=True)
class Tokens:
    count: int  # at least 1, in one chunk


@dataclass(frozen=True, slots=True)
class Finish:
    prompt_tokens: int | None = None  # None where the server does not count
    completion_tokens: int | None = None
    cached_tokens: int = 0
    timings: Timings | None = None


class CallFailed(Exception):
    """One call went wrong; `kind` groups it with others like it, e.g. "http_503", "grpc_UNAVAILABLE", "truncated"."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class CallShed(CallFailed):
    """The server has too much to do and turned the call away; it asked to be left alone for `retry_after_s` (0: not said)."""

    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(kind, message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class TargetInfo:
    model: str
    prompt_form: str  # how prompts travel, for the report
    vocab_size: int = 0  # 0 = unknown
    max_model_len: int = 0  # tokens; 0 = unknown


class Client(Protocol):
    async def prepare(self) -> TargetInfo:
        """Learn what the target is.

        Raises:
            CallFailed: it cannot be reached, or refuses every form of prompt.
        """

    def stream(self, call: PlannedCall) -> AsyncGenerator[Tokens | Finish, None]: ...

    async def close(self) -> None: ...
