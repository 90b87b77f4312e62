"""`baton bench router`: what the router costs, measured from outside over stub workers with a compiled load generator.

    baton bench router --quick --endpoints 8               two minutes, for work on the router
    baton bench router --only cpu,speed --endpoints 8      single figures: added, cpu, speed, gap, start, grpc
    baton bench router --json router.json --processes 1,2 --peers sglang,dynamo --peer-python PATH

A fleet of stub workers (bench/router_bench_stub.py, one process) speaks worker.proto; the load generator (bench/router_load.c)
is built by gcc on first use. Everything that costs is on: see Features. How each figure is made: docs/router_cost.md. Exit status
1 where one of our figures is missing, 2 for flags that make no sense.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.child import ChildError
from bench.foreign_load import ForeignLoad
from bench.kv_report import Progress
from bench.report import dump
from bench.router_bench_cases import FULL, PARTS, QUICK, Effort, measure_parts
from bench.router_bench_grpc import measure_grpc
from bench.router_bench_peers import PEERS, PeerRun, measure_peer
from bench.router_bench_report import Report, RouterRun, print_report, to_document
from bench.router_bench_rig import Features, running_rig
from bench.serve_cli import positive_int

USUAL = Features()
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


class UsageError(Exception):
    """Options that make no sense."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("router", help="what the router costs per token and request, beside other routers")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--quick", action="store_true", help="small loads and short windows")
    add("--only", type=names, default=PARTS, help=f"some of {','.join(PARTS)} (all)")
    add("--endpoints", type=positive_int, default=USUAL.num_endpoints, help="workers with a Session (%(default)s)")
    add("--processes", type=numbers, default=(1,), help="router processes, e.g. 1,2 (1)")
    add("--model", default=USUAL.model, help="whose tokenizer the router uses (%(default)s)")
    add("--trace-ratio", type=ratio, help="of calls whose spans go to a collector (tracing is off)")
    add("--peers", type=names, default=(), help=f"other routers to run beside: {','.join(PEERS)}")
    add("--peer-python", default=sys.executable, metavar="PATH", help="the interpreter that has them (this one)")
    add("--json", type=Path, help="write the result to this file")


def main(args: argparse.Namespace) -> int:
    try:
        check(args)
    except UsageError as error:
        print(f"baton bench router: {error}", file=sys.stderr)
        return 2
    try:
        load = ForeignLoad()
        with Progress() as progress:
            routers, peers = measure(args, QUICK if args.quick else FULL, progress)
        report = Report(routers, peers, load.cores())
    except ChildError as error:
        print(f"baton bench router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print_report(report)
    if args.json:
        args.json.write_bytes(dump(to_document(report)))
    return int(any(router.figures.missing for router in routers))


def check(args: argparse.Namespace) -> None:
    """Raises: UsageError."""
    unknown = [part for part in args.only if part not in PARTS]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: known are {', '.join(PARTS)}")
    unknown = [peer for peer in args.peers if peer not in PEERS]
    if unknown:
        raise UsageError(f"--peers {unknown[0]}: known are {', '.join(PEERS)}")


def features(args: argparse.Namespace) -> Features:
    own = min(USUAL.num_prefill, max(1, args.endpoints // 2))
    return replace(
        USUAL,
        num_endpoints=max(2, args.endpoints),
        num_prefill=own,
        num_decode=own,
        model=args.model,
        trace_ratio=args.trace_ratio,
    )


def measure(args: argparse.Namespace, effort: Effort, progress: Progress) -> tuple[list[RouterRun], list[PeerRun]]:
    """Raises: ChildError: ours did not do what it should."""
    routers = []
    for number in args.processes:
        wanted = replace(features(args), num_processes=number)
        progress.say(f"baton, {number} process(es): start with {wanted.num_endpoints} endpoints")
        with running_rig(wanted) as rig:
            figures = measure_parts(rig, effort, args.only, progress.say)
            if "grpc" in args.only:
                progress.say("gRPC")
            grpc = measure_grpc(rig, effort) if "grpc" in args.only else []
            routers.append(RouterRun(wanted, rig.start_s, rig.start_cpu_s, figures, grpc))
    peers = []
    for name in args.peers:
        progress.say(name)
        peers.append(measure_peer(name, args.peer_python, args.model, effort, args.only))
    return routers, peers


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def ratio(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
