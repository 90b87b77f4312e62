"""`baton sim`: how a deployment would serve a load, by simulation: attainment, goodput, times, GPU-hours.

Exit status: 0; 1 where no call met its targets; 2 for options that make no sense or a trace that cannot be used; 130 after
Ctrl-C, which shows what was simulated until then. Imports nothing heavy: no torch, ray or transformers, here or below.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

from baton.config import EngineConfig
from baton.errors import ConfigError
from bench.serve_cli import count, positive_float, positive_int, share
from bench.sim import arrivals, autoscale, sources
from bench.sim.call import Call
from bench.sim.control import ControlledOutcome, ControlledRun
from bench.sim.deployment import MAX_NUM_SEQS, STEP_TOKENS, Deployment, Hardware, Layout
from bench.sim.flags import INTERRUPTED, add_classes, add_dtypes, add_lengths, mix_of
from bench.sim.report import document, render
from bench.sim.simulation import BOUNDS, INTERACTIVE, Mix, Outcome, Simulation
from bench.traces import TraceError, TraceRow

DEFAULT_CALLS = 5_000  # of a load that has no end of its own: some seconds
_SHOWN_CALLS = 100  # at once: a bar that moves with each call costs as much as a twentieth of simulating it


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "sim",
        help="simulate a deployment under a trace or synthetic load",
        description="Simulate a deployment: the product's scheduler, placement and admission on GPUs with modelled step times.",
    )
    parser.set_defaults(run=main)
    deployment = parser.add_argument_group("deployment")
    add = deployment.add_argument
    add("--gpu", default="h100", help="h100, h200, a100, b200, ... (%(default)s)")
    add("--model", default="llama-3.1-8b", help="(%(default)s)")
    add("--tp", "--tensor-parallel-size", type=positive_int, default=1, help="GPUs of a worker (%(default)s)")
    add("--decode-gpu", help="of decode workers, where theirs is another")
    add("--decode-tp", type=positive_int, help="likewise")
    add("--prefill", type=count, default=0, help="workers that prefill for others")
    add("--decode", type=count, default=0, help="workers that decode")
    add(
        "--both", type=count, default=0, help="colocated workers, with chunked prefill; default: 1 if no other is given"
    )
    add_dtypes(deployment)
    add = parser.add_argument_group("engines").add_argument
    add("--max-num-seqs", type=positive_int, default=MAX_NUM_SEQS, help="sequences in a step (%(default)s)")
    add("--max-num-batched-tokens", type=positive_int, default=2_048, help="tokens in a step (%(default)s)")
    add("--chunk-tokens", type=positive_int, default=512, help="largest part of a prompt in a step (%(default)s)")
    add("--prefill-step-tokens", type=positive_int, default=STEP_TOKENS, help="both, on prefill workers (%(default)s)")
    add(
        "--block-size", type=positive_int, default=16, help="tokens; coarser ones are quicker to simulate (%(default)s)"
    )
    add("--pool-tokens", type=count, default=0, help="KV of a worker; default: what its memory holds")
    add(
        "--local-prefill-tokens",
        type=count,
        default=0,
        help="prompts up to it may be prefilled on decode (%(default)s)",
    )
    load = parser.add_argument_group("load")
    add = load.add_argument
    add(
        "--trace", default="azure", help=f"{', '.join(sources.NAMES)}, or a file: .jsonl, .csv, .jsonl.gz (%(default)s)"
    )
    add("--rate", type=positive_float, help="calls per second on average; default: as recorded, synthetic: 1")
    add("--speed", type=positive_float, default=1.0, help="how many times as fast as recorded (%(default)s)")
    add(
        "--num-requests", type=positive_int, help=f"default: the whole trace once; servegen, synthetic: {DEFAULT_CALLS}"
    )
    add("--arrivals", choices=("poisson", "uniform", "burst", "sinusoid"), default="poisson", help="synthetic only")
    add("--period", type=positive_float, default=3_600.0, help="of bursts or swings, seconds (%(default)s)")
    add("--swing", type=share, default=0.6, help="sinusoid: share of the mean rate (%(default)s)")
    add("--burst-factor", type=positive_float, default=3.0, help="burst: times the usual rate (%(default)s)")
    add("--burst-seconds", type=positive_float, default=60.0, help="burst: in each period (%(default)s)")
    add_lengths(load)
    targets = parser.add_argument_group("targets")
    add_classes(targets, default=INTERACTIVE)
    targets.add_argument("--no-admission", action="store_true", help="let every call in at once, whatever the forecast")
    autoscale.add_flags(parser)
    add = parser.add_argument_group("run and output").add_argument
    add("--warm-up", type=float_from_0, default=30.0, help="seconds at the start that do not count (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--runs", type=positive_int, default=1, help="with this seed and the ones after it (%(default)s)")
    add("--no-fast-forward", action="store_true", help="compute every step on its own: slower, the same result")
    add("--json", type=Path, help="write the result to this file")
    add("--progress", action=argparse.BooleanOptionalAction, default=True)


def main(args: argparse.Namespace) -> int:
    try:
        source = source_of(args)
        deployment = deployment_of(args, caches=source.has_content)
        mix = mix_of(args.slo)
        runs, interrupted = _run_all(args, source, deployment, mix)
        if args.json:
            args.json.write_text(document(vars(args), deployment, runs, complete=not interrupted))
    except (TraceError, ConfigError, OSError) as error:
        print(f"baton sim: {error}", file=sys.stderr)
        return 2
    render(deployment, runs)
    if interrupted:
        print("baton sim: interrupted; this is what was simulated until then", file=sys.stderr)
        return INTERRUPTED
    return 0 if any(run.outcome.goodput for run in runs) else 1


@dataclass(frozen=True, slots=True)
class Run:
    """One seed."""

    seed: int
    outcome: Outcome
    wall_s: float
    controlled: ControlledOutcome | None = None  # with --autoscale


def _run_all(
    args: argparse.Namespace, source: sources.Source, deployment: Deployment, mix: Mix
) -> tuple[list[Run], bool]:
    """Every run, and whether the user stopped the last one."""
    runs: list[Run] = []
    with progress_bar(args.runs * source.num_calls, args.progress) as advance:
        for seed in range(args.seed, args.seed + args.runs):
            simulation, controlled = _simulation(args, deployment, mix, seed, advance)
            started_s = time.perf_counter()
            try:
                outcome, interrupted = simulation.run(source.stream(seed)), False
            except KeyboardInterrupt:
                outcome, interrupted = simulation.outcome(), True
            wall_s = time.perf_counter() - started_s
            runs.append(Run(seed, outcome, wall_s, controlled.outcome() if controlled is not None else None))
            if interrupted:
                return runs, True
    return runs, False


def _simulation(
    args: argparse.Namespace, deployment: Deployment, mix: Mix, seed: int, advance: Callable[[Call], None] | None
) -> tuple[Simulation, ControlledRun | None]:
    bounds, fast = None if args.no_admission else BOUNDS, not args.no_fast_forward
    if args.autoscale:
        controlled = autoscale.controlled_run(
            args, deployment, mix, seed, warm_up_s=args.warm_up, bounds=bounds, fast=fast, on_call=advance
        )
        return controlled.simulation, controlled
    simulation = Simulation(
        deployment, mix, seed=seed, warm_up_s=args.warm_up, bounds=bounds, fast=fast, on_call=advance
    )
    return simulation, None


def deployment_of(args: argparse.Namespace, *, caches: bool) -> Deployment:
    """Prefix caches are on where the trace says what prompts have in common."""
    num_both = args.both or (0 if args.prefill or args.decode else 1)
    return Deployment(
        Layout(args.prefill, args.decode, num_both),
        gpu=args.gpu,
        model=args.model,
        tp=args.tp,
        decode_hardware=decode_hardware_of(args),
        weight_dtype=args.weight_dtype,
        kv_dtype=args.kv_cache_dtype,
        engine=EngineConfig(
            block_size=args.block_size,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            chunk_tokens=args.chunk_tokens,
            prefix_cache=caches,
            max_queued_seqs=sys.maxsize,
        ),
        prefill_step_tokens=args.prefill_step_tokens,
        local_prefill_tokens=args.local_prefill_tokens,
        max_pool_tokens=args.pool_tokens,
    )


def decode_hardware_of(args: argparse.Namespace) -> Hardware | None:
    if not args.decode_gpu and not args.decode_tp:
        return None
    return Hardware(args.decode_gpu or args.gpu, args.decode_tp or args.tp)


def source_of(args: argparse.Namespace) -> sources.Source:
    num_calls = args.num_requests or DEFAULT_CALLS
    if args.trace == "servegen":
        return sources.servegen_source(rate=args.rate, speed=args.speed, num_calls=num_calls)
    if args.trace == "synthetic":
        return sources.Source(partial(_drawn, args, num_calls), num_calls, has_content=False)
    return sources.trace_source(args.trace, rate=args.rate, speed=args.speed, num_calls=args.num_requests)


def _drawn(args: argparse.Namespace, num_calls: int, seed: int) -> Iterator[TraceRow]:
    mean = args.rate or 1.0
    rates: dict[str, arrivals.Rate] = {
        "poisson": arrivals.Constant(mean),
        "sinusoid": arrivals.Sinusoid(mean, args.swing, args.period),
        "burst": arrivals.Bursts(mean, args.burst_factor, args.burst_seconds, args.period),
    }
    times_s = arrivals.evenly(mean) if args.arrivals == "uniform" else arrivals.instants(rates[args.arrivals], seed)
    return islice(arrivals.synthetic(times_s, args.input_len, args.output_len, seed), num_calls)


def float_from_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return value


@contextmanager
def progress_bar(num_calls: int, wanted: bool) -> Iterator[Callable[[Call], None] | None]:
    """Advance by one per call that is over. On stderr; nothing where nobody watches."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("simulating", total=num_calls)
        num_over = 0

        def advance(_call: Call) -> None:
            nonlocal num_over
            num_over += 1
            if num_over % _SHOWN_CALLS == 0:
                progress.advance(task, _SHOWN_CALLS)

        yield advance
