"""A fleet under more load than it can take, as a discrete-event simulation: the router's own admission policy under a virtual
clock, over prefill and decode workers whose service times are given. No engine, no socket, no wall time.

    arrival ── admission ── queue ── released ── prefill worker (one prompt after the other) ── first token
                  └ shed                                              decode worker (steps of a + b x batch) ── end

The simulated router does what router/turns.py does: it lets the policy look at the fleet when a call comes, begins or ends and
each PUMP_S while someone waits. Messages between router and workers take HOP_S. Placement is the least work waiting, then the
fewest sequences: what router/placement.py comes to for prompts that nobody caches.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from baton.slo import SLO
from router.admission import Admission, Bounds, Reason, Turn
from router.capacity import WorkerLoad
from router.tenants import Tenant
from router.turns import OBSERVE_S, PUMP_S

HOP_S = 0.001  # router to worker and back, gRPC on one host; measured: docs/router_cost.md


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the fleet. Defaults: 8B on H200, rounded (docs/architecture.md: same model and GPU as the flow-back table)."""

    num_prefill: int = 4
    num_decode: int = 2
    tokens_per_s: float = 20_000.0  # of one prefill worker
    prompt_s: float = 0.003  # per prompt besides: reserve, grant, launch
    step_s: float = 0.010
    step_s_per_seq: float = 0.0002
    max_seqs: int = 256
    kv_tokens: int = 600_000


@dataclass(frozen=True, slots=True)
class Job:
    """One call that a client will make."""

    at_s: float
    tenant: Tenant
    slo: SLO
    prompt_tokens: int
    output_tokens: int
    timeout_s: float = 600.0
    leaves_s: float = float("inf")  # the client's own patience


@dataclass(slots=True, eq=False)
class Outcome:
    """What became of it. None = it did not come that far."""

    job: Job
    shed: Reason | None = None
    shed_s: float | None = None
    retry_after_s: float = 0.0
    released_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    num_tokens: int = 0
    abandoned: bool = False

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.job.at_s

    @property
    def met(self) -> bool:
        """Whether it ended within its targets."""
        if self.first_s is None or self.end_s is None:
            return False
        tpot_s = (self.end_s - self.first_s) / max(1, self.job.output_tokens - 1)
        return self.ttft_s <= self.job.slo.ttft_ms / 1e3 and tpot_s <= self.job.slo.tpot_ms / 1e3


@dataclass(slots=True, eq=False)
class _Live:
    turn: Turn
    outcome: Outcome
    prefill: _Prefill | None = None
    decode: _Decode | None = None


@dataclass(slots=True, eq=False)
class _Prefill:
    name: str
    queue: deque[_Live] = field(default_factory=deque)  # the first one is being computed

    @property
    def waiting_tokens(self) -> int:
        return sum(live.outcome.job.prompt_tokens for live in self.queue)


@dataclass(slots=True, eq=False)
class _Decode:
    name: str
    placed: set[_Live] = field(default_factory=set)  # on their way or here
    running: dict[_Live, None] = field(default_factory=dict)  # as they came: a set's order is that of addresses
    is_stepping: bool = False


class Fleet:
    """Runs jobs through an Admission."""

    def __init__(self, shape: Shape, bounds: Bounds) -> None:
        self.now_s = 0.0
        self.shape = shape
        self.admission = Admission(bounds)
        self.outcomes: list[Outcome] = []
        self._prefills = [_Prefill(f"p{i}") for i in range(shape.num_prefill)]
        self._decodes = [_Decode(f"d{i}") for i in range(shape.num_decode)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._lives: dict[int, _Live] = {}  # by id() of the turn
        self._next_look_s = 0.0
        self._is_pumping = False  # a timer is set

    @property
    def num_busy(self) -> int:
        """Sequences that any worker holds."""
        return sum(len(p.queue) for p in self._prefills) + sum(len(d.running) for d in self._decodes)

    def run(self, jobs: Iterator[Job], until_s: float = float("inf")) -> list[Outcome]:
        """Until the last job has come and everything has ended, or `until_s`."""
        self._next_job(jobs)
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return self.outcomes

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._serial), event))

    def _next_job(self, jobs: Iterator[Job]) -> None:
        job = next(jobs, None)
        if job is not None:
            self._at(job.at_s, partial(self._come, job, jobs))

    def _come(self, job: Job, later: Iterator[Job]) -> None:
        self._next_job(later)
        self._arrive(job)

    # -- the router --------------------------------------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        turn = Turn(
            tenant=job.tenant,
            band=job.slo.priority,
            tokens=job.prompt_tokens,
            since_s=job.at_s,
            slo_class=job.slo.name,
            ttft_s=job.slo.ttft_ms / 1e3,
            tpot_s=job.slo.tpot_ms / 1e3,
            class_tpot_s=job.slo.tpot_ms / 1e3,
            deadline_s=job.at_s + job.timeout_s,
            num_seqs=1,
            prompt_tokens=job.prompt_tokens,
            max_tokens=4 * job.output_tokens,
            value=job.slo.weight,
        )
        live = _Live(turn, Outcome(job))
        self.outcomes.append(live.outcome)
        self._look()
        if shed := self.admission.arrive(turn, self.now_s):
            self._shed(live, shed.reason, shed.retry_after_s)
            return
        self._lives[id(turn)] = live
        if job.leaves_s < float("inf"):
            self._at(job.at_s + job.leaves_s, lambda: self._abandon(live))
        if turn.released_s is not None:
            self._submit(live)
        self._pump()

    def _pump(self) -> None:
        if not self.admission.has_news:
            return
        self._look()
        released, shed = self.admission.due(self.now_s)
        for turn, why in shed:
            self._shed(self._lives.pop(id(turn)), why.reason, why.retry_after_s)
        for turn in released:
            self._submit(self._lives[id(turn)])
        if len(self.admission.queue) and not self._is_pumping:
            self._is_pumping = True
            self._at(self.now_s + PUMP_S, self._on_timer)

    def _on_timer(self) -> None:
        self._is_pumping = False
        self._pump()

    def _look(self) -> None:
        if self.now_s < self._next_look_s:
            return
        self._next_look_s = self.now_s + OBSERVE_S
        for live in self._lives.values():
            self.admission.charge(live.turn, live.outcome.num_tokens)
        self.admission.observe(self._loads(), self.now_s)

    def _loads(self) -> Iterator[WorkerLoad]:
        shape = self.shape
        for prefill in self._prefills:
            yield WorkerLoad(
                prefill.name, True, False, shape.tokens_per_s, prefill.waiting_tokens, 0, 0.0, 0, shape.kv_tokens, 0
            )
        for decode in self._decodes:
            used = sum(live.outcome.job.prompt_tokens + live.outcome.num_tokens for live in decode.placed)
            step_s = shape.step_s + shape.step_s_per_seq * len(decode.placed)
            yield WorkerLoad(
                decode.name, False, True, float("inf"), 0, len(decode.placed), step_s, shape.max_seqs, shape.kv_tokens,
                used, shape.step_s_per_seq,
            )  # fmt: skip

    def _shed(self, live: _Live, reason: Reason, retry_after_s: float) -> None:
        live.outcome.shed, live.outcome.shed_s, live.outcome.retry_after_s = reason, self.now_s, retry_after_s

    def _submit(self, live: _Live) -> None:
        live.outcome.released_s = self.now_s
        live.prefill = min(self._prefills, key=lambda prefill: prefill.waiting_tokens)
        live.decode = min(self._decodes, key=lambda decode: len(decode.placed))
        live.turn.worker = live.prefill.name
        live.decode.placed.add(live)
        live.prefill.queue.append(live)
        if len(live.prefill.queue) == 1:
            self._compute(live.prefill, HOP_S)

    def _abandon(self, live: _Live) -> None:
        """The client hangs up: the workers are told, and the chunk under way is not cut."""
        if live.outcome.end_s is not None or live.outcome.shed is not None:
            return
        live.outcome.abandoned = True
        self._leave(live)
        if live.decode is not None:
            live.decode.placed.discard(live)
            live.decode.running.pop(live, None)
        if live.prefill is not None and live in live.prefill.queue and live.prefill.queue[0] is not live:
            live.prefill.queue.remove(live)

    def _leave(self, live: _Live) -> None:
        self._lives.pop(id(live.turn), None)
        self.admission.charge(live.turn, live.outcome.num_tokens)
        self.admission.leave(live.turn, self.now_s)
        self._pump()

    # -- the workers -------------------------------------------------------------------------------------------------

    def _compute(self, prefill: _Prefill, after_s: float = 0.0) -> None:
        tokens = prefill.queue[0].outcome.job.prompt_tokens
        took_s = after_s + self.shape.prompt_s + tokens / self.shape.tokens_per_s
        self._at(self.now_s + took_s, lambda: self._computed(prefill))

    def _computed(self, prefill: _Prefill) -> None:
        live = prefill.queue.popleft()
        if prefill.queue:
            self._compute(prefill)
        if live.outcome.abandoned:
            return
        self._at(self.now_s + HOP_S, lambda: self._first_token(live))

    def _first_token(self, live: _Live) -> None:
        if live.outcome.abandoned:
            return
        live.outcome.first_s = self.now_s
        live.outcome.num_tokens = 1
        self.admission.began(live.turn, self.now_s)
        self._pump()
        if live.outcome.job.output_tokens == 1:
            self._end(live)
            return
        assert live.decode is not None
        live.decode.running[live] = None
        if not live.decode.is_stepping:
            self._step(live.decode)

    def _step(self, decode: _Decode) -> None:
        decode.is_stepping = True
        batch = list(decode.running)
        took_s = self.shape.step_s + self.shape.step_s_per_seq * len(batch)
        self._at(self.now_s + took_s, lambda: self._stepped(decode, batch))

    def _stepped(self, decode: _Decode, batch: list[_Live]) -> None:
        for live in batch:
            if live not in decode.running:
                continue
            live.outcome.num_tokens += 1
            if live.outcome.num_tokens >= live.outcome.job.output_tokens:
                decode.running.pop(live)
                decode.placed.discard(live)
                self._end(live)
        decode.is_stepping = False
        if decode.running:
            self._step(decode)

    def _end(self, live: _Live) -> None:
        live.outcome.end_s = self.now_s
        if live.decode is not None:
            live.decode.placed.discard(live)
        self._leave(live)
