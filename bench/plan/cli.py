"""`baton plan`: the layout that serves a traffic within its targets for the least money, found by guess and simulation.

Exit status: 0; 1 where nothing on offer meets the targets; 2 for options that make no sense or a trace that cannot be used; 130
after Ctrl-C. Imports nothing heavy: no torch, ray or transformers, here or below.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.errors import ConfigError
from bench.plan.judge import Effort
from bench.plan.plan import Plan, PlanError, Question, make_plan
from bench.plan.report import document, picture, render
from bench.plan.space import WIDTHS, Offer
from bench.plan.traffic import Drawn, Traffic, recorded
from bench.serve_cli import positive_float, positive_int
from bench.sim import arrivals, sources
from bench.sim.call import Call
from bench.sim.flags import INTERRUPTED, add_classes, add_dtypes, add_lengths, mix_of
from bench.sim.simulation import INTERACTIVE
from bench.traces import TraceError, find_trace

_USUAL = Effort()
_SHOWN_CALLS = 1_000  # at once, on stderr


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="find the layout that serves a traffic within its targets for the least money",
        description="Find the layout of GPUs that serves a traffic within its targets for the least money, by simulation.",
    )
    parser.set_defaults(run=main)
    used = parser.add_argument_group("what may be used")
    add = used.add_argument
    add("--model", default="llama-3.1-8b", help="(%(default)s)")
    add(
        "--gpu",
        action="append",
        metavar="NAME[=USD]",
        help="a GPU on offer and its price per hour; may be repeated (h100 at its listed price)",
    )
    add(
        "--gpus",
        type=positive_int,
        help="exactly so many: what is the most they serve? Default: as few as serve the rate",
    )
    add(
        "--tp",
        type=positive_int,
        action="append",
        help=f"GPUs of a worker; may be repeated ({', '.join(map(str, WIDTHS))})",
    )
    add_dtypes(used)
    traffic = parser.add_argument_group("traffic")
    add = traffic.add_argument
    add("--trace", help=f"{', '.join(sources.NAMES[:-1])}, or a file: .jsonl, .csv, .jsonl.gz; default: drawn lengths")
    add("--rate", type=positive_float, help="calls per second on average; default: as recorded, drawn: 1")
    add_lengths(traffic)
    add_classes(parser.add_argument_group("targets"), default=INTERACTIVE)
    add = parser.add_argument_group("run and output").add_argument
    add("--calls", type=positive_int, default=_USUAL.search_calls, help="of a trial, at least (%(default)s)")
    add("--seeds", type=positive_int, default=_USUAL.final_seeds, help="for the figures of the answer (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--json", type=Path, help="write the plan to this file")
    add("--plot", type=Path, help="write attainment against rate to this file, .svg")
    add("--progress", action=argparse.BooleanOptionalAction, default=True)


def main(args: argparse.Namespace) -> int:
    try:
        _check_plot(args.plot)
        question = question_of(args)
        with _progress(args.progress) as on_call:
            plan = make_plan(question, on_call=on_call)
        write(plan, args.json, args.plot)
    except PlanError as error:
        print(f"baton plan: {error.message}", file=sys.stderr)
        return 1
    except (TraceError, ConfigError, OSError) as error:
        print(f"baton plan: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("baton plan: interrupted; a plan that is half compared is none", file=sys.stderr)
        return INTERRUPTED
    render(plan)
    return 0


def write(plan: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    if json_path is not None:
        json_path.write_text(document(plan))
    if plot_path is not None:
        plot_path.write_text(picture(plan))


def question_of(args: argparse.Namespace) -> Question:
    """Raises: TraceError, ConfigError."""
    return Question(
        args.model,
        [Offer.parse(text) for text in args.gpu or ["h100"]],
        _traffic(args),
        mix_of(args.slo),
        args.gpus,
        tuple(sorted(set(args.tp or WIDTHS))),
        args.weight_dtype,
        args.kv_cache_dtype,
        Effort(args.calls, 2 * args.calls, args.seeds, args.seed),
    )


def _traffic(args: argparse.Namespace) -> Traffic:
    if args.trace is None:
        return Drawn(args.rate or 1.0, args.input_len, args.output_len)
    if args.trace == "servegen":
        rates, found = map(find_trace, sources.SERVEGEN)
        return Drawn(args.rate or arrivals.mean_rate(arrivals.read_rates(rates)), *arrivals.read_lengths(found))
    return recorded(args.trace, rate=args.rate)


def _check_plot(path: Path | None) -> None:
    """Before minutes of simulation, not after."""
    if path is not None and path.suffix != ".svg":
        raise ConfigError(
            f"--plot {path}: only .svg is written; any browser shows it, and rsvg-convert makes a PNG of it"
        )


@contextmanager
def _progress(wanted: bool) -> Iterator[Callable[[Call], None] | None]:
    """How many calls were simulated until now; how many there will be, nobody knows."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    num_calls, started_s = 0, time.perf_counter()

    def advance(_call: Call) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls % _SHOWN_CALLS == 0:
            print(f"\r{num_calls:,} calls simulated, {time.perf_counter() - started_s:.0f} s", end="", file=sys.stderr)

    yield advance
    print("\r\x1b[K", end="", file=sys.stderr)
