"""What one choice costs the router, and what its index of cached blocks takes: `python -m bench.placement`.

placement   500 prefill and 500 decode workers with ready links, a prompt of 8,208 tokens = 512 hashed blocks of which each
            worker caches some leading part, all loads different: index look-up, forecasts, choice, plan (and, apart, what
            keeps it for explanations). Hashing is not part of it. Each call sees other loads than the last.
index       blocks of chains of 512, each cached by 1 to 3 of 1,000 workers, one in a hundred chains by all: memory of the
            process before and after, time to add them, time to look up a chain that many cache
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from baton.request import Role
from router.explain import Rules, explain
from router.fleet import MAX_WORKERS
from router.flow_back import Plan, plan
from router.placement import Choice, Demand, Outlook, choose, look
from router.prefix_index import ExpectedPrefixes, PrefixIndex, PrefixRoot
from router.worker_table import LinkView, WorkerSnapshot, WorkerTable

ROOT = PrefixRoot("bench", "auto", 16)
NUM_BLOCKS = 512
NUM_CALLS = 2_000
PAGE_BYTES = resource.getpagesize()


def chain(seed: int, num_blocks: int = NUM_BLOCKS) -> list[bytes]:
    """Hashes as random as real ones."""
    return [hashlib.blake2b(b"%d/%d" % (seed, n), digest_size=16).digest() for n in range(num_blocks)]


class Bench:
    """A table and an index as router/fleet.py keeps them."""

    def __init__(self, num_prefill: int, num_decode: int, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.table = WorkerTable()
        self.prefixes = PrefixIndex(4_000_000, MAX_WORKERS)
        self.expected = ExpectedPrefixes(MAX_WORKERS)
        self.hashes = {ROOT: chain(0)}
        links = {f"d{number}": LinkView(1, "ready") for number in range(num_decode)}
        for role, count in ((Role.DECODE, num_decode), (Role.PREFILL, num_prefill)):
            for number in range(count):
                self._add(f"{role.name[0].lower()}{number}", role, links if role is Role.PREFILL else {})
        self.num_workers = num_prefill + num_decode

    def _add(self, worker_id: str, role: Role, links: dict[str, LinkView]) -> None:
        row = self.table.add()
        self.table.put(
            row,
            WorkerSnapshot(
                worker_id, 1, role, "ready", "bench", pool_tokens=760_000, num_running=20, root=ROOT,
                token_bytes=131_072, step_s=0.02, prefill_tokens_per_s=60_000.0, kv_bytes_per_s=40e9, links=links,
            ),
        )  # fmt: skip
        num_cached = self.rng.randrange(NUM_BLOCKS)
        self.prefixes.follow(row, ROOT, 1 << 30).apply(1, self.hashes[ROOT][:num_cached], (), reset=True)

    def shake(self) -> None:
        """Other loads, as reports would bring them."""
        rows = slice(0, self.num_workers)
        draw = np.random.default_rng(self.rng.randrange(1 << 30))
        self.table.waiting_tokens[rows] = draw.integers(0, 50_000, self.num_workers)
        self.table.used_tokens[rows] = draw.integers(0, 600_000, self.num_workers)

    def demand(self) -> Demand:
        tokens = NUM_BLOCKS * ROOT.block_size + 16
        return Demand(tokens, tokens + 512, self.hashes, request_id="bench")

    def look(self, demand: Demand) -> Outlook:
        blocks = self.prefixes.leading(demand.hashes, len(self.table))
        np.maximum(blocks, self.expected.leading(demand.hashes, len(self.table)), out=blocks)
        np.multiply(blocks, self.table.block_size, out=self.table.cached_tokens)
        return look(self.table, demand)

    def place(self, demand: Demand, local_prefill_tokens: int) -> tuple[Outlook, Choice, Plan]:
        outlook = self.look(demand)
        choice = choose(outlook, local_prefill_tokens=local_prefill_tokens)
        assert isinstance(choice, Choice), choice
        return outlook, choice, plan(choice, outlook)


Figures = dict[str, object]


def timed(act: Callable[[], object], num_calls: int, before: Callable[[], None] = lambda: None) -> Figures:
    """Microseconds of each call, CPU time of this thread, so that other processes do not count; `before` does not either."""
    spent_us = []
    for _ in range(num_calls):
        before()
        start_ns = time.thread_time_ns()
        act()
        spent_us.append((time.thread_time_ns() - start_ns) / 1e3)
    p10, p50, p90, p99 = np.percentile(spent_us, (10, 50, 90, 99))
    return {
        "n": num_calls,
        "p10_us": round(p10, 1),
        "p50_us": round(p50, 1),
        "p90_us": round(p90, 1),
        "p99_us": round(p99, 1),
    }


def placement_figures(num_prefill: int, num_decode: int, num_calls: int = NUM_CALLS) -> Iterator[Figures]:
    bench = Bench(num_prefill, num_decode)
    demand = bench.demand()
    for local in (0, 512):
        cost = timed(lambda local=local: bench.place(demand, local), num_calls, bench.shake)  # type: ignore[misc]
        yield {"what": "placement", "workers": bench.num_workers, "local_prefill_tokens": local, **cost}
    look_up = timed(lambda: bench.prefixes.leading(demand.hashes, len(bench.table)), num_calls)
    yield {"what": "of it: index look-up", **look_up}
    outlook, choice, made = bench.place(demand, 0)
    kept = timed(lambda: explain(outlook, choice, made, Rules()), num_calls)
    yield {"what": "keeping its explanation", **kept}
    expect = timed(lambda: bench.expected.add(choice.prefill_row, demand.hashes, ROOT), num_calls)
    yield {"what": "expecting its prefix", **expect}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def index_figures(num_blocks: int, num_workers: int = 1_000) -> Figures:
    rng = random.Random(0)
    index = PrefixIndex(num_blocks, MAX_WORKERS)
    follows = [index.follow(row, ROOT, 1 << 30) for row in range(num_workers)]
    before_bytes, spent_s, num_added = resident_bytes(), 0.0, 0
    popular: Sequence[bytes] = ()
    number = 0
    while index.num_blocks < num_blocks - NUM_BLOCKS:
        number += 1
        hashes = chain(number)
        everybody = number % 100 == 0
        popular = hashes if everybody else popular
        holders = follows if everybody else rng.sample(follows, rng.choice((1, 1, 2, 3)))
        start_s = time.perf_counter()
        for follow in holders:
            follow.apply(1, hashes, (), reset=False)
        spent_s += time.perf_counter() - start_s
        num_added += len(holders) * len(hashes)
    used_bytes = resident_bytes() - before_bytes
    look_up = timed(lambda: index.leading({ROOT: popular}, num_workers), 200)
    return {
        "what": "index",
        "blocks": index.num_blocks,
        "reports": num_added,
        "resident_mb": round(used_bytes / 1e6),
        "own_count_mb": round(index.nbytes / 1e6),
        "bytes_per_block": round(used_bytes / index.num_blocks, 1),
        "add_us": round(spent_s / num_added * 1e6, 3),
        "ignored": index.num_ignored,
        **look_up,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement")
    parser.add_argument("--prefill", type=int, default=500)
    parser.add_argument("--decode", type=int, default=500)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="of the index; 0 = leave it out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    found = list(placement_figures(options.prefill, options.decode))
    if options.blocks:
        found.append(index_figures(options.blocks))
    for figures in found:
        print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
