"""One worker: the prefill role's queue, the handoff and the decode role over one engine, as the product's roles run them.

    prompt for another worker            1 QUEUED ─ Reserve ─▶ 2 RESERVING ─ Grant ─▶ 3 PREFILLING ─ first token ─▶ 4 SHIPPING
                                              └─── one token wanted ─────────────────────┘    └── it ends ──┐   all is there │
                                                                                           gone ◀─ Ack ─────┴─────── 5 ◀─────┘
    sequence to decode                   1 QUEUED ─ blocks ─▶ 2 GRANTED ─ all is there: adopt, Ack ─▶ 3 RUNNING ─ end ─▶ gone
    prompt for itself                    the engine's own queue ─▶ RUNNING ─ end ─▶ gone

Which queued prompt may reserve is prefill_worker/prefill_queue.py's to say. A chunk's whole blocks leave when it is done, the
last partial one with the first token. Messages take HOP_S. Nothing dies here yet, and no KV flows back.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Protocol

from baton.request import Role
from baton.slo import SLO
from bench.sim.call import Call
from bench.sim.clock import Event
from bench.sim.engine import EngineShape, SimEngine
from bench.sim.gaps import LongSteps, count_gap
from bench.sim.links import Nic, send
from engine.ports import ChunkDone, PrefillEnded, SequenceEnded, StepResult
from engine.scheduler import Plan
from prefill_worker.prefill_queue import PATIENCE_S, Queued, Underway, next_to_reserve

HOP_S = 0.0005  # one way: half of gRPC's round trip on one host, with what the loops add; measured: docs/router_cost.md
_NEVER_EARLY = 1.001  # a look after PATIENCE_S must see that it has passed

_order = attrgetter("order")


class Router(Protocol):
    """To whom a worker tells what its clients should see."""

    def on_first_token(self, call: Call, now_s: float) -> Iterable[Event]: ...

    def on_end(self, call: Call, now_s: float) -> Iterable[Event]: ...


class SimWorker:
    def __init__(
        self,
        worker_id: str,
        role: Role,
        shape: EngineShape,
        router: Router,
        *,
        block_bytes: float,
        nic_bytes_per_s: float,
        classes: Iterable[SLO],
        fast: bool,
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.engine = SimEngine(shape, self, fast=fast)
        self.nic = Nic(nic_bytes_per_s)
        self.num_served = 0
        self.sent_bytes = 0.0
        self.peers: dict[str, SimWorker] = {}  # by worker_id: who decodes
        self._router = router
        self._block_bytes = block_bytes
        self._long_steps = LongSteps(classes)
        self._calls: dict[int, Call] = {}  # by seq: in the engine
        self._watched: dict[int, Call] = {}  # of those: whose next token's instant matters
        self._queue: list[Queued] = []
        self._queued: dict[int, Call] = {}
        self._queued_tokens = 0
        self._underway: dict[int, Call] = {}  # reserving or prefilling here, for others
        self._begun: list[Call] = []  # got their first token from the step that is just over

    # What routers hear of it

    def waiting_tokens(self) -> int:
        return self._queued_tokens + self.engine.waiting_tokens

    def used_tokens(self, now_s: float) -> int:
        return self.engine.scheduler.num_held_tokens + self.engine.num_decoded_since(now_s)

    @property
    def num_running(self) -> int:
        return self.engine.scheduler.num_running

    # A call comes

    def submit(self, call: Call, decode: SimWorker, now_s: float) -> Iterable[Event]:
        self.num_served += 1
        if decode is self:
            self._watched[call.seq] = self._calls[call.seq] = call
            return self.engine.add(call.request, now_s, prefill_only=False)
        peer = decode.worker_id if call.row.output_tokens > 1 else ""
        queued = Queued(call.seq, peer, call.row.input_tokens, call.request.priority, now_s)
        self._queued[call.seq] = call
        self._queued_tokens += call.row.input_tokens
        insort(self._queue, queued, key=_order)
        return self._start_queued(now_s)

    def _start_queued(self, now_s: float) -> list[Event]:
        """1 -> 2, or 3."""
        if not self._queue:
            return []
        underway = [Underway(_decode_id(c), _num_left(c), c.reserve_sent_s) for c in self._underway.values()]
        step_tokens = self.engine.shape.config.max_num_batched_tokens
        seqs = next_to_reserve(self._queue, underway, self.peers, step_tokens=step_tokens, now_s=now_s)
        if not seqs:
            return []
        chosen = set(seqs)
        self._queue = [queued for queued in self._queue if queued.seq not in chosen]
        events: list[Event] = []
        for seq in seqs:
            call = self._underway[seq] = self._queued.pop(seq)
            self._queued_tokens -= call.row.input_tokens
            events += self._reserve(call, now_s) if call.row.output_tokens > 1 else self._prefill(call, now_s)
        return events

    def _reserve(self, call: Call, now_s: float) -> list[Event]:
        call.reserve_sent_s = now_s
        ask = partial(self.peers[_decode_id(call)].on_reserve, call, self)
        return [
            Event(now_s + HOP_S, ask),
            Event(now_s + PATIENCE_S * _NEVER_EARLY, partial(self._on_patience, call)),
        ]

    def _on_patience(self, call: Call, now_s: float) -> list[Event]:
        return self._start_queued(now_s) if call.reserve_sent_s is not None else []

    def on_grant(self, call: Call, now_s: float) -> list[Event]:
        """2 -> 3."""
        call.reserve_sent_s = None
        return [*self._prefill(call, now_s), *self._start_queued(now_s)]

    def _prefill(self, call: Call, now_s: float) -> list[Event]:
        self._calls[call.seq] = call
        return self.engine.add(call.request, now_s, prefill_only=True)

    # Decode: asked for room, given KV

    def on_reserve(self, call: Call, prefill: SimWorker, now_s: float) -> Iterable[Event]:
        self._calls[call.seq] = call
        call.prefill_worker = prefill
        return self.engine.reserve(call.request, now_s)

    def on_commit(self, call: Call, prefill: SimWorker, now_s: float) -> Iterable[Event]:
        """Every byte is there."""
        self._watched[call.seq] = call
        self.num_served += 1
        ack = Event(now_s + HOP_S, partial(prefill.on_ack, call))
        return [*self.engine.adopt(call.seq, now_s), ack]

    def on_ack(self, call: Call, now_s: float) -> Iterable[Event]:
        return self._let_go(call, now_s)

    def _let_go(self, call: Call, now_s: float) -> list[Event]:
        del self._calls[call.seq]
        return self.engine.drop(call.seq, now_s)

    # What came out of the engine

    def on_run(self, step_s: Callable[[int], float], num_steps: int, begin_s: float) -> None:
        first_s = step_s(0)
        for call in [call for seq, call in self._watched.items() if self.engine.scheduler.runs(seq)]:
            del self._watched[call.seq]
            self._note_token(call, begin_s + first_s)
            self._long_steps.begin(call)
            call.long_steps_before += call.slo.itl_p99_ms is not None and 1e3 * first_s > call.slo.itl_p99_ms
        self._long_steps.count_run(num_steps, step_s)

    def on_step(self, plan: Plan, result: StepResult, begin_s: float, end_s: float) -> None:
        self._long_steps.count(end_s - begin_s)
        for seq in plan.preempted:
            if seq not in self._watched:
                call = self._watched[seq] = self._calls[seq]
                call.last_s = begin_s
                self._long_steps.end(call)
        if not self._watched:
            return
        for token in result.tokens:
            if token.seq in self._watched:
                call = self._watched.pop(token.seq)
                self._note_token(call, end_s)
                self._long_steps.begin(call)

    def _note_token(self, call: Call, at_s: float) -> None:
        """The first one here, or the first one after a preemption."""
        if call.first_s is None:
            call.first_s = at_s + HOP_S
            self._begun.append(call)
            return
        if call.is_shipped and call.handoff_gap_s is None:
            call.last_s, call.handoff_gap_s = call.first_s - HOP_S, at_s + HOP_S - call.first_s
        count_gap(call, at_s - call.last_s)

    def after_step(self, result: StepResult, now_s: float) -> Iterable[Event]:
        events = [Event(_first_s(call), partial(self._router.on_first_token, call)) for call in self._begun]
        self._begun = []
        for chunk in result.chunks:
            events += self._ship(self._calls[chunk.seq], chunk, now_s)
        for prefilled in result.prefilled:
            events += self._on_prefilled(self._calls[prefilled.seq], prefilled, now_s)
        for reservation in result.reserved:
            call = self._calls[reservation.seq]
            assert call.prefill_worker is not None, "nobody asked for it"
            call.num_shipped_blocks = reservation.num_leading_blocks
            events.append(Event(now_s + HOP_S, partial(call.prefill_worker.on_grant, call)))
        for ended in result.ended:
            events += self._on_ended(self._calls.pop(ended.seq), ended, now_s)
        if result.chunks:
            events += self._start_queued(now_s)
        return events

    # 3 -> 4 -> 5

    def _ship(self, call: Call, chunk: ChunkDone, now_s: float) -> list[Event]:
        call.num_computed_tokens = chunk.num_computed_tokens
        if call.row.output_tokens == 1:
            return []
        is_last = chunk.num_computed_tokens == call.row.input_tokens
        num_blocks = (
            len(chunk.block_ids) if is_last else chunk.num_computed_tokens // self.engine.shape.config.block_size
        )
        num_new = num_blocks - call.num_shipped_blocks
        if num_new <= 0:
            return []
        call.num_shipped_blocks = num_blocks
        call.num_flows += 1
        nbytes = num_new * self._block_bytes
        self.sent_bytes += nbytes
        target = self.peers[_decode_id(call)].nic
        return send(self.nic, target, nbytes, now_s, partial(self._on_arrived, call))

    def _on_prefilled(self, call: Call, prefilled: PrefillEnded, now_s: float) -> list[Event]:
        del self._underway[call.seq]
        call.first_s = now_s + HOP_S
        if prefilled.first.finish:
            call.end_s = call.first_s
            return [*self._let_go(call, now_s), Event(call.first_s, partial(self._router.on_end, call))]
        call.is_computed = True
        told = Event(call.first_s, partial(self._router.on_first_token, call))
        return [told, *self._commit_if_all_there(call, now_s)]

    def _on_arrived(self, call: Call, now_s: float) -> list[Event]:
        call.num_flows -= 1
        return self._commit_if_all_there(call, now_s)

    def _commit_if_all_there(self, call: Call, now_s: float) -> list[Event]:
        if call.num_flows or not call.is_computed:
            return []
        call.is_shipped = True
        return [Event(now_s + HOP_S, partial(self.peers[_decode_id(call)].on_commit, call, self))]

    def _on_ended(self, call: Call, ended: SequenceEnded, now_s: float) -> list[Event]:
        assert ended.error is None, ended.error
        call.end_s = now_s + HOP_S
        if call.seq in self._watched:
            del self._watched[call.seq]
        else:
            self._long_steps.end(call)
        return [Event(call.end_s, partial(self._router.on_end, call))]


def _decode_id(call: Call) -> str:
    assert call.plan is not None, "it was not placed"
    return call.plan.choice.decode


def _first_s(call: Call) -> float:
    assert call.first_s is not None, "no token yet"
    return call.first_s


def _num_left(call: Call) -> int:
    return call.row.input_tokens - call.num_computed_tokens
