"""`baton bench control`: the autoscaler beside baselines and an oracle, on loads that swing, burst, stop and break; simulated.

Exit status: 0; 2 for options that make no sense or a trace that cannot be used; 130 after Ctrl-C, which shows the loads that were
done until then. A load whose trace is not there is left out, and said so. Imports nothing heavy: no torch, ray or transformers.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from baton.errors import ConfigError
from bench.child import ChildError
from bench.control.book import Book, Settings
from bench.control.contest import Contest
from bench.control.dynamo import DynamoPlanner, PlannerFailed
from bench.control.jobs import Jobs
from bench.control.loads import Load, catalogue
from bench.control.report import render
from bench.control.runs import digest
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
    parser.add_argument(
        "--jobs", type=positive_int, default=len(os.sched_getaffinity(0)), help="processes that simulate (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, after each load")
    parser.add_argument(
        "--continue", dest="goes_on", action="store_true", help="take over the loads that the --json file has already"
    )
    parser.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True)
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    seeds, length = (range(1), QUICK_LENGTH) if args.quick else (range(args.seeds), args.length)
    try:
        loads = chosen(args.loads or (QUICK if args.quick else None), length)
        settings = Settings(tuple(seeds), length, args.tune and not args.quick, _planner_version(args.planner_python))
        book = Book(args.json, settings)
        if args.goes_on:
            if args.json is None:
                raise ConfigError("--continue needs the --json file to go on with")
            book.go_on()
        is_whole = _measure(loads, book, settings, args)
    except (ConfigError, PlannerFailed, TraceError, OSError, ChildError) as error:
        print(f"baton bench control: {error}", file=sys.stderr)
        return 2
    if book.rows:
        render(book.rows)
    return 0 if is_whole else INTERRUPTED


def _planner_version(python: str | None) -> str | None:
    """Raises: PlannerFailed: it cannot run there."""
    if python is None:
        return None
    planner = DynamoPlanner(python)
    try:
        return planner.version
    finally:
        planner.close()


def chosen(names: str | None, length: float) -> list[Load]:
    """Raises: ConfigError: a load that nobody knows."""
    loads = {load.name: load for load in catalogue(length)}
    wanted = [name.strip() for name in names.split(",")] if names else list(loads)
    if unknown := [name for name in wanted if name not in loads]:
        raise ConfigError(f"--loads: there is no load {unknown[0]!r}; there are {', '.join(loads)}")
    return [loads[name] for name in wanted]


def _measure(loads: Sequence[Load], book: Book, settings: Settings, args: argparse.Namespace) -> bool:
    """Every load that can be; False: the user stopped it."""
    jobs = Jobs(args.jobs)
    try:
        with told(len(loads), args.progress) as progress:
            asyncio.run(_measure_all(loads, book, settings, args, jobs, progress))
        return True
    except KeyboardInterrupt:
        print("baton bench control: interrupted; these loads were done until then", file=sys.stderr)
        return False
    finally:
        jobs.close()


async def _measure_all(
    loads: Sequence[Load], book: Book, settings: Settings, args: argparse.Namespace, jobs: Jobs, progress: Progress
) -> None:
    """So many loads at a time as there are processes: what one of them must wait for, others make use of. Nothing is measured
    before all that is there was found to be of the same loads. Raises: ConfigError: it is not."""
    places = asyncio.Semaphore(args.jobs)

    async def take_over(load: Load) -> bool:
        """Whether nothing is left to measure."""
        if not book.has(load):
            return False
        with _left_out_without_trace(load):
            book.take_over(load, await jobs.do(digest, load, settings.seeds))
        progress.is_over(load.name)
        return True

    async def measure(load: Load) -> None:
        async with places:
            with _left_out_without_trace(load):
                say = partial(progress.says, load.name)
                python, tunes = args.planner_python, settings.tunes
                contest = Contest(load, jobs.do, planner_python=python, tunes=tunes, say=say)
                book.add(await contest.row(settings.seeds))
            progress.is_over(load.name)

    are_over = await asyncio.gather(*map(take_over, loads))
    await asyncio.gather(*(measure(load) for load, is_over in zip(loads, are_over, strict=True) if not is_over))


@contextmanager
def _left_out_without_trace(load: Load) -> Iterator[None]:
    try:
        yield
    except TraceError as error:
        print(f"baton bench control: {load.name} is left out: {error}", file=sys.stderr)


class Progress:
    """Which loads are under way, and how far; one line."""

    def __init__(self, num_loads: int, show: Callable[[str], None], over: Callable[[str], None]) -> None:
        """`show`: what is under way, whenever it changes; `over`: each load that is done."""
        self._num_loads = num_loads
        self._num_over = 0
        self._began_s = time.monotonic()
        self._show = show
        self._over = over
        self._under_way: dict[str, str] = {}

    def says(self, load: str, what: str) -> None:
        self._under_way[load] = what
        self._tell()

    def is_over(self, load: str) -> None:
        self._under_way.pop(load, None)
        self._num_over += 1
        self._over(
            f"{self._num_over}/{self._num_loads} {load}: {time.monotonic() - self._began_s:.0f} s since the start"
        )
        self._tell()

    def _tell(self) -> None:
        here = "; ".join(f"{load}: {what}" for load, what in self._under_way.items())
        self._show(f"{self._num_over}/{self._num_loads} loads done; {here}")


@contextmanager
def told(num_loads: int, wanted: bool) -> Iterator[Progress]:
    """Says on stderr what is being done: in one line on a terminal, else one line per load."""
    if not wanted:
        yield Progress(num_loads, lambda _: None, lambda _: None)
        return
    if not sys.stderr.isatty():
        yield Progress(num_loads, lambda _: None, lambda line: print(line, file=sys.stderr))
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield Progress(num_loads, status.update, lambda _: None)
