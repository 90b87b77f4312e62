"""/admin/v1/slo: the SLO classes in force, their history, and how well they are met.

Writes are compare-and-swap: the ETag of a GET goes into If-Match; 428 without one, 412 when somebody else was faster.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Response

from baton.errors import NotFound
from baton.slo import SLO
from baton.v1 import control_pb2
from router.controller.admin_access import Doors, Refusal
from router.controller.admin_models import (
    Name,
    PatchClass,
    PatchSet,
    PutClass,
    PutSet,
    Rollback,
    SLOClass,
    SLOClassPatch,
)
from router.controller.controller import Controller
from router.controller.slo_store import Revision

IfMatch = Annotated[str | None, Header(alias="if-match")]
DEFAULT_CLASS = "interactive"  # of calls that name none: serving.proto Slo.class_name


def slo_routes(controller: Controller, doors: Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")
    view, operate = Depends(doors.view), Depends(doors.operate)

    async def swap(
        response: Response, if_match: str | None, who: str, reason: str, change: Callable[[Revision], list[SLO]]
    ) -> dict[str, object]:
        """Apply `change` to the revision that If-Match names, and store it if that one is still in force."""
        base = controller.slo
        _require_match(if_match, base)
        classes = change(base)
        if all(slo.name != DEFAULT_CLASS for slo in classes):
            raise Refusal(
                422,
                "invalid",
                f"classes: {DEFAULT_CLASS!r} must stay; calls that name no class use it",
                field="classes",
            )
        revision = await controller.put_slo(base.version, classes, who, reason)
        response.headers["etag"] = _etag(revision)
        return _set_json(controller, revision)

    @api.get("/slo", dependencies=[view])
    async def get_set(response: Response) -> dict[str, object]:
        response.headers["etag"] = _etag(controller.slo)
        return _set_json(controller, controller.slo)

    @api.put("/slo")
    async def put_set(
        body: PutSet, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        def change(base: Revision) -> list[SLO]:
            return [targets.named(name) for name, targets in body.classes.items()]

        return await swap(response, if_match, who, body.reason, change)

    @api.patch("/slo")
    async def patch_set(
        body: PatchSet, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        def change(base: Revision) -> list[SLO]:
            classes = {slo.name: slo for slo in base.classes}
            for name, patch in body.classes.items():
                if patch is None:
                    _class(base, name)
                    del classes[name]
                else:
                    classes[name] = _patched(name, classes.get(name), patch)
            return list(classes.values())

        return await swap(response, if_match, who, body.reason, change)

    @api.get("/slo/history", dependencies=[view])
    async def history(limit: Annotated[int, Query(ge=1, le=1_000)] = 50) -> dict[str, object]:
        return {"revisions": [_revision_json(revision) for revision in await controller.slo_history(limit)]}

    @api.post("/slo:rollback")
    async def rollback(
        body: Rollback, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        old = await controller.slo_revision(body.version)
        reason = body.reason or f"back to version {body.version}"
        return await swap(response, if_match, who, reason, lambda base: list(old.classes))

    @api.get("/slo/{name}", dependencies=[view])
    async def get_class(name: str, response: Response) -> dict[str, object]:
        response.headers["etag"] = _etag(controller.slo)
        return dataclasses.asdict(_class(controller.slo, name))

    @api.put("/slo/{name}")
    async def put_class(
        name: Name,
        body: PutClass,
        response: Response,
        if_match: IfMatch = None,
        who: str = operate,
    ) -> dict[str, object]:
        targets = SLOClass(**body.model_dump(exclude={"reason"})).named(name)
        return await swap(response, if_match, who, body.reason, lambda base: _with(base, targets))

    @api.patch("/slo/{name}")
    async def patch_class(
        name: Name,
        body: PatchClass,
        response: Response,
        if_match: IfMatch = None,
        who: str = operate,
    ) -> dict[str, object]:
        patch = SLOClassPatch(**body.model_dump(exclude={"reason"}, exclude_unset=True))
        return await swap(
            response, if_match, who, body.reason, lambda base: _with(base, _patched(name, _class(base, name), patch))
        )

    @api.get("/attainment", dependencies=[view])
    async def attainment() -> dict[str, object]:
        return {"classes": _verdicts_json(controller), "routers": _routers_json(controller)}

    return api


def _etag(revision: Revision) -> str:
    return f'"{revision.version}"'


def _require_match(if_match: str | None, base: Revision) -> None:
    if if_match is None:
        raise Refusal(428, "precondition_required", "send If-Match with the ETag of a GET", field="if-match")
    tags = {tag.strip() for tag in if_match.split(",")}
    if not tags & {"*", _etag(base)}:
        raise stale(base)


def stale(current: Revision) -> Refusal:
    message = f"version {current.version} is in force, set by {current.who}; read it and try again"
    return Refusal(412, "stale", message, field="if-match", etag=_etag(current))


def _class(revision: Revision, name: str) -> SLO:
    for slo in revision.classes:
        if slo.name == name:
            return slo
    known = ", ".join(slo.name for slo in revision.classes)
    raise NotFound(f"no SLO class {name!r}; there are: {known}", field="name")


def _with(revision: Revision, targets: SLO) -> list[SLO]:
    """The set with one class replaced, in its place, or added."""
    return list({**{slo.name: slo for slo in revision.classes}, targets.name: targets}.values())


def _patched(name: str, known: SLO | None, patch: SLOClassPatch) -> SLO:
    """The class with the patch's fields; a new class needs all required ones."""
    fields = dataclasses.asdict(known) if known else {}
    fields.pop("name", None)
    fields.update(patch.model_dump(exclude_unset=True))
    return SLOClass(**fields).named(name)


def _set_json(controller: Controller, revision: Revision) -> dict[str, object]:
    return {
        **_revision_json(revision),
        "verdicts": _verdicts_json(controller),
        "routers": _routers_json(controller),
    }


def _revision_json(revision: Revision) -> dict[str, object]:
    classes = {slo.name: dataclasses.asdict(slo) for slo in revision.classes}
    for fields in classes.values():
        del fields["name"]
    return {
        "version": revision.version,
        "classes": classes,
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
    now_s = time.monotonic()
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
