"""What `baton bench router` says to its stub fleet and its gRPC client, and they to it. Times are seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

VOCABULARY = range(300, 512)  # of prompts and answers: common words of the usual vocabularies, and no special tokens
FLUSH_MS = 100  # four tokens of a stream at its pace


@dataclass(frozen=True, slots=True)
class StubFleet:
    """The first question: who is to be there. Answer: StubStarted."""

    num_prefill: int
    num_decode: int
    num_other: int  # endpoints that other routers keep busy: candidates of each placement, and never the best
    blocks_each: int  # cached by each worker; its router is told every hash
    num_classes: int  # of SLO
    step_s: float  # of decode; 0 = a step as soon as its routers have taken the last one


@dataclass(frozen=True, slots=True)
class StubStarted:
    control_address: str  # of the controller that names the fleet
    pid: int


@dataclass(frozen=True, slots=True)
class SetStep:
    """Answer: StubDone."""

    step_s: float


@dataclass(frozen=True, slots=True)
class CountSessions:
    """Answer: Sessions."""


@dataclass(frozen=True, slots=True)
class Sessions:
    num_open: int  # of all routers
    num_running: int  # sequences


@dataclass(frozen=True, slots=True)
class StartLog:
    """Note every token from now on. Answer: StubDone."""


@dataclass(frozen=True, slots=True)
class EndLog:
    """Write what was noted to a .npy file of router_bench_load.EVENT. Answer: StubDone."""

    path: Path


@dataclass(frozen=True, slots=True)
class StubDone:
    """Nothing more to say."""


class GrpcKind(enum.StrEnum):
    """How a client takes its tokens."""

    GENERATE = "gRPC Generate, each token at once"
    GENERATE_FLUSH = f"gRPC Generate, max_flush_ms {FLUSH_MS}"
    SESSION = "gRPC Session, one message per step"
    SESSION_FLUSH = f"gRPC Session, max_flush_ms {FLUSH_MS}"

    @property
    def max_flush_ms(self) -> int:
        return FLUSH_MS if self in (GrpcKind.GENERATE_FLUSH, GrpcKind.SESSION_FLUSH) else 0

    @property
    def is_session(self) -> bool:
        return self in (GrpcKind.SESSION, GrpcKind.SESSION_FLUSH)


@dataclass(frozen=True, slots=True)
class GrpcLoad:
    """The only question. Answer: Taken."""

    address: str
    kind: GrpcKind
    keys: tuple[str, ...]  # of the streams, one each; a Session has the first one's
    num_classes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Taken:
    """When how many tokens came. CLOCK_MONOTONIC."""

    received_ns: NDArray[np.int64]
    num_tokens: NDArray[np.int64]

    def between(self, from_ns: int, to_ns: int) -> int:
        inside = (self.received_ns >= from_ns) & (self.received_ns < to_ns)
        return int(self.num_tokens[inside].sum())


def class_name(i: int) -> str:
    """Of the i-th SLO class, in the fleet's controller and in requests."""
    return f"class{i:02d}"
