"""`baton bench overlap`: what of a transfer a client waits for, when KV leaves while the prompt is still computed.

Two processes with a KV plane each, as in `baton bench kv`; no model. The sender ships a chunk's blocks every `--chunk-ms`, as a
prefill would finish them, and three things are measured:

    exposed   end of the last chunk -> Ack, against a lone transfer of one chunk + 2 ms; a chunk is late if its bytes were not
              all acknowledged when the next one ended
    handoff   ship -> Ack of a prompt of 32 tokens, everything reserved before
    decode    a decode-like loop in the receiver's engine thread: mean step with chunks coming in / without
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.child import ChildError
from bench.kv import INTERRUPTED
from bench.kv_pair import KVPair, Table
from bench.kv_plan import LAYOUTS, TRANSPORT_MODES, TRANSPORT_TLS, Case, Spread, block_tables, pool_blocks, spread
from bench.kv_report import Progress, new_table, report_console
from bench.report import dump, this_machine
from bench.serve_cli import positive_float, positive_int

PROMPTS = (512, 2_048, 8_192)  # tokens
CHUNK_TOKENS = 512  # EngineConfig.chunk_tokens
SHORT_TOKENS = 32
SHORT_ROUNDS = 50
ALLOWANCE_MS = 2.0  # of exposed transfer above the last chunk's own bytes, and of a short prompt's handoff
MAX_DECODE_RATIO = 1.05
FAST_PACE = 10  # times as fast: a prefill worker with ten times the compute


@dataclass(frozen=True, slots=True)
class Exposed:
    tokens: int
    exposed_ms: Spread
    last_chunk_ms: Spread  # a lone transfer of as many bytes
    num_chunks: int  # before the last ones, all rounds
    num_late: int  # of them

    @property
    def holds(self) -> bool:
        return not self.num_late and self.exposed_ms.median <= self.last_chunk_ms.median + ALLOWANCE_MS


@dataclass(frozen=True, slots=True)
class Slowdown:
    chunk_ms: float  # between two chunks of CHUNK_TOKENS
    ratio: Spread  # mean step with transfers / without, by round
    step_ms: float  # without


@dataclass(frozen=True, slots=True)
class Result:
    transport: str
    mode: str
    exposed: tuple[Exposed, ...]
    short_ms: Spread
    slowdowns: tuple[Slowdown, ...]


class Bench:
    """One pair of processes and the room for the longest prompt on both sides."""

    def __init__(self, pair: KVPair, layout_name: str, rounds: int, chunk_s: float) -> None:
        self._pair = pair
        self._layout_name = layout_name
        self._rounds = rounds
        self._chunk_s = chunk_s
        self._num_blocks = most_blocks(layout_name)
        self._seed = 0

    def exposed(self, tokens: int) -> Exposed:
        exposed_ms, num_chunks, num_late = [], 0, 0
        for _ in range(self._rounds):
            sent, received = self._pair.accept(self._table(tokens), self._table(tokens))
            paced = self._pair.ship_paced(sent[0], self._chunk_blocks, self._chunk_s)
            self._pair.compare(sent, received)
            exposed_ms.append(1e3 * paced.exposed_s)
            num_chunks += paced.num_chunks - 1
            num_late += paced.num_late
        lone_ms = self.lone(min(tokens, CHUNK_TOKENS), self._rounds)
        return Exposed(tokens, spread(exposed_ms), lone_ms, num_chunks, num_late)

    def lone(self, tokens: int, rounds: int) -> Spread:
        """Milliseconds from ship to Ack of one prompt, warm."""
        self._pair.transfer(self._table(tokens), self._table(tokens))
        samples = [self._pair.transfer(self._table(tokens), self._table(tokens)) for _ in range(rounds)]
        return spread([1e3 * sample.wall_s for sample in samples])

    def slowdown(self, tokens: int, chunk_s: float) -> Slowdown:
        duration_s = chunk_s * tokens / CHUNK_TOKENS
        self._decode(duration_s)
        ratios, alone_s = [], []
        for _ in range(self._rounds):
            alone = self._decode(duration_s)
            sent, _ = self._pair.accept(self._table(tokens), self._table(tokens))
            self._pair.begin_decoding(duration_s)
            self._pair.ship_paced(sent[0], self._chunk_blocks, chunk_s)
            ratios.append(statistics.fmean(self._pair.end_decoding()) / alone)
            alone_s.append(alone)
        return Slowdown(1e3 * chunk_s, spread(ratios), 1e3 * statistics.median(alone_s))

    def _decode(self, duration_s: float) -> float:
        """Mean seconds of a step with nothing coming in."""
        self._pair.begin_decoding(duration_s)
        return statistics.fmean(self._pair.end_decoding())

    @property
    def _chunk_blocks(self) -> int:
        return LAYOUTS[self._layout_name].num_blocks_for(CHUNK_TOKENS)

    def _table(self, tokens: int) -> list[Table]:
        self._seed += 1
        return block_tables(Case(self._layout_name, tokens, 1, True), self._num_blocks, self._seed)


def most_blocks(layout_name: str) -> int:
    return pool_blocks(LAYOUTS[layout_name].num_blocks_for(max(PROMPTS)))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("overlap", help="the part of a KV transfer that prefill does not hide")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--layout", choices=sorted(LAYOUTS), default="demo", help="shape of a block (%(default)s)")
    add("--chunk-ms", type=positive_float, default=250.0, help="time a prefill takes for 512 tokens (%(default)s)")
    add("--transport", choices=sorted(TRANSPORT_TLS), help="default: each")
    add("--mode", choices=("direct", "staged"), help="default: each that the transport has")
    add("--rounds", type=positive_int, default=5, help="(%(default)s)")
    add("--json", type=Path, help="write the result to this file")


def main(args: argparse.Namespace) -> int:
    if args.transport and args.mode not in (None, *TRANSPORT_MODES[args.transport]):
        print(f"baton bench overlap: --mode {args.mode} is not to be had over {args.transport}", file=sys.stderr)
        return 2
    try:
        with Progress() as progress:
            results = list(measure(args, progress))
    except ChildError as error:
        print(f"baton bench overlap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    print_results(results, args.chunk_ms)
    if args.json:
        document = {"machine": asdict(this_machine()), "chunk_ms": args.chunk_ms, "results": [*map(asdict, results)]}
        args.json.write_bytes(dump(document))
    return 0


def measure(args: argparse.Namespace, progress: Progress) -> Iterator[Result]:
    """Raises: ChildError: a process failed, or bytes differed."""
    layout, chunk_s = args.layout, args.chunk_ms / 1e3
    for transport in (args.transport,) if args.transport else TRANSPORT_TLS:
        for mode in TRANSPORT_MODES[transport]:
            if args.mode in (None, mode):
                progress.say(f"{transport} {mode}")
                with KVPair(LAYOUTS[layout], most_blocks(layout), TRANSPORT_TLS[transport], mode) as pair:
                    pair.connect()
                    bench = Bench(pair, layout, args.rounds, chunk_s)
                    yield Result(
                        transport,
                        mode,
                        tuple(bench.exposed(tokens) for tokens in PROMPTS),
                        bench.lone(SHORT_TOKENS, SHORT_ROUNDS),
                        (bench.slowdown(PROMPTS[1], chunk_s), bench.slowdown(PROMPTS[2], chunk_s / FAST_PACE)),
                    )


def print_results(results: list[Result], chunk_ms: float) -> None:
    console = report_console()
    columns = (
        "transport",
        "mode",
        ">tokens",
        ">exposed ms",
        ">min-max",
        ">n",
        ">a chunk alone ms",
        ">late chunks",
        "holds",
    )
    table = new_table(f"Exposed transfer, chunks of {CHUNK_TOKENS} tokens every {chunk_ms:g} ms", *columns)
    for result in results:
        for row in result.exposed:
            ms = row.exposed_ms
            table.add_row(
                result.transport, result.mode, str(row.tokens), f"{ms.median:.2f}", f"{ms.min:.2f}-{ms.max:.2f}", str(ms.n),
                f"{row.last_chunk_ms.median:.2f}", f"{row.num_late} of {row.num_chunks}", "yes" if row.holds else "NO",
            )  # fmt: skip
    console.print(f"{this_machine()}", markup=False, soft_wrap=True)
    console.print(table)
    for result in results:
        for line in lines(result):
            console.print(f"{result.transport} {result.mode}: {line}", markup=False, soft_wrap=True)


def lines(result: Result) -> Iterator[str]:
    ms = result.short_ms
    yield (
        f"handoff of {SHORT_TOKENS} tokens {ms.median:.2f} ms at p50 ({ms.min:.2f}-{ms.max:.2f}, n = {ms.n}); "
        f"the limit is {ALLOWANCE_MS:g} ms"
    )
    for slowdown in result.slowdowns:
        ratio = slowdown.ratio
        yield (
            f"a decode step of {slowdown.step_ms:.1f} ms takes {ratio.median:.3f} times as long "
            f"({ratio.min:.3f}-{ratio.max:.3f}, n = {ratio.n}) with {CHUNK_TOKENS} tokens coming in "
            f"every {slowdown.chunk_ms:g} ms; the limit is {MAX_DECODE_RATIO}"
        )
