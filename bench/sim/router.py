"""The router under virtual time: admission, placement and the loads they see are the product's own objects.

Does what router/turns.py, router/fleet.py and router/handoff.py do around them, one router for the whole deployment: the policy
looks at the fleet when a call comes, begins or ends, and each PUMP_S while someone waits. Workers are seen as they were at the
end of their last step, less the hop; step times are known, not learned. What differs: docs/simulator.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from baton.request import Role
from baton.slo import SLO
from bench.sim.call import Call, request_of
from bench.sim.clock import Event
from bench.sim.worker import HOP_S, SimWorker
from bench.traces import TraceRow
from engine.timing.step_time import Batch
from router.admission import Admission, Bounds, Shed, Turn
from router.capacity import WorkerLoad
from router.flow_back import plan
from router.holds import Ledger
from router.placement import Choice, Demand, choose, look
from router.prefix_index import ExpectedPrefixes, PrefixIndex, PrefixRoot, hash_prompt
from router.tenants import OPEN
from router.turns import OBSERVE_S, PUMP_S
from router.worker_table import LinkView, WorkerSnapshot, WorkerTable

MAX_INDEX_BLOCKS = 4_000_000  # RouterConfig's size of index
TIMEOUT_S = 600.0  # of a call: the front end's default deadline
# Clients name a max_tokens well above what they get; bench/overload_fleet.py assumes as much.
MAX_TOKENS_SLACK = 4
_NO_PULLS = 1e-9  # bytes/s: KV does not flow back in the simulator, so no router may count on it


class SimRouter:
    def __init__(
        self,
        workers: Sequence[SimWorker],
        *,
        bounds: Bounds | None,
        token_bytes: float,
        local_prefill_tokens: int,
        on_over: Callable[[Call, Shed | None], None],
    ) -> None:
        """`bounds`: None = every call is let in at once. `on_over` is told of each call once, shed or ended."""
        self.admission = Admission(bounds) if bounds is not None else None
        self._workers = {worker.worker_id: worker for worker in workers}
        self._local_prefill_tokens = local_prefill_tokens
        self._on_over = on_over
        self._calls: dict[int, Call] = {}  # by id() of the turn: let in or waiting
        self._serial = 0
        self._next_look_s = 0.0
        self._reported_s = -1.0
        self._is_pumping = False
        self._caches = any(worker.engine.shape.config.prefix_cache for worker in workers)
        self._fill_table(workers, token_bytes)

    @property
    def num_open(self) -> int:
        return len(self._calls)

    # -- a call's life -----------------------------------------------------------------------------------------------

    def on_arrival(self, row: TraceRow, slo: SLO, now_s: float) -> Iterable[Event]:
        self._serial += 1
        call = Call(row, self._serial, slo, request_of(row, self._serial, slo))
        call.turn = turn = _turn(call)
        self._calls[id(turn)] = call
        if self.admission is None:
            return self._submit(call, now_s)
        self._look(now_s)
        if shed := self.admission.arrive(turn, now_s):
            self._over(call, shed)
            return self._pump(now_s)
        events = self._submit(call, now_s) if turn.released_s is not None else []
        return [*events, *self._pump(now_s)]

    def on_first_token(self, call: Call, now_s: float) -> Iterable[Event]:
        prefill_hold, *_ = call.holds
        prefill_hold.waiting_tokens = 0
        if call.plan is not None and not call.plan.choice.local:
            prefill_hold.release()
        if self.admission is None or call.turn is None:
            return []
        self.admission.began(call.turn, now_s)
        return self._pump(now_s)

    def on_end(self, call: Call, now_s: float) -> Iterable[Event]:
        for hold in call.holds:
            hold.release()
        if self.admission is not None and call.turn is not None:
            self.admission.charge(call.turn, call.row.output_tokens)
            if call.row.output_tokens == 1:
                self.admission.began(call.turn, now_s)
            self.admission.leave(call.turn, now_s)
        self._over(call, None)
        return self._pump(now_s)

    def _over(self, call: Call, shed: Shed | None) -> None:
        del self._calls[id(call.turn)]
        self._on_over(call, shed)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _pump(self, now_s: float) -> list[Event]:
        if self.admission is None or not self.admission.has_news:
            return []
        self._look(now_s)
        released, shed = self.admission.due(now_s)
        for turn, why in shed:
            self._over(self._calls[id(turn)], why)
        events = [event for turn in released for event in self._submit(self._calls[id(turn)], now_s)]
        if self.admission.has_news and not self._is_pumping:
            self._is_pumping = True
            events.append(Event(now_s + PUMP_S, self._on_timer))
        return events

    def _on_timer(self, now_s: float) -> list[Event]:
        self._is_pumping = False
        return self._pump(now_s)

    def _look(self, now_s: float) -> None:
        if now_s < self._next_look_s or self.admission is None:
            return
        self._next_look_s = now_s + OBSERVE_S
        self._take_reports(now_s)
        self.admission.observe(self._loads(now_s), now_s)

    def _loads(self, now_s: float) -> Iterator[WorkerLoad]:
        table = self._table
        for worker in self._workers.values():
            row, shape = self._row_of[worker.worker_id], worker.engine.shape
            yield WorkerLoad(
                worker_id=worker.worker_id,
                prefills=worker.role is not Role.DECODE,
                decodes=worker.role is not Role.PREFILL,
                tokens_per_s=float(table.prefill_tokens_per_s[row]),
                waiting_tokens=int(table.waiting_tokens[row]),
                num_seqs=int(table.num_running[row]),
                step_s=float(table.step_s[row]),
                max_seqs=shape.config.max_num_seqs,
                kv_tokens=shape.pool_tokens,
                used_tokens=worker.used_tokens(now_s),
                step_s_per_seq=float(table.step_s_per_seq[row]),
                step_s_per_token=float(table.step_s_per_token[row]),
            )

    # -- placement ---------------------------------------------------------------------------------------------------

    def _submit(self, call: Call, now_s: float) -> list[Event]:
        row = call.row
        self._take_reports(now_s)
        demand = self._demand(call)
        if self._caches:
            blocks = self._prefixes.leading(demand.hashes, len(self._table))
            np.maximum(blocks, self._expected.leading(demand.hashes, len(self._table)), out=blocks)
            np.multiply(blocks, self._table.block_size, out=self._table.cached_tokens)
        outlook = look(self._table, demand)
        choice = choose(outlook, local_prefill_tokens=self._local_prefill_tokens)
        if not isinstance(choice, Choice):  # no pool holds it: nobody is away here
            return self._refuse(call, now_s)
        call.plan = made = plan(choice, outlook)
        self._serial_of_choice += 1
        self._table.last_chosen[[choice.prefill_row, choice.decode_row]] = self._serial_of_choice
        if self._caches:
            self._expected.add(choice.prefill_row, demand.hashes, self._roots[choice.prefill_row])
        if choice.local:
            call.holds = (self._ledgers[choice.decode_row].hold(made.lacking_tokens, row.input_tokens),)
        else:
            call.holds = (
                self._ledgers[choice.prefill_row].hold(made.lacking_tokens, row.input_tokens),
                self._ledgers[choice.decode_row].hold(0, row.input_tokens),
            )
        if call.turn is not None:
            call.turn.worker = choice.prefill
        prefill, decode = self._workers[choice.prefill], self._workers[choice.decode]
        return [Event(now_s + HOP_S, partial(prefill.submit, call, decode))]

    def _refuse(self, call: Call, now_s: float) -> list[Event]:
        if self.admission is not None and call.turn is not None:
            self.admission.leave(call.turn, now_s)
        self._over(call, None)
        return []

    def _demand(self, call: Call) -> Demand:
        row, slo = call.row, call.slo
        hashes = hash_prompt(call.request.token_ids, b"", set(self._roots.values())) if self._caches else {}
        return Demand(
            row.input_tokens,
            row.input_tokens + row.output_tokens,
            hashes,
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.tpot_ms,
        )

    # -- what is known of workers --------------------------------------------------------------------------------------

    def _fill_table(self, workers: Sequence[SimWorker], token_bytes: float) -> None:
        self._table = WorkerTable()
        self._prefixes = PrefixIndex(MAX_INDEX_BLOCKS if self._caches else 1, max(2, len(workers)))
        self._expected = ExpectedPrefixes(max(2, len(workers)))
        self._serial_of_choice = 0
        self._row_of = {worker.worker_id: self._table.add() for worker in workers}
        self._ledgers: dict[int, Ledger] = {}
        self._roots: dict[int, PrefixRoot] = {}
        links = {worker.worker_id: LinkView(1, "ready") for worker in workers if worker.role is not Role.PREFILL}
        for worker in workers:
            row, shape = self._row_of[worker.worker_id], worker.engine.shape
            self._roots[row] = PrefixRoot(shape.fingerprint, "auto", shape.config.block_size)
            self._ledgers[row] = Ledger(partial(self._write, row, worker))
        for worker in workers:
            row = self._row_of[worker.worker_id]
            peers = links if worker.role is Role.PREFILL else {}
            self._table.put(row, _snapshot(worker, self._roots[row], token_bytes, peers))
            self._ledgers[row].report(0, 0, 0)
        self._follows = {row: self._prefixes.follow(row, root, 1 << 30) for row, root in self._roots.items()}
        self._generations = dict.fromkeys(self._follows, 0)

    def _write(self, row: int, worker: SimWorker) -> None:
        ledger, table = self._ledgers[row], self._table
        table.waiting_tokens[row], table.used_tokens[row] = ledger.waiting_tokens, ledger.used_tokens
        table.num_running[row] = ledger.num_running
        step_time = worker.engine.shape.step_time
        table.step_s[row] = step_time.decode_steps_s(max(1, ledger.num_running), ledger.used_tokens, 1)

    def _take_reports(self, now_s: float) -> None:
        if now_s == self._reported_s:
            return
        self._reported_s = now_s
        for worker in self._workers.values():
            row = self._row_of[worker.worker_id]
            self._ledgers[row].report(worker.waiting_tokens(), worker.used_tokens(now_s), worker.num_running)
            if worker.engine.cache.has_delta():
                self._generations[row] += 1
                self._follows[row].apply(self._generations[row], *worker.engine.cache.take_delta(), reset=False)


def _turn(call: Call) -> Turn:
    row, slo = call.row, call.slo
    return Turn(
        tenant=OPEN,
        band=slo.priority,
        tokens=row.input_tokens,
        since_s=row.at_s,
        slo_class=slo.name,
        ttft_s=slo.ttft_ms / 1e3,
        tpot_s=slo.tpot_ms / 1e3,
        class_tpot_s=slo.tpot_ms / 1e3,
        deadline_s=row.at_s + TIMEOUT_S,
        num_seqs=1,
        prompt_tokens=row.input_tokens,
        max_tokens=MAX_TOKENS_SLACK * row.output_tokens,
    )


def _snapshot(worker: SimWorker, root: PrefixRoot, token_bytes: float, links: dict[str, LinkView]) -> WorkerSnapshot:
    shape = worker.engine.shape
    step_time, budget = shape.step_time, shape.config.max_num_batched_tokens
    one_s = step_time.decode_steps_s(1, 0, 1)
    return WorkerSnapshot(
        worker.worker_id,
        1,
        worker.role,
        "ready",
        shape.fingerprint,
        pool_tokens=shape.pool_tokens,
        root=root,
        token_bytes=round(token_bytes),
        step_s_per_seq=step_time.decode_steps_s(2, 0, 1) - one_s,
        step_s_per_token=step_time.decode_steps_s(1, 1, 1) - one_s,
        prefill_tokens_per_s=budget / step_time.step_s(Batch(((budget, 0),))),
        kv_bytes_per_s=_NO_PULLS,
        links=links,
    )
