"""Whose turn it is, live: the admission policy with a clock, a fleet and calls that wait.

    turns.enter(turn, reports)    returns when the call may go to the workers; raises where it is shed or its time runs out
    turns.began(turn)             its first token came
    turns.leave(turn)             it is over, however

Waiting calls hold nothing but their place, which a cancelled one gives up at once. The policy hears of the fleet when a call
comes, begins or ends, and each PUMP_S while someone waits; never more often than OBSERVE_SHARE of the loop's time allows, so a
fleet of a thousand costs no more than one of ten. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceeded, Overloaded
from baton.request import Role
from router.admission_metrics import AdmissionMetrics
from router.admission_next import Admission, Reason, Shed, Turn
from router.capacity import WorkerLoad
from router.fleet import Fleet
from router.handoff import SequenceReport

PUMP_S = 0.01  # half of the default window: a lane that nobody told us is free gets work before it runs dry
OBSERVE_S = 0.005  # between looks at the fleet, at least: half of a pump
OBSERVE_SHARE = 0.02  # of the loop's time for looking


@dataclass(slots=True, eq=False)
class _Inside:
    """A call that was let in."""

    turn: Turn
    reports: Sequence[SequenceReport]
    waits: asyncio.Future[None] | None = None


class Turns:
    """One router's."""

    def __init__(self, admission: Admission, fleet: Fleet, metrics: AdmissionMetrics) -> None:
        self._admission = admission
        self._fleet = fleet
        self._metrics = metrics
        self._inside: dict[int, _Inside] = {}  # by id() of the turn
        self._next_look_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._admission.queue)

    async def enter(self, turn: Turn, reports: Sequence[SequenceReport]) -> None:
        """Wait for the call's turn; `leave` it afterwards. Where this raises, it has been left.

        Raises:
            Overloaded: it was shed; says when to come back.
            DeadlineExceeded: its time would run out, or did, before an answer.
        """
        now_s = time.monotonic()
        self._look(now_s)
        if shed := self._admission.arrive(turn, now_s):
            raise self._error(turn, shed)
        inside = self._inside[id(turn)] = _Inside(turn, reports)
        if turn.released_s is not None:
            self._metrics.waited(turn.slo_class, 0.0)
            return
        inside.waits = asyncio.get_running_loop().create_future()
        try:
            self._pump()
            await inside.waits
        except BaseException:
            self.leave(turn)
            raise
        self._metrics.waited(turn.slo_class, time.monotonic() - now_s)

    def began(self, turn: Turn) -> None:
        """Its first token came; may be said again."""
        if turn.began_s is None and (inside := self._inside.get(id(turn))):
            turn.worker = inside.reports[0].prefill_worker
            self._admission.began(turn, time.monotonic())
            self._pump()

    def leave(self, turn: Turn) -> None:
        """It is over; may be said again."""
        if inside := self._inside.pop(id(turn), None):
            self._charge(inside)
            self._admission.leave(turn, time.monotonic())
            self._pump()

    # -- the policy's clock ------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Let in whose turn it is; nothing to do where nobody waits."""
        if not self._admission.has_news:
            return
        now_s = time.monotonic()
        self._look(now_s)
        released, shed = self._admission.due(now_s)
        for turn in released:
            waits = self._inside[id(turn)].waits
            if waits is not None and not waits.done():
                waits.set_result(None)
        for turn, why in shed:
            waits = self._inside[id(turn)].waits
            if waits is not None and not waits.done():
                waits.set_exception(self._error(turn, why))
        if self._timer is None and len(self._admission.queue):
            self._timer = asyncio.get_running_loop().call_later(PUMP_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _look(self, now_s: float) -> None:
        """Tell the policy of the fleet, and of what those inside have come to, where that was not done just now."""
        if now_s < self._next_look_s:
            return
        for inside in self._inside.values():
            if inside.turn.began_s is None:
                inside.turn.worker = inside.reports[0].prefill_worker
            elif len(self._admission.queue):
                self._charge(inside)
        self._admission.observe(worker_loads(self._fleet), now_s)
        cost_s = time.monotonic() - now_s
        self._next_look_s = now_s + max(OBSERVE_S, cost_s / OBSERVE_SHARE)

    def _charge(self, inside: _Inside) -> None:
        self._admission.charge(inside.turn, sum(report.num_tokens for report in inside.reports))

    def _error(self, turn: Turn, shed: Shed) -> BatonError:
        self._metrics.shed(turn.slo_class, shed.reason)
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
            max_seqs=opened.max_num_seqs,
            kv_tokens=opened.num_blocks * opened.block_size,
            used_tokens=(load.active_blocks + load.reserved_blocks) * opened.block_size,
            step_s_per_seq=float(table.step_s_per_seq[row]),
            step_s_per_token=float(table.step_s_per_token[row]),
        )
