"""/admin/v1/workers and config: who serves, how loaded they are, and orders to single workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from fastapi import APIRouter, Depends

from baton.config import ClusterConfig
from baton.database_url import without_password
from baton.log import get_log
from baton.request import Role
from baton.v1 import worker_pb2
from router.controller.admin_access import Doors
from router.controller.admin_models import SetRole
from router.controller.controller import Controller
from router.controller.fleet_state import Member

log = get_log("controller.admin")


def worker_routes(controller: Controller, cluster: ClusterConfig, doors: Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")
    view, operate = Depends(doors.view), Depends(doors.operate)

    @api.get("/workers", dependencies=[view])
    async def workers() -> dict[str, object]:
        ejections = _ejections(controller)
        members = [_member_json(controller, member, ejections) for member in controller.fleet.members()]
        return {"fleet_version": controller.fleet.version, "workers": members}

    @api.get("/config", dependencies=[view])
    async def config() -> dict[str, object]:
        return {name: _without_passwords(value) for name, value in dataclasses.asdict(cluster).items()}

    @api.post("/workers/{worker_id}:drain")
    async def drain(worker_id: str, who: str = operate) -> dict[str, object]:
        log.info("drain", worker=worker_id, who=who)
        return _member_json(controller, await controller.drain(worker_id, True), _ejections(controller))

    @api.post("/workers/{worker_id}:undrain")
    async def undrain(worker_id: str, who: str = operate) -> dict[str, object]:
        log.info("undrain", worker=worker_id, who=who)
        return _member_json(controller, await controller.drain(worker_id, False), _ejections(controller))

    @api.post("/workers/{worker_id}:set_role")
    async def set_role(worker_id: str, body: SetRole, who: str = operate) -> dict[str, object]:
        log.info("set_role", worker=worker_id, role=body.role, who=who)
        return _member_json(
            controller, await controller.set_role(worker_id, Role[body.role.upper()]), _ejections(controller)
        )

    return api


def _without_passwords(value: object) -> object:
    """A setting, or a section of them, wherever a database's URL may stand in it."""
    if isinstance(value, Mapping):
        return {name: _without_passwords(item) for name, item in value.items()}
    return without_password(value) if isinstance(value, str) else value


def _member_json(
    controller: Controller, member: Member, ejections: Mapping[str, Mapping[str, str]]
) -> dict[str, object]:
    view = controller.view(member.worker_id)
    return {
        "worker_id": member.worker_id,
        "role": member.role.name.lower(),
        "state": member.state,
        "reason": member.reason,
        "epoch": f"{member.epoch:016x}" if member.epoch else "",
        "address": member.address,
        "pid": member.pid,
        "num_restarts": member.num_restarts,
        "fingerprint": member.fingerprint,
        "start_up": dataclasses.asdict(start_up) if (start_up := controller.starts.of(member.worker_id)) else None,
        "ejected": ejections.get(member.worker_id, {}),  # by router: why it gives this worker no calls
        "load": _load_json(view.load) if view else None,
        "links": [_link_json(link) for link in view.links.values()] if view else [],
        "kv": _kv_json(view.kv) if view and view.kv else None,
    }


def _ejections(controller: Controller) -> dict[str, dict[str, str]]:
    """Worker -> router -> why that router gives it no calls."""
    ejections: dict[str, dict[str, str]] = {}
    for report in controller.fresh_reports():
        for view in report.workers:
            if view.state == "ejected":
                ejections.setdefault(view.worker_id, {})[report.router_id] = view.reason
    return ejections


def _load_json(load: worker_pb2.Load) -> dict[str, object]:
    gauges = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
    role = Role(load.role).name.lower() if load.role else ""
    return {**gauges, "role": role, "kv_failures": dict(load.kv_failures)}


def _link_json(link: worker_pb2.LinkStatus) -> dict[str, object]:
    return {
        "peer": link.peer.worker_id,
        "peer_epoch": f"{link.peer.epoch:016x}",
        "state": link.state,
        "transport": link.transport,
        "reason": link.reason,
        "field": link.field,
        "mine": link.mine,
        "yours": link.yours,
    }


def _kv_json(kv: worker_pb2.KvStatus) -> dict[str, object]:
    return {
        "transport": kv.transport,
        "version": kv.version,
        "options": dict(kv.options),
        "pairs": [_pair_json(pair) for pair in kv.pairs],
    }


def _pair_json(pair: worker_pb2.KvPair) -> dict[str, object]:
    totals = {field.name: getattr(pair, field.name) for field in pair.DESCRIPTOR.fields if field.name != "link"}
    return {**_link_json(pair.link), **totals}
