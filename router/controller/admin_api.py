"""The admin endpoint: /admin/v1 behind bearer tokens, /healthz and /readyz open. One FastAPI app over a Controller.

    viewer      GET
    operator    GET and everything that changes something

The routes are in admin_slo.py, admin_workers.py and admin_requests.py, the tokens in admin_access.py. 422 when a value is
beyond its limit (the body names field and limit), 400 for what is not JSON. Every error body is {"error": {"code", "message",
"field"}}. Runs on the controller's event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from baton.config import ClusterConfig
from baton.errors import BatonError
from router.controller.admin_access import Doors, Refusal, Token
from router.controller.admin_requests import request_routes
from router.controller.admin_slo import slo_routes, stale
from router.controller.admin_workers import worker_routes
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED, STARTING
from router.controller.slo_store import StaleVersion


def make_app(controller: Controller, cluster: ClusterConfig, tokens: Iterable[Token]) -> FastAPI:
    app = FastAPI(title="Baton admin", docs_url=None, redoc_url=None, openapi_url=None)
    doors = Doors(list(tokens))
    app.include_router(_health(controller))
    app.include_router(slo_routes(controller, doors))
    app.include_router(worker_routes(controller, cluster, doors))
    app.include_router(request_routes(controller, doors))
    _answer_errors(app)
    return app


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


def _answer_errors(app: FastAPI) -> None:
    @app.exception_handler(Refusal)
    async def refused(request: Request, error: Refusal) -> JSONResponse:
        headers = {"etag": error.etag} if error.etag else {}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        return _error(error.status, error.code, str(error), error.field, headers)

    @app.exception_handler(StaleVersion)
    async def stale_version(request: Request, error: StaleVersion) -> JSONResponse:
        return await refused(request, stale(error.current))

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
