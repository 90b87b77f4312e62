"""The router under virtual time: admission, placement and the loads they see are the product's own objects.

Does what router/turns.py, router/fleet.py, router/handoff.py and router/moves.py do around them, one router for the whole
deployment: the policy looks at the fleet when a call comes, begins or ends, and each PUMP_S while someone waits. What differs:
docs/simulator.md.

    1 waits for its turn ─▶ 2 placed: an Attempt ─▶ its first token, its end
                            ▲   │ a worker of it is lost, which is noticed after a while
                            │   ▼
                            3 waits for a place: until the fleet changes, or its time is up
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from baton.request import Request
from baton.slo import SLO
from bench.sim.call import Attempt, Call, continued, request_of
from bench.sim.clock import Event
from bench.sim.hashing import hash_prompt
from bench.sim.roster import Roster
from bench.sim.worker import HOP_S, SimWorker, num_sent
from bench.traces import TraceRow
from router.admission import Admission, Bounds, Shed, Turn
from router.flow_back import plan
from router.holds import Hold
from router.placement import Choice, Demand, choose, helps, look
from router.tenants import OPEN
from router.turns import PUMP_S

TIMEOUT_S = 600.0  # of a call: the front end's default deadline
# Clients name a max_tokens well above what they get; bench/overload_fleet.py assumes as much.
MAX_TOKENS_SLACK = 4


class Watcher(Protocol):
    """Is told of every call, as live a router's measures are."""

    def on_arrival(self, call: Call, now_s: float) -> None: ...

    def on_placed(self, attempt: Attempt, now_s: float) -> None:
        """For the first time."""
        ...

    def on_over(self, call: Call, shed: Shed | None, now_s: float) -> None: ...


class MostTokens(NamedTuple):
    """That a worker can hold which prefills, and one which decodes."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True, eq=False)
class _Homeless:
    """A call without a place."""

    call: Call
    request: Request


class SimRouter:
    def __init__(
        self,
        *,
        bounds: Bounds | None,
        token_bytes: float,
        caches: bool,
        local_prefill_tokens: int,
        most_tokens: MostTokens,
        watcher: Watcher,
    ) -> None:
        """`bounds`: None = every call is let in at once. A call beyond `most_tokens` is refused, whoever is away."""
        self.admission = Admission(bounds, self._helps) if bounds is not None else None
        # Half of a fixed window and of that, as PUMP_S and OBSERVE_S are of the least one that is learned
        self._pump_s = PUMP_S if bounds is None or bounds.window_s is None else bounds.window_s / 2
        self.roster = Roster(token_bytes=token_bytes, caches=caches)
        self.local_prefill_tokens = local_prefill_tokens
        self.itl_p99_ms = 0.0  # the tightest of all classes in force; 0: none limits it
        self._caches = caches
        self._most_tokens = most_tokens
        self._watcher = watcher
        self._calls: dict[int, Call] = {}  # by id() of the turn: let in or waiting
        self._homeless: list[_Homeless] = []
        self._serial = 0
        self._next_look_s = 0.0
        self._is_pumping = False

    @property
    def num_open(self) -> int:
        return len(self._calls)

    @property
    def queued_tokens(self) -> int:
        """Of prompts that no worker has yet."""
        queue = self.admission.queue if self.admission is not None else None
        return sum(len(one.request.token_ids) for one in self._homeless) + (round(queue.tokens) if queue else 0)

    def oldest_queued_s(self, now_s: float) -> float:
        """For how long the call waits that waits longest for its turn; 0: none does."""
        queue = self.admission.queue if self.admission is not None else None
        return now_s - min((turn.since_s for turn in queue.calls), default=now_s) if queue else 0.0

    # -- a call's life -----------------------------------------------------------------------------------------------

    def on_arrival(self, row: TraceRow, slo: SLO, now_s: float) -> Iterable[Event]:
        call = Call(row, self._next_serial(), slo)
        call.turn = turn = _turn(call)
        self._calls[id(turn)] = call
        self._watcher.on_arrival(call, now_s)
        if self.admission is None:
            return self._begin(call, now_s)
        self._look(now_s)
        if shed := self.admission.arrive(turn, now_s):
            self._over(call, shed, now_s)
            return self._pump(now_s)
        events = self._begin(call, now_s) if turn.released_s is not None else []
        return [*events, *self._pump(now_s)]

    def on_first_token(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        prefill_hold, *_ = attempt.holds
        prefill_hold.waiting_tokens = 0
        if not attempt.plan.choice.local:
            prefill_hold.release()
            self.roster.granted(attempt)
        if self.admission is None or attempt.call.turn is None:
            return []
        self.admission.began(attempt.call.turn, now_s)
        return self._pump(now_s)

    def on_end(self, attempt: Attempt, now_s: float) -> Iterable[Event]:
        call = attempt.call
        for hold in attempt.holds:
            hold.release()
        if self.admission is not None and call.turn is not None:
            self.admission.charge(call.turn, call.row.output_tokens)
            if call.row.output_tokens == 1:
                self.admission.began(call.turn, now_s)
            self.admission.leave(call.turn, now_s)
        self._over(call, None, now_s)
        return self._pump(now_s)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _refuse(self, call: Call, now_s: float) -> list[Event]:
        if self.admission is not None and call.turn is not None:
            self.admission.leave(call.turn, now_s)
        self._over(call, None, now_s)
        return []

    def _over(self, call: Call, shed: Shed | None, now_s: float) -> None:
        del self._calls[id(call.turn)]
        self._watcher.on_over(call, shed, now_s)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _pump(self, now_s: float) -> list[Event]:
        if self.admission is None or not self.admission.has_news:
            return []
        self._look(now_s)
        released, shed = self.admission.due(now_s)
        for turn, why in shed:
            self._over(self._calls[id(turn)], why, now_s)
        events = [event for turn in released for event in self._begin(self._calls[id(turn)], now_s)]
        if self.admission.has_news and not self._is_pumping:
            self._is_pumping = True
            events.append(Event(now_s + self._pump_s, self._on_timer))
        return events

    def _on_timer(self, now_s: float) -> list[Event]:
        self._is_pumping = False
        return self._pump(now_s)

    def _look(self, now_s: float) -> None:
        if now_s < self._next_look_s or self.admission is None:
            return
        self._next_look_s = now_s + self._pump_s / 2
        self.roster.take_reports(now_s)
        self.admission.observe(self.roster.loads(), now_s)

    def _helps(self, turn: Turn) -> bool:
        if not self.local_prefill_tokens:
            return False
        call = self._calls[id(turn)]
        demand = self._demand(call, request_of(call.row, call.seq, call.slo))
        outlook = look(self.roster.table_for(demand.hashes), demand)
        return helps(outlook, local_prefill_tokens=self.local_prefill_tokens)

    # -- placement ---------------------------------------------------------------------------------------------------

    def _begin(self, call: Call, now_s: float) -> list[Event]:
        row = call.row
        most = self._most_tokens
        if row.input_tokens > most.prefill or row.input_tokens + row.output_tokens - 1 > most.decode:
            return self._refuse(call, now_s)
        return self._submit(call, request_of(row, call.seq, call.slo), now_s)

    def _submit(self, call: Call, request: Request, now_s: float) -> list[Event]:
        self.roster.take_reports(now_s)
        demand = self._demand(call, request)
        outlook = look(self.roster.table_for(demand.hashes), demand)
        choice = choose(outlook, local_prefill_tokens=self.local_prefill_tokens)
        if not isinstance(choice, Choice):
            return self._wait_for_place(_Homeless(call, request), now_s)
        made = plan(choice, outlook)
        self.roster.note(choice, demand.hashes)
        prefill, decode = self.roster[choice.prefill], self.roster[choice.decode]
        holds = self._holds(choice, made.lacking_tokens, len(request.token_ids))
        call.attempt, before = Attempt(call, request, made, prefill, decode, holds), call.attempt
        prefill.open[request.seq] = call.attempt
        if not call.attempt.ends_on_prefill:
            decode.open[request.seq] = call.attempt
        if call.turn is not None:
            call.turn.worker = choice.prefill
        if before is None:
            self._watcher.on_placed(call.attempt, now_s)
        return [Event(now_s + HOP_S, partial(prefill.submit, call.attempt))]

    def _holds(self, choice: Choice, lacking_tokens: int, num_tokens: int) -> tuple[Hold, ...]:
        if choice.local:
            return (self.roster.hold(choice.decode, lacking_tokens, num_tokens),)
        return (
            self.roster.hold(choice.prefill, lacking_tokens, num_tokens),
            self.roster.hold(choice.decode, 0, num_tokens),
        )

    def _demand(self, call: Call, request: Request) -> Demand:
        num_tokens, slo = len(request.token_ids), call.slo
        hashes = hash_prompt(request.token_ids, self.roster.roots) if self._caches else {}
        num_left = request.num_tokens_left
        return Demand(num_tokens, num_tokens + num_left, hashes, ttft_ms=slo.ttft_ms, tpot_ms=slo.pace_ms)

    # -- workers that come and go ------------------------------------------------------------------------------------

    def _wait_for_place(self, homeless: _Homeless, now_s: float) -> list[Event]:
        self._homeless.append(homeless)
        until_s = max(now_s, homeless.call.row.at_s + TIMEOUT_S)
        return [Event(until_s, partial(self._on_deadline, homeless))]

    def _on_deadline(self, homeless: _Homeless, now_s: float) -> list[Event]:
        if homeless not in self._homeless:
            return []
        self._homeless.remove(homeless)
        return self._refuse(homeless.call, now_s)

    def on_join(self, worker: SimWorker, now_s: float) -> list[Event]:
        """It takes calls from now on."""
        self.roster.join(worker)
        return self._on_more(now_s)

    def on_change(self, worker: SimWorker, now_s: float, *, takes_calls: bool) -> list[Event]:
        """Its role, its limits, or whether it takes calls."""
        self.roster.change(worker, takes_calls=takes_calls)
        return self._on_more(now_s)

    def _on_more(self, now_s: float) -> list[Event]:
        self._next_look_s = now_s
        homeless, self._homeless = self._homeless, []
        moved = [event for one in homeless for event in self._submit(one.call, one.request, now_s)]
        return [*moved, *self._pump(now_s)]

    def on_leave(self, worker: SimWorker, now_s: float) -> list[Event]:
        """It is gone, whether in peace or not: what it had a part in that it still owes is done elsewhere."""
        self.roster.leave(worker)
        self._next_look_s = now_s
        events: list[Event] = []
        for attempt in list(worker.open.values()):
            if not attempt.is_given_up and (attempt.decode is worker or not attempt.is_adopted):
                events += self._move(attempt, worker, now_s)
        return [*events, *self._pump(now_s)]

    def _move(self, attempt: Attempt, lost: SimWorker, now_s: float) -> list[Event]:
        """Prefill it again, with the tokens that its client has."""
        attempt.is_given_up = True
        for hold in attempt.holds:
            hold.release()
        call = attempt.call
        call.num_moves += 1
        other = attempt.decode if attempt.prefill is lost else attempt.prefill
        rest = continued(attempt.request, call, self._next_serial(), num_sent(attempt))
        cancel = [Event(now_s + HOP_S, partial(other.on_cancel, attempt))] if other is not lost else []
        return [*cancel, *self._submit(call, rest, now_s)]


def _turn(call: Call) -> Turn:
    row, slo = call.row, call.slo
    return Turn(
        tenant=OPEN,
        band=slo.priority,
        tokens=row.input_tokens,
        since_s=row.at_s,
        slo_class=slo.name,
        ttft_s=slo.ttft_ms / 1e3,
        tpot_s=slo.pace_ms / 1e3,
        class_tpot_s=slo.pace_ms / 1e3,
        e2e_s=slo.e2e_ms / 1e3 if slo.e2e_ms is not None else math.inf,
        deadline_s=row.at_s + TIMEOUT_S,
        num_seqs=1,
        prompt_tokens=row.input_tokens,
        max_tokens=MAX_TOKENS_SLACK * row.output_tokens,
        value=slo.weight,
    )
