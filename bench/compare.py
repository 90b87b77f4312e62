"""`baton bench compare`: P/D against colocated serving on this machine, in one run.

Layouts: one prefill and one decode worker; one worker that does both, with all cores; two such workers with half the cores each.
Every layout answers the same calls at every concurrency, closed loop; each is a cluster of its own, started and stopped in turn.
Prints a Markdown table under the machine's name and writes JSON. It shows whatever comes out.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.client import CallFailed
from bench.cluster import COLOCATED, DISAGGREGATED, REPLICAS, ClusterError, Layout, running
from bench.measure import Percentiles, Summary
from bench.report import MIN_P99_SAMPLES, Machine, dump, format_ms, this_machine
from bench.serve import ServeOptions, ServeResult, serve
from bench.serve_cli import lengths, positive_int

LAYOUTS = (DISAGGREGATED, COLOCATED, REPLICAS)
CONCURRENCY = (1, 8, 32, 100)  # what the README's table promises
PATIENT = "batch"  # under class interactive's TPOT target the router would let few of a hundred clients decode at once
MIN_CALLS = 16
WAVES = 2  # calls per client at high concurrency: a second wave shows the steady state after the first burst


@dataclass(frozen=True, slots=True)
class Row:
    layout: str
    concurrency: int
    summary: Summary
    generator_cpu_share: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("compare", help="P/D against colocated serving, in one run")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--concurrency", type=positive_int, nargs="+", default=list(CONCURRENCY))
    add("--input-len", type=lengths, default="128", help="tokens (%(default)s)")
    add("--output-len", type=lengths, default="32", help="tokens (%(default)s)")
    add("--http", action="store_true", help="load the HTTP API instead of gRPC")
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="write the result to this file")
    add("up_flags", nargs="*", metavar="FLAG", help="after --: flags for every `baton up`")


def main(args: argparse.Namespace) -> int:
    rows: list[Row] = []
    status = 0
    try:
        asyncio.run(compare(args, rows))
    except (ClusterError, CallFailed, OSError) as error:
        print(f"baton bench compare: {error}", file=sys.stderr)
        status = 2
    machine = this_machine()
    print(f"{markdown(rows, machine)}\n\n{conditions(args)}")  # after an error too: what was measured until then
    if args.json:
        document = {
            "machine": asdict(machine),
            "config": {name: value for name, value in vars(args).items() if name != "run"},
            "complete": status == 0,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_bytes(dump(document))
    return status or int(any(row.summary.num_completed == 0 for row in rows))


async def compare(args: argparse.Namespace, rows: list[Row]) -> None:
    """Measure layout after layout, adding to `rows` as each figure is there."""
    for layout in LAYOUTS:
        print(f"{layout.name}: starting", file=sys.stderr)
        async with running(layout, args.up_flags) as cluster:
            target = cluster.http_url if args.http else cluster.grpc_target
            for concurrency in args.concurrency:
                result = await serve(options_of(args, target, concurrency))
                rows.append(row_of(layout, concurrency, result))
                print(f"{layout.name}: {concurrency} concurrent done", file=sys.stderr)


def options_of(args: argparse.Namespace, target: str, concurrency: int) -> ServeOptions:
    return ServeOptions(
        target=target,
        slo_class=PATIENT,
        concurrency=concurrency,
        num_requests=max(MIN_CALLS, WAVES * concurrency),
        input_lengths=args.input_len,
        output_lengths=args.output_len,
        seed=args.seed + concurrency,  # other prompts at each level: none finds the last level's prefixes cached
    )


def row_of(layout: Layout, concurrency: int, result: ServeResult) -> Row:
    return Row(layout.name, concurrency, result.summary, result.generator.cpu_share)


HEADER = (
    "| layout | concurrent | output tok/s | TTFT p50 / p99 ms | handoff gap p50 / p99 ms | TPOT p50 / p99 ms | calls | shed"
    " | failed |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def markdown(rows: list[Row], machine: Machine) -> str:
    return "\n".join([f"{machine}\n", HEADER, *map(markdown_row, rows)])


def conditions(args: argparse.Namespace) -> str:
    """What a reader must know to read the table."""
    flags = f", `baton up {' '.join(args.up_flags)}`" if args.up_flags else ""
    return (
        f"Closed loop over {'HTTP' if args.http else 'gRPC'} in class {PATIENT}, nobody shed by forecast, random prompts of"
        f" {args.input_len} tokens, {args.output_len} output tokens, seed {args.seed}{flags}; max({MIN_CALLS}, {WAVES} x clients)"
        f" calls per row, so the p99 of fewer than"
        f" {MIN_P99_SAMPLES} calls is their maximum. One run; the layouts take turns on the same cores as the load generator."
    )


def markdown_row(row: Row) -> str:
    summary = row.summary
    cells = (
        row.layout,
        str(row.concurrency),
        f"{summary.output_tokens_per_s:.1f}",
        pair(summary.ttft_ms),
        pair(summary.handoff_gap_ms),
        pair(summary.tpot_ms),
        str(summary.num_calls),
        str(summary.num_shed),
        str(summary.num_failed),
    )
    return f"| {' | '.join(cells)} |"


def pair(values: Percentiles) -> str:
    return f"{format_ms(values.p50)} / {format_ms(values.p99)}"
