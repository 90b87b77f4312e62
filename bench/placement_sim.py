"""What placement makes of a fleet: the router's own policy objects on a real trace with simulated workers.

    python -m bench.placement_sim ../shared/traces/mooncake/conversation_trace.jsonl

Routers are real: WorkerTable, Ledger, PrefixIndex, `look`, `choose` and `plan`, as router/fleet.py uses them, one set per
router. Workers are queues with the step times of Llama-3.1-8B FP8 on an H200, fitted to measured ones (traces README,
calibration/dynamo_h200): a prefill worker computes one prompt after the other, a decode worker steps all of its sequences
together and stands still while it computes a prompt; each caches whole 512-token blocks, least recently used out first. Reports
of load and cache reach routers every REPORT_S, and of load at once where worker/load_news.py says so. KV moves at the wire's
rate and is waited for. What is left out: chunks of several prompts in one step, preemption, failures, the cost of routing
itself. Times are the model's, not a measurement on GPUs. Pure but for reading the trace.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from baton.request import Role
from bench.traces import MOONCAKE_BLOCK_TOKENS, TraceError, TraceRow, load_trace
from router.flow_back import Plan, plan
from router.holds import Hold, Ledger
from router.placement import AUTO_LOCAL_TOKENS, Choice, Demand, choose, look
from router.prefix_index import ExpectedPrefixes, PrefixIndex, PrefixRoot, WorkerPrefixes
from router.worker_table import LinkView, WorkerSnapshot, WorkerTable
from worker.load_news import LoadNews

BLOCK = MOONCAKE_BLOCK_TOKENS
ROOT = PrefixRoot("sim", "auto", BLOCK)
# A chunk of 2,048 tokens takes 47 ms there, a decode step 10-30 ms, and each brings a report to its router
REPORT_S = 0.05
HEARTBEAT_S = 0.5  # how often a router hears of a worker that has nothing of it; DESIGN section 5
POOL_TOKENS = 760_000  # 100 GB of KV at 131,072 B per token
TOKEN_BYTES = 131_072  # bf16: 32 layers x 8 heads x 128 x 2 x 2 B
WIRE_BYTES_PER_S = 42.5e9  # InfiniBand, 400 Gb/s at 85 %
OVER_16K = 16_384
SHORT_TOKENS = 4_096  # azure2023's p99 of a conversation's input


def prefill_s(lacking_tokens: int, context_tokens: int) -> float:
    """TTFT = 16.5 + 0.01518 isl + 4.21e-7 isl^2 ms; the square's part of what is cached is not paid again."""
    cached = context_tokens - lacking_tokens
    return 1e-3 * (16.5 + 0.01518 * lacking_tokens + 4.21e-7 * (context_tokens**2 - cached**2))


def step_s(num_running: int, kv_tokens: float) -> float:
    """ITL = 6.09 + 0.0203 batch + 2.93e-5 kv_tokens ms."""
    return 1e-3 * (6.09 + 0.0203 * num_running + 2.93e-5 * kv_tokens)


SPEED = 2_048 / (prefill_s(2_048, 2_048))  # what routers believe of a prefill worker, tokens/s


class BlockCache:
    """Blocks of one worker, least recently used out first; says what changed."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.added: list[int] = []
        self.removed: list[int] = []

    def num_leading(self, block_ids: Sequence[int]) -> int:
        for number, block in enumerate(block_ids):
            if block not in self._blocks:
                return number
        return len(block_ids)

    def use(self, block_ids: Sequence[int]) -> None:
        """The last block is the least valuable one: it goes first."""
        for block in reversed(block_ids):
            if block not in self._blocks:
                self.added.append(block)
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self.removed.append(self._blocks.popitem(last=False)[0])


def whole_blocks(row: TraceRow) -> tuple[int, ...]:
    """Those that a cache can give: not the one with the last token."""
    return row.block_ids[: (row.input_tokens - 1) // BLOCK]


def name(block_id: int) -> bytes:
    return block_id.to_bytes(16, "little")


@dataclass(slots=True)
class Job:
    """One request on its way."""

    row: TraceRow
    number: int
    router: SimRouter
    plan: Plan
    stack: list[Callable[[], None]] = field(default_factory=list)  # what is taken back when it ends
    hold: Hold | None = None
    cached_blocks: int = 0  # that were not computed
    ttft_s: float = 0.0
    first_s: float = 0.0
    tpot_s: float = 0.0


class SimWorker:
    """A prefill queue and a decode batch; a role uses one of them, or both for a prompt prefilled on decode."""

    def __init__(self, worker_id: str, role: Role, sim: Sim) -> None:
        self.worker_id = worker_id
        self.role = role
        self.cache = BlockCache(sim.pool_tokens // BLOCK)
        self.num_served = 0
        self.queue: deque[tuple[Job, int]] = deque()  # and lacking tokens
        self.queued_tokens = 0
        self.busy_until_s = 0.0
        self.current: tuple[float, float, int] = (0.0, 0.0, 0)  # start, end, tokens
        self.running: list[tuple[float, int, Job]] = []  # heap by the step at which it ends
        self.kv_tokens = 0.0
        self.steps = 0.0
        self.at_s = 0.0
        self.waiting: deque[Job] = deque()  # for room
        self.reserved_tokens = 0
        self.news = LoadNews()
        self._sim = sim
        self._event = 0

    # prefill

    def waiting_tokens(self, now_s: float) -> int:
        start_s, end_s, tokens = self.current
        left = tokens * max(0.0, (end_s - now_s) / (end_s - start_s)) if end_s > start_s else 0.0
        return self.queued_tokens + int(left)

    def submit(self, job: Job, lacking: int, now_s: float) -> None:
        self.queue.append((job, lacking))
        self.queued_tokens += lacking
        if now_s >= self.busy_until_s:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        job, _ = self.queue.popleft()
        blocks = whole_blocks(job.row)
        cached = self.cache.num_leading(blocks)
        wait_s = 0.0
        if (pull := job.plan.pull) is not None:
            there = self._sim.workers[pull.worker_id].cache.num_leading(blocks)
            if there > cached:  # moved while the prompts ahead were computed; only what sticks out is waited for
                wait_s = (there - cached) * BLOCK * TOKEN_BYTES / WIRE_BYTES_PER_S
                cached = there
        job.cached_blocks = cached
        lacking = job.row.input_tokens - cached * BLOCK
        self.queued_tokens -= _
        end_s = now_s + wait_s + prefill_s(lacking, job.row.input_tokens)
        if self.running:  # streams that run here stand still meanwhile
            self._advance(now_s)
            self.at_s = end_s
            self._plan_next(end_s)
        self.current, self.busy_until_s = (now_s, end_s, lacking), end_s
        self._sim.at(end_s, lambda: self._computed(job, end_s))

    def _computed(self, job: Job, now_s: float) -> None:
        self.current = (0.0, 0.0, 0)
        self.cache.use(whole_blocks(job.row))
        self._sim.first_token(job, self, now_s)
        if self.queue:
            self._start(now_s)

    # decode

    def adopt(self, job: Job, now_s: float) -> None:
        self.waiting.append(job)
        self._let_in(now_s)

    def _let_in(self, now_s: float) -> None:
        self._advance(now_s)
        while self.waiting:
            job = self.waiting[0]
            total = job.row.input_tokens + job.row.output_tokens
            if self.running and self.reserved_tokens + total > self._sim.pool_tokens:
                break
            self.waiting.popleft()
            self.reserved_tokens += total
            self.kv_tokens += job.row.input_tokens
            self.cache.use(whole_blocks(job.row))
            heapq.heappush(self.running, (self.steps + max(1, job.row.output_tokens - 1), job.number, job))
        self._plan_next(now_s)

    def _advance(self, now_s: float) -> None:
        if self.running and now_s > self.at_s:
            done = (now_s - self.at_s) / step_s(len(self.running), self.kv_tokens)
            self.steps += done
            self.kv_tokens += done * len(self.running)
        self.at_s = max(self.at_s, now_s)

    def _plan_next(self, now_s: float) -> None:
        self._event += 1
        if self.running:
            event, left = self._event, max(0.0, self.running[0][0] - self.steps)
            # The batch grows meanwhile: look again within some steps, so that the length of a step follows its KV.
            end_s = max(now_s, self.at_s) + min(left, 64.0) * step_s(len(self.running), self.kv_tokens)
            self._sim.at(end_s, lambda: self._stepped(event, end_s))

    def _stepped(self, event: int, now_s: float) -> None:
        if event != self._event:
            return
        self._advance(now_s)
        while self.running and self.running[0][0] <= self.steps + 1e-6:
            _, _, job = heapq.heappop(self.running)
            total = job.row.input_tokens + job.row.output_tokens
            self.reserved_tokens -= total
            self.kv_tokens = max(0.0, self.kv_tokens - total) if self.running else 0.0
            self._sim.ended(job, now_s)
        self._let_in(now_s)


class SimRouter:
    """One router's knowledge, kept as router/fleet.py keeps it."""

    def __init__(self, workers: Sequence[SimWorker], local_prefill_tokens: int, seed: int) -> None:
        self.table = WorkerTable()
        self.prefixes = PrefixIndex(4_000_000, len(workers))
        self.expected = ExpectedPrefixes(len(workers))
        self.ledgers: list[Ledger] = []
        self.follows: list[WorkerPrefixes] = []
        self._local = local_prefill_tokens
        self._serial = seed
        links = {worker.worker_id: LinkView(1, "ready") for worker in workers if worker.role is not Role.PREFILL}
        for worker in workers:
            row = self.table.add()
            self.table.put(row, _snapshot(worker, links if worker.role is Role.PREFILL else {}))
            self.ledgers.append(Ledger(lambda row=row: self._write(row)))  # type: ignore[misc]
            self.follows.append(self.prefixes.follow(row, ROOT, 1 << 30))
        self.rows = [self.table.row_of[worker.worker_id] for worker in workers]
        self.at_row = {row: number for number, row in enumerate(self.rows)}

    def _write(self, row: int) -> None:
        ledger = self.ledgers[self.at_row[row]]
        self.table.waiting_tokens[row] = ledger.waiting_tokens
        self.table.used_tokens[row] = ledger.used_tokens
        self.table.num_running[row] = ledger.num_running
        self.table.step_s[row] = step_s(ledger.num_running, ledger.used_tokens)

    def place(self, row: TraceRow) -> tuple[Choice, Plan]:
        demand = Demand(
            row.input_tokens, row.input_tokens + row.output_tokens, {ROOT: list(map(name, whole_blocks(row)))}
        )
        blocks = self.prefixes.leading(demand.hashes, len(self.table))
        np.maximum(blocks, self.expected.leading(demand.hashes, len(self.table)), out=blocks)
        np.multiply(blocks, self.table.block_size, out=self.table.cached_tokens)
        outlook = look(self.table, demand)
        choice = choose(outlook, local_prefill_tokens=self._local)
        assert isinstance(choice, Choice), choice
        self._serial += 1
        self.table.last_chosen[choice.prefill_row] = self.table.last_chosen[choice.decode_row] = self._serial
        self.expected.add(choice.prefill_row, demand.hashes, ROOT)
        return choice, plan(choice, outlook)


def _snapshot(worker: SimWorker, links: dict[str, LinkView]) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker.worker_id,
        1,
        worker.role,
        "ready",
        "sim",
        pool_tokens=POOL_TOKENS,
        root=ROOT,
        token_bytes=TOKEN_BYTES,
        step_s_per_seq=step_s(1, 0) - step_s(0, 0),
        step_s_per_token=step_s(0, 1) - step_s(0, 0),
        prefill_tokens_per_s=SPEED,
        kv_bytes_per_s=WIRE_BYTES_PER_S,
        links=links,
    )


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated."""

    num_prefill: int = 100
    num_decode: int = 100
    num_routers: int = 4
    pool_tokens: int = POOL_TOKENS
    local_prefill_tokens: int = AUTO_LOCAL_TOKENS


class Sim:
    """Runs rows through routers and workers; look at the attributes after `run`."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self.pool_tokens = fleet.pool_tokens
        made = [SimWorker(f"p{n}", Role.PREFILL, self) for n in range(fleet.num_prefill)]
        made += [SimWorker(f"d{n}", Role.DECODE, self) for n in range(fleet.num_decode)]
        self.workers = {worker.worker_id: worker for worker in made}
        self.routers = [SimRouter(made, fleet.local_prefill_tokens, number) for number in range(fleet.num_routers)]
        self.jobs: list[Job] = []
        self.samples: list[list[int]] = []  # queued tokens of each prefill worker, per report
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._num_open = self._num_reports = 0
        self._rng = random.Random(f"{seed}/routers")

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, act))

    def run(self, rows: Sequence[TraceRow]) -> None:
        for row in rows:
            self.at(row.at_s, lambda row=row: self._arrive(row, self._router_of(row)))  # type: ignore[misc]
        self._num_open = len(rows)
        self._last_arrival_s = rows[-1].at_s
        self.at(0.0, lambda: self._report(0.0))
        while self._events and self._num_open:
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def _router_of(self, row: TraceRow) -> SimRouter:
        """Turns of a conversation, told apart by their second block, come over one connection and so to one router."""
        if len(row.block_ids) < 2:
            return self._rng.choice(self.routers)
        return self.routers[hash(row.block_ids[:2]) % len(self.routers)]

    def _arrive(self, row: TraceRow, router: SimRouter) -> None:
        choice, made = router.place(row)
        prefill, decode = self.workers[choice.prefill], self.workers[choice.decode]
        job = Job(row, len(self.jobs), router, made)
        self.jobs.append(job)
        self._hold(job, choice.prefill_row, made.lacking_tokens, row.input_tokens if not choice.local else 0)
        if not choice.local or prefill is decode:
            self._hold(job, choice.decode_row, 0, row.input_tokens + row.output_tokens)
        prefill.num_served += 1
        if decode is not prefill:
            decode.num_served += 1
        prefill.submit(job, made.lacking_tokens, row.at_s)
        self._tell_news(prefill, row.at_s)

    def _tell_news(self, worker: SimWorker, now_s: float) -> None:
        """To every router, as worker/host.py does."""
        if worker.news.is_news(waiting := worker.waiting_tokens(now_s)):
            for router in self.routers:
                ledger = router.ledgers[router.at_row[router.table.row_of[worker.worker_id]]]
                ledger.report(waiting, worker.reserved_tokens, len(worker.running))

    def _hold(self, job: Job, row: int, waiting: int, used: int) -> None:
        hold = job.router.ledgers[job.router.at_row[row]].hold(waiting, used)
        if waiting:
            job.hold = hold
        job.stack.append(hold.release)

    def first_token(self, job: Job, prefill: SimWorker, now_s: float) -> None:
        job.ttft_s, job.first_s = now_s - job.row.at_s, now_s
        self._tell_news(prefill, now_s)
        if job.hold is not None:
            job.hold.waiting_tokens = 0
        decode = self.workers[job.plan.choice.decode]
        lacking = job.row.input_tokens - decode.cache.num_leading(whole_blocks(job.row)) * BLOCK
        moved_s = 0.0 if decode is prefill else lacking * TOKEN_BYTES / WIRE_BYTES_PER_S
        if decode is not prefill:
            job.stack.pop(0)()
        self.at(now_s + moved_s, lambda: decode.adopt(job, now_s + moved_s))

    def ended(self, job: Job, now_s: float) -> None:
        job.tpot_s = (now_s - job.first_s) / max(1, job.row.output_tokens - 1)
        for undo in job.stack:
            undo()
        self._num_open -= 1

    def _report(self, now_s: float) -> None:
        workers = list(self.workers.values())
        for number, worker in enumerate(workers):
            waiting = worker.waiting_tokens(now_s)
            added, removed = [*map(name, worker.cache.added)], [*map(name, worker.cache.removed)]
            worker.cache.added, worker.cache.removed = [], []
            beat = self._num_reports % round(HEARTBEAT_S / REPORT_S) == number % round(HEARTBEAT_S / REPORT_S)
            for router in self.routers:
                if beat or router.ledgers[number].num_held:
                    router.ledgers[number].report(waiting, worker.reserved_tokens, len(worker.running))
                if added or removed:
                    router.follows[number].apply(router.follows[number]._generation + 1, added, removed, reset=False)
        self._num_reports += 1
        if now_s < self._last_arrival_s:
            self.samples.append([w.waiting_tokens(now_s) for w in workers if w.role is Role.PREFILL])
        if self._num_open:
            self.at(now_s + REPORT_S, lambda: self._report(now_s + REPORT_S))


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run."""

    num_requests: int
    hit_share: float  # of prompt tokens not computed
    global_hit_share: float  # of one LRU with the capacity of all workers together
    queued_mean: float  # tokens
    queued_p95_to_mean: float  # over workers, of each one's mean over time
    queued_p95_to_mean_at_once: float  # over workers and instants
    least_served: float  # requests of the worker with fewest, as a share of its pool's mean
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    local_share: float


def figures(sim: Sim) -> Figures:
    jobs = sim.jobs
    tokens = sum(job.row.input_tokens for job in jobs)
    queued = np.array(sim.samples[len(sim.samples) // 10 :])  # the first tenth fills the queues
    means = queued.mean(axis=0)
    served = [
        min(counts) / (sum(counts) / len(counts))
        for role in (Role.PREFILL, Role.DECODE)
        if (counts := [w.num_served for w in sim.workers.values() if w.role is role])
    ]
    ttft, tpot = np.array([job.ttft_s for job in jobs]), np.array([job.tpot_s for job in jobs])
    capacity = len(sim.workers) * sim.pool_tokens // BLOCK
    return Figures(
        num_requests=len(jobs),
        hit_share=sum(job.cached_blocks for job in jobs) * BLOCK / tokens,
        global_hit_share=global_lru_hits([job.row for job in jobs], capacity) / tokens,
        queued_mean=float(queued.mean()),
        queued_p95_to_mean=float(np.percentile(means, 95) / means.mean()),
        queued_p95_to_mean_at_once=float(np.percentile(queued, 95) / queued.mean()),
        least_served=min(served),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        tpot_p50_s=float(np.percentile(tpot, 50)),
        tpot_p99_s=float(np.percentile(tpot, 99)),
        local_share=sum(job.plan.choice.local for job in jobs) / len(jobs),
    )


def global_lru_hits(rows: Iterable[TraceRow], capacity_blocks: int) -> int:
    """Prompt tokens that one cache for all would have had, if each prompt were in it the moment it arrives."""
    cache, num_tokens = BlockCache(capacity_blocks), 0
    for row in rows:
        blocks = whole_blocks(row)
        num_tokens += cache.num_leading(blocks) * BLOCK
        cache.use(blocks)
    return num_tokens


def at_load(rows: Sequence[TraceRow], load: float, num_prefill: int) -> list[TraceRow]:
    """The same rows in a time in which prefill workers, each prompt's ideal hits taken off, are busy to this share."""
    cache, work_s = BlockCache(1 << 60), 0.0
    for row in rows:
        blocks = whole_blocks(row)
        work_s += prefill_s(row.input_tokens - cache.num_leading(blocks) * BLOCK, row.input_tokens)
        cache.use(blocks)
    speed = rows[-1].at_s / (work_s / (load * num_prefill))
    return [replace(row, at_s=row.at_s / speed) for row in rows]


def repeated(rows: Sequence[TraceRow], times: int) -> list[TraceRow]:
    """The trace again and again, each time as other conversations: a longer look at the same mix."""
    length_s = rows[-1].at_s
    stride = 1 + max(max(row.block_ids, default=0) for row in rows)
    return [
        replace(row, at_s=row.at_s + n * length_s, block_ids=tuple(b + n * stride for b in row.block_ids))
        for n in range(times)
        for row in rows
    ]


def with_tail(rows: Sequence[TraceRow], share: float, seed: int) -> list[TraceRow]:
    """The short prompts, with as many over 16k tokens mixed in as makes them `share` of all."""
    rng = random.Random(f"{seed}/tail")
    short = [row for row in rows if row.input_tokens <= SHORT_TOKENS]
    long = [row for row in rows if row.input_tokens > OVER_16K]
    num_long = round(len(short) * share / (1 - share))
    mixed = [replace(rng.choice(long), at_s=rng.uniform(0, short[-1].at_s)) for _ in range(num_long)]
    return sorted([*short, *mixed], key=lambda row: row.at_s)


def tail_ratio(rows: Sequence[TraceRow], fleet: Fleet, load: float, share: float = 0.05, seed: int = 0) -> float:
    """TTFT p99 of short prompts with long ones among them, over that without; `load` is that of both together."""
    mixed = at_load(with_tail(rows, share, seed), load, fleet.num_prefill)
    p99_s = []
    for part in ([row for row in mixed if row.input_tokens <= SHORT_TOKENS], mixed):
        sim = Sim(fleet, seed)
        sim.run(part)
        p99_s.append(np.percentile([j.ttft_s for j in sim.jobs if j.row.input_tokens <= SHORT_TOKENS], 99))
    return float(p99_s[1] / p99_s[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement_sim")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--load", type=float, nargs="+", default=[0.5, 0.7, 0.9])
    parser.add_argument("--routers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=0, help="0 = the whole trace")
    parser.add_argument("--repeat", type=int, default=1, help="the trace so many times, each as other conversations")
    parser.add_argument("--local-prefill-tokens", type=int, default=AUTO_LOCAL_TOKENS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        rows = load_trace(options.trace, seed=options.seed)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    rows = repeated(rows[: options.requests or None], options.repeat)
    fleet = Fleet(num_routers=options.routers, local_prefill_tokens=options.local_prefill_tokens)
    for load in options.load:
        sim = Sim(fleet, options.seed)
        sim.run(at_load(rows, load, fleet.num_prefill))
        found = figures(sim)
        print(json.dumps({"load": load} | {name: round(getattr(found, name), 4) for name in found.__slots__}))
    print(json.dumps({"tail_ttft_p99_ratio": round(tail_ratio(rows, fleet, 0.7, seed=options.seed), 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
