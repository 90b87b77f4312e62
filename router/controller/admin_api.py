"""The admin endpoint: /admin/v1 behind bearer tokens, /healthz, /readyz and /metrics open. One FastAPI app over a Controller.

    viewer      GET
    operator    GET and everything that changes something

The routes are in admin_slo.py, admin_control.py, admin_workers.py, admin_pools.py, admin_goodput.py, admin_pd.py and
admin_requests.py, the tokens in admin_tokens.py. 422 when a value is beyond its limit (the body names field and limit), 400 for
what is not JSON. Every error body is {"error": {"code", "message", "field"}}. Runs on the controller's event loop.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from baton import clock
from baton.config import ClusterConfig
from baton.errors import BatonError
from baton.log import get_log
from router.controller import admin_models
from router.controller.admin_access import Doors, Refusal, stale
from router.controller.admin_control import control_routes
from router.controller.admin_goodput import goodput_routes
from router.controller.admin_pd import pd_routes
from router.controller.admin_pools import pool_routes
from router.controller.admin_requests import request_routes
from router.controller.admin_slo import slo_routes
from router.controller.admin_tokens import Token
from router.controller.admin_workers import worker_routes
from router.controller.controller import Controller
from router.controller.feasibility import FloorSource, Forecast, emulated_floor
from router.controller.fleet_state import FAILED, STARTING
from router.controller.live_control import LiveControl
from router.controller.live_facts import gpus_per_worker
from router.controller.pays import Pays
from router.controller.versioned import StaleVersion
from router.series import CONTENT_TYPE, Registry

log = get_log("controller.audit")

_NOT_JSON = "the body is not JSON that can be read"
MAX_BODY_BYTES = 1 << 20  # 64 classes take 16 KB
_MAX_DIGITS = 18  # Python refuses to read numbers of thousands


def make_app(
    controller: Controller,
    cluster: ClusterConfig,
    tokens: Callable[[], Sequence[Token]],
    *,
    floors: FloorSource | None = None,
    forecast: Forecast | None = None,
    pays: Pays | None = None,
    control: LiveControl | None = None,
) -> FastAPI:
    """`tokens`: those in force now. `floors`: what targets must be above; None = the timing of emulated GPUs, else what the
    controller measured. `forecast` and `pays`: None = there is no planner."""
    app = FastAPI(title="Baton admin", docs_url=None, redoc_url=None, openapi_url=None)
    doors = Doors(tokens)
    require_reason = cluster.controller.require_reason
    app.include_router(_health(controller))
    floors = floors or emulated_floor(cluster.emulation) or controller.floor
    app.include_router(slo_routes(controller, doors, floors, forecast, require_reason=require_reason))
    app.include_router(control_routes(controller, doors, gpus_per_worker(cluster)))
    app.include_router(worker_routes(controller, cluster, doors))
    app.include_router(pool_routes(controller, doors, control))
    if control is not None:
        app.include_router(_metrics(control.registry))
    app.include_router(request_routes(controller, doors))
    app.include_router(goodput_routes(controller, doors))
    app.include_router(pd_routes(pays, doors))
    _answer_errors(app)
    _bound_and_audit(app)
    return app


def _health(controller: Controller) -> APIRouter:
    api = APIRouter()

    @api.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/readyz")
    async def readyz(response: Response) -> dict[str, object]:
        members = (
            m for m in controller.fleet.members() if m.epoch or not m.extra
        )  # nobody counts on what is only asked for
        waiting = [m.worker_id for m in members if m.state in (STARTING, FAILED)]
        if waiting:
            response.status_code = 503
        return {"ready": not waiting, "waiting_for": waiting}

    return api


def _metrics(registry: Registry) -> APIRouter:
    api = APIRouter()

    @api.get("/metrics")
    async def metrics() -> Response:
        return Response("".join(registry.lines()), media_type=CONTENT_TYPE)

    return api


def _bound_and_audit(app: FastAPI) -> None:
    """Refuse large bodies before they are read, and leave one line per change and per refused caller."""

    @app.middleware("http")
    async def audited(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if not _is_bounded(request.headers):
            message = f"the body is larger than {MAX_BODY_BYTES} bytes, or does not say how large it is"
            response: Response = _error(413, "too_large", message, "", {})
        else:
            response = await go_on(request)
        if request.method not in ("GET", "HEAD") or response.status_code in (401, 403):
            who = getattr(request.state, "caller", "")
            log.info("admin", who=who, method=request.method, path=request.url.path, status=response.status_code)
        return response


def _is_bounded(headers: Mapping[str, str]) -> bool:
    """Whether the body says its length, and that is one that can be of use."""
    length = headers.get("content-length", "0")
    fits = length.isdecimal() and len(length) <= _MAX_DIGITS and int(length) <= MAX_BODY_BYTES
    return fits and "transfer-encoding" not in headers


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        headers = {"etag": error.etag} if error.etag else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _error(error.status, error.code, str(error), error.field, headers)

    @app.exception_handler(StaleVersion)
    async def stale_version(request: Request, error: StaleVersion) -> JSONResponse:
        return await refused(request, stale(error.version, error.who))

    @app.exception_handler(BatonError)
    async def baton_error(request: Request, error: BatonError) -> JSONResponse:
        headers = {"retry-after": str(math.ceil(clock.real_s(error.retry_after_s)))} if error.retry_after_s else {}
        return _error(error.http_status, error.code, error.message, error.field, headers)

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> JSONResponse:
        return _invalid(error.errors())

    @app.exception_handler(ValidationError)
    async def bad_merge(request: Request, error: ValidationError) -> JSONResponse:
        return _invalid(error.errors())

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        if error.status_code == 400:  # FastAPI's own: its JSON reader gave up on too many digits, or levels
            return _error(400, "invalid_json", _NOT_JSON, "", {})
        return _error(error.status_code, "http", str(error.detail), "", {})


def _invalid(problems: Iterable[Mapping[str, Any]]) -> JSONResponse:
    """The first problem, by its field: where in the body, what is wrong, what the limit is."""
    problem = next(iter(problems))
    if problem["type"] == "json_invalid":
        return _error(400, "invalid_json", _NOT_JSON, "", {})
    field = ".".join(str(part) for part in problem["loc"] if part not in ("body", "path", "query"))
    message = str(problem["msg"])
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(problem["loc"][-1]), admin_models.FIELDS, n=1, cutoff=0.0)
        message = f"unknown field; the nearest known is {near[0]}"
    return _error(422, "invalid", f"{field}: {message}", field, {})


def _error(status: int, code: str, message: str, field: str, headers: Mapping[str, str]) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message, "field": field}}, status, headers=headers)
