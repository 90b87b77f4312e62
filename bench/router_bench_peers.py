"""Other routers in the same run: each measured by a child that lives in a network namespace with nothing but a loopback.

Some of their parts listen on every interface and on fixed ports; in a namespace of their own nobody else sees them. The child
(`python -m bench.router_bench_peers`, in our interpreter) starts the router in the peers' interpreter, runs the load generator
beside it and answers with Figures. A router that does not run is a line, not a failure: its own words say why.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from bench.child import Child, ChildError, Failed
from bench.peers.dynamo_frontend import DynamoFrontend
from bench.peers.sglang_router import SglangRouter
from bench.router_bench_cases import Effort, Figures, measure_parts

MEASURE_TIMEOUT_S = 900.0
ALONE_TIMEOUT_S = 10.0
NOT_ALONE = "no network namespace of its own can be had here"
_UP = 'ip link set lo up && exec "$@"'


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A router, and what it does of the work that Baton's does."""

    make: type[SglangRouter] | type[DynamoFrontend]
    does: str


PEERS: Mapping[str, PeerKind] = {
    "sglang": PeerKind(
        SglangRouter,
        "sglang-router 0.3.2, P/D over HTTP: sends each call to one prefill and one decode worker, passes decode's bytes on; "
        "no tokenizer, no look at tokens, no keys, no classes, no index (round_robin)",
    ),
    "dynamo": PeerKind(
        DynamoFrontend,
        "ai-dynamo 1.6.1 frontend over its mock engines, P/D: tokenises, detokenises, writes events; no keys, no classes, "
        "no index (round-robin)",
    ),
}


@dataclass(frozen=True, slots=True)
class MeasurePeer:
    """The only question. Answer: Figures."""

    name: str
    python: str
    model: str
    effort: Effort
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PeerRun:
    name: str
    does: str
    figures: Figures | None  # None where it does not run here
    reason: str = ""  # why not


def measure_peer(name: str, python: str, model: str, effort: Effort, parts: Sequence[str]) -> PeerRun:
    """All of a peer's figures, or why there are none."""
    does = PEERS[name].does
    if reason := why_not_alone():
        return PeerRun(name, does, None, reason)
    try:
        child = Child(name, "bench.router_bench_peers", prefix=alone())
    except ChildError as error:
        return PeerRun(name, does, None, str(error))
    try:
        question = MeasurePeer(name, python, model, effort, tuple(parts))
        return PeerRun(name, does, child.ask(question, Figures, MEASURE_TIMEOUT_S))
    except ChildError as error:
        return PeerRun(name, does, None, str(error))
    finally:
        child.close()


def alone() -> list[str]:
    """The command that runs another one in a network namespace with only a loopback; unshare(1), ip-link(8)."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", "--net", *user, "sh", "-c", _UP, "sh"]


def why_not_alone() -> str:
    """Why this system gives no process a network namespace of its own; "" = it does."""
    try:
        tried = subprocess.run([*alone(), "true"], capture_output=True, text=True, timeout=ALONE_TIMEOUT_S, check=False)
    except OSError as error:
        return f"{NOT_ALONE}: {error}"
    return f"{NOT_ALONE}: {tried.stderr.strip()}" if tried.returncode != 0 else ""


def end_with(parent: Connection) -> None:
    """A bench that is gone waits for no figures; what this process started dies with it."""
    parent.poll(None)
    os._exit(1)


def main() -> None:
    parent = Connection(int(sys.argv[1]))
    try:
        question: MeasurePeer = parent.recv()
        threading.Thread(target=end_with, args=(parent,), daemon=True).start()
        target = PEERS[question.name].make(question.python, question.model)
        try:
            parent.send(measure_parts(target, question.effort, question.parts, lambda what: None))
        finally:
            target.close()
    except ChildError as error:
        parent.send(Failed(str(error)))
    except EOFError:
        return  # the bench is gone


if __name__ == "__main__":
    main()
