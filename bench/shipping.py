"""`baton bench shipping`: what it costs a prefill worker to ship KV while it computes.

Long prompts, one at a time, in alternating rounds on two layouts with as many threads per worker: 1 prefill + 1 decode worker,
whose KV is shipped, and 2 workers that do both, whose KV stays. Prefill speed = uncached prompt tokens / the server's prefill_ms
(first prefill step -> first token), so queueing, HTTP and decode are outside it. The ratio is shipped / not shipped of each
round's medians, given with its spread over the rounds; a round whose `kv_bytes` contradict its layout is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.client import CallFailed
from bench.cluster import DISAGGREGATED, REPLICAS, ClusterError, Layout, running
from bench.measure import Outcome, Record
from bench.report import dump, this_machine
from bench.serve import ServeOptions, serve
from bench.serve_cli import positive_int
from bench.workload import Lengths

MIN_RATIO = 0.95  # shipping may cost a prefill worker at most 5 %


@dataclass(frozen=True, slots=True)
class Round:
    shipped_tok_per_s: float  # median over the round's calls
    kept_tok_per_s: float

    @property
    def ratio(self) -> float:
        return self.shipped_tok_per_s / self.kept_tok_per_s


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("shipping", help="prefill speed with and without shipping KV")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--rounds", type=positive_int, default=3, help="clusters started of each layout (%(default)s)")
    add("--num-requests", type=positive_int, default=10, help="prompts per round and layout (%(default)s)")
    add("--input-len", type=positive_int, default=2_000, help="tokens (%(default)s)")
    add("--json", type=Path, help="write the result to this file")


def main(args: argparse.Namespace) -> int:
    try:
        rounds = asyncio.run(measure(args))
    except (ClusterError, CallFailed, OSError) as error:
        print(f"baton bench shipping: {error}", file=sys.stderr)
        return 2
    ratios = [one.ratio for one in rounds]
    ratio = statistics.median(ratios)
    print(
        f"{this_machine()}\n"
        f"prefill with shipping {statistics.median(one.shipped_tok_per_s for one in rounds):.1f} tok/s, "
        f"without {statistics.median(one.kept_tok_per_s for one in rounds):.1f} tok/s\n"
        f"ratio {ratio:.3f} (rounds {min(ratios):.3f} to {max(ratios):.3f}, n = {len(rounds)} x {args.num_requests} prompts of "
        f"{args.input_len} tokens); the limit is {MIN_RATIO}"
    )
    if args.json:
        document = {"machine": asdict(this_machine()), "ratio": ratio, "rounds": [asdict(one) for one in rounds]}
        args.json.write_bytes(dump(document))
    return 0 if ratio >= MIN_RATIO else 1


async def measure(args: argparse.Namespace) -> list[Round]:
    rounds = []
    for number in range(args.rounds):
        shipped = await prefill_tok_per_s(DISAGGREGATED, args, seed=number, ships=True)
        kept = await prefill_tok_per_s(REPLICAS, args, seed=number, ships=False)
        rounds.append(Round(shipped, kept))
        print(f"round {number + 1}: {shipped:.1f} / {kept:.1f} tok/s", file=sys.stderr)
    return rounds


async def prefill_tok_per_s(layout: Layout, args: argparse.Namespace, *, seed: int, ships: bool) -> float:
    async with running(layout) as cluster:
        result = await serve(
            ServeOptions(
                target=cluster.grpc_target,
                concurrency=1,
                num_requests=args.num_requests,
                num_warmup=2,
                input_lengths=Lengths(args.input_len, args.input_len),
                output_lengths=Lengths(2, 2),  # the second token is what needs the KV on the decode worker
                seed=seed,
            )
        )
    return statistics.median(prefill_speed(record, ships=ships) for record in result.records)


def prefill_speed(record: Record, *, ships: bool) -> float:
    """Tokens per second of one prefill.

    Raises:
        ClusterError: the call failed, or its KV went where this layout should not send it.
    """
    timings = record.timings
    if record.outcome is not Outcome.COMPLETED or timings is None or timings.prefill_ms <= 0:
        raise ClusterError(f"call {record.index} has no prefill time: {record.error_kind} {record.error_message}")
    if (timings.kv_bytes > 0) != ships:
        raise ClusterError(
            f"call {record.index} shipped {timings.kv_bytes} bytes of KV, expected {'some' if ships else 'none'}"
        )
    return 1e3 * (record.prompt_tokens - record.cached_tokens) / timings.prefill_ms
