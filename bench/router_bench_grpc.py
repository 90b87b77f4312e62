"""What a token costs the router over public gRPC: Generate, Generate with max_flush_ms, and the bulk Session.

The client (bench/router_bench_grpc_client.py) is plain grpc.aio in a process of its own. It need not be quick, since only the
router's CPU is looked at; it must keep up, so it opens fewer streams than the C generator.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from bench.child import Child
from bench.router_bench_cases import WARM_UP_S, Effort
from bench.router_bench_figures import Window
from bench.router_bench_messages import GrpcKind, GrpcLoad, Taken
from bench.router_bench_rig import Rig
from bench.router_bench_target import ANSWER_S, HOST


@dataclass(frozen=True, slots=True)
class GrpcCost:
    """Of the router, from two windows that differ in running streams."""

    kind: GrpcKind
    us_per_token: float  # NaN where many streams brought no more tokens than few
    windows: tuple[Window, Window]


def measure_grpc(rig: Rig, effort: Effort) -> list[GrpcCost]:
    """Raises: ChildError: the client failed."""
    return [grpc_cost(rig, kind, effort) for kind in GrpcKind]


def grpc_cost(rig: Rig, kind: GrpcKind, effort: Effort) -> GrpcCost:
    wanted = effort.streams if kind.is_session else effort.grpc_streams
    few, many = (window_of_streams(rig, kind, streams, effort) for streams in wanted)
    more_tokens = many.tokens_per_s - few.tokens_per_s
    per_token = 1e6 * (many.cpu_share - few.cpu_share) / more_tokens if more_tokens > 0 else math.nan
    return GrpcCost(kind, per_token, (few, many))


def window_of_streams(rig: Rig, kind: GrpcKind, streams: int, effort: Effort) -> Window:
    """As router_bench_cases.window_of_streams."""
    client = Child("gRPC client", "bench.router_bench_grpc_client")
    try:
        seconds = 2 * WARM_UP_S + effort.window_s
        keys = tuple(rig.keys[i % len(rig.keys)] for i in range(streams))
        client.tell(GrpcLoad(f"{HOST}:{rig.grpc_port}", kind, keys, rig.features.num_classes, seconds + WARM_UP_S))
        time.sleep(2 * WARM_UP_S)
        from_ns, before_s = time.monotonic_ns(), rig.cpu_s()
        time.sleep(effort.window_s)
        to_ns, after_s = time.monotonic_ns(), rig.cpu_s()
        taken = client.hear(Taken, ANSWER_S)
    finally:
        client.close()
    rig.settle()
    return Window((to_ns - from_ns) / 1e9, after_s - before_s, 0, taken.between(from_ns, to_ns))
