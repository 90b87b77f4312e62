"""Shows the figures of `baton bench router`: a table for people, JSON for scripts. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from bench.kv_plan import Spread
from bench.report import this_machine
from bench.router_bench_cases import Figures
from bench.router_bench_figures import Window
from bench.router_bench_grpc import GrpcCost
from bench.router_bench_peers import PeerRun
from bench.router_bench_rig import Features


@dataclass(frozen=True, slots=True)
class RouterRun:
    """Ours, with what was on."""

    features: Features
    start_s: float  # until every endpoint had its Session
    start_cpu_s: float
    figures: Figures
    grpc: Sequence[GrpcCost]


@dataclass(frozen=True, slots=True)
class Report:
    routers: Sequence[RouterRun]  # by number of processes
    peers: Sequence[PeerRun]
    foreign_cores: float


def print_report(report: Report) -> None:
    print(f"{this_machine()}; others used {report.foreign_cores:.2f} cores meanwhile")
    for router in report.routers:
        known = router.features
        print(
            f"\nbaton, {known.num_processes} process(es), {known.num_endpoints} endpoints, {known.num_keys} keys, "
            f"{known.num_classes} classes, {known.num_endpoints * known.blocks_each} blocks in the index\n"
            f"  start {router.start_s:.1f} s ({router.start_cpu_s:.1f} s CPU)"
        )
        print_figures(router.figures)
        for grpc in router.grpc:
            print(
                f"  {grpc.kind.value}: CPU {told(grpc.us_per_token)} per token; {' and '.join(map(describe, grpc.windows))}"
            )
    for peer in report.peers:
        print(f"\n{peer.does}")
        if peer.figures is None:
            print(f"  does not run: {peer.reason}")
        else:
            print_figures(peer.figures)


def print_figures(figures: Figures) -> None:
    for line in lines(figures):
        print(f"  {line}")


def lines(figures: Figures) -> Iterator[str]:
    yield f"idle {figures.idle_share:.3f} of a core, {figures.memory_bytes / 2**20:.0f} MiB"
    for name, reason in figures.missing.items():
        yield f"{name}: NO FIGURE: {reason}"
    if (added := figures.added) is not None:
        yield (
            f"added latency p50 {added.p50:.2f} ms, p99 {added.p99:.2f} ms (via {added.via_ms.p50:.2f}/{added.via_ms.p99:.2f}, "
            f"direct {added.direct_ms.p50:.2f}/{added.direct_ms.p99:.2f}, n = {added.n})"
        )
    if (cpu := figures.cpu) is not None:
        yield f"CPU {ranged(cpu.us_per_token)} us per token, {ranged(cpu.us_per_request)} us per request, n = {len(cpu.rounds)}"
        last = cpu.rounds[-1]
        yield f"  few streams: {describe(last.few_streams)}; many: {describe(last.many_streams)}"
        yield f"  few requests: {describe(last.few_requests)}; many: {describe(last.many_requests)}"
    if (speed := figures.speed) is not None:
        yield f"speed: {describe(speed)}"
    if (gaps := figures.gaps) is not None:
        ms = gaps.added_ms
        yield (
            f"{gaps.streams} streams: added gap p50 {ms.p50:.2f}, p99 {ms.p99:.2f}, max {ms.max:.1f} ms (n = {ms.n}), "
            f"{gaps.tokens_per_s:.0f} tok/s, CPU {gaps.cpu_share:.2f}"
        )
        yield f"  a token is on its way p50 {gaps.transit_ms.p50:.1f}, p99 {gaps.transit_ms.p99:.1f} ms"
    if (start := figures.start) is not None:
        yield (
            f"{start.starting} streams start at once: the {start.running} running ones stall {start.stall_ms:.1f} ms (before: "
            f"{start.before_ms:.1f}); {start.started} had a first token, the last after {start.last_first_token_s:.2f} s"
        )


def told(us_per_token: float) -> str:
    """NaN: the client had no more tokens of many streams than of few."""
    return "no figure" if math.isnan(us_per_token) else f"{us_per_token:.1f} us"


def ranged(values: Spread) -> str:
    alone = f"{values.median:.1f}"
    return alone if values.n == 1 else f"{alone} ({values.min:.1f}-{values.max:.1f})"


def describe(part: Window) -> str:
    return f"{part.tokens_per_s:.0f} tok/s, {part.num_requests / part.wall_s:.0f} requests/s, CPU {part.cpu_share:.2f}"


def to_document(report: Report) -> dict[str, object]:
    """The first router's figures at the top, all by their number of processes below, peers in the same words."""
    by_processes = {str(router.features.num_processes): router_document(router) for router in report.routers}
    return {
        **next(iter(by_processes.values())),
        "processes": by_processes,
        "peers": {peer.name: peer_document(peer) for peer in report.peers},
        "machine": asdict(this_machine()),
        "foreign_cores": report.foreign_cores,
    }


def router_document(router: RouterRun) -> dict[str, object]:
    own = {"features": asdict(router.features), "start_s": router.start_s, "start_cpu_s": router.start_cpu_s}
    grpc = {cost.kind.name.lower(): asdict(cost) for cost in router.grpc}
    return {**figures_document(router.figures), **own, "grpc": grpc}


def peer_document(peer: PeerRun) -> dict[str, object]:
    figures = figures_document(peer.figures) if peer.figures is not None else {}
    return {**figures, "does": peer.does, "reason": peer.reason}


def figures_document(figures: Figures) -> dict[str, object]:
    added, cpu, gaps, start, speed = figures.added, figures.cpu, figures.gaps, figures.start, figures.speed
    return {
        "added_ms": asdict(added) if added else None,
        "cpu_us_per_token": cpu.us_per_token.median if cpu else None,
        "cpu_us_per_request": cpu.us_per_request.median if cpu else None,
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "gap_ms_p99": gaps.added_ms.p99 if gaps else None,
        "stall_ms_at_start": start.stall_ms if start else None,
        "idle_cpu_share": figures.idle_share,
        "memory_bytes": figures.memory_bytes,
        "missing": figures.missing,
        "cpu": asdict(cpu) if cpu else None,
        "gaps": asdict(gaps) if gaps else None,
        "start": asdict(start) if start else None,
        "speed": asdict(speed) if speed else None,
    }
