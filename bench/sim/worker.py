"""One worker: the prefill role's queue, the handoff and the decode role over one engine, as the product's roles run them.

    prompt for another worker            1 QUEUED ─ Reserve ─▶ 2 RESERVING ─ Grant ─▶ 3 PREFILLING ─ first token ─▶ 4 SHIPPING
                                              └─── one token wanted ─────────────────────┘    └── it ends ──┐   all is there │
                                                                                           gone ◀─ Ack ─────┴─────── 5 ◀─────┘
    sequence to decode                   1 QUEUED ─ blocks ─▶ 2 GRANTED ─ all is there: adopt, Ack ─▶ 3 RUNNING ─ end ─▶ gone
    prompt for itself                    the engine's own queue ─▶ RUNNING ─ end ─▶ gone

Which queued prompt may reserve is prefill_worker/prefill_queue.py's to say. A chunk's whole blocks leave when it is done, the
last partial one with the first token. Messages take HOP_S. No KV flows back.

`open` is every attempt that this worker has a part in, from the moment at which the router says so; it is idle without any. A
dead worker hears nothing and says nothing; what it had said before still arrives. One that gives an attempt up forgets it at
once, and its engine between two steps.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol

from baton.request import Role
from bench.sim.call import Attempt
from bench.sim.clock import Event
from bench.sim.engine import EngineShape, SimEngine
from bench.sim.gaps import LongSteps, count_gap
from bench.sim.links import Nic, cut, send
from engine.ports import ChunkDone, PrefillEnded, SequenceEnded, StepResult
from engine.scheduler import Plan
from engine.tuning import Tuning
from prefill_worker.prefill_queue import PATIENCE_S, Queued, Underway, next_to_reserve

HOP_S = 0.0005  # one way: half of gRPC's round trip on one host, with what the loops add; measured: docs/router_cost.md
_NEVER_EARLY = 1.001  # a look after PATIENCE_S must see that it has passed

_order = attrgetter("order")


class Listener(Protocol):
    """To whom a worker tells what its clients should see, and that it has nothing to do."""

    def on_first_token(self, attempt: Attempt, now_s: float) -> Iterable[Event]: ...

    def on_end(self, attempt: Attempt, now_s: float) -> Iterable[Event]: ...

    def on_idle(self, worker: SimWorker, now_s: float) -> Iterable[Event]: ...


@dataclass(frozen=True, slots=True)
class WorkerUse:
    """What one process did."""

    worker_id: str
    role: Role
    busy_share: float  # of its life
    num_served: int
    num_steps: int
    num_preemptions: int
    sent_bytes: float


class SimWorker:
    def __init__(
        self,
        worker_id: str,
        epoch: int,
        role: Role,
        shape: EngineShape,
        listener: Listener,
        started_s: float,
        *,
        block_bytes: float,
        nic_bytes_per_s: float,
        fast: bool,
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.role = role
        self.tuning = shape.tuning
        self.engine = SimEngine(shape, self, fast=fast)
        self.nic = Nic(nic_bytes_per_s)
        self.num_served = 0
        self.sent_bytes = 0.0
        self.peers: frozenset[str] = frozenset()  # worker_ids that it may reserve on
        self.open: dict[int, Attempt] = {}  # by seq
        self._started_s = started_s
        self._listener = listener
        self._block_bytes = block_bytes
        self._long_steps = LongSteps()
        self._watched: dict[int, Attempt] = {}  # of those in the engine: whose next token's instant matters
        self._queue: list[Queued] = []
        self._queued: dict[int, Attempt] = {}
        self._queued_tokens = 0
        self._underway: dict[int, Attempt] = {}  # reserving or prefilling here, for others
        self._begun: list[Attempt] = []  # got their first token from the step that is just over

    # What routers hear of it

    def waiting_tokens(self) -> int:
        return self._queued_tokens + self.engine.waiting_tokens

    def used_tokens(self, now_s: float) -> int:
        return self.engine.held_tokens + self.engine.num_decoded_since(now_s)

    @property
    def num_running(self) -> int:
        return self.engine.scheduler.num_running

    @property
    def is_dead(self) -> bool:
        return self.engine.is_halted

    def use(self, now_s: float) -> WorkerUse:
        work, lived_s = self.engine.work(now_s), now_s - self._started_s
        return WorkerUse(
            self.worker_id,
            self.role,
            work.busy_s / lived_s if lived_s else 0.0,
            self.num_served,
            work.num_steps,
            self.engine.scheduler.totals.num_preemptions,
            self.sent_bytes,
        )

    # What it is told to be

    def tune(self, tuning: Tuning, now_s: float) -> list[Event]:
        """From the next step on."""
        self.tuning = tuning
        return [*self.engine.tune(tuning, now_s), *self._start_queued(now_s)]

    def die(self, now_s: float) -> list[Event]:
        """Whatever it is doing."""
        last_s = self.engine.halt(now_s)
        for seq, attempt in self.open.items():
            if attempt.decode is self and self.engine.scheduler.runs(seq) and seq not in self._watched:
                self._long_steps.end(attempt.call)
                attempt.call.last_s = last_s
        return cut(self.nic, now_s)

    # A call comes

    def submit(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        if self.is_dead or attempt.is_given_up:
            return ()
        self.num_served += 1
        if attempt.decode is self:
            self._watched[attempt.seq] = attempt
            return self.engine.add(attempt.request, now_s, prefill_only=False)
        peer = "" if attempt.ends_on_prefill else attempt.decode.worker_id
        queued = Queued(attempt.seq, peer, attempt.num_tokens, attempt.request.priority, now_s)
        self._queued[attempt.seq] = attempt
        self._queued_tokens += attempt.num_tokens
        insort(self._queue, queued, key=_order)
        return self._start_queued(now_s)

    def _start_queued(self, now_s: float) -> list[Event]:
        """1 -> 2, or 3."""
        if not self._queue:
            return []
        underway = [Underway(a.decode.worker_id, _num_left(a), a.reserve_sent_s) for a in self._underway.values()]
        step_tokens = self.tuning.max_num_batched_tokens
        seqs = next_to_reserve(self._queue, underway, self.peers, step_tokens=step_tokens, now_s=now_s)
        if not seqs:
            return []
        chosen = set(seqs)
        self._queue = [queued for queued in self._queue if queued.seq not in chosen]
        events: list[Event] = []
        for seq in seqs:
            attempt = self._underway[seq] = self._take_queued(seq)
            events += self._prefill(attempt, now_s) if attempt.ends_on_prefill else self._reserve(attempt, now_s)
        return events

    def _take_queued(self, seq: int) -> Attempt:
        attempt = self._queued.pop(seq)
        self._queued_tokens -= attempt.num_tokens
        return attempt

    def _reserve(self, attempt: Attempt, now_s: float) -> list[Event]:
        attempt.reserve_sent_s = now_s
        return [
            Event(now_s + HOP_S, partial(attempt.decode.on_reserve, attempt)),
            Event(now_s + PATIENCE_S * _NEVER_EARLY, partial(self._on_patience, attempt)),
        ]

    def _on_patience(self, attempt: Attempt, now_s: float) -> list[Event]:
        return self._start_queued(now_s) if self._waits_for_grant(attempt) else []

    def on_grant(self, attempt: Attempt, now_s: float) -> list[Event]:
        """2 -> 3."""
        if attempt.reserve_sent_s is None or not self._waits_for_grant(attempt):
            return []
        attempt.reserve_wait_s, attempt.reserve_sent_s = now_s - attempt.reserve_sent_s, None
        return [*self._prefill(attempt, now_s), *self._start_queued(now_s)]

    def _waits_for_grant(self, attempt: Attempt) -> bool:
        return attempt.reserve_sent_s is not None and not (self.is_dead or attempt.is_given_up)

    def _prefill(self, attempt: Attempt, now_s: float) -> list[Event]:
        return self.engine.add(attempt.request, now_s, prefill_only=True)

    # Decode: asked for room, given KV

    def on_reserve(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        if self.is_dead or attempt.is_given_up:
            return ()
        return self.engine.reserve(attempt.request, now_s)

    def on_commit(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        """Every byte is there."""
        if self.is_dead or attempt.is_given_up:
            return ()
        attempt.is_adopted = True
        self._watched[attempt.seq] = attempt
        self.num_served += 1
        ack = Event(now_s + HOP_S, partial(attempt.prefill.on_ack, attempt))
        return [*self.engine.adopt(attempt.seq, now_s), ack]

    def on_ack(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        return () if self.is_dead else self._let_go(attempt, now_s)

    def on_cancel(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        """It goes on elsewhere."""
        if self.is_dead or attempt.seq not in self.open:
            return ()
        if attempt.seq in self._queued:
            self._take_queued(attempt.seq)
            self._queue = [queued for queued in self._queue if queued.seq != attempt.seq]
        self._underway.pop(attempt.seq, None)
        self._watched.pop(attempt.seq, None)
        return [*self._let_go(attempt, now_s), *self._start_queued(now_s)]

    def _let_go(self, attempt: Attempt, now_s: float) -> list[Event]:
        if attempt.seq not in self.open:
            return []
        return [*self.engine.drop(attempt.seq, now_s), *self._close(attempt, now_s)]

    def _close(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        """It has no part in it any more."""
        del self.open[attempt.seq]
        return () if self.open else self._listener.on_idle(self, now_s)

    # What came out of the engine

    def on_run(self, step_s: Callable[[int], float], num_steps: int, begin_s: float) -> None:
        first_s = step_s(0)
        self._long_steps.count(first_s)
        for attempt in [attempt for seq, attempt in self._watched.items() if self.engine.scheduler.runs(seq)]:
            del self._watched[attempt.seq]
            self._note_token(attempt, begin_s + first_s)
            self._long_steps.begin(attempt.call)
        self._long_steps.count_run(num_steps, step_s)

    def on_step(self, plan: Plan, result: StepResult, begin_s: float, end_s: float) -> None:
        decodes = any(chunk.start >= chunk.sequence.request.num_prompt_tokens for chunk in plan.chunks)
        note_step = self._long_steps.count if decodes else self._long_steps.wait
        note_step(end_s - begin_s)
        for seq in plan.preempted:
            if seq in self.open and seq not in self._watched:
                attempt = self._watched[seq] = self.open[seq]
                attempt.call.last_s = begin_s
                self._long_steps.end(attempt.call)
        if not self._watched:
            return
        for token in result.tokens:
            if (watched := self._watched.get(token.seq)) is None:
                continue
            self._note_token(watched, end_s)
            if decodes:  # else its next gap is shorter than that of those who wait
                del self._watched[token.seq]
                self._long_steps.begin(watched.call)

    def _note_token(self, attempt: Attempt, at_s: float) -> None:
        """The first one here, or the first one after a preemption."""
        if not attempt.has_begun:
            self._begin(attempt, at_s)
            self._begun.append(attempt)
            return
        call = attempt.call
        if attempt.is_computed and call.handoff_gap_s is None:
            call.handoff_gap_s = at_s - call.last_s
        count_gap(call, at_s - call.last_s)

    def _begin(self, attempt: Attempt, at_s: float) -> None:
        """Its first token; the client may have some from other workers."""
        attempt.has_begun = True
        call = attempt.call
        if call.first_s is None:
            call.first_s = at_s + HOP_S
        else:
            count_gap(call, at_s - call.last_s)
        call.last_s = at_s

    def after_step(self, result: StepResult, now_s: float) -> Iterable[Event]:
        events = [Event(now_s + HOP_S, partial(self._listener.on_first_token, attempt)) for attempt in self._begun]
        self._begun = []
        known = self.open
        for chunk in result.chunks:
            if chunk.seq in known:
                events += self._ship(known[chunk.seq], chunk, now_s)
        for prefilled in result.prefilled:
            if prefilled.seq in known:
                events += self._on_prefilled(known[prefilled.seq], prefilled, now_s)
        for reservation in result.reserved:
            if reservation.seq in known:
                attempt = known[reservation.seq]
                attempt.num_shipped_blocks = reservation.num_leading_blocks
                events.append(Event(now_s + HOP_S, partial(attempt.prefill.on_grant, attempt)))
        for ended in result.ended:
            if ended.seq in known:
                events += self._on_ended(known[ended.seq], ended, now_s)
        if result.chunks:
            events += self._start_queued(now_s)
        return events

    # 3 -> 4 -> 5

    def _ship(self, attempt: Attempt, chunk: ChunkDone, now_s: float) -> list[Event]:
        attempt.num_computed_tokens = chunk.num_computed_tokens
        if attempt.ends_on_prefill:
            return []
        is_last = chunk.num_computed_tokens == attempt.num_tokens
        num_blocks = (
            len(chunk.block_ids) if is_last else chunk.num_computed_tokens // self.engine.shape.config.block_size
        )
        num_new = num_blocks - attempt.num_shipped_blocks
        if num_new <= 0:
            return []
        attempt.num_shipped_blocks = num_blocks
        attempt.num_flows += 1
        nbytes = num_new * self._block_bytes
        self.sent_bytes += nbytes
        return send(self.nic, attempt.decode.nic, nbytes, now_s, partial(self._on_arrived, attempt))

    def _on_prefilled(self, attempt: Attempt, prefilled: PrefillEnded, now_s: float) -> list[Event]:
        del self._underway[attempt.seq]
        self._begin(attempt, now_s)
        if prefilled.first.finish:
            attempt.call.end_s = now_s + HOP_S
            return [*self._let_go(attempt, now_s), Event(now_s + HOP_S, partial(self._listener.on_end, attempt))]
        attempt.is_computed = True
        told = Event(now_s + HOP_S, partial(self._listener.on_first_token, attempt))
        return [told, *self._commit_if_all_there(attempt, now_s)]

    def _on_arrived(self, attempt: Attempt, now_s: float) -> list[Event]:
        attempt.num_flows -= 1
        return self._commit_if_all_there(attempt, now_s)

    def _commit_if_all_there(self, attempt: Attempt, now_s: float) -> list[Event]:
        if attempt.num_flows or not attempt.is_computed or attempt.is_given_up:
            return []
        return [Event(now_s + HOP_S, partial(attempt.decode.on_commit, attempt))]

    def _on_ended(self, attempt: Attempt, ended: SequenceEnded, now_s: float) -> list[Event]:
        assert ended.error is None, ended.error
        call = attempt.call
        call.end_s = now_s + HOP_S
        if attempt.seq in self._watched:
            del self._watched[attempt.seq]
        else:
            self._long_steps.end(call)
        return [Event(call.end_s, partial(self._listener.on_end, attempt)), *self._close(attempt, now_s)]


def num_sent(attempt: Attempt) -> int:
    """Tokens that its client has."""
    decoded = attempt.decode.engine.scheduler.num_output_tokens(attempt.seq)
    return max(attempt.request.num_output_tokens + attempt.is_computed, decoded)


def _num_left(attempt: Attempt) -> int:
    return attempt.num_tokens - attempt.num_computed_tokens
