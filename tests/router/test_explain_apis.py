"""A caller that asks is told why its answer was made where it was, on both APIs; operators ask the controller, by request id."""

from __future__ import annotations

import asyncio
import json

import httpx

from baton.config import ClusterConfig
from baton.model_files import ModelFiles
from baton.request import Role
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.fleet_state import Announcement
from router.explain import replay
from router.placement import Choice
from tests.controller.conftest import ControlPlane, plane  # noqa: F401  # a fixture
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker

BODY = {"prompt": "hello", "max_tokens": 3}


def check(text: str) -> None:
    told = json.loads(text)
    assert (told["choice"]["prefill"], told["choice"]["decode"]) == ("p0", "d0")
    again = replay(told)
    assert isinstance(again, Choice)
    assert (again.prefill, again.decode) == ("p0", "d0")
    assert "p0" in told["reason"]
    assert len(text) < 4_096, "proxies take headers of 4 KiB"


async def test_the_http_api_explains_whole_and_streamed_answers_to_who_asks(rig: Rig) -> None:
    asks = {"x-baton-explain": "1"}
    whole = await rig.http.post("/v1/completions", json=BODY, headers=asks)
    check(whole.headers["x-baton-explain"])
    async with rig.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}, headers=asks) as streamed:
        await streamed.aread()
    check(streamed.headers["x-baton-explain"])
    plain = await rig.http.post("/v1/completions", json=BODY)
    assert "x-baton-explain" not in plain.headers


async def test_the_grpc_api_explains_in_trailing_metadata(rig: Rig) -> None:
    call = rig.stub.Generate(request(max_tokens=3), metadata=(("x-baton-explain", "1"),))
    async for _ in call:
        pass
    check(str(dict(await call.trailing_metadata())["x-baton-explain"]))


async def test_no_prompt_is_part_of_an_explanation(rig: Rig) -> None:
    asks = {"x-baton-explain": "1"}
    answer = await rig.http.post("/v1/completions", json={**BODY, "prompt": "a secret thing"}, headers=asks)
    assert "hashes" not in json.loads(answer.headers["x-baton-explain"])["demand"]
    assert "secret" not in answer.headers["x-baton-explain"]


async def test_the_controller_asks_its_routers_why_a_request_went_where_it_went(
    files: ModelFiles,
    plane: ControlPlane,  # noqa: F811
) -> None:
    app = make_app(plane.controller, ClusterConfig(), lambda: [Token.of("dash", "viewer", "secret")])
    async with (
        running_rig(files, [], wait_ready=False, control_address=plane.address) as rig,
        running_rig(files, [], wait_ready=False, control_address=plane.address),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://admin", headers={"authorization": "Bearer secret"}
        ) as admin,
    ):
        worker = await StubWorker("b0").start()
        rig.workers.append(worker)
        announce(plane, worker)
        await until(lambda: not rig.front_end.fleet.unready_reason(), "the router knows the worker")
        await until(lambda: len(plane.controller.fresh_reports()) == 2, "both routers have reported")
        answer = await rig.http.post("/v1/completions", json=BODY, headers={"x-request-id": "why-me"})
        assert answer.status_code == 200
        told = await asyncio.wait_for(admin.get("/admin/v1/requests/why-me"), 10)
        unknown = await admin.get("/admin/v1/requests/nobody")
    assert told.status_code == 200, told.text
    [placement] = told.json()["placements"]
    assert placement["choice"]["shape"] == "both"
    assert placement["router"]
    found = replay(placement)
    assert isinstance(found, Choice)
    assert found.prefill == "b0"
    assert unknown.status_code == 404
    assert "no router remembers" in unknown.json()["error"]["message"]


def announce(plane: ControlPlane, worker: StubWorker) -> None:  # noqa: F811
    """As a worker's process would."""
    plane.controller.announce(Announcement("b0", worker.epoch, worker.address, Role.BOTH, 1, "", ""))
