"""The admin endpoint: /admin/v1 behind bearer tokens, /healthz and /readyz open. One FastAPI app over a Controller.

    viewer      GET
    operator    GET and everything that changes something

SLO writes are compare-and-swap: the ETag of a GET goes into If-Match. 428 without one, 412 when somebody else was faster, 422
when a value is beyond its limit (the body names field and limit), 400 for what is not JSON. Every error body is
{"error": {"code", "message", "field"}}. Runs on the controller's event loop.
"""

from __future__ import annotations

import dataclasses
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from baton.config import ClusterConfig
from baton.errors import BatonError, NotFound
from baton.log import get_log
from baton.request import Role
from baton.slo import SLO
from baton.v1 import control_pb2, worker_pb2
from router.controller.admin_models import (
    Name,
    PatchClass,
    PatchSet,
    PutClass,
    PutSet,
    Rollback,
    SetRole,
    SLOClass,
    SLOClassPatch,
)
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, STARTING, Member
from router.controller.slo_store import Revision, StaleVersion

log = get_log("controller.admin")

IfMatch = Annotated[str | None, Header(alias="if-match")]
DEFAULT_CLASS = "interactive"  # of calls that name none: serving.proto Slo.class_name


@dataclass(frozen=True, slots=True)
class Token:
    """Who may do what. `secret` is compared in constant time and never logged."""

    name: str
    role: str  # viewer | operator
    secret: str


class Refusal(Exception):
    """An answer of this endpoint alone, such as 412."""

    def __init__(self, status: int, code: str, message: str, *, field: str = "", etag: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.etag = etag


def make_app(controller: Controller, cluster: ClusterConfig, tokens: Iterable[Token]) -> FastAPI:
    app = FastAPI(title="Baton admin", docs_url=None, redoc_url=None, openapi_url=None)
    doors = _Doors(list(tokens))
    app.include_router(_health(controller))
    app.include_router(_slo(controller, doors))
    app.include_router(_workers(controller, cluster, doors))
    _answer_errors(app)
    return app


class _Doors:
    """Checks a request's token; each method is a FastAPI dependency that yields the caller's name."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens

    def view(self, authorization: Annotated[str, Header()] = "") -> str:
        return self._caller(authorization).name

    def operate(self, authorization: Annotated[str, Header()] = "") -> str:
        caller = self._caller(authorization)
        if caller.role != "operator":
            raise Refusal(403, "forbidden", f"token {caller.name!r} is a {caller.role}; this needs an operator")
        return caller.name

    def _caller(self, authorization: str) -> Token:
        scheme, _, secret = authorization.partition(" ")
        given = secret.strip().encode()
        if scheme.lower() == "bearer":
            for token in self._tokens:
                if hmac.compare_digest(token.secret.encode(), given):
                    return token
        raise Refusal(401, "unauthorized", "send 'Authorization: Bearer <token>'; tokens are in the run folder")


def _health(controller: Controller) -> APIRouter:
    api = APIRouter()

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        waiting = [m.worker_id for m in controller.fleet.members() if m.state in (STARTING, FAILED)]
        if waiting:
            response.status_code = 503
        return {"ready": not waiting, "waiting_for": waiting}

    return api


# -- SLO classes -----------------------------------------------------------------------------------------------------


def _slo(controller: Controller, doors: _Doors) -> APIRouter:
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
        raise _stale(base)


def _stale(current: Revision) -> Refusal:
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


# -- workers ---------------------------------------------------------------------------------------------------------


def _workers(controller: Controller, cluster: ClusterConfig, doors: _Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1")
    view, operate = Depends(doors.view), Depends(doors.operate)

    @api.get("/workers", dependencies=[view])
    async def workers() -> dict[str, object]:
        members = [_member_json(controller, member) for member in controller.fleet.members()]
        return {"fleet_version": controller.fleet.version, "workers": members}

    @api.get("/pools", dependencies=[view])
    async def pools() -> dict[str, object]:
        return {"pools": {role.name.lower(): _pool_json(controller, role) for role in Role}}

    @api.get("/config", dependencies=[view])
    async def config() -> dict[str, object]:
        return dataclasses.asdict(cluster)

    @api.post("/workers/{worker_id}:drain")
    async def drain(worker_id: str, who: str = operate) -> dict[str, object]:
        log.info("drain", worker=worker_id, who=who)
        return _member_json(controller, await controller.drain(worker_id, True))

    @api.post("/workers/{worker_id}:undrain")
    async def undrain(worker_id: str, who: str = operate) -> dict[str, object]:
        log.info("undrain", worker=worker_id, who=who)
        return _member_json(controller, await controller.drain(worker_id, False))

    @api.post("/workers/{worker_id}:set_role")
    async def set_role(worker_id: str, body: SetRole, who: str = operate) -> dict[str, object]:
        log.info("set_role", worker=worker_id, role=body.role, who=who)
        return _member_json(controller, await controller.set_role(worker_id, Role[body.role.upper()]))

    return api


def _member_json(controller: Controller, member: Member) -> dict[str, object]:
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
        "load": _load_json(view.load) if view else None,
        "links": [_link_json(link) for link in view.links.values()] if view else [],
    }


def _load_json(load: worker_pb2.Load) -> dict[str, object]:
    gauges = {field.name: getattr(load, field.name) for field in load.DESCRIPTOR.fields}
    return {**gauges, "role": Role(load.role).name.lower() if load.role else ""}


def _link_json(link: worker_pb2.LinkStatus) -> dict[str, object]:
    return {
        "peer": link.peer.worker_id,
        "peer_epoch": f"{link.peer.epoch:016x}",
        "state": link.state,
        "transport": link.transport,
        "reason": link.reason,
    }


def _pool_json(controller: Controller, role: Role) -> dict[str, object]:
    members = [member for member in controller.fleet.members() if member.role is role]
    loads = [view.load for member in members if (view := controller.view(member.worker_id))]
    return {
        "workers": [member.worker_id for member in members],
        "num_ready": sum(member.state == "ready" for member in members),
        "num_running": sum(load.num_running for load in loads),
        "num_waiting": sum(load.num_waiting for load in loads),
        "active_blocks": sum(load.active_blocks for load in loads),
        "reserved_blocks": sum(load.reserved_blocks for load in loads),
        "free_blocks": sum(load.free_blocks for load in loads),
    }


# -- errors ----------------------------------------------------------------------------------------------------------


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        headers = {"etag": error.etag} if error.etag else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _error(error.status, error.code, str(error), error.field, headers)

    @app.exception_handler(StaleVersion)
    async def stale(request: Request, error: StaleVersion) -> JSONResponse:
        return await refused(request, _stale(error.current))

    @app.exception_handler(BatonError)
    async def baton_error(request: Request, error: BatonError) -> JSONResponse:
        headers = {"retry-after": f"{error.retry_after_s:.0f}"} if error.retry_after_s else {}
        return _error(error.http_status, error.code, error.message, error.field, headers)

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors())

    @app.exception_handler(ValidationError)
    async def bad_merge(request: Request, error: ValidationError) -> JSONResponse:
        return _invalid(error.errors())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, "http", str(error.detail), "", {})


def _invalid(problems: Iterable[Mapping[str, Any]]) -> JSONResponse:
    """The first problem, by its field: where in the body, what is wrong, what the limit is."""
    problem = next(iter(problems))
    if problem["type"] == "json_invalid":
        return _error(400, "invalid_json", "the body is not JSON", "", {})
    field = ".".join(str(part) for part in problem["loc"] if part not in ("body", "path", "query"))
    message = "unknown field" if problem["type"] == "extra_forbidden" else str(problem["msg"])
    return _error(422, "invalid", f"{field}: {message}", field, {})


def _error(status: int, code: str, message: str, field: str, headers: Mapping[str, str]) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, "field": field}}, status, headers=headers)
