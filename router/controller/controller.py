"""What the controller knows and does, between its two doors (Control over gRPC, admin over HTTP) and the workers.

Owns the Fleet (which outlives this process in a file), one Session to each announced worker (the only way it learns of a
death), what is in force (in_force.py) and the routers' last reports. Every change wakes all `watch()` streams, which send the
whole newest state: a slow router skips versions, it never queues them. What is wanted of a worker and its reports do not show, it
is told again, when its Session comes back and each second. Of several controllers only the one that leads tells workers
anything. Knows nothing of Ray. Runs on the event loop; disks and databases run beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial

from baton import clock
from baton.config import ControllerConfig, EmulationConfig
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.ids import new_router_epoch
from baton.log import get_log
from baton.peer_trust import PLAIN, PeerTrust
from baton.request import Logprobs, Role
from baton.slo import SLO
from baton.v1 import control_pb2, worker_pb2
from router.controller.arrivals import TICK_S
from router.controller.autoscaler.facts import Tuning
from router.controller.background import Background, failures_of
from router.controller.control_store import ControlStore
from router.controller.decisions import Decision, LoggedDecision
from router.controller.feasibility import MeasuredFloor
from router.controller.fleet_state import AfterDrain, Announcement, Fleet, Member, SavedFleet
from router.controller.fleet_store import Fleets
from router.controller.in_force import InForce
from router.controller.lease import ALONE, Leadership
from router.controller.measures import Measures, roofline_of
from router.controller.questions import Answer, Questions
from router.controller.rate_store import RateStore
from router.controller.slo_store import SLOSet
from router.controller.starts import Starts
from router.controller.step_samples import totals_of
from router.controller.versioned import Revision
from router.events import Inbox, SequenceEvent, SequenceRefused
from router.series import Registry
from router.session import Liveness, SessionIdentity, WorkerSession, WorkerView
from router.windows import windows_of

log = get_log("controller")

_CONTROLLER_SEQ = 0  # routers' epochs are never 0, so no sequence has this number: it addresses the worker itself
_ORDER_S = 5.0  # a worker answers an order within a step and a heartbeat (0.5 s); ten times that is a stuck one
_FRESH_S = 5.0  # routers report each second
_ROLE_NAMES = {int(role): role.name.lower() for role in Role}
_MEASURE_S = 1.0  # two heartbeats: each sample has news
_RETRY_S = 1.0  # a full disk is no sooner empty
_KEEP_S = 1.0  # that an order waits for a disk, which takes a millisecond; a full one must not stop orders
_MAX_REPORTS = 64  # routers remembered apart; of older ones only the totals are kept


@dataclass(frozen=True, slots=True)
class HeardReport:
    report: control_pb2.RouterReport
    at_s: float  # monotonic


class Controller:
    """Create it inside a running event loop."""

    def __init__(
        self,
        config: ControllerConfig,
        store: ControlStore,
        fleets: Fleets | None = None,
        trust: PeerTrust = PLAIN,
        emulation: EmulationConfig | None = None,
        rates: RateStore | None = None,
        leadership: Leadership = ALONE,
    ) -> None:
        """`fleets`, `rates`: where the fleet, and what is known of traffic, outlive this process; what they hold is taken over.
        `emulation`: of the workers, if any. `leadership`: what allows orders to workers."""
        saved = fleets.load() if fleets else SavedFleet()
        self.fleet = Fleet(saved)
        self.in_force = InForce(store, self._wake)
        self._leadership = leadership
        self._decisions = store.decisions
        self.floor = MeasuredFloor()
        self._identity = SessionIdentity("controller", new_router_epoch(), trust)
        self._liveness = Liveness(config.heartbeat_s, config.missed_heartbeats)
        self._sessions: dict[str, WorkerSession] = {}
        self._ordering: dict[
            str, asyncio.Lock
        ] = {}  # one order to a worker at a time: all have one number to answer to
        self._awaited: dict[str, asyncio.Event] = {}  # workers under an order: set by each of their reports
        self._undrained = {
            m.worker_id for m in saved.members if not m.draining
        }  # and their reports have yet to show it
        self._tuned: dict[str, tuple[WorkerView, Tuning]] = {}  # told again, once in each Session: it may refuse
        self._ending: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._reports: dict[str, HeardReport] = {}
        self._retired: dict[str, control_pb2.ClassVerdicts] = {}
        self._changed = asyncio.Event()
        self.questions = Questions()
        known = rates.load() if rates else None
        self.measures = Measures(roofline_of(emulation or EmulationConfig()), clock.now_s(), known, clock.unix_s())
        self._nonsense: set[str] = set()  # routers whose last report was refused in part
        self.registry = Registry()  # of this process's /metrics
        self.starts = Starts(self.registry)
        self.task_failures = failures_of(self.registry)
        self._background = Background(self.task_failures)
        self._background.keep("follow the store", self.in_force.follow)
        self._background.keep("measure", self._measure)
        if rates:
            self._background.keep("save rates", partial(self._save_rates, rates))
        self._saved_version = 0 if fleets else sys.maxsize  # of the fleet, that is on disk
        self._saved = asyncio.Event()  # set, and replaced, by each write
        if fleets:
            self._background.keep("save fleet", partial(self._save_changes, fleets))
        for member in saved.members:
            if member.address:
                self._open_session(member)

    async def close(self) -> None:
        await self._background.end()
        await asyncio.gather(*(session.close("the controller stops") for session in self._sessions.values()))
        await asyncio.gather(*self._closing)

    @property
    def slo(self) -> Revision[SLOSet]:
        """In force."""
        return self.in_force.slo.revision

    # -- workers -----------------------------------------------------------------------------------------------------

    def expect(self, worker_id: str, role: Role, shape: str = "", *, extra: bool = False) -> None:
        """As Fleet.expect."""
        self.fleet.expect(worker_id, role, shape, extra=extra)
        self._wake()

    def announce(self, said: Announcement) -> Member:
        """A worker is there: open a Session to it.

        Raises:
            PeerRefused: a process that was replaced spoke.
        """
        known = self.fleet.find(said.worker_id)
        member = self.fleet.announce(said)
        log.info("worker_announced", worker=said.worker_id, epoch=said.epoch, address=said.address, pid=said.pid)
        if known is None or known.epoch != said.epoch:
            self.starts.came_up(said.worker_id, said.start_up)
        session = self._sessions.get(said.worker_id)
        if session is None or session.address != said.address:
            self._open_session(member)
        self._wake()
        return member

    def start_failed(self, worker_id: str, epoch: int, reason: str) -> None:
        """No process came up after the one of `epoch` (0 = the first)."""
        log.error("worker_start_failed", worker=worker_id, reason=reason)
        self.fleet.lost(worker_id, epoch, reason)
        self._wake()

    async def leave(self, worker_id: str) -> bool:
        """A worker's machine is about to take it down: it drains, until its next process. Whether nothing runs there any more."""
        member = self.fleet.find(worker_id)
        if member is None:
            return True
        if not member.draining and not self.is_ending(worker_id):
            with contextlib.suppress(Unavailable):  # it is told as soon as it answers
                await self.drain(worker_id, True, AfterDrain.RETURN)
        view = self.view(worker_id)
        return view is not None and view.load.draining and view.load.idle

    def vanished(self, worker_id: str, reason: str) -> None:
        """Its machine is gone. Routers are told at once; a straggler is refused, the next process is not."""
        self.fleet.vanished(worker_id)
        if session := self._sessions.pop(worker_id, None):
            self._close(session, reason)
        log.warning("worker_vanished", worker=worker_id, reason=reason)
        self._wake()

    def view(self, worker_id: str) -> WorkerView | None:
        """What the worker last said of itself; None while there is no Session."""
        session = self._sessions.get(worker_id)
        return session.view if session else None

    async def drain(self, worker_id: str, draining: bool, after: AfterDrain = AfterDrain.STAY) -> Member:
        """Let a worker take no new sequence, or take them again. What `after` names follows once it is idle (levers.py).

        Raises:
            NotFound: no such worker.
            InvalidRequest: it is being ended.
            Unavailable: another controller leads, and nothing has changed. Or it is wanted, but the worker is away or does not
                answer; it is told as soon as it does.
        """
        self._check_order(worker_id)
        member = self.fleet.want_draining(worker_id, draining, after)
        if not draining:
            self._undrained.add(worker_id)
        log.info("worker_draining", worker=worker_id, draining=draining, after=str(after))
        self._wake()
        await self.keep()
        await self._order(
            worker_id,
            lambda session: session.drain(draining),
            lambda load: load.draining == draining or bool(load.next_role),  # who flips drains
        )
        return member

    async def set_role(self, worker_id: str, role: Role) -> Member:
        """Flip a worker in place: it takes no new sequence from now on and changes its role once it is idle, however long that
        takes.

        Raises:
            NotFound: no such worker.
            InvalidRequest: it is being ended.
            BatonError: the worker's own refusal, or Unavailable: it is away or does not answer, or another controller leads. It
                keeps its role then.
        """
        self._check_order(worker_id)
        before = self.fleet.get(worker_id).role
        wanted, kept = (worker_pb2.Role.ValueType(r) for r in (role, before))
        try:
            await self._order(
                worker_id,
                lambda session: session.set_role(wanted),
                lambda load: wanted in (load.next_role, load.role if not load.next_role else None),
            )
        except Unavailable:
            if session := self._sessions.get(worker_id):
                session.set_role(kept)  # it may only be slow: nobody is to be surprised later
            raise
        log.info("worker_role", worker=worker_id, role=role.name.lower())
        member = self.fleet.want_role(worker_id, role)
        self._wake()
        await self.keep()
        return member

    async def tune(self, worker_id: str, tuning: Tuning) -> Member:
        """Change limits of a worker's engine, from its next step on; a restarted one is told when it announces itself.

        Raises:
            NotFound: no such worker.
            InvalidRequest: it is being ended.
            BatonError: the worker's own refusal, or Unavailable: it is away or does not answer, or another controller leads. It
                keeps its limits then.
        """
        self._check_order(worker_id)
        self.fleet.get(worker_id)
        view = self.view(worker_id)
        before = tuning_of(view.load) if view else None
        try:
            await self._order(
                worker_id, lambda session: session.tune(tune_pb(tuning)), lambda load: tuning_of(load) == tuning
            )
        except Unavailable:
            if (session := self._sessions.get(worker_id)) and before is not None:
                session.tune(tune_pb(before))  # as in set_role
            raise
        log.info("worker_tuned", worker=worker_id, **dataclasses.asdict(tuning))
        member = self.fleet.want_tuning(worker_id, tuning)
        self._wake()
        await self.keep()
        return member

    def want_local_prefill(self, max_tokens: int | None) -> None:
        """Tell all routers which prompts may be prefilled where they decode: those that lack at most so many tokens; None: as
        each is configured."""
        self.fleet.want_local_prefill(max_tokens)
        self._wake()

    async def surge_from(self, pool: str, size: int) -> None:
        """Its pool is about to have one more worker than `size`, for a while: whoever leads after this process knows, too."""
        self.fleet.surge_from(pool, size)
        self._wake()
        await self.keep()

    def surge_is_over(self, pool: str) -> None:
        self.fleet.surge_is_over(pool)
        self._wake()

    def let_go(self, worker_id: str) -> None:
        """A worker that is away is to be ended, also where it comes back. Raises: Unavailable: another controller leads."""
        self._leadership.check()
        self.fleet.want_draining(worker_id, True, AfterDrain.END)
        self._wake()

    def begin_end(self, worker_id: str) -> None:
        """From now on it is being ended: it takes no work, and nothing but `forget` takes that back.

        Raises:
            Unavailable: another controller leads.
        """
        self.let_go(worker_id)
        self._ending.add(worker_id)

    def is_ending(self, worker_id: str) -> bool:
        return worker_id in self._ending

    def _check_order(self, worker_id: str) -> None:
        """Raises: Unavailable: another controller leads; InvalidRequest: it is being ended."""
        self._leadership.check()
        if worker_id in self._ending:
            raise InvalidRequest(f"{worker_id} is being ended", field="worker_id")

    def stand_by(self, worker_id: str) -> None:
        """A worker that drained for it is idle: from now on it is a standby."""
        self.fleet.stand_by(worker_id)
        self._wake()

    def forget(self, worker_id: str) -> None:
        """The worker has been ended for good. Routers are told; a straggler of that name is refused."""
        self.fleet.forget(worker_id)
        self.starts.forget(worker_id)
        self._ordering.pop(worker_id, None)
        self._tuned.pop(worker_id, None)
        self._undrained.discard(worker_id)
        self._ending.discard(worker_id)
        if session := self._sessions.pop(worker_id, None):
            self._close(session, "the worker was ended")
        log.info("worker_forgotten", worker=worker_id)
        self._wake()

    def _close(self, session: WorkerSession, reason: str) -> None:
        task = asyncio.create_task(session.close(reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open_session(self, member: Member) -> None:
        worker_id = member.worker_id
        if old := self._sessions.pop(worker_id, None):
            self._close(old, "the worker restarted")
        session = WorkerSession(
            worker_id,
            member.address,
            self._identity,
            self._liveness,
            lambda: self._on_session(session),
            on_load=lambda load: self._on_load(worker_id, load),
            want_kv=True,
        )
        self._sessions[worker_id] = session
        session.start()

    def _on_session(self, session: WorkerSession) -> None:
        worker_id = session.worker_id
        if self._sessions.get(worker_id) is not session:
            return  # of a process that was replaced
        if session.view is None:
            self.fleet.lost(worker_id, self.fleet.get(worker_id).epoch, session.reason)
        else:
            self.fleet.heard(worker_id, session.epoch)
            self._remind(session)
        self._wake()

    def _remind(self, session: WorkerSession) -> None:
        """Tell a worker again what is wanted of it and its last report does not show.

        One that drains and nobody here wanted it is about to stop, by its own platform: it is left alone.
        """
        worker_id, view = session.worker_id, session.view
        order = self._ordering.get(worker_id)
        if view is None or (order is not None and order.locked()) or not self._leadership.is_held:
            return
        member, load = self.fleet.get(worker_id), view.load
        role = worker_pb2.Role.ValueType(member.role)
        if (load.next_role or load.role) != role:
            session.set_role(role)
        if not load.draining and not member.draining:
            self._undrained.discard(worker_id)
        is_wanted = member.draining or worker_id in self._undrained
        if is_wanted and load.draining != member.draining and not load.next_role:  # who flips drains
            session.drain(member.draining)
        if member.tuning is not None and tuning_of(load) != member.tuning:
            before = self._tuned.get(worker_id)
            if before is None or before[0] is not view or before[1] != member.tuning:
                self._tuned[worker_id] = (view, member.tuning)
                session.tune(tune_pb(member.tuning))

    def _on_load(self, worker_id: str, load: worker_pb2.Load) -> None:
        self.floor.observe(load)
        if worker_id in self._awaited:
            self._awaited[worker_id].set()

    async def _order(
        self, worker_id: str, send: Callable[[WorkerSession], None], obeyed: Callable[[worker_pb2.Load], bool]
    ) -> None:
        """Tell a worker something and wait until its load report shows it, or it refuses."""
        async with self._ordering.setdefault(worker_id, asyncio.Lock()):
            await self._order_alone(worker_id, send, obeyed)

    async def _order_alone(
        self, worker_id: str, send: Callable[[WorkerSession], None], obeyed: Callable[[worker_pb2.Load], bool]
    ) -> None:
        session = self._sessions.get(worker_id)
        if session is None or session.view is None:
            reason = session.reason if session else "it has not announced itself"
            raise Unavailable(f"{worker_id} is away ({reason})", retry_after_s=_ORDER_S)
        answers = _Answers()
        session.attach(_CONTROLLER_SEQ, answers)
        refusal = asyncio.create_task(answers.get())
        refusal.add_done_callback(lambda _: reported.set())
        reported = self._awaited[worker_id] = asyncio.Event()
        try:
            async with asyncio.timeout(_ORDER_S):
                send(session)
                while session.view is None or not obeyed(session.view.load):
                    await reported.wait()
                    reported.clear()
                    if refusal.done():
                        raise _refusal(worker_id, refusal.result())
        except TimeoutError:
            raise Unavailable(f"{worker_id} did not comply within {_ORDER_S:g} s; is it busy?") from None
        finally:
            session.detach(_CONTROLLER_SEQ)
            del self._awaited[worker_id]
            refusal.cancel()

    # -- decisions ---------------------------------------------------------------------------------------------------

    async def decide(self, decision: Decision) -> LoggedDecision:
        """Write down what was, or would be, done. Raises: Unavailable."""
        return await asyncio.to_thread(self._decisions.append, decision)

    async def query_decisions(
        self, limit: int, since_unix_s: float, until_unix_s: float, before: int
    ) -> list[LoggedDecision]:
        """As DecisionLog.query."""
        return await asyncio.to_thread(
            self._decisions.query, limit, since_unix_s=since_unix_s, until_unix_s=until_unix_s, before=before
        )

    # -- routers -----------------------------------------------------------------------------------------------------

    async def watch(self) -> AsyncIterator[control_pb2.ControlState]:
        """Yield the state now and after each change; changes meanwhile are one."""
        while True:
            changed = self._changed
            yield self._state()
            await changed.wait()

    def report(self, report: control_pb2.RouterReport) -> None:
        """Take in a router's totals; each report replaces its last one."""
        self._reports.pop(report.router_id, None)
        self._reports[report.router_id] = HeardReport(report, clock.now_s())
        if len(self._reports) > _MAX_REPORTS:
            oldest = self._reports.pop(next(iter(self._reports)))
            _add_verdicts(self._retired, oldest.report.verdicts)
        self.questions.answer(report.router_id, report.explained)
        try:
            self.measures.heard(report.router_id, windows_of(report), clock.now_s())
            self._nonsense.discard(report.router_id)
        except InvalidRequest as error:  # what one router gets wrong must not spoil what all of them say
            if report.router_id not in self._nonsense and len(self._nonsense) < _MAX_REPORTS:
                self._nonsense.add(report.router_id)
                log.warning("windows_refused", router=report.router_id, field=error.field, reason=error.message)

    async def explain(self, request_id: str) -> list[Answer]:
        """Ask every router that lives why a request went where it went; those that know it have answered."""
        routers = {report.router_id for report in self.fresh_reports()}
        with self.questions.asked(request_id, routers) as question:
            self._wake()
            await question.wait()
        return question.answers

    def reports(self) -> list[HeardReport]:
        """The last one of each router, the freshest last."""
        return list(self._reports.values())

    def fresh_reports(self) -> list[control_pb2.RouterReport]:
        """Of routers that live: those heard of a moment ago."""
        oldest_s = clock.now_s() - _FRESH_S
        return [heard.report for heard in self._reports.values() if heard.at_s > oldest_s]

    def verdicts(self) -> dict[str, control_pb2.ClassVerdicts]:
        """Totals per class over all routers heard of since this controller started; each reports those of its life."""
        totals: dict[str, control_pb2.ClassVerdicts] = {}
        _add_verdicts(totals, self._retired.values())
        for heard in self._reports.values():
            _add_verdicts(totals, heard.report.verdicts)
        return totals

    def _state(self) -> control_pb2.ControlState:
        return control_pb2.ControlState(
            workers=[_record_pb(member) for member in self.fleet.members()],
            slo=control_pb2.SloSet(version=self.slo.version, classes=[_class_pb(slo) for slo in self.slo.value]),
            fleet_version=self.fleet.version,
            explain=self.questions.open_ids,
            local_prefill_tokens=self.fleet.local_prefill_tokens,
        )

    async def _save_changes(self, fleets: Fleets) -> None:
        """For ever. What cannot be written is tried again each second."""
        failed = False
        while True:
            changed, version = self._changed, self.fleet.version
            if version == self._saved_version:
                await changed.wait()
                continue
            try:
                await asyncio.to_thread(fleets.save, self.fleet.saved())
                self._saved_version, failed = version, False
                self._saved.set()
                self._saved = asyncio.Event()
            except OSError as error:
                if not failed:  # said once
                    log.error("fleet_not_saved", reason=str(error))
                failed = True
                await asyncio.sleep(_RETRY_S)

    async def keep(self) -> None:
        """Return once the fleet as it is now is on disk: what was promised outlives this process. Where no disk takes it, it is
        promised all the same."""
        version = self.fleet.version
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KEEP_S):
                while self._saved_version < version:
                    await self._saved.wait()

    async def _save_rates(self, rates: RateStore) -> None:
        """For ever. What cannot be written is lost with this process."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await asyncio.to_thread(rates.save, self.measures.saved(clock.unix_s()))
            except OSError as error:
                log.warning("rates_not_saved", reason=str(error))

    async def _measure(self) -> None:
        """For ever: take what each worker's steps came to, let time pass where no router reports, remind workers."""
        while True:
            await asyncio.sleep(_MEASURE_S)
            now_s = clock.now_s()
            for session in self._sessions.values():
                if (view := session.view) is not None and (role := _ROLE_NAMES.get(view.load.role)):
                    self.measures.sampled(session.worker_id, session.epoch, role, totals_of(view.load), now_s)
                self._remind(session)
            self.measures.advance(now_s)

    async def until_changed(self) -> None:
        """Until the next change of the fleet, of targets, mode or budget."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Answers(Inbox):
    """What workers say to orders; orders make no tokens."""

    def on_token(
        self, worker: str, index: int, token_id: int, finish: int, logprobs: Logprobs | None, now_s: float
    ) -> None:
        log.error("token_for_nobody", worker=worker, index=index)


def tuning_of(limits: worker_pb2.Load | worker_pb2.Tune) -> Tuning:
    """Limits of an engine, as a worker reports them."""
    return Tuning(limits.max_num_seqs, limits.max_num_batched_tokens, limits.chunk_tokens)


def tune_pb(tuning: Tuning) -> worker_pb2.Tune:
    return worker_pb2.Tune(**dataclasses.asdict(tuning))


def _refusal(worker_id: str, event: SequenceEvent) -> BatonError:
    if isinstance(event, SequenceRefused):
        return event.error
    return Unavailable(f"{worker_id} went away meanwhile")


def _add_verdicts(totals: dict[str, control_pb2.ClassVerdicts], more: Iterable[control_pb2.ClassVerdicts]) -> None:
    for verdicts in more:
        total = totals.setdefault(verdicts.class_name, control_pb2.ClassVerdicts(class_name=verdicts.class_name))
        total.num_met += verdicts.num_met
        total.num_missed_ttft += verdicts.num_missed_ttft
        total.num_missed_tpot += verdicts.num_missed_tpot
        total.num_missed_itl += verdicts.num_missed_itl
        total.num_missed_e2e += verdicts.num_missed_e2e
        total.num_failed += verdicts.num_failed


def _record_pb(member: Member) -> control_pb2.WorkerRecord:
    return control_pb2.WorkerRecord(
        worker_id=member.worker_id,
        epoch=member.epoch,
        address=member.address,
        role=worker_pb2.Role.ValueType(member.role),
        shape=member.shape,
        pid=member.pid,
        state=member.state,
        reason=member.reason,
        fingerprint=member.fingerprint,
        num_restarts=member.num_restarts,
    )


def _class_pb(slo: SLO) -> control_pb2.SloClass:
    return control_pb2.SloClass(**dataclasses.asdict(slo))
