"""Carries out what the autoscaler, or an operator, asks for: each lever by its orders to workers, routers and machines.

    tune, local_prefill, flip, undrain, wake    an order that is obeyed at once, or begins to be, or is refused
    create                                      asked for; the worker is pending until it announces itself
    drain                                       the worker takes no new work; what follows waits until it is idle
    give_up                                     ended at once: nothing runs on what is pending, away or stands by

`settle` does what had to wait, in whatever mode: a drained worker that is idle stands by or is ended, one that did not come up
is given up. It goes by the fleet alone, which outlives this process, so a new controller goes on where the last one stopped.

Nothing in flight is lost. A worker is ended only when it says that nothing is open there and every router has read of every
end; or when it is away; or after `drain_s`, and then routers carry its calls on elsewhere, as after a death. It is kept for
another RESUMED_S, since it may hold the only copy of a call that its client resumes. Event loop only.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from baton.errors import InvalidRequest
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
    resumed_s: float = 30.0  # once idle, for clients that resume a call which broke there


class Levers:
    """Of one fleet."""

    def __init__(
        self,
        controller: Controller,
        scaler: PoolScaler,
        gpus_per_worker: int,
        waits: Waits = Waits(),
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._scaler = scaler
        self._gpus_per_worker = gpus_per_worker
        self._waits = waits
        self._now_s = now_s
        self._draining_since_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}

    # -- at once -----------------------------------------------------------------------------------------------------

    async def pull(self, act: Act, budget: Budget) -> str:
        """Carry one act out, or begin to. Returns what was done, for the log.

        Raises:
            BatonError: it was refused, by worker, machine or budget, or nobody answered; nothing has changed.
        """
        match act:
            case Tune(worker_id, tuning):
                await self._controller.tune(worker_id, tuning)
            case LocalPrefill(max_tokens):
                self._controller.want_local_prefill(max_tokens)
            case Flip(worker_id, role):
                self._leaves(self._member(worker_id, READY), budget)
                await self._controller.set_role(worker_id, role)
            case Undrain(worker_id):
                await self._controller.drain(worker_id, False)
            case Wake(worker_id, role):
                await self._wake(self._member(worker_id, STANDBY), role)
            case Create(role, shape):
                self._fits(role, budget)
                return f"create {await self._scaler.scale_up(role, shape)}"
            case Drain(worker_id, keep_standby):
                await self._drain(self._member(worker_id, READY, DRAINING, FAILED), keep_standby, budget)
            case GiveUp(worker_id):
                await self._end(self._expendable(self._controller.fleet.get(worker_id)))
        return describe(act)

    async def _wake(self, member: Member, role: Role) -> None:
        if member.role is not role:
            await self._controller.set_role(member.worker_id, role)
        await self._controller.drain(member.worker_id, False)

    async def _drain(self, member: Member, keep_standby: bool, budget: Budget) -> None:
        if member.state == READY:
            self._leaves(member, budget)
        if keep_standby and member.state == FAILED:
            raise InvalidRequest(f"{member.worker_id} is away: {member.reason}", field="worker_id")
        if not keep_standby:
            size = await self._scaler.get(member.shape)
            if member.worker_id not in size.victims:
                raise InvalidRequest(
                    f"{member.worker_id} cannot be ended before {', '.join(size.victims)}", field="worker_id"
                )
        if member.state == FAILED:
            self._controller.let_go(member.worker_id)
            return
        after = AfterDrain.STANDBY if keep_standby else AfterDrain.END
        await self._controller.drain(member.worker_id, True, after)

    def _member(self, worker_id: str, *states: str) -> Member:
        """Raises: NotFound, or InvalidRequest: it is in another state."""
        member = self._controller.fleet.get(worker_id)
        if member.state not in states:
            raise InvalidRequest(f"{worker_id} is {member.state}, not {' or '.join(states)}", field="worker_id")
        return member

    def _leaves(self, member: Member, budget: Budget) -> None:
        """Raises: InvalidRequest: fewer would serve than have to; who is away or not up yet does not count."""
        role = member.role.name.lower()
        least = budget.pools()[role].min_workers
        rest = [m for m in self._controller.fleet.members() if m.role is member.role and m.state == READY]
        if len(rest) - 1 < least:
            raise InvalidRequest(f"{role}.min_workers = {least}: {len(rest)} are there", field=f"{role}.min_workers")

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
        """Do what has become possible; yields what is worth a line in the log of decisions.

        Raises:
            Unavailable: machines do not answer; the rest waits for the next call.
        """
        for member in self._controller.fleet.members():
            if why := self._given_up(member):
                await self._end(member)
                yield Decision("give_up", f"end {member.worker_id}", why, applied=True)
            elif member.after_drain is AfterDrain.STANDBY and member.state == DRAINING and self._is_idle(member):
                self._controller.stand_by(member.worker_id)
            elif member.after_drain is AfterDrain.END and (why := self._may_end(member)):
                await self._end(member)
                yield Decision("end", f"end {member.worker_id}", why, applied=True)
        self._forget_gone()

    def _given_up(self, member: Member) -> str:
        """Why; "" where not."""
        never_came = member.extra and member.state == FAILED and not member.epoch
        return f"it did not come up: {member.reason}" if never_came else ""

    def _may_end(self, member: Member) -> str:
        """Why a worker that is to leave may do so now; "" while it may not."""
        if member.state == FAILED:
            return f"it was to leave, and is away: {member.reason}"
        now_s, worker_id = self._now_s(), member.worker_id
        if now_s - self._draining_since_s.setdefault(worker_id, now_s) > self._waits.drain_s:
            return f"it was not idle after {self._waits.drain_s:g} s; its calls go on elsewhere"
        if not self._is_idle(member):
            self._idle_since_s.pop(worker_id, None)
            return ""
        idle_s = now_s - self._idle_since_s.setdefault(worker_id, now_s)
        return "it has drained" if idle_s >= self._waits.resumed_s else ""

    def _is_idle(self, member: Member) -> bool:
        """By its own word, given since it drains."""
        view = self._controller.view(member.worker_id)
        return view is not None and view.load.draining and view.load.idle

    def _expendable(self, member: Member) -> Member:
        """Raises: InvalidRequest: calls may be running there, or it is configured and only late."""
        if member.state not in (STARTING, STANDBY, FAILED):
            raise InvalidRequest(f"{member.worker_id} is {member.state}: drain it first", field="worker_id")
        if member.state == STARTING and not member.extra:
            raise InvalidRequest(
                f"{member.worker_id} is configured: its start is tried again for ever", field="worker_id"
            )
        return member

    async def _end(self, member: Member) -> None:
        await self._scaler.scale_down(member.worker_id)
        self._controller.forget(member.worker_id)

    def _forget_gone(self) -> None:
        leaving = {m.worker_id for m in self._controller.fleet.members() if m.after_drain is AfterDrain.END}
        for since_s in (self._draining_since_s, self._idle_since_s):
            for worker_id in since_s.keys() - leaving:
                del since_s[worker_id]


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
