"""What `baton bench router` says to its stub fleet, and the fleet to it. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StubFleet:
    """The first question: who is to be there. Answer: StubStarted."""

    num_prefill: int
    num_decode: int
    num_other: int  # endpoints that other routers keep busy: candidates of each placement, and never the best
    blocks_each: int  # of a worker's pool; its cache is full, and its router is told every hash
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


def class_name(i: int) -> str:
    """Of the i-th SLO class, in the fleet's controller and in requests."""
    return f"class{i:02d}"
