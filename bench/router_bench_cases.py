"""The measurements of `baton bench router`, one function each, over a Rig that runs.

Each leaves the rig as it found it: nothing running, decode at its usual step. Loads are made by another process and CPU time
is read from outside, so this process sleeps while it measures.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.child import ChildError
from bench.measure import Percentiles, percentiles
from bench.router_bench_figures import Cost, Window, added_gaps_ms, check_answers, cost, transit_ms, window
from bench.router_bench_load import Generator, HttpStub, Load, Records, Seen
from bench.router_bench_messages import CountSessions, EndLog, Sessions, SetStep, StartLog, StubDone
from bench.router_bench_rig import ANSWER_S, HOST, Rig

STEP_S = 0.025  # 40 tokens/s for each stream
LONG_TOKENS = 4_000  # an answer that no measurement sees the end of
SHORT_TOKENS = 2  # one from prefill, one from decode: the cost of a request is that of its whole life
SETTLE_S = 30.0
WARM_UP_S = 2.0  # after the last stream of a load began
NUMBERS_OF_A_LOAD = 1 << 20

_loads = itertools.count()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    num_calls: int  # for added latency
    window_s: float
    streams: tuple[int, int]  # of the two windows that tell a token's cost
    request_rates: tuple[float, float]  # of those that tell a request's, per second
    speed_streams: int
    gap_streams: int
    gap_s: float
    start_running: int
    start_streams: int


FULL = Effort(2_000, 8.0, (200, 1_000), (50, 250), 1_500, 1_500, 20.0, 100, 1_500)
QUICK = Effort(300, 2.0, (50, 200), (25, 75), 200, 200, 3.0, 20, 200)


@dataclass(frozen=True, slots=True)
class Added:
    """What the router adds to one call on one connection: ms of the client's time, via less direct at the same rank."""

    p50: float
    p99: float
    n: int
    via_ms: Percentiles
    direct_ms: Percentiles


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between tokens at the client, less those at the stub; and how long a token is on its way. ms."""

    added_ms: Percentiles
    transit_ms: Percentiles
    streams: int
    tokens_per_s: float
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Start:
    """What streams that run see when many start at once."""

    running: int
    starting: int
    stall_ms: float  # the largest added gap of a running stream from the start on
    before_ms: float  # the largest one before it
    started: int  # that had a first token before the measurement ended
    last_first_token_s: float  # after the start


@dataclass(frozen=True, slots=True)
class CpuFigures:
    idle_share: float  # of a core
    cost: Cost
    windows: tuple[Window, Window, Window, Window]  # few and many streams, few and many requests


def measure_idle(rig: Rig, effort: Effort) -> float:
    before_s, began_s = rig.router.cpu_s(), time.monotonic()
    time.sleep(effort.window_s)
    return (rig.router.cpu_s() - before_s) / (time.monotonic() - began_s)


# -- one connection ---------------------------------------------------------------------------------------------------


def measure_added(rig: Rig, effort: Effort) -> Added:
    """Calls that take turns: one through the router, one to an HTTP stub that answers the very bytes of the router."""
    body = {
        "model": rig.model,
        "messages": [{"role": "user", "content": "Name one word that rhymes with time."}],
        "max_tokens": 1,
    }
    raw = json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {rig.keys[0]}", "x-slo-class": "class00"}
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(keep_alive(rig.router.http_port))
        answer = call(router, raw, headers)
        stub = stack.enter_context(HttpStub(canned=answer))
        direct = stack.enter_context(keep_alive(stub.ports[0]))
        via_ms, direct_ms = [], []
        for i in range(-effort.num_calls // 10, effort.num_calls):
            times = [timed(connection, raw, headers) for connection in (direct, router)]
            if i >= 0:  # those before warm up
                direct_ms.append(times[0])
                via_ms.append(times[1])
    via, alone = percentiles(via_ms), percentiles(direct_ms)
    return Added(via.p50 - alone.p50, via.p99 - alone.p99, via.n, via, alone)


@contextlib.contextmanager
def keep_alive(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(HOST, port, timeout=ANSWER_S)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield connection
    finally:
        connection.close()


def timed(connection: http.client.HTTPConnection, raw: bytes, headers: dict[str, str]) -> float:
    """Milliseconds until the answer was read whole."""
    began_s = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", raw, headers)
    answer = connection.getresponse()
    answer.read()
    elapsed_ms = 1e3 * (time.perf_counter() - began_s)
    if answer.status != http.client.OK:
        raise ChildError(f"the answer's status is {answer.status}")
    return elapsed_ms


def call(connection: http.client.HTTPConnection, raw: bytes, headers: dict[str, str]) -> bytes:
    """The bytes of an answer, put together again."""
    connection.request("POST", "/v1/chat/completions", raw, headers)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise ChildError(f"the router answers {answer.status}: {body.decode(errors='replace')}")
    head = "".join(f"{name}: {value}\r\n" for name, value in answer.getheaders())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


# -- many connections -------------------------------------------------------------------------------------------------


def measure_cpu(rig: Rig, effort: Effort, idle_share: float) -> CpuFigures:
    few, many = (window_of_streams(rig, streams, effort) for streams in effort.streams)
    rare, often = (window_of_requests(rig, rate, effort) for rate in effort.request_rates)
    return CpuFigures(idle_share, cost((few, many), (rare, often)), (few, many, rare, often))


def measure_speed(rig: Rig, effort: Effort) -> Window:
    """As many tokens as go through: decode steps as soon as its last step was taken."""
    rig.fleet.ask(SetStep(0.0), StubDone, ANSWER_S)
    try:
        return window_of_streams(rig, effort.speed_streams, effort)
    finally:
        rig.fleet.ask(SetStep(STEP_S), StubDone, ANSWER_S)


def window_of_streams(rig: Rig, streams: int, effort: Effort) -> Window:
    """Streams that run all the time; none begins or ends in the window."""
    load = running_load(rig, streams, effort.window_s)
    return watch(rig, load, rig.requests(LONG_TOKENS), effort.window_s)[0]


def window_of_requests(rig: Rig, rate: float, effort: Effort) -> Window:
    load = Load(
        rig.router.http_port,
        connections=256,
        seconds=WARM_UP_S + effort.window_s,
        rate=rate,
        first_number=new_numbers(),
    )
    return watch(rig, load, rig.requests(SHORT_TOKENS), effort.window_s)[0]


def measure_gap(rig: Rig, effort: Effort) -> Gaps:
    load = running_load(rig, effort.gap_streams, effort.gap_s)
    with logged(rig) as said:
        part, seen, from_ns, to_ns = watch(rig, load, rig.requests(LONG_TOKENS), effort.gap_s)
    gaps = added_gaps_ms(seen.events, said(), from_ns, to_ns)
    transit = transit_ms(seen.events, said())
    return Gaps(percentiles(gaps), percentiles(transit), effort.gap_streams, part.tokens_per_s, part.cpu_share)


def measure_start(rig: Rig, effort: Effort) -> Start:
    """Let some streams run, then start many in the same instant, over connections that stand already."""
    requests = rig.requests(LONG_TOKENS)
    running_s = 2 * WARM_UP_S + effort.window_s
    with logged(rig) as said, Generator(running_load(rig, effort.start_running, running_s), requests) as running:
        burst_ns = running.start_ns + int(2 * WARM_UP_S * 1e9)
        burst = Load(
            rig.router.http_port, effort.start_streams, seconds=effort.window_s, start_ns=burst_ns,
            max_requests=effort.start_streams, first_number=new_numbers(),
        )  # fmt: skip
        time.sleep(max(0.0, (burst_ns - time.monotonic_ns()) / 1e9 - WARM_UP_S))
        with Generator(burst, requests) as starting:
            started, seen = starting.seen(), running.seen()
    settle(rig)
    check_answers(seen)
    before = added_gaps_ms(seen.events, said(), burst_ns - int(WARM_UP_S * 1e9), burst_ns)
    after = added_gaps_ms(seen.events, said(), burst_ns, running.stop_ns)
    first_ns = started.records["first_ns"]
    return Start(
        effort.start_running, effort.start_streams, float(after.max()), float(before.max()),
        int(np.count_nonzero(first_ns)), float(first_ns.max() - burst_ns) / 1e9,
    )  # fmt: skip


def running_load(rig: Rig, streams: int, seconds: float) -> Load:
    """Streams that begin within WARM_UP_S and are watched WARM_UP_S later."""
    return Load(
        rig.router.http_port, streams, seconds=2 * WARM_UP_S + seconds, ramp_s=WARM_UP_S, max_requests=streams,
        first_number=new_numbers(),
    )  # fmt: skip


def new_numbers() -> int:
    """A range of request numbers that no other load of this bench has."""
    return next(_loads) * NUMBERS_OF_A_LOAD


def watch(rig: Rig, load: Load, requests: list[bytes], seconds: float) -> tuple[Window, Seen, int, int]:
    """Run a load and watch its last `seconds`.

    Raises:
        ChildError: the load did not run.
        NoFigure: answers failed.
    """
    with Generator(load, requests) as generator:
        from_ns = generator.stop_ns - int(seconds * 1e9)
        time.sleep(max(0.0, (from_ns - time.monotonic_ns()) / 1e9))
        from_ns, before_s = time.monotonic_ns(), rig.router.cpu_s()
        time.sleep(max(0.0, (generator.stop_ns - time.monotonic_ns()) / 1e9))
        to_ns, after_s = time.monotonic_ns(), rig.router.cpu_s()
        seen = generator.seen()
    settle(rig)
    check_answers(seen)
    return window(seen, from_ns, to_ns, after_s - before_s), seen, from_ns, to_ns


@contextlib.contextmanager
def logged(rig: Rig) -> Iterator[Callable[[], Records]]:
    """What the stubs say in the block; to be had after it."""
    path = Path(rig.folder) / "said.npy"
    rig.fleet.ask(StartLog(), StubDone, ANSWER_S)
    try:
        yield lambda: np.load(path)
    finally:
        rig.fleet.ask(EndLog(path), StubDone, ANSWER_S)


def settle(rig: Rig) -> None:
    """Wait until nothing runs any more. Raises: ChildError: something does not end."""
    ends_s = time.monotonic() + SETTLE_S
    while time.monotonic() < ends_s:
        if rig.fleet.ask(CountSessions(), Sessions, ANSWER_S).num_running == 0:
            return
        time.sleep(0.05)
    raise ChildError(f"{SETTLE_S:g} s after a load's end the fleet still has sequences")
