"""/admin/v1/mode, budget, settings and decisions: how far the autoscaler may go, and what it did.

Mode and budget are one versioned document and share its ETag; both always want a reason, for both act on machines.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Response

from baton.errors import InvalidRequest
from router.controller.admin_access import Doors, IfMatch, Refusal, etag, require_match
from router.controller.admin_models import Bounds, PatchBudget, PutBudget, PutMode
from router.controller.controller import Controller
from router.controller.decisions import MAX_NUMBER, LoggedDecision
from router.controller.settings import Budget, ControlSettings, Mode, PoolBounds
from router.controller.versioned import Revision

_MAX_LISTED = 1_000
_MAX_UNIX_S = 1e11  # the year 5138: a time in milliseconds is a slip
Time = Annotated[float, Query(ge=0.0, le=_MAX_UNIX_S, allow_inf_nan=False)]


def control_routes(controller: Controller, doors: Doors, gpus_per_worker: int) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")
    view, operate = Depends(doors.view), Depends(doors.operate)
    live = controller.in_force.settings

    async def swap(
        response: Response,
        if_match: str | None,
        who: str,
        reason: str,
        change: Callable[[ControlSettings], ControlSettings],
    ) -> dict[str, object]:
        base = live.revision
        require_match(if_match, base.version, base.who)
        settings = change(base.value)
        try:
            settings.budget.check(gpus_per_worker)
        except InvalidRequest as error:
            raise Refusal(422, "infeasible", error.message, field=error.field) from None
        revision = await live.put(base.version, settings, who, reason)
        response.headers["etag"] = etag(revision.version)
        return _revision_json(revision)

    @api.get("/mode", dependencies=[view])
    @api.get("/budget", dependencies=[view])
    async def get_settings(response: Response) -> dict[str, object]:
        response.headers["etag"] = etag(live.revision.version)
        return _revision_json(live.revision)

    @api.put("/mode")
    async def put_mode(
        body: PutMode, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        mode = Mode(body.mode)
        return await swap(response, if_match, who, body.reason, lambda base: dataclasses.replace(base, mode=mode))

    @api.put("/budget")
    async def put_budget(
        body: PutBudget, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        budget = _budget(body)
        return await swap(response, if_match, who, body.reason, lambda base: dataclasses.replace(base, budget=budget))

    @api.patch("/budget")
    async def patch_budget(
        body: PatchBudget, response: Response, if_match: IfMatch = None, who: str = operate
    ) -> dict[str, object]:
        given = body.model_dump(exclude_unset=True)

        def change(base: ControlSettings) -> ControlSettings:
            return dataclasses.replace(
                base, budget=_budget(PutBudget(**_merged(dataclasses.asdict(base.budget), given)))
            )

        return await swap(response, if_match, who, body.reason, change)

    @api.get("/settings/history", dependencies=[view])
    async def history(limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 50) -> dict[str, object]:
        return {"revisions": [_revision_json(revision) for revision in await live.history(limit)]}

    @api.get("/decisions", dependencies=[view])
    async def decisions(
        since: Time = 0.0,
        until: Time | None = None,
        before: Annotated[int, Query(ge=1, le=MAX_NUMBER)] = MAX_NUMBER,
        limit: Annotated[int, Query(ge=1, le=_MAX_LISTED)] = 100,
    ) -> dict[str, object]:
        if until is not None and until < since:
            raise Refusal(422, "invalid", f"until = {until:g} is before since = {since:g}", field="until")
        found = await controller.query_decisions(limit, since, math.inf if until is None else until, before)
        return {"decisions": [_decision_json(logged) for logged in found]}

    return api


def _budget(body: PutBudget) -> Budget:
    return Budget(body.max_gpus, _bounds(body.prefill), _bounds(body.decode), _bounds(body.both))


def _bounds(body: Bounds) -> PoolBounds:
    return PoolBounds(body.min_workers, body.max_workers)


def _merged(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The budget with what a PATCH names; null takes a field back to its default."""
    merged = {**base, **{name: value for name, value in given.items() if not isinstance(value, dict)}}
    for pool in Budget().pools():
        fields = {**base[pool], **given.get(pool, {})}
        merged[pool] = {name: value for name, value in fields.items() if value is not None}
    return merged


def _revision_json(revision: Revision[ControlSettings]) -> dict[str, object]:
    return {
        "version": revision.version,
        "mode": revision.value.mode.value,
        "budget": dataclasses.asdict(revision.value.budget),
        "at_unix_s": revision.at_unix_s,
        "who": revision.who,
        "reason": revision.reason,
    }


def _decision_json(logged: LoggedDecision) -> dict[str, object]:
    decision = logged.decision
    return {
        "number": logged.number,
        "at_unix_s": logged.at_unix_s,
        "lever": decision.lever,
        "action": decision.action,
        "reason": decision.reason,
        "applied": decision.applied,
        "inputs": dict(decision.inputs),
    }
