"""The measurements of `baton bench router`, one function each, over a Target that runs.

Each leaves it as it found it, with nothing running. Loads are made by another process and CPU time is read from outside, so
this process sleeps while it measures.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.child import ChildError
from bench.kv_plan import Spread, spread
from bench.measure import Percentiles, percentiles
from bench.router_bench_figures import (
    Cost,
    NoFigure,
    Window,
    added_gaps_ms,
    check_answers,
    cost,
    gaps_beyond_usual_ms,
    transit_ms,
    window,
)
from bench.router_bench_load import Generator, HttpStub, Load, Records, Seen
from bench.router_bench_target import ANSWER_S, HOST, Exchange, Target

LONG_TOKENS = 4_000  # an answer that no measurement sees the end of
SHORT_TOKENS = 2  # one from prefill, one from decode: the cost of a request is that of its whole life
# Of the load generator where CPU is measured: a client on another host is not woken on the router's account.
NAP_S = 0.001
COME_UP_S = 6.0  # a fleet of a thousand is introduced to itself for 4 s after its last Session is open
WARM_UP_S = 2.0  # after the last stream of a load began
NUMBERS_OF_A_LOAD = 1 << 20

Figure = TypeVar("Figure")
_loads = itertools.count()


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    num_calls: int  # for added latency
    window_s: float
    rounds: int  # of the windows that tell costs
    streams: tuple[int, int]  # of the two windows that tell a token's cost
    request_rates: tuple[float, float]  # of those that tell a request's, per second
    speed_streams: int
    gap_streams: int
    gap_s: float
    start_running: int
    start_streams: int
    grpc_streams: tuple[int, int]  # as streams, for a client in Python that gets a message for each token


PARTS = ("added", "cpu", "speed", "gap", "start", "grpc")
FULL = Effort(2_000, 5.0, 3, (200, 1_000), (250, 500), 1_500, 1_500, 20.0, 20, 1_500, (50, 200))
QUICK = Effort(300, 2.0, 1, (50, 200), (100, 200), 200, 200, 3.0, 20, 200, (20, 80))


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
class CpuRound:
    """Four windows, and what follows from them."""

    few_streams: Window
    many_streams: Window
    few_requests: Window
    many_requests: Window

    @property
    def cost(self) -> Cost:
        """Raises: NoFigure: the windows hardly differ."""
        return cost((self.few_streams, self.many_streams), (self.few_requests, self.many_requests))


@dataclass(frozen=True, slots=True)
class CpuFigures:
    us_per_token: Spread  # over rounds
    us_per_request: Spread
    rounds: tuple[CpuRound, ...]


@dataclass(slots=True)
class Figures:
    """Of one router; a part that was not asked for is None."""

    idle_share: float  # of a core, with nothing to do but what it does by itself
    added: Added | None = None
    cpu: CpuFigures | None = None
    gaps: Gaps | None = None
    start: Start | None = None
    speed: Window | None = None
    memory_bytes: int = 0  # after the paced loads
    missing: dict[str, str] = field(default_factory=dict)  # why a part that was asked for has no figure


def measure_parts(target: Target, effort: Effort, parts: Sequence[str], say: Callable[[str], None]) -> Figures:
    """Measure what is asked for. Raises: ChildError: a process failed."""

    def measured(part: str, under: Target, measure: Callable[[Target, Effort], Figure]) -> Figure | None:
        if part not in parts:
            return None
        say(part)
        try:
            return measure(under, effort)
        except NoFigure as error:
            figures.missing[part] = str(error)
            return None

    say("idle")
    time.sleep(COME_UP_S)
    figures = Figures(measure_idle(target, effort))
    figures.cpu = measured("cpu", target, measure_cpu)
    figures.gaps = measured("gap", target, measure_gap)
    figures.start = measured("start", target, measure_start)
    figures.memory_bytes = target.memory_bytes()
    with target.unpaced() as fast:
        figures.added = measured("added", fast, measure_added)
        figures.speed = measured("speed", fast, measure_speed)
    return figures


def measure_idle(target: Target, effort: Effort) -> float:
    before_s, began_s = target.cpu_s(), time.monotonic()
    time.sleep(effort.window_s)
    return (target.cpu_s() - before_s) / (time.monotonic() - began_s)


# -- one connection ---------------------------------------------------------------------------------------------------


def measure_added(target: Target, effort: Effort) -> Added:
    """Calls that take turns: one through the router, one to an HTTP stub that answers the very bytes of the router."""
    chat = target.chat()
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(keep_alive(target.port))
        stub = stack.enter_context(HttpStub(canned=answer_of(router, chat)))
        direct = stack.enter_context(keep_alive(stub.ports[0]))
        via_ms, direct_ms = [], []
        for i in range(-effort.num_calls // 10, effort.num_calls):
            times = [timed(connection, chat) for connection in (direct, router)]
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


def timed(connection: http.client.HTTPConnection, chat: Exchange) -> float:
    """Milliseconds until the answer was read whole."""
    began_s = time.perf_counter()
    exchange(connection, chat)
    return 1e3 * (time.perf_counter() - began_s)


def exchange(connection: http.client.HTTPConnection, chat: Exchange) -> tuple[http.client.HTTPResponse, bytes]:
    """Raises: ChildError: the answer is a refusal."""
    connection.request("POST", chat.path, chat.body, {"content-type": "application/json", **chat.fields})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise ChildError(f"the router answers {answer.status}: {body.decode(errors='replace')}")
    return answer, body


def answer_of(connection: http.client.HTTPConnection, chat: Exchange) -> bytes:
    """The bytes of an answer, put together again with its length instead of chunks."""
    answer, body = exchange(connection, chat)
    fields = {name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"}
    fields |= {"content-length": str(len(body))}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


# -- many connections -------------------------------------------------------------------------------------------------


def measure_cpu(target: Target, effort: Effort) -> CpuFigures:
    rounds = tuple(cpu_round(target, effort) for _ in range(effort.rounds))
    costs = [each.cost for each in rounds]
    return CpuFigures(
        spread([each.us_per_token for each in costs]), spread([each.us_per_request for each in costs]), rounds
    )


def cpu_round(target: Target, effort: Effort) -> CpuRound:
    few, many = (window_of_streams(target, streams, effort) for streams in effort.streams)
    rare, often = (window_of_requests(target, rate, effort) for rate in effort.request_rates)
    return CpuRound(few, many, rare, often)


def measure_speed(target: Target, effort: Effort) -> Window:
    """Of a target whose workers keep no time: as many tokens as go through."""
    return window_of_streams(target, effort.speed_streams, effort)


def window_of_streams(target: Target, streams: int, effort: Effort) -> Window:
    """Streams that run all the time; none begins or ends in the window."""
    load = replace(running_load(target, streams, effort.window_s), nap_s=NAP_S)
    return watch(target, load, target.requests(LONG_TOKENS), effort.window_s)[0]


def window_of_requests(target: Target, rate: float, effort: Effort) -> Window:
    load = Load(
        target.port,
        connections=256,
        seconds=WARM_UP_S + effort.window_s,
        rate=rate,
        first_number=new_numbers(),
        nap_s=NAP_S,
    )
    return watch(target, load, target.requests(SHORT_TOKENS), effort.window_s)[0]


def measure_gap(target: Target, effort: Effort) -> Gaps:
    load = running_load(target, effort.gap_streams, effort.gap_s)
    with target.logged() as said:
        part, seen, from_ns, to_ns = watch(target, load, target.requests(LONG_TOKENS), effort.gap_s)
    sent = said(seen)
    transit = percentiles(transit_ms(seen.events, sent) if sent is not None else ())
    gaps = percentiles(gaps_between(seen, sent, from_ns, to_ns))
    return Gaps(gaps, transit, effort.gap_streams, part.tokens_per_s, part.cpu_share)


def gaps_between(seen: Seen, sent: Records | None, from_ns: int, to_ns: int) -> NDArray[np.float64]:
    """Added by the router; where the workers' instants are not known, beyond the usual gap."""
    if sent is None:
        return gaps_beyond_usual_ms(seen.events, from_ns, to_ns)
    return added_gaps_ms(seen.events, sent, from_ns, to_ns)


def measure_start(target: Target, effort: Effort) -> Start:
    """Let some streams run, then start many in the same instant, over connections that stand already."""
    requests = target.requests(LONG_TOKENS)
    running_s = 2 * WARM_UP_S + effort.window_s
    with target.logged() as said, Generator(running_load(target, effort.start_running, running_s), requests) as running:
        burst_ns = running.start_ns + int(2 * WARM_UP_S * 1e9)
        burst = Load(
            target.port, effort.start_streams, seconds=effort.window_s, start_ns=burst_ns,
            max_requests=effort.start_streams, first_number=new_numbers(),
        )  # fmt: skip
        time.sleep(max(0.0, (burst_ns - time.monotonic_ns()) / 1e9 - WARM_UP_S))
        with Generator(burst, requests) as starting:
            started, seen = starting.seen(), running.seen()
    target.settle()
    check_answers(seen)
    sent = said(seen)
    before = gaps_between(seen, sent, burst_ns - int(WARM_UP_S * 1e9), burst_ns)
    after = gaps_between(seen, sent, burst_ns, running.stop_ns)
    first_ns = started.records["first_ns"]
    return Start(
        effort.start_running, effort.start_streams, float(after.max()), float(before.max()),
        int(np.count_nonzero(first_ns)), float(first_ns.max() - burst_ns) / 1e9,
    )  # fmt: skip


def running_load(target: Target, streams: int, seconds: float) -> Load:
    """Streams that begin within WARM_UP_S and are watched WARM_UP_S later."""
    return Load(
        target.port, streams, seconds=2 * WARM_UP_S + seconds, ramp_s=WARM_UP_S, max_requests=streams,
        first_number=new_numbers(),
    )  # fmt: skip


def new_numbers() -> int:
    """A range of request numbers that no other load of this bench has."""
    return next(_loads) * NUMBERS_OF_A_LOAD


def watch(target: Target, load: Load, requests: list[bytes], seconds: float) -> tuple[Window, Seen, int, int]:
    """Run a load and watch its last `seconds`.

    Raises:
        ChildError: the load did not run.
        NoFigure: answers failed.
    """
    with Generator(load, requests) as generator:
        from_ns = generator.stop_ns - int(seconds * 1e9)
        time.sleep(max(0.0, (from_ns - time.monotonic_ns()) / 1e9))
        from_ns, before_s = time.monotonic_ns(), target.cpu_s()
        time.sleep(max(0.0, (generator.stop_ns - time.monotonic_ns()) / 1e9))
        to_ns, after_s = time.monotonic_ns(), target.cpu_s()
        seen = generator.seen()
    target.settle()
    check_answers(seen)
    return window(seen, from_ns, to_ns, after_s - before_s), seen, from_ns, to_ns
