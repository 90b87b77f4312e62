"""/admin/v1/pools, and orders to pools and workers that go through the levers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from fastapi import APIRouter, Depends

from baton.request import Role
from router.controller.admin_access import Doors
from router.controller.admin_models import FlipOrder, ReasonOnly, RoleName, ScaleOrder, TuneOrder, WakeOrder
from router.controller.autoscaler.acts import Act, Drain, Flip, Tune, Wake
from router.controller.autoscaler.facts import Tuning
from router.controller.controller import Controller
from router.controller.live_control import LiveControl
from router.controller.pool_orders import Order, PoolOrders

NO_REASON = ReasonOnly()
_STATES = ("ready", "starting", "draining", "standby", "failed")


def pool_routes(controller: Controller, doors: Doors, control: LiveControl | None) -> APIRouter:
    """`control`: None = nobody here starts or ends workers; pools are only shown."""
    api = APIRouter(prefix="/admin/v1")

    @api.get("/pools", dependencies=[Depends(doors.view)])
    async def pools() -> dict[str, object]:
        shown: dict[str, object] = {"pools": {role.name.lower(): _pool_json(controller, role) for role in Role}}
        if control is not None:
            shown["autoscaler"] = _autoscaler_json(controller, control)
        return shown

    if control is not None:
        _add_orders(api, control.orders, doors)
    return api


def _add_orders(api: APIRouter, orders: PoolOrders, doors: Doors) -> None:
    operate = Depends(doors.operate)

    async def pull(act: Act, who: str, reason: str) -> dict[str, object]:
        return {"done": [await orders.carry_out(act, Order(who, reason))]}

    @api.post("/pools/{role}:scale")
    async def scale(role: RoleName, body: ScaleOrder, who: str = operate) -> dict[str, object]:
        """To a size, within the budget."""
        return {"done": await orders.scale(Role[role.upper()], body.workers, Order(who, body.reason))}

    @api.post("/workers/{worker_id}:flip")
    async def flip(worker_id: str, body: FlipOrder, who: str = operate) -> dict[str, object]:
        """Once idle; answered when the worker has begun to drain for it."""
        return await pull(Flip(worker_id, Role[body.role.upper()]), who, body.reason)

    @api.post("/workers/{worker_id}:standby")
    async def standby(worker_id: str, body: ReasonOnly = NO_REASON, who: str = operate) -> dict[str, object]:
        """Once idle."""
        return await pull(Drain(worker_id, keep_standby=True), who, body.reason)

    @api.post("/workers/{worker_id}:wake")
    async def wake(worker_id: str, body: WakeOrder, who: str = operate) -> dict[str, object]:
        return await pull(Wake(worker_id, Role[body.role.upper()]), who, body.reason)

    @api.post("/workers/{worker_id}:end")
    async def end(worker_id: str, body: ReasonOnly = NO_REASON, who: str = operate) -> dict[str, object]:
        """For good, once idle."""
        return await pull(Drain(worker_id, or_another=False), who, body.reason)

    @api.post("/workers/{worker_id}:tune")
    async def tune(worker_id: str, body: TuneOrder, who: str = operate) -> dict[str, object]:
        tuning = Tuning(body.max_num_seqs, body.max_num_batched_tokens, body.chunk_tokens)
        return await pull(Tune(worker_id, tuning), who, body.reason)


def _pool_json(controller: Controller, role: Role) -> dict[str, object]:
    members = [member for member in controller.fleet.members() if member.role is role]
    states = Counter(member.state for member in members)
    loads = [view.load for member in members if (view := controller.view(member.worker_id))]
    return {
        "workers": [member.worker_id for member in members],
        "desired": sum(member.stays for member in members),  # neither to leave nor to stand by
        **{f"num_{state}": states[state] for state in _STATES},
        "num_flipping": sum(bool(load.next_role) for load in loads),
        "num_running": sum(load.num_running for load in loads),
        "num_waiting": sum(load.num_waiting for load in loads),
        "active_blocks": sum(load.active_blocks for load in loads),
        "reserved_blocks": sum(load.reserved_blocks for load in loads),
        "free_blocks": sum(load.free_blocks for load in loads),
    }


def _autoscaler_json(controller: Controller, control: LiveControl) -> dict[str, object]:
    settings = controller.in_force.settings.revision.value
    return {
        "mode": settings.mode.value,
        "budget": asdict(settings.budget),
        "leads": control.loop.leads,  # false: another controller acts on this database
        "last_tick_s": control.loop.tick_age_s,
        "times": asdict(control.live_times.times),
        "spare_workers": control.facts.spare_workers,
        "local_prefill_tokens": controller.fleet.local_prefill_tokens,
    }
