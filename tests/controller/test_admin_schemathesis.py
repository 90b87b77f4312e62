"""Whatever an operator sends to the admin endpoint, right or wrong: no 5xx, and what is in force is whole at every version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Ok

from baton.config import ClusterConfig
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from tests.controller.conftest import ControlPlane

# A random token or If-Match would be refused before anything else is looked at.
HEADERS = {"authorization": "Bearer op-secret", "if-match": "*"}


@pytest.fixture
def app(plane: ControlPlane) -> FastAPI:
    return make_app(plane.controller, ClusterConfig(), lambda: [Token.of("ann", "operator", "op-secret")])


@pytest.fixture
async def admin(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=HEADERS) as client:
        yield client


def cases(app: FastAPI, num_each: int) -> list[Case[Any]]:
    """Of every operation, as its document allows and as it forbids; always the same ones."""
    made: list[Case[Any]] = []
    for found in schemathesis.openapi.from_dict(app.openapi()).get_all_operations():
        assert isinstance(found, Ok), found
        operation = found.ok()
        for mode in GenerationMode:
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue  # there is nothing to get wrong
            limits = settings(
                max_examples=num_each,
                database=None,
                derandomize=True,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )

            @limits
            @given(operation.as_strategy(generation_mode=mode))
            def note(case: Case[Any]) -> None:
                made.append(case)

            note()
    return made


async def send(admin: httpx.AsyncClient, case: Case[Any]) -> httpx.Response:
    sent: dict[str, Any] = case.as_transport_kwargs(base_url="http://admin")
    headers = {"content-type": "application/json"} if case.method != "GET" else {}
    content = json.dumps(sent["json"]) if "json" in sent else sent.get("data")
    return await admin.request(case.method, sent["url"], params=sent["params"], content=content, headers=headers)


async def versions(admin: httpx.AsyncClient) -> int:
    """How many there are; each is whole."""
    classes = (await admin.get("/admin/v1/slo/history?limit=1000")).json()["revisions"]
    budgets = (await admin.get("/admin/v1/settings/history?limit=1000")).json()["revisions"]
    for revision in classes:
        assert "interactive" in revision["classes"]
        for slo in revision["classes"].values():
            assert all(0.1 <= slo[name] <= 86_400_000 for name in ("ttft_ms", "tpot_ms"))
            assert slo["e2e_ms"] is None or slo["e2e_ms"] >= slo["ttft_ms"]
            assert 0 < slo["percentile"] < 1
    for revision in budgets:
        pools = [revision["budget"][role] for role in ("prefill", "decode", "both")]
        assert all(pool["max_workers"] is None or pool["min_workers"] <= pool["max_workers"] for pool in pools)
        most = revision["budget"]["max_gpus"]
        assert most is None or most >= sum(pool["min_workers"] for pool in pools)
    numbers = [revision["version"] for revision in classes]
    assert numbers == sorted(numbers, reverse=True)
    return len(classes) + len(budgets)


async def judge(app: FastAPI, admin: httpx.AsyncClient, num_each: int) -> None:
    made = await asyncio.to_thread(cases, app, num_each)
    assert len(made) > 40
    refused = 0
    for case in made:
        before = await versions(admin)
        answer = await send(admin, case)
        told = f"{case.method} {case.formatted_path} {case.query} {case.body!r}: {answer.status_code} {answer.text}"
        assert answer.status_code < 500 or answer.json()["error"]["code"] == "unavailable", told
        assert answer.status_code not in (401, 428), told
        if answer.status_code >= 400:
            refused += 1
            assert answer.status_code == 405 or answer.json()["error"]["message"], told
            assert await versions(admin) == before, told
    assert refused > 10
    assert await versions(admin) > 4, "some were right, and done"


async def test_no_request_that_schemathesis_makes_gets_a_5xx_or_is_half_applied(
    app: FastAPI, admin: httpx.AsyncClient
) -> None:
    await judge(app, admin, num_each=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nor_does_one_of_many_more(app: FastAPI, admin: httpx.AsyncClient) -> None:
    await judge(app, admin, num_each=100)
