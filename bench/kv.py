"""`baton bench kv`: how fast KV goes from one process into another through the whole plane, beside what the machine can do.

For each transport and mode two processes with a KV plane each; for each case rounds of ship -> verify -> scatter -> Ack, with new
block tables every round, every byte compared after it, outside the timed part. Cold rounds connect a fresh pair first. Rates
are payload / (first ship -> last Ack), both at the sender. memcpy, ucx_perftest and other libraries run in the same minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.child import ChildError
from bench.foreign_load import ForeignLoad
from bench.kv_limits import Limit, limit_of, measure_memcpy, measure_perftest, perftests
from bench.kv_pair import KVPair
from bench.kv_plan import (
    DEFAULT_TOKENS,
    DEFAULT_TRANSFERS,
    LAYOUTS,
    TRANSPORT_MODES,
    TRANSPORT_TLS,
    Case,
    Sample,
    block_tables,
    figures,
)
from bench.kv_report import Progress, Report, Row, print_report, to_document
from bench.peers.runs import PEERS, PeerRow, measure_peer
from bench.report import dump
from bench.serve_cli import positive_int

INTERRUPTED = 130  # 128 + SIGINT, as shells say it
SMALL_BYTES = 16 << 20  # cases below it last milliseconds and get more rounds
SMALL_ROUNDS = 4  # times as many


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    rounds: int
    warmups: int
    perftest_rounds: int
    perftest_iterations: int


@dataclass(frozen=True, slots=True)
class Plan:
    transports: tuple[str, ...]
    modes: tuple[str, ...]  # () = all that a transport has
    cases: tuple[Case, ...]
    effort: Effort
    peers: tuple[str, ...]
    peer_python: str


class UsageError(Exception):
    """Options that make no sense together."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "kv", help="speed of the KV plane between two processes, beside the machine's limits"
    )
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--layout", choices=sorted(LAYOUTS), default="default", help="shape of a block; demo = the demo model's")
    add("--tokens", type=numbers, help="of all transfers of a case together, e.g. 32,8192 (by layout)")
    add("--transfers", type=numbers, help="at once, e.g. 1,4,16 (by layout)")
    add("--transport", choices=sorted(TRANSPORT_TLS), help="default: each")
    add("--mode", choices=("direct", "staged"), help="default: each that the transport has")
    add("--rounds", type=positive_int, help="of each case (7; --quick 3)")
    add("--quick", action="store_true", help="under 30 s: 1,024 tokens, 1 and 4 transfers, few rounds")
    add("--peers", type=names, default=(), help=f"other libraries to run beside: {','.join(PEERS)}")
    add("--peer-python", default=sys.executable, metavar="PATH", help="the interpreter that has them (this one)")
    add("--json", type=Path, help="write the result to this file")


def main(args: argparse.Namespace) -> int:
    try:
        plan = make_plan(args)
    except UsageError as error:
        print(f"baton bench kv: {error}", file=sys.stderr)
        return 2
    try:
        load = ForeignLoad()
        with Progress() as progress:
            limits, rows, peers = measure(plan, progress)
    except ChildError as error:
        print(f"baton bench kv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    report = Report(limits, rows, peers, load.cores())
    print_report(report)
    if args.json:
        args.json.write_bytes(dump(to_document(report)))
    return 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Raises: UsageError: direct over a transport that has no shared memory, or a peer that is none."""
    transports = (args.transport,) if args.transport else tuple(TRANSPORT_TLS)
    for transport in transports:
        if args.mode and args.transport and args.mode not in TRANSPORT_MODES[transport]:
            raise UsageError(f"--mode {args.mode} needs memory that a peer can map: not over {transport}")
    unknown = [peer for peer in args.peers if peer not in PEERS]
    if unknown:
        raise UsageError(f"--peers {unknown[0]}: known are {', '.join(PEERS)}")
    tokens = args.tokens or ((1_024,) if args.quick else DEFAULT_TOKENS[args.layout])
    transfers = args.transfers or ((1, 4) if args.quick else DEFAULT_TRANSFERS[args.layout])
    cases = tuple(
        Case(args.layout, num_tokens, num_transfers, warm)
        for num_tokens in tokens
        for num_transfers in transfers
        for warm in ((False, True) if num_transfers == transfers[0] else (True,))
    )
    effort = Effort(args.rounds or 3, 1, 1, 3) if args.quick else Effort(args.rounds or 7, 2, 3, 6)
    return Plan(transports, (args.mode,) if args.mode else (), cases, effort, args.peers, args.peer_python)


def measure(plan: Plan, progress: Progress) -> tuple[list[Limit], list[Row], list[PeerRow]]:
    """Raises: ChildError: a process failed, or bytes differed."""
    limits: list[Limit] = []
    rows: list[Row] = []
    peer_rows: list[PeerRow] = []
    progress.say("memcpy")
    limits.append(measure_memcpy(plan.effort.rounds))
    for transport in plan.transports:
        for test in perftests(transport):
            progress.say(f"{transport}: {test.name}")
            limits.append(measure_perftest(test, plan.effort.perftest_rounds, plan.effort.perftest_iterations))
        limit = next(
            limit for limit in limits if (limit.transport, limit.name) == (transport, limit_of(transport).name)
        )
        warm = [case for case in plan.cases if case.warm]
        for peer in plan.peers:
            progress.say(f"{transport}: {peer}")
            peer_rows += measure_peer(peer, transport, warm, plan.effort.rounds, plan.peer_python)
        for mode in TRANSPORT_MODES[transport]:
            if not plan.modes or mode in plan.modes:
                rows += measure_mode(plan, transport, mode, limit, peer_rows, progress)
    return limits, rows, peer_rows


def measure_mode(
    plan: Plan, transport: str, mode: str, limit: Limit, peers: list[PeerRow], progress: Progress
) -> Iterator[Row]:
    """All cases of one pair of processes."""
    num_blocks = max(case.pool_blocks for case in plan.cases)
    with KVPair(plan.cases[0].layout, num_blocks, TRANSPORT_TLS[transport], mode) as pair:
        for case in plan.cases:
            progress.say(f"{transport} {mode}: {case.name}")
            samples = measure_case(pair, case, num_blocks, plan.effort)
            yield Row(
                transport, mode, case, figures(case.nbytes, samples), limit, tuple(peers_of(peers, transport, case))
            )


def measure_case(pair: KVPair, case: Case, num_blocks: int, effort: Effort) -> list[Sample]:
    rounds = effort.rounds * (SMALL_ROUNDS if case.nbytes < SMALL_BYTES else 1)
    if case.warm:
        pair.connect()
        for number in range(effort.warmups):
            move(pair, case, num_blocks, seed=-1 - number)
        return [move(pair, case, num_blocks, seed) for seed in range(rounds)]
    samples = []
    for seed in range(effort.rounds):
        pair.connect()
        samples.append(move(pair, case, num_blocks, seed))
    return samples


def move(pair: KVPair, case: Case, num_blocks: int, seed: int) -> Sample:
    source = block_tables(case, num_blocks, 2 * seed)
    return pair.transfer(source, block_tables(case, num_blocks, 2 * seed + 1))


def peers_of(peers: list[PeerRow], transport: str, case: Case) -> Iterator[PeerRow]:
    """Those that moved the same bytes in the same way."""
    return (row for row in peers if (row.transport, row.case) == (transport, case))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
