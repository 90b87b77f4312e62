"""Whose turn it is, live: quotas and the admission policy with a clock, a fleet and calls that wait.

    place = turns.knock(tenant, ...)  counted against the tenant's limits
    place.arrive(turn, reports)       judged by forecast, perhaps released at once
    await place.wait()                returns when the call may go to the workers
    place.close()                     in the `finally` of whoever knocked: everything is given back, now

The first three raise Overloaded, or DeadlineExceeded where no retry would help.

A waiting call holds nothing but its place. The policy hears of the fleet when a call comes, begins or ends, and each PUMP_S
while someone waits; never more often than OBSERVE_SHARE of the loop's time allows, so a fleet of a thousand workers costs no
more than one of ten. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from baton import clock
from baton.config import RouterConfig
from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.request import Role
from router.admission import MIN_RETRY_AFTER_S, Admission, Bounds, Reason, Shed, Slack, Turn
from router.admission_metrics import AdmissionMetrics
from router.capacity import WorkerLoad
from router.fleet import Fleet
from router.quota import Quotas
from router.sequence import SequenceReport
from router.tenants import Tenant

PUMP_S = 0.005  # half of the least window: a lane that nobody told us is free gets work before it runs dry
OBSERVE_S = 0.0025  # between looks at the fleet, at least: half of a pump
OBSERVE_SHARE = 0.02  # of the loop's time for looking


class Place:
    """One call's, from the door to its end."""

    def __init__(self, turns: Turns, tenant: Tenant, num_seqs: int) -> None:
        self.turn: Turn | None = None  # None: it has not arrived
        self.reports: Sequence[SequenceReport] = ()
        self.waits: asyncio.Future[None] | None = None
        self.error: BatonError | None = None  # why it was let go
        self.is_at_door = True  # its prompt is not tokenised yet
        self._turns = turns
        self._tenant = tenant
        self._num_seqs = num_seqs
        self._is_closed = False

    @property
    def num_output(self) -> int:
        return sum(report.num_tokens for report in self.reports)

    def arrive(self, turn: Turn, reports: Sequence[SequenceReport]) -> None:
        """Raises: Overloaded, DeadlineExceeded."""
        self.turn, self.reports = turn, reports
        reports[0].on_first_token = self._began
        self._turns.arrive(self, turn)

    async def wait(self) -> None:
        """Raises: Overloaded, DeadlineExceeded."""
        if self.waits is not None:
            await self.waits
        if self.error is not None:
            raise self.error

    def let_go(self, error: BatonError | None = None) -> None:
        """End `wait`."""
        self.error = error
        if self.waits is not None and not self.waits.done():
            self.waits.set_result(None)

    def _began(self) -> None:
        assert self.turn is not None
        self._turns.began(self, self.turn)

    def tell_worker(self) -> None:
        """Let the turn know where it went."""
        assert self.turn is not None
        self.turn.worker = self.reports[0].prefill_worker

    def charge(self, admission: Admission) -> None:
        """Let the policy know what it has come to."""
        assert self.turn is not None
        admission.charge(self.turn, self.num_output)

    def close(self) -> None:
        """It is over, however; may be said again."""
        if not self._is_closed:
            self._is_closed = True
            self._turns.close(self, self._tenant, self._num_seqs)


class Turns:
    """One router's."""

    def __init__(self, config: RouterConfig, fleet: Fleet, metrics: AdmissionMetrics) -> None:
        self.quotas = Quotas()
        self.admission = Admission(
            Bounds(
                max_inflight=config.max_inflight,
                max_queued=config.max_queued,
                max_queued_tokens=config.max_queued_tokens,
                window_s=config.queue_window_s if config.queue_window_s >= 0 else None,
                by_forecast=config.shed_by_forecast,
            ),
            lambda turn: turn.demand is not None and fleet.helps(turn.demand),
        )
        self._fleet = fleet
        self._metrics = metrics
        self._places: dict[int, Place] = {}  # that arrived, by id() of the turn
        self._fresh: dict[int, Place] = {}  # of these, without a first token
        self._num_at_door = 0
        self._num_shed: Counter[str] = Counter()  # for want of room, by class
        self._next_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        metrics.follow(lambda: len(self.admission.queue), lambda: self.admission.queue.tokens)

    def knock(self, tenant: Tenant, num_seqs: int, slo_class: str) -> Place:
        """Raises: Overloaded, where a limit of the tenant is reached, or too many prompts wait to be tokenised."""
        if self._num_at_door >= self.admission.bounds.max_queued:
            self._metrics.shed(slo_class, Reason.QUEUE_FULL)
            message = (
                f"{self._num_at_door} prompts wait to be tokenised; the limit is {self.admission.bounds.max_queued}"
            )
            raise Overloaded(message, retry_after_s=MIN_RETRY_AFTER_S)
        try:
            self.quotas.take(tenant, num_seqs, clock.now_s())
        except Overloaded as error:
            self._metrics.shed(slo_class, error.field)
            raise
        self._num_at_door += 1
        return Place(self, tenant, num_seqs)

    def _enter(self, place: Place) -> None:
        """It is at the door no more."""
        self._num_at_door -= place.is_at_door
        place.is_at_door = False

    def arrive(self, place: Place, turn: Turn) -> None:
        """See `Place`."""
        self._enter(place)
        now_s = clock.now_s()
        self._look(now_s)
        if shed := self.admission.arrive(turn, now_s):
            raise self._error(turn, shed)
        self.quotas.spend(turn.tenant, turn.prompt_tokens, now_s)
        self._places[id(turn)] = self._fresh[id(turn)] = place
        if turn.released_s is None:
            place.waits = asyncio.get_running_loop().create_future()
        else:
            self._metrics.waited(turn.slo_class, 0.0)
        self._pump()  # somebody may have had to go for it, also where it need not wait

    def began(self, place: Place, turn: Turn) -> None:
        """See `Place`."""
        self._fresh.pop(id(turn), None)
        place.tell_worker()
        self.admission.began(turn, clock.now_s())
        self._pump()

    def close(self, place: Place, tenant: Tenant, num_seqs: int) -> None:
        """See `Place`."""
        self._enter(place)
        self.quotas.give_back(tenant, num_seqs)
        turn = place.turn
        if turn is None or self._places.pop(id(turn), None) is None:
            return
        self._fresh.pop(id(turn), None)
        if place.waits is not None:
            place.waits.cancel()
        now_s, num_output = clock.now_s(), place.num_output
        if turn.released_s is None:  # it waited in vain, and cost nothing
            self.quotas.spend(tenant, -turn.prompt_tokens, now_s)
        else:
            self.quotas.spend(tenant, num_output, now_s)
            self._metrics.used(tenant, turn.prompt_tokens, num_output)
            place.charge(self.admission)
        self.admission.leave(turn, now_s)
        self._pump()

    def queued_tokens(self) -> int:
        """Of prompts that wait."""
        return int(self.admission.queue.tokens)

    def oldest_s(self) -> float:
        """Age of the oldest call in the queue; 0 = none waits."""
        oldest_s = self.admission.queue.oldest_since_s()
        return 0.0 if oldest_s is None else max(0.0, clock.now_s() - oldest_s)

    def slack(self, slo_class: str, targets_s: Iterable[float]) -> Slack:
        """What the other classes, whose TPOT targets these are, leave to this one, now."""
        now_s = clock.now_s()
        self._look(now_s)
        num_shed = self._num_shed.total() - self._num_shed[slo_class]
        return self.admission.slack(slo_class, targets_s, num_shed, now_s)

    # -- the policy's clock ------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Let in whose turn it is; nothing to do where nobody waits."""
        if not self.admission.has_news:
            return
        now_s = clock.now_s()
        self._look(now_s)
        released, shed = self.admission.due(now_s)
        for turn in released:
            self._metrics.waited(turn.slo_class, now_s - turn.since_s)
            self._places[id(turn)].let_go()
        for turn, why in shed:
            self._places[id(turn)].let_go(self._error(turn, why))
        if self._timer is None and self.admission.has_news:
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _look(self, now_s: float) -> None:
        """Tell the policy of the fleet, and of what those inside have come to, where that was not done just now."""
        if now_s < self._next_look_s:
            return
        began_s = time.thread_time()  # of the CPU: to be kept from it for a while is no reason to look away for longer
        for place in self._fresh.values():
            place.tell_worker()
        if self.admission.queue:  # else nobody compares what was charged
            for place in self._places.values():
                place.charge(self.admission)
        self.admission.observe(worker_loads(self._fleet), now_s)
        cost_s = clock.here_s(time.thread_time() - began_s)
        self._next_look_s = now_s + max(OBSERVE_S, cost_s / OBSERVE_SHARE)

    def _error(self, turn: Turn, shed: Shed) -> BatonError:
        self._metrics.shed(turn.slo_class, shed.reason)
        self._num_shed[turn.slo_class] += 1
        if shed.reason is Reason.DEADLINE and not shed.retry_after_s:
            return DeadlineExceeded(shed.message)
        return Overloaded(shed.message, retry_after_s=shed.retry_after_s)


def worker_loads(fleet: Fleet) -> Iterable[WorkerLoad]:
    """Of those that take calls."""
    table = fleet.table
    for endpoint in fleet.endpoints:
        view, row = endpoint.session.view, endpoint.row
        if view is None or endpoint.state != "ready":
            continue
        load, opened, role = view.load, view.opened, endpoint.role
        yield WorkerLoad(
            worker_id=endpoint.worker_id,
            prefills=role is not Role.DECODE,
            decodes=role is not Role.PREFILL,
            tokens_per_s=float(table.prefill_tokens_per_s[row]) if endpoint.rates.has_computed else math.inf,
            waiting_tokens=int(table.waiting_tokens[row]),
            num_seqs=int(table.num_running[row]),
            step_s=float(table.step_s[row]),
            max_seqs=load.max_num_seqs or opened.max_num_seqs,
            kv_tokens=opened.num_blocks * opened.block_size,
            used_tokens=(load.active_blocks + load.reserved_blocks) * opened.block_size,
            step_s_per_seq=float(table.step_s_per_seq[row]),
            step_s_per_token=float(table.step_s_per_token[row]),
            grant_s=endpoint.rates.grants.most_s if role is Role.PREFILL else 0.0,
        )
