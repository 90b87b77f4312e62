"""/admin/v1/slo: the SLO classes in force, their history, and how well they are met.

Writes are compare-and-swap: the ETag of a GET goes into If-Match; 428 without one, 412 when somebody else was faster. A set is
checked as a whole before anything is stored: 422 for targets that contradict each other or are below the physical floor. What
:dryRun says of a change is what the change itself would say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Response

from baton import clock
from baton.slo import SLO
from baton.v1 import control_pb2
from router.controller.admin_access import Doors, IfMatch, Refusal, etag, require_match
from router.controller.admin_models import (
    DryRun,
    Import,
    Name,
    PatchClass,
    PatchSet,
    PutClass,
    PutSet,
    Rollback,
    SLOClass,
    SLOClassPatch,
    Version,
)
from router.controller.controller import Controller
from router.controller.feasibility import NO_FORECAST, Floor, FloorSource, Forecast, NoForecast, infeasible
from router.controller.slo_changes import DEFAULT_CLASS, changes, contradiction, with_class
from router.controller.slo_merge import class_of, patched, patched_set
from router.controller.slo_store import SLOSet
from router.controller.versioned import MAX_VERSION, Revision

_FORMAT = "baton.slo/1"
_RESERVED = ("history", "diff", "export")  # paths beside the classes' own
_MAX_LISTED = 1_000


class _Changes:
    """How a change of the set is checked and stored."""

    def __init__(self, controller: Controller, floors: FloorSource, require_reason: bool) -> None:
        self._controller = controller
        self._floors = floors
        self._require_reason = require_reason

    async def swap(
        self, if_match: str | None, who: str, reason: str, change: Callable[[SLOSet], SLOSet]
    ) -> Revision[SLOSet]:
        """Apply `change` to the revision that If-Match names, and store it if that one is still in force."""
        base = self._controller.slo
        require_match(if_match, base.version, base.who)
        if self._require_reason and not reason.strip():
            raise Refusal(422, "invalid", "reason: say why; this cluster requires it", field="reason")
        classes = change(base.value)
        self.check(base.value, classes)
        return await self._controller.in_force.slo.put(base.version, classes, who, reason)

    def check(self, base: SLOSet, classes: SLOSet) -> None:
        """Raises: Refusal: the set cannot be in force. A target that is below the floor already hinders no other change."""
        if all(slo.name != DEFAULT_CLASS for slo in classes):
            raise _invalid("classes", f"{DEFAULT_CLASS!r} must stay; calls that name no class use it")
        for slo in classes:
            if slo.name in _RESERVED:
                raise _invalid(f"classes.{slo.name}", f"the name is taken: /slo/{slo.name} is something else")
            if found := contradiction(slo):
                raise _invalid(f"classes.{slo.name}.{found[0]}", found[1])
        floor = self._floors.floor()
        standing = infeasible(base, floor)
        for miss in infeasible(classes, floor):
            if miss not in standing:
                message = f"{miss.field}: {miss.target_ms:g} is below the physical floor of {miss.floor_ms:g}"
                raise Refusal(422, "infeasible", f"{message} ({floor.source})", field=miss.field)


def slo_routes(
    controller: Controller,
    doors: Doors,
    floors: FloorSource,
    forecast: Forecast | None = None,
    *,
    require_reason: bool = False,
) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")
    view, operate = Depends(doors.view), Depends(doors.operate)
    made = _Changes(controller, floors, require_reason)

    async def swap(
        response: Response, if_match: str | None, who: str, reason: str, change: Callable[[SLOSet], SLOSet]
    ) -> dict[str, object]:
        revision = await made.swap(if_match, who, reason, change)
        response.headers["etag"] = etag(revision.version)
        return _set_json(controller, revision)

    async def dry_run(if_match: str | None, change: Callable[[SLOSet], SLOSet]) -> dict[str, object]:
        base = controller.slo
        if if_match is not None:
            require_match(if_match, base.version, base.who)
        classes = change(base.value)
        made.check(base.value, classes)
        return {
            "dry_run": True,
            "version": base.version,
            "changes": _changes_json(base.value, classes),
            "classes": _classes_json(classes),
            "floor": _floor_json(floors.floor()),
            "prediction": await _prediction_json(forecast, base.value, classes),
        }

    @api.get("/slo", dependencies=[view])
    async def get_set(response: Response) -> dict[str, object]:
        response.headers["etag"] = etag(controller.slo.version)
        return {**_set_json(controller, controller.slo), "floor": _floor_json(floors.floor())}

    @api.put("/slo")
    async def put_set(
        body: PutSet, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        classes = tuple(targets.named(name) for name, targets in body.classes.items())
        return await swap(response, if_match, who, body.reason, lambda base: classes)

    @api.patch("/slo")
    async def patch_set(
        body: PatchSet, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        return await swap(response, if_match, who, body.reason, lambda base: patched_set(base, body.classes))

    @api.post("/slo:dryRun", dependencies=[view])
    async def dry_run_set(body: DryRun, if_match: IfMatch = None) -> dict[str, object]:
        return await dry_run(if_match, lambda base: patched_set(() if body.replace else base, body.classes))

    @api.get("/slo/history", dependencies=[view])
    async def history(
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 50,
        before: Annotated[int, Query(ge=1, le=MAX_VERSION)] = MAX_VERSION,
    ) -> dict[str, object]:
        found = await controller.in_force.slo.history(limit + 1, before)  # and the one that the last one replaced
        pairs = zip(found, [*(revision.value for revision in found[1:]), None], strict=True)
        return {
            "revisions": [
                {**_revision_json(revision), "changes": [] if older is None else _changes_json(older, revision.value)}
                for revision, older in list(pairs)[:limit]
            ]
        }

    @api.get("/slo/diff", dependencies=[view])
    async def diff(old: Version, new: Version | None = None) -> dict[str, object]:
        before = await controller.in_force.slo.at(old)
        after = controller.slo if new is None else await controller.in_force.slo.at(new)
        return {"old": before.version, "new": after.version, "changes": _changes_json(before.value, after.value)}

    @api.get("/slo/export", dependencies=[view])
    async def export(response: Response) -> dict[str, object]:
        revision = controller.slo
        response.headers["etag"] = etag(revision.version)
        told = {"version": revision.version, "at_unix_s": revision.at_unix_s, "who": revision.who}
        return {"format": _FORMAT, **told, "classes": _classes_json(revision.value)}

    @api.post("/slo:import")
    async def import_set(
        body: Import, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        classes = tuple(targets.named(name) for name, targets in body.classes.items())
        return await swap(response, if_match, who, body.reason, lambda base: classes)

    @api.post("/slo:rollback")
    async def rollback(
        body: Rollback, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        old = await controller.in_force.slo.at(body.version)
        reason = body.reason or f"back to version {body.version}"
        return await swap(response, if_match, who, reason, lambda base: old.value)

    @api.get("/slo/{name}", dependencies=[view])
    async def get_class(name: str, response: Response) -> dict[str, object]:
        response.headers["etag"] = etag(controller.slo.version)
        return dataclasses.asdict(class_of(controller.slo.value, name))

    @api.put("/slo/{name}")
    async def put_class(
        name: Name, body: PutClass, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        targets = SLOClass(**body.model_dump(exclude={"reason"})).named(name)
        return await swap(response, if_match, who, body.reason, lambda base: with_class(base, targets))

    @api.patch("/slo/{name}")
    async def patch_class(
        name: Name, body: PatchClass, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        return await swap(response, if_match, who, body.reason, lambda base: _patched_class(base, name, body))

    @api.post("/slo/{name}:dryRun", dependencies=[view])
    async def dry_run_class(name: Name, body: PatchClass, if_match: IfMatch = None) -> dict[str, object]:
        return await dry_run(if_match, lambda base: _patched_class(base, name, body))

    @api.get("/attainment", dependencies=[view])
    async def attainment() -> dict[str, object]:
        return {"classes": _verdicts_json(controller), "routers": _routers_json(controller)}

    return api


def _invalid(field: str, why: str) -> Refusal:
    return Refusal(422, "invalid", f"{field}: {why}", field=field)


def _patched_class(base: SLOSet, name: str, body: PatchClass) -> SLOSet:
    patch = SLOClassPatch(**body.model_dump(exclude={"reason"}, exclude_unset=True))
    return with_class(base, patched(base, name, patch))


def _classes_json(classes: SLOSet) -> dict[str, dict[str, object]]:
    return {
        slo.name: {name: value for name, value in dataclasses.asdict(slo).items() if name != "name"} for slo in classes
    }


def _changes_json(old: Sequence[SLO], new: Sequence[SLO]) -> list[dict[str, object]]:
    return [
        {"class": change.class_name, "field": change.field, "old": change.old, "new": change.new}
        for change in changes(old, new)
    ]


def _floor_json(floor: Floor) -> dict[str, object]:
    return {"ttft_ms": floor.ttft_ms, "tpot_ms": floor.tpot_ms, "source": floor.source or "nothing is measured yet"}


async def _prediction_json(forecast: Forecast | None, before: SLOSet, after: SLOSet) -> dict[str, object]:
    if forecast is None:
        return {"available": False, "reason": NO_FORECAST}
    try:
        outlook = await forecast.predict(before, after)
    except NoForecast as error:
        return {"available": False, "reason": str(error)}
    return {"available": True, **dataclasses.asdict(outlook)}


def _set_json(controller: Controller, revision: Revision[SLOSet]) -> dict[str, object]:
    return {
        **_revision_json(revision),
        "verdicts": _verdicts_json(controller),
        "routers": _routers_json(controller),
    }


def _revision_json(revision: Revision[SLOSet]) -> dict[str, object]:
    return {
        "version": revision.version,
        "classes": _classes_json(revision.value),
        "at_unix_s": revision.at_unix_s,
        "who": revision.who,
        "reason": revision.reason,
    }


def _verdicts_json(controller: Controller) -> dict[str, dict[str, int | float | None]]:
    return {name: _class_verdicts_json(verdicts) for name, verdicts in sorted(controller.verdicts().items())}


def _class_verdicts_json(verdicts: control_pb2.ClassVerdicts) -> dict[str, int | float | None]:
    counts = {
        "met": verdicts.num_met,
        "ttft": verdicts.num_missed_ttft,
        "tpot": verdicts.num_missed_tpot,
        "itl": verdicts.num_missed_itl,
        "e2e": verdicts.num_missed_e2e,
        "failed": verdicts.num_failed,
    }
    total = sum(counts.values())
    return {**counts, "attainment": verdicts.num_met / total if total else None}


def _routers_json(controller: Controller) -> list[dict[str, object]]:
    now_s = clock.now_s()
    return [
        {
            "router_id": heard.report.router_id,
            "pid": heard.report.pid,
            "slo_version": heard.report.slo_version,
            "num_inflight": heard.report.num_inflight,
            "heard_s_ago": round(now_s - heard.at_s, 3),
        }
        for heard in controller.reports()
    ]
