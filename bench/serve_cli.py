"""`baton bench serve`: load one target and say what its clients saw.

Open loop with --rate or --trace (--concurrency is then a cap on calls in flight), closed loop with --concurrency alone.
Exit status: 0; 1 where every call failed or none was made; 2 for options that make no sense or a target that cannot be used.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from baton.slo import DEFAULT_CLASSES, MIN_TARGET_MS, SLO
from bench.client import CallFailed
from bench.client_openai import PromptForm
from bench.measure import Record
from bench.report import dump, render, to_document
from bench.serve import DEFAULT_REQUESTS, ServeOptions, ServeResult, UsageError, num_requests, serve
from bench.traces import TraceError
from bench.workload import Lengths

INTERACTIVE = DEFAULT_CLASSES[0]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("serve", help="load an OpenAI URL or a Baton gRPC address, measure from the client")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--target", default="grpc://127.0.0.1:50051", help="http(s)://HOST:PORT or grpc://HOST:PORT (%(default)s)")
    add("--model", default="", help="default: the first one that the target lists")
    add(
        "--prompt-form",
        type=PromptForm,
        choices=list(PromptForm),
        help="HTTP only; default: the first that is accepted",
    )
    add("--slo-class", default="", help="of Baton's, by which a router admits calls; default: what the target takes")
    add("--api-key-file", type=Path, help="HTTP only: a file that holds the bearer token")
    add = parser.add_argument_group("pace").add_argument
    add("--rate", type=positive_float, help="open loop: calls per second")
    add("--arrivals", choices=("poisson", "uniform"), default="poisson")
    add("--trace", type=Path, help="open loop: replay a mooncake .jsonl or an azure .csv")
    add("--trace-speed", type=positive_float, default=1.0, help="how many times as fast as recorded")
    add("--concurrency", type=positive_int, help="closed loop: clients; open loop: cap on calls in flight")
    add(
        "--num-requests", type=positive_int, help=f"default {DEFAULT_REQUESTS}, a trace: all, with --duration: no limit"
    )
    add("--duration", type=positive_float, help="seconds in which calls start")
    add("--warmup", type=count, default=4, help="calls before the measurement, not counted (%(default)s)")
    add("--timeout", type=positive_float, default=600.0, help="seconds until a call has failed (%(default)s)")
    add = parser.add_argument_group("content").add_argument
    add("--input-len", type=lengths, default="256", help="tokens: N, LOW:HIGH or lognormal:P50,P95 (%(default)s)")
    add("--output-len", type=lengths, default="64", help="likewise (%(default)s)")
    add("--shared-prefix-ratio", type=share, default=0.0, help="share of calls whose first half is a common prefix")
    add("--cancel-ratio", type=share, default=0.0, help="share of calls whose client leaves before the end")
    add("--max-context", type=count, default=0, help="prompt + answer, tokens; default: what the target says")
    add("--vocab-size", type=count, default=0, help="token ids are drawn below it; default: what the target says")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of the full length")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("verdict and output").add_argument
    add("--slo-ttft-ms", type=target_ms, default=INTERACTIVE.ttft_ms, help="(%(default)s)")
    add("--slo-tpot-ms", type=target_ms, default=INTERACTIVE.tpot_ms, help="(%(default)s)")
    add("--json", type=Path, help="write the result to this file")
    add("--save-requests", action="store_true", help="with --json: one row per call as well")
    add("--progress", action=argparse.BooleanOptionalAction, default=True)


def main(args: argparse.Namespace) -> int:
    from rich.console import Console  # loaded only when something runs

    options = options_of(args)
    try:
        with progress_bar(options, args.progress) as on_record:
            result = asyncio.run(serve(options, on_record))
        if args.json:
            args.json.write_bytes(result_json(options, result, with_requests=args.save_requests))
    except (UsageError, TraceError, CallFailed, OSError) as error:
        print(f"baton bench serve: {error}", file=sys.stderr)
        return 2
    render(Console(), result.summary, result.generator, title=f"{options.target}: {result.target.prompt_form}")
    return 1 if result.all_failed else 0


def options_of(args: argparse.Namespace) -> ServeOptions:
    return ServeOptions(
        target=args.target,
        model=args.model,
        prompt_form=args.prompt_form,
        api_key_file=args.api_key_file,
        slo_class=args.slo_class,
        rate_per_s=args.rate,
        uniform=args.arrivals == "uniform",
        trace=args.trace,
        trace_speed=args.trace_speed,
        concurrency=args.concurrency,
        num_requests=args.num_requests,
        duration_s=args.duration,
        num_warmup=args.warmup,
        call_timeout_s=args.timeout,
        input_lengths=args.input_len,
        output_lengths=args.output_len,
        shared_prefix_ratio=args.shared_prefix_ratio,
        cancel_ratio=args.cancel_ratio,
        max_context_tokens=args.max_context,
        vocab_size=args.vocab_size,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        slo=SLO("bench", ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms),
    )


@contextmanager
def progress_bar(options: ServeOptions, wanted: bool) -> Iterator[Callable[[Record], None]]:
    """Advance by one call per Record. On stderr, so that stdout is the report alone; nothing where nobody watches."""
    if not wanted or not sys.stderr.isatty():
        yield lambda _record: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=2) as progress:
        task = progress.add_task(options.target, total=num_requests(options))
        yield lambda _record: progress.advance(task)


def result_json(options: ServeOptions, result: ServeResult, *, with_requests: bool) -> bytes:
    config = {**asdict(options), "target_info": asdict(result.target), "trace_factor": result.trace_factor}
    records = result.records if with_requests else ()
    return dump(to_document(config, result.summary, result.generator, records, started_s=result.started_s))


Number = TypeVar("Number", int, float)


def checked(value: Number, holds: bool, limit: str) -> Number:
    if not holds:
        raise argparse.ArgumentTypeError(f"{value} must be {limit}")
    return value


def positive_float(text: str) -> float:
    return checked(float(text), float(text) > 0 and float(text) != float("inf"), "above 0")


def positive_int(text: str) -> int:
    return checked(int(text), int(text) > 0, "at least 1")


def count(text: str) -> int:
    return checked(int(text), int(text) >= 0, "at least 0")


def share(text: str) -> float:
    return checked(float(text), 0 <= float(text) <= 1, "in [0, 1]")


def target_ms(text: str) -> float:
    return checked(float(text), float(text) >= MIN_TARGET_MS, f"at least {MIN_TARGET_MS} ms")


def lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
