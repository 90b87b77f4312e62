"""Carries out what the autoscaler, or an operator, asks for: each lever by its orders to workers, routers and machines.

    tune, local_prefill, flip, undrain, wake    an order that is obeyed at once, or begins to be, or is refused
    create                                      asked for; the worker is pending until it announces itself
    drain                                       the worker takes no new work; what follows waits until it is idle
    give_up                                     ended at once: nothing runs on what is pending, away or stands by

`settle` does what had to wait, in whatever mode: a drained worker that is idle stands by or is ended, one that did not come up
is given up. It goes by the fleet alone, which outlives this process, so a new controller goes on where the last one stopped.
Limits are checked and then awaited on, so one lever is pulled at a time (`alone`), and settling is one of them.

Nothing in flight is lost. A worker is ended only when it says that nothing is open there and every router has read of every
end; or when it has been away for `resumed_s` and no router hears it either; or after `drain_s`, and then routers carry its calls
on elsewhere, as after a death. It is kept for another `resumed_s`, since it may hold the only copy of a call that its client
resumes. An end that has begun is not taken back: machines that do not answer are asked again. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from baton import clock
from baton.errors import InvalidRequest, Unavailable
from baton.log import get_log
from baton.request import Role
from router.controller.autoscaler.acts import Act, Create, Drain, Flip, GiveUp, LocalPrefill, Tune, Undrain, Wake
from router.controller.controller import Controller
from router.controller.decisions import Decision
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY, STARTING, AfterDrain, Member
from router.controller.pool_scaler import PoolScaler
from router.controller.settings import Budget

log = get_log("controller.levers")


@dataclass(frozen=True, slots=True)
class Waits:
    """How long is waited before a drained worker is ended, seconds."""

    drain_s: float = 600.0  # for what runs there; DESIGN section 5
    drain_s_by_role: Mapping[Role, float] = field(default_factory=dict)  # of those that have their own
    resumed_s: float = (
        30.0  # once idle, for clients that resume a call which broke there; once away, for it to come back
    )


class Levers:
    """Of one fleet."""

    def __init__(
        self,
        controller: Controller,
        scaler: PoolScaler,
        gpus_per_worker: int,
        waits: Waits = Waits(),
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        self._controller = controller
        self._scaler = scaler
        self._gpus_per_worker = gpus_per_worker
        self._waits = waits
        self._now_s = now_s
        self._draining_since_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        self._away_since_s: dict[str, float] = {}
        self.alone = asyncio.Lock()  # whoever holds it may `pull_alone`

    # -- at once -----------------------------------------------------------------------------------------------------

    async def pull(self, act: Act, budget: Budget) -> str:
        """Carry one act out, or begin to. Returns what was done, for the log.

        Raises:
            BatonError: it was refused, by worker, machine or budget, or nobody answered; nothing has changed. Drains, their
                end and ends that have begun are not refused where nobody answers: they are told as soon as somebody does.
        """
        async with self.alone:
            return await self.pull_alone(act, budget)

    async def pull_alone(self, act: Act, budget: Budget) -> str:
        """As `pull`, by whoever holds `alone`."""
        later = ""
        match act:
            case Tune(worker_id, tuning):
                await self._controller.tune(worker_id, tuning)
            case LocalPrefill(max_tokens):
                self._controller.want_local_prefill(max_tokens)
            case Flip(worker_id, role):
                member = self._member(worker_id, READY)
                self._leaves(member, budget)
                self._takes(member, role, budget)
                await self._controller.set_role(worker_id, role)
            case Undrain(worker_id):
                later = await self._undrain(self._controller.fleet.get(worker_id), budget)
            case Wake(worker_id, role):
                later = await self._wake(self._member(worker_id, STANDBY), role, budget)
            case Create(role, shape):
                self._fits(role, budget)
                worker_id = await self._scaler.scale_up(role, shape)
                await self._controller.keep()
                return f"create {worker_id}"
            case Drain(worker_id, keep_standby):
                member = self._member(worker_id, READY, DRAINING, FAILED, STARTING)
                if not keep_standby and (other := await self._victim(member, act.or_another)) is not member:
                    act, member = replace(act, worker_id=other.worker_id), other
                    later = f", since {worker_id} cannot be ended before it"
                later += await self._drain(member, keep_standby, budget)
            case GiveUp(worker_id):
                later = await self._give_up(self._expendable(self._controller.fleet.get(worker_id)))
        return describe(act) + later

    async def _undrain(self, member: Member, budget: Budget) -> str:
        self._not_ending(member)
        if member.draining:
            self._takes(member, member.role, budget)
        return await self._tell_draining(member, False)

    async def _wake(self, member: Member, role: Role, budget: Budget) -> str:
        self._takes(member, role, budget)
        if member.role is not role:
            await self._controller.set_role(member.worker_id, role)
        return await self._tell_draining(member, False)

    async def _give_up(self, member: Member) -> str:
        try:
            await self._end(member.worker_id)
        except Unavailable as error:
            return f" as soon as machines answer ({error.message})"
        return ""

    async def _tell_draining(self, member: Member, draining: bool, after: AfterDrain = AfterDrain.STAY) -> str:
        """It is wanted from now on, whoever answers; what is to be said about that, or ""."""
        if member.after_drain is not after:  # no drain inherits the time of another one
            self._draining_since_s.pop(member.worker_id, None)
            self._idle_since_s.pop(member.worker_id, None)
        try:
            await self._controller.drain(member.worker_id, draining, after)
        except Unavailable as error:
            return f"; it is told as soon as it answers ({error.message})"
        return ""

    async def _drain(self, member: Member, keep_standby: bool, budget: Budget) -> str:
        if member.state == READY:
            self._leaves(member, budget)
        if keep_standby and member.state in (FAILED, STARTING):
            state = f"away: {member.reason}" if member.state == FAILED else member.state
            raise InvalidRequest(f"{member.worker_id} is {state}", field="worker_id")
        if member.state in (FAILED, STARTING):
            self._controller.let_go(member.worker_id)
            return ""
        return await self._tell_draining(member, True, AfterDrain.STANDBY if keep_standby else AfterDrain.END)

    async def _victim(self, member: Member, or_another: bool) -> Member:
        """Who is to be drained for the end of this one: itself, or another one that does the same and may be ended.

        Raises:
            InvalidRequest: nobody may.
            Unavailable: the platform does not answer.
        """
        victims = (await self._scaler.get(member.shape)).victims
        if member.worker_id in victims:
            return member
        others = [m for m in self._controller.fleet.members() if m.worker_id in victims and m.role is member.role]
        for other in others:
            if or_another and other.state in (READY, STARTING, FAILED) and other.after_drain is AfterDrain.STAY:
                return other
        raise InvalidRequest(f"{member.worker_id} cannot be ended before {', '.join(victims)}", field="worker_id")

    def _member(self, worker_id: str, *states: str) -> Member:
        """Raises: NotFound, or InvalidRequest: it is in another state, or is being ended."""
        member = self._controller.fleet.get(worker_id)
        self._not_ending(member)
        if member.state not in states:
            raise InvalidRequest(f"{worker_id} is {member.state}, not {' or '.join(states)}", field="worker_id")
        return member

    def _not_ending(self, member: Member) -> None:
        """Raises: InvalidRequest."""
        if self._controller.is_ending(member.worker_id):
            raise InvalidRequest(f"{member.worker_id} is being ended", field="worker_id")

    def _leaves(self, member: Member, budget: Budget) -> None:
        """Raises: InvalidRequest: fewer would serve than have to; who is away, not up yet or still flips in does not count."""
        role = member.role.name.lower()
        least = budget.pools()[role].min_workers
        serving = {m.worker_id for m in self._controller.fleet.members() if m.role is member.role and self._serves(m)}
        if len(serving - {member.worker_id}) < least:
            raise InvalidRequest(f"{role}.min_workers = {least}: {len(serving)} are there", field=f"{role}.min_workers")

    def _serves(self, member: Member) -> bool:
        """By its own word, in the role that is wanted of it."""
        view = self._controller.view(member.worker_id)
        if member.state != READY or view is None:
            return False
        return not (view.load.draining or view.load.next_role) and Role(view.load.role) is member.role

    def _takes(self, member: Member, role: Role, budget: Budget) -> None:
        """Raises: InvalidRequest: a pool may not have, or the budget not keep, this worker that is there; or it is of a wrong
        shape. Who is to leave or stands by does not count."""
        others = [m for m in self._controller.fleet.members() if m.worker_id != member.worker_id]
        name, most = role.name.lower(), budget.pools()[role.name.lower()].max_workers
        if most is not None and sum(m.role is role and m.stays for m in others) >= most:
            raise InvalidRequest(f"{name}.max_workers = {most}: so many are there", field=f"{name}.max_workers")
        num_gpus = (sum(m.after_drain is not AfterDrain.END for m in others) + 1) * self._gpus_per_worker
        is_more = not member.stays  # a flip takes no more than it had
        if is_more and budget.max_gpus is not None and num_gpus > budget.max_gpus:
            raise InvalidRequest(f"max_gpus = {budget.max_gpus}: with this worker {num_gpus} stay", field="max_gpus")
        shape = self._scaler.shape_of(role)
        if member.role is not role and member.shape != shape:
            raise InvalidRequest(
                f"{member.worker_id} is a {member.shape!r}, {name} workers are {shape!r}", field="worker_id"
            )

    def _fits(self, role: Role, budget: Budget) -> None:
        """Raises: InvalidRequest: one more worker is beyond the budget."""
        members = self._controller.fleet.members()
        num_gpus = (len(members) + 1) * self._gpus_per_worker
        if budget.max_gpus is not None and num_gpus > budget.max_gpus:
            raise InvalidRequest(f"max_gpus = {budget.max_gpus}: one more worker makes {num_gpus}", field="max_gpus")
        name, most = role.name.lower(), budget.pools()[role.name.lower()].max_workers
        if most is not None and sum(m.role is role for m in members) >= most:
            raise InvalidRequest(f"{name}.max_workers = {most}: so many are there", field=f"{name}.max_workers")

    # -- what has to wait --------------------------------------------------------------------------------------------

    async def settle(self) -> AsyncIterator[Decision]:
        """Do what has become possible; yields what is worth a line in the log of decisions. While a lever is being pulled, it
        all waits for the next call.

        Raises:
            Unavailable: machines do not answer for at least one worker; what they must do waits for the next call.
        """
        if self.alone.locked():
            return
        async with self.alone:
            self._note_times()
            due = list(self._due())
            outcomes = await asyncio.gather(*(self._end(worker_id) for _, worker_id, _ in due), return_exceptions=True)
        for (lever, worker_id, why), outcome in zip(due, outcomes, strict=True):
            if outcome is None:
                yield Decision(lever, f"end {worker_id}", why, applied=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    def _due(self) -> Iterator[tuple[str, str, str]]:
        """Ends that are due: lever, worker and why. Those that may stand by do so."""
        for member in self._controller.fleet.members():
            can_end = self._scaler.can_end(member.worker_id)
            if can_end and (why := self._given_up(member)):
                yield "give_up", member.worker_id, why
            elif member.after_drain is AfterDrain.STANDBY and member.state == DRAINING and self._is_idle(member):
                self._controller.stand_by(member.worker_id)
            elif member.after_drain is AfterDrain.END and (why := self._may_end(member)) and can_end:
                yield "end", member.worker_id, why

    def _given_up(self, member: Member) -> str:
        """Why; "" where not."""
        never_came = member.extra and member.state == FAILED and not member.epoch
        return f"it did not come up: {member.reason}" if never_came else ""

    def _may_end(self, member: Member) -> str:
        """Why a worker that is to leave may do so now; "" while it may not."""
        now_s, worker_id = self._now_s(), member.worker_id
        if self._controller.is_ending(worker_id):
            return "its end had begun"
        if not member.epoch:
            return f"it was to leave, and never came up{': ' if member.reason else ''}{member.reason}"
        drain_s = self._waits.drain_s_by_role.get(member.role, self._waits.drain_s)
        if now_s - self._draining_since_s.setdefault(worker_id, now_s) > drain_s:
            return f"it was not idle after {drain_s:g} s; its calls go on elsewhere"
        if member.state == FAILED:
            return f"it was to leave, and is away: {member.reason}" if self._is_gone(member) else ""
        if not self._is_idle(member):
            self._idle_since_s.pop(worker_id, None)
            return ""
        idle_s = now_s - self._idle_since_s.setdefault(worker_id, now_s)
        return "it has drained" if idle_s >= self._waits.resumed_s else ""

    def _is_gone(self, member: Member) -> bool:
        """Away for long enough, and not only from here: routers may go on with calls there that we know nothing of."""
        now_s = self._now_s()
        if now_s - self._away_since_s.setdefault(member.worker_id, now_s) < self._waits.resumed_s:
            return False
        views = (view for report in self._controller.fresh_reports() for view in report.workers)
        return not any(view.worker_id == member.worker_id and view.state != "connecting" for view in views)

    def _is_idle(self, member: Member) -> bool:
        """By its own word, given since it drains."""
        view = self._controller.view(member.worker_id)
        return view is not None and view.load.draining and view.load.idle

    def _expendable(self, member: Member) -> Member:
        """Raises: InvalidRequest: calls may be running there, or it is configured and only late."""
        if self._controller.is_ending(member.worker_id):
            return member
        if member.state not in (STARTING, STANDBY, FAILED):
            raise InvalidRequest(f"{member.worker_id} is {member.state}: drain it first", field="worker_id")
        if member.state == STARTING and not member.extra:
            raise InvalidRequest(
                f"{member.worker_id} is configured: its start is tried again for ever", field="worker_id"
            )
        if member.state == FAILED and member.epoch and not self._is_gone(member):
            raise InvalidRequest(
                f"{member.worker_id} may come back: it is away for less than {self._waits.resumed_s:g} s, or a router hears it",
                field="worker_id",
            )
        return member

    async def _end(self, worker_id: str) -> None:
        """Raises: Unavailable: it will have to be asked for again; it does not come back."""
        self._controller.begin_end(worker_id)
        await self._scaler.scale_down(worker_id)
        self._controller.forget(worker_id)

    def _note_times(self) -> None:
        """Since when who is away; what was noted of others is forgotten."""
        members, now_s = self._controller.fleet.members(), self._now_s()
        leaving = {m.worker_id for m in members if m.after_drain is AfterDrain.END}
        away = {m.worker_id for m in members if m.state == FAILED}
        kept = ((self._draining_since_s, leaving), (self._idle_since_s, leaving), (self._away_since_s, away))
        for since_s, ids in kept:
            for worker_id in since_s.keys() - ids:
                del since_s[worker_id]
        for worker_id in away:
            self._away_since_s.setdefault(worker_id, now_s)


NAMES: dict[type[Act], str] = {
    Tune: "tune",
    LocalPrefill: "local_prefill",
    Flip: "flip",
    Undrain: "undrain",
    Wake: "wake",
    Create: "create",
    Drain: "drain",
    GiveUp: "give_up",
}


def lever_of(act: Act) -> str:
    """Its name in decisions and metrics."""
    return "standby" if isinstance(act, Drain) and act.keep_standby else NAMES[type(act)]


def describe(act: Act) -> str:
    """What is to be done, as an operator would say it."""
    match act:
        case Tune(worker_id, tuning):
            return (
                f"tune {worker_id} to {tuning.max_num_seqs} sequences, {tuning.max_num_batched_tokens} tokens a step,"
                f" chunks of {tuning.chunk_tokens}"
            )
        case LocalPrefill(max_tokens):
            return f"prefill up to {max_tokens} tokens where they decode"
        case Flip(worker_id, role):
            return f"flip {worker_id} to {role.name.lower()}"
        case Undrain(worker_id):
            return f"undrain {worker_id}"
        case Wake(worker_id, role):
            return f"wake {worker_id} as {role.name.lower()}"
        case Create(role, shape):
            return f"create a {role.name.lower()} worker on {shape}"
        case Drain(worker_id, keep_standby):
            return f"drain {worker_id}, then {'keep it as a standby' if keep_standby else 'end it'}"
        case GiveUp(worker_id):
            return f"end {worker_id}"
