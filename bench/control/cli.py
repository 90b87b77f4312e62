"""`baton bench control`: the autoscaler beside baselines and an oracle, on loads that swing, burst, stop and break; simulated.

Exit status: 0; 2 for options that make no sense or a trace that cannot be used; 130 after Ctrl-C, which shows the loads that were
done until then. A load whose trace is not there is left out, and said so. Imports nothing heavy: no torch, ray or transformers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.errors import ConfigError
from bench.control.contest import Contest, Row, Say
from bench.control.dynamo import DynamoPlanner, PlannerFailed
from bench.control.loads import Load, catalogue
from bench.control.report import document, render
from bench.control.rig import Costs
from bench.serve_cli import positive_float, positive_int
from bench.traces import TraceError

QUICK = "mix swings"
QUICK_LENGTH = 0.5  # there and back
INTERRUPTED = 130  # as shells say it


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "control",
        help="the autoscaler beside baselines and an oracle, simulated",
        description="How well sizes follow a load: attainment, GPU-hours, reversals of the autoscaler, baselines and an oracle.",
    )
    names = ", ".join(load.name for load in catalogue())
    parser.add_argument("--loads", metavar="NAME[,NAME]", help=f"some of: {names} (default: all)")
    parser.add_argument("--seeds", type=positive_int, default=5, help="runs of each policy (%(default)s)")
    parser.add_argument("--length", type=positive_float, default=1.0, help="of runs, times the usual (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, half a run of one load, nothing tuned: a minute"
    )
    parser.add_argument(
        "--tune",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="give each baseline the best of its settings on this load; off: the first, in half the time",
    )
    parser.add_argument(
        "--planner-python", metavar="PATH", help="an interpreter that has ai-dynamo, for its planner as a baseline"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, after each load")
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    seeds, length = (range(1), QUICK_LENGTH) if args.quick else (range(args.seeds), args.length)
    planner: DynamoPlanner | None = None
    try:
        loads = chosen(args.loads or (QUICK if args.quick else None), length)
        planner = DynamoPlanner(args.planner_python) if args.planner_python else None
        rows, interrupted = _measure_all(loads, seeds, planner, args)
    except (ConfigError, PlannerFailed, TraceError, OSError) as error:
        print(f"baton bench control: {error}", file=sys.stderr)
        return 2
    finally:
        if planner is not None:
            planner.close()
    if rows:
        render(rows)
    return INTERRUPTED if interrupted else 0


def chosen(names: str | None, length: float) -> list[Load]:
    """Raises: ConfigError: a load that nobody knows."""
    loads = {load.name: load for load in catalogue(length)}
    wanted = [name.strip() for name in names.split(",")] if names else list(loads)
    if unknown := [name for name in wanted if name not in loads]:
        raise ConfigError(f"--loads: there is no load {unknown[0]!r}; there are {', '.join(loads)}")
    return [loads[name] for name in wanted]


def _measure_all(
    loads: Sequence[Load], seeds: Sequence[int], planner: DynamoPlanner | None, args: argparse.Namespace
) -> tuple[list[Row], bool]:
    """Every load that can be, and whether the user stopped it."""
    costs, rows = Costs(), []
    for number, load in enumerate(loads, 1):
        with told(f"{number}/{len(loads)} {load.name}", args.progress) as say:
            try:
                contest = Contest(load, costs, planner=planner, tunes=args.tune and not args.quick, say=say)
                rows.append(contest.row(seeds))
            except TraceError as error:
                print(f"baton bench control: {load.name} is left out: {error}", file=sys.stderr)
                continue
            except KeyboardInterrupt:
                print("baton bench control: interrupted; these loads were done until then", file=sys.stderr)
                return rows, True
        if args.json:
            version = planner.version if planner is not None else None
            args.json.write_text(document(rows, seeds, args.length, version))
    return rows, False


@contextmanager
def told(what: str, wanted: bool) -> Iterator[Say]:
    """Says on stderr what is being done: in one line on a terminal, else one line per load."""
    if not wanted:
        yield lambda _step: None
        return
    if not sys.stderr.isatty():
        began_s = time.monotonic()
        yield lambda _step: None
        print(f"{what}: {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:
        yield lambda step: status.update(f"{what}: {step}")
