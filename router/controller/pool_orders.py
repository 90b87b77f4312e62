"""What an operator orders of pools and single workers, through the same levers as the autoscaler, within the same budget.

Each order is a decision like the autoscaler's, in whatever mode, with who gave it; in mode auto the autoscaler may decide
otherwise at its next tick. A controller that does not lead refuses orders: the fleet it sees is another one's to change. Event
loop only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.errors import BatonError
from baton.request import Role
from router.controller.autoscaler.acts import Act, Create, Drain, GiveUp, Undrain, Wake
from router.controller.controller import Controller
from router.controller.decisions import Decision
from router.controller.fleet_state import DRAINING, STANDBY, STARTING, AfterDrain, Member
from router.controller.lease import Leadership
from router.controller.levers import Levers, describe, lever_of


@dataclass(frozen=True, slots=True)
class Order:
    who: str
    reason: str = ""


class PoolOrders:
    """Of one controller."""

    def __init__(
        self,
        controller: Controller,
        levers: Levers,
        shape_of: Callable[[Role], str],
        record: Callable[[Decision], Awaitable[None]],
        leadership: Leadership,
    ) -> None:
        """`shape_of`: of a new worker. `record`: writes a decision down. `leadership`: whether this controller is to act."""
        self._controller = controller
        self._levers = levers
        self._shape_of = shape_of
        self._record = record
        self._leadership = leadership

    async def carry_out(self, act: Act, order: Order) -> str:
        """Returns what was done. Raises: BatonError: as Levers.pull, or Unavailable: another controller leads."""
        async with self._levers.alone:
            return await self._carry_out_alone(act, order)

    async def _carry_out_alone(self, act: Act, order: Order) -> str:
        settings = self._controller.in_force.settings.revision.value
        reason, inputs = order.reason or f"asked for by {order.who}", {"who": order.who}
        try:
            self._leadership.check()
            done = await self._levers.pull_alone(act, settings.budget)
        except BatonError as error:
            refused = {**inputs, "not_done": error.message}
            await self._record(Decision(lever_of(act), describe(act), reason, applied=False, inputs=refused))
            raise
        await self._record(Decision(lever_of(act), done, reason, applied=True, inputs=inputs))
        return done

    async def scale(self, role: Role, num_workers: int, order: Order) -> list[str]:
        """Bring a pool to a size; what was done, in order. Raises: BatonError: what came before it holds, and is said."""
        done: list[str] = []
        async with self._levers.alone:
            self._leadership.check()
            for act in self.acts(role, num_workers):
                try:
                    done.append(await self._carry_out_alone(act, order))
                except BatonError as error:
                    error.message += f" (done so far: {', '.join(done)})" if done else ""
                    raise
        return done

    def acts(self, role: Role, num_workers: int) -> list[Act]:
        """The cheapest way to a size: back from draining, woken, created; or, the youngest first, not started, drained."""
        members = [member for member in self._controller.fleet.members() if member.role is role]
        stay = [member for member in members if member.stays]
        missing = num_workers - len(stay)
        if missing >= 0:
            is_ending = self._controller.is_ending
            back: list[Act] = [Undrain(m.worker_id) for m in members if _is_leaving(m) and not is_ending(m.worker_id)]
            woken: list[Act] = [
                Wake(m.worker_id, role) for m in self._controller.fleet.members() if _can_wake(m, self._shape_of(role))
            ]
            created: list[Act] = [Create(role, self._shape_of(role))] * missing
            return [*back, *woken, *created][:missing]
        youngest = sorted(stay, key=lambda m: (m.state != STARTING, not m.extra, -_number(m)))
        return [GiveUp(m.worker_id) if _is_asked_for(m) else Drain(m.worker_id) for m in youngest[:-missing]]


def _is_leaving(member: Member) -> bool:
    return member.state == DRAINING and member.after_drain is AfterDrain.END


def _is_asked_for(member: Member) -> bool:
    """And not up yet; a configured one is let go instead."""
    return member.state == STARTING and member.extra


def _can_wake(member: Member, shape: str) -> bool:
    return member.state == STANDBY and member.shape == shape


def _number(member: Member) -> int:
    """Of its name, the larger the younger; names of other platforms may have none."""
    tail = member.worker_id.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else 0
