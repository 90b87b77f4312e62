"""What the router knows of its workers: placement's table, loads, caches. Workers come, change and leave while calls run.

As router/fleet.py keeps it, but: step times are known, not learned; reports come whenever somebody looks, and say how a worker
was at the end of its last step. Rows are placement's; a worker that left is in none, however long its calls' Holds live on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from baton.request import Role
from bench.sim.call import Attempt
from bench.sim.worker import SimWorker
from engine.timing.step_time import Batch
from router.capacity import WorkerLoad
from router.holds import Hold, Ledger
from router.lane_window import GrantWait
from router.placement import Choice
from router.prefix_index import ExpectedPrefixes, Hashes, PrefixIndex, PrefixRoot, WorkerPrefixes
from router.worker_table import LinkView, WorkerSnapshot, WorkerTable

MAX_INDEX_BLOCKS = 4_000_000  # RouterConfig's size of index
MAX_ROWS = 64  # of the prefix index: more workers than that are served, and not known to cache anything
_NO_PULLS = 1e-9  # bytes/s: KV does not flow back in the simulator, so no router may count on it


class Known:
    """One worker, as the router knows it. What changes with every call goes into its row only when placement looks."""

    def __init__(self, worker: SimWorker, table: WorkerTable) -> None:
        shape = worker.engine.shape
        self.worker = worker
        self.takes_calls = True
        self.row = table.add()
        self.root = PrefixRoot(shape.fingerprint, "auto", shape.config.block_size)
        self.ledger = Ledger(self._on_change)
        self.follow: WorkerPrefixes | None = None  # its cache, where it has one
        self.generation = 0
        self._grants = GrantWait()
        self._table = table
        self._is_changed = True
        self._used_tokens = 0  # reported
        self._loaded: tuple[int, ...] = ()
        self._load: WorkerLoad | None = None  # of those numbers
        self._fact = self._snapshot({}, 0.0)

    def put(self, links: dict[str, LinkView], token_bytes: float) -> None:
        """Write what changes rarely."""
        is_listed = self._table.facts[self.row] is not None
        last_chosen = int(self._table.last_chosen[self.row]) if is_listed else 0
        self._fact = self._snapshot(links, token_bytes)
        self._table.put(self.row, replace(self._fact, last_chosen=last_chosen))
        self._is_changed, self._load = True, None

    def leave(self) -> None:
        self._table.clear(self.row)
        self._table.free(self.row)

    def report(self, now_s: float) -> None:
        worker = self.worker
        self._used_tokens = worker.used_tokens(now_s)
        self.ledger.report(worker.waiting_tokens(), self._used_tokens, worker.num_running)

    def granted(self, wait_s: float) -> None:
        """Room on another worker, after so long."""
        self._grants.observe(wait_s)
        self._load = None

    def take_delta(self, follow: WorkerPrefixes) -> None:
        cache = self.worker.engine.cache
        if cache.has_delta():
            self.generation += 1
            follow.apply(self.generation, *cache.take_delta(), reset=False)

    def load(self) -> WorkerLoad:
        """As of the last report; the one before where nothing has changed."""
        ledger = self.ledger
        numbers = (ledger.waiting_tokens, ledger.num_running, ledger.used_tokens, self._used_tokens)
        if numbers != self._loaded or self._load is None:
            self._loaded, self._load = numbers, self._new_load(*numbers)
        return self._load

    def _new_load(self, waiting_tokens: int, num_running: int, expected_tokens: int, used_tokens: int) -> WorkerLoad:
        """`used_tokens`: reported; `expected_tokens`: with what was given since."""
        worker, fact = self.worker, self._fact
        return WorkerLoad(
            worker_id=worker.worker_id,
            prefills=worker.role is not Role.DECODE,
            decodes=worker.role is not Role.PREFILL,
            tokens_per_s=fact.prefill_tokens_per_s,
            waiting_tokens=waiting_tokens,
            num_seqs=num_running,
            step_s=self._step_s(num_running, expected_tokens),
            max_seqs=worker.tuning.max_num_seqs,
            kv_tokens=fact.pool_tokens,
            used_tokens=used_tokens,
            step_s_per_seq=fact.step_s_per_seq,
            step_s_per_token=fact.step_s_per_token,
            grant_s=self._grants.most_s if worker.role is Role.PREFILL else 0.0,
        )

    def _step_s(self, num_running: int, used_tokens: int) -> float:
        """Of one at this load."""
        return self.worker.engine.shape.step_time.decode_steps_s(max(1, num_running), used_tokens, 1)

    def write(self) -> None:
        """What changes with every call, where it has."""
        if not self._is_changed:
            return
        self._is_changed = False
        ledger, table, row = self.ledger, self._table, self.row
        num_running, used_tokens = ledger.num_running, ledger.used_tokens
        table.waiting_tokens[row], table.used_tokens[row] = ledger.waiting_tokens, used_tokens
        table.num_running[row] = num_running
        table.step_s[row] = self._step_s(num_running, used_tokens)

    def _on_change(self) -> None:
        self._is_changed = True

    def _snapshot(self, links: dict[str, LinkView], token_bytes: float) -> WorkerSnapshot:
        worker, shape = self.worker, self.worker.engine.shape
        step_time, budget = shape.step_time, worker.tuning.max_num_batched_tokens
        one_s = step_time.decode_steps_s(1, 0, 1)
        return WorkerSnapshot(
            worker.worker_id,
            worker.epoch,
            worker.role,
            "ready" if self.takes_calls else "draining",
            shape.fingerprint,
            pool_tokens=shape.pool_tokens,
            root=self.root,
            token_bytes=round(token_bytes),
            step_s_per_seq=step_time.decode_steps_s(2, 0, 1) - one_s,
            step_s_per_token=step_time.decode_steps_s(1, 1, 1) - one_s,
            prefill_tokens_per_s=budget / step_time.step_s(Batch(((budget, 0),))),
            kv_bytes_per_s=_NO_PULLS,
            chunk_tokens=worker.tuning.chunk_tokens,
            links=links,
        )


class Roster:
    """All workers that the router may name."""

    def __init__(self, *, token_bytes: float, caches: bool) -> None:
        self._table = WorkerTable()
        self._known: dict[str, Known] = {}
        self._token_bytes = token_bytes
        self._caches = caches
        self._prefixes = PrefixIndex(MAX_INDEX_BLOCKS if caches else 1, MAX_ROWS)
        self._expected = ExpectedPrefixes(MAX_ROWS)
        self._reported_s = -1.0
        self._num_choices = 0

    def __getitem__(self, worker_id: str) -> SimWorker:
        return self._known[worker_id].worker

    # -- workers -----------------------------------------------------------------------------------------------------

    def join(self, worker: SimWorker) -> None:
        known = self._known[worker.worker_id] = Known(worker, self._table)
        if self._caches:
            known.follow = self._prefixes.follow(known.row, known.root, 1 << 30)
            self._expected.forget(known.row)
        self._settle()

    def change(self, worker: SimWorker, *, takes_calls: bool) -> None:
        """It has another role, limit or state."""
        self._known[worker.worker_id].takes_calls = takes_calls
        self._settle()

    def leave(self, worker: SimWorker) -> None:
        known = self._known.pop(worker.worker_id)
        known.leave()
        self._prefixes.forget(known.row)
        self._settle()

    def _settle(self) -> None:
        """Each prefill worker is linked to each that decodes."""
        decoding = [known.worker for known in self._known.values() if known.worker.role is not Role.PREFILL]
        links = {worker.worker_id: LinkView(worker.epoch, "ready") for worker in decoding}
        peers = frozenset(links)
        for known in self._known.values():
            prefills = known.worker.role is Role.PREFILL
            known.worker.peers = peers
            known.put(dict(links) if prefills else {}, self._token_bytes)

    # -- what they say of themselves -----------------------------------------------------------------------------------

    def take_reports(self, now_s: float) -> None:
        if now_s == self._reported_s:
            return
        self._reported_s = now_s
        for known in self._known.values():
            known.report(now_s)
            if known.follow is not None:
                known.worker.engine.settle_cache(now_s)
                known.take_delta(known.follow)

    def loads(self) -> Iterator[WorkerLoad]:
        return (known.load() for known in self._known.values() if known.takes_calls)

    # -- placement's view ------------------------------------------------------------------------------------------------

    @property
    def roots(self) -> Collection[PrefixRoot]:
        return {known.root for known in self._known.values()}

    def table_for(self, hashes: Hashes) -> WorkerTable:
        """As things are now, and with what each worker caches of this prompt."""
        for known in self._known.values():
            known.write()
        if self._caches:
            self._find_cached(hashes)
        return self._table

    def _find_cached(self, hashes: Hashes) -> None:
        num_rows = len(self._table)
        blocks = self._prefixes.leading(hashes, num_rows)
        np.maximum(blocks, self._expected.leading(hashes, num_rows), out=blocks)
        np.multiply(blocks, self._table.block_size, out=self._table.cached_tokens)

    def note(self, choice: Choice, hashes: Hashes) -> None:
        """It is taken."""
        self._num_choices += 1
        self._table.last_chosen[[choice.prefill_row, choice.decode_row]] = self._num_choices
        if self._caches:
            self._expected.add(choice.prefill_row, hashes, self._known[choice.prefill].root)

    def granted(self, attempt: Attempt) -> None:
        """Room for it, on another worker, by now."""
        if (known := self._known.get(attempt.prefill.worker_id)) is not None:
            known.granted(attempt.reserve_wait_s)

    def hold(self, worker_id: str, waiting_tokens: int, used_tokens: int) -> Hold:
        return self._known[worker_id].ledger.hold(waiting_tokens, used_tokens)
