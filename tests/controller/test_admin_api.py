from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton.config import ClusterConfig
from baton.request import Role
from baton.slo import DEFAULT_CLASSES
from baton.v1 import control_pb2
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from tests.controller.conftest import ControlPlane, StartWorker

TOKENS = [Token.of("ann", "operator", "op-secret"), Token.of("dash", "viewer", "view-secret")]
TARGETS = {"ttft_ms": 500.0, "tpot_ms": 50.0}


def client_of(plane: ControlPlane, secret: str) -> httpx.AsyncClient:
    app = make_app(plane.controller, ClusterConfig(), lambda: TOKENS)
    headers = {"authorization": f"Bearer {secret}"} if secret else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers)


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(plane, "op-secret") as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    return error


async def test_health_is_open_and_readiness_names_who_is_missing(plane: ControlPlane) -> None:
    plane.controller.expect("decode-0", Role.DECODE)
    async with client_of(plane, "") as nobody:
        assert (await nobody.get("/healthz")).status_code == 200
        ready = await nobody.get("/readyz")
    assert (ready.status_code, ready.json()["waiting_for"]) == (503, ["decode-0"])


@pytest.mark.parametrize(
    ("secret", "method", "status"),
    [
        ("", "GET", 401),
        ("wrong", "GET", 401),
        ("view-secret", "GET", 200),
        ("view-secret", "PUT", 403),
        ("op-secret", "GET", 200),
    ],
)
async def test_tokens_open_what_their_role_may_do(plane: ControlPlane, secret: str, method: str, status: int) -> None:
    async with client_of(plane, secret) as client:
        answer = await client.request(method, "/admin/v1/slo", json={"classes": {}} if method == "PUT" else None)
    assert answer.status_code == status
    assert secret == "" or secret not in answer.text


async def test_the_set_is_replaced_whole_and_history_says_who_and_why(admin: httpx.AsyncClient) -> None:
    before = await admin.get("/admin/v1/slo")
    assert set(before.json()["classes"]) == {"interactive", "batch"}
    body = {"classes": {"interactive": TARGETS}, "reason": "launch"}
    after = await admin.put("/admin/v1/slo", json=body, headers={"if-match": before.headers["etag"]})
    assert (after.status_code, after.json()["version"], after.headers["etag"]) == (200, 2, '"2"')
    assert after.json()["classes"]["interactive"]["ttft_ms"] == 500.0
    [newest, oldest] = (await admin.get("/admin/v1/slo/history")).json()["revisions"]
    assert (newest["who"], newest["reason"], oldest["who"]) == ("ann", "launch", "baton")


async def test_of_two_writers_with_one_etag_the_second_gets_412(admin: httpx.AsyncClient) -> None:
    etag = (await admin.get("/admin/v1/slo")).headers["etag"]
    body = {"classes": {"interactive": TARGETS}}
    first = await admin.put("/admin/v1/slo", json=body, headers={"if-match": etag})
    second = await admin.put("/admin/v1/slo", json=body, headers={"if-match": etag})
    assert (first.status_code, second.status_code) == (200, 412)
    assert second.headers["etag"] == first.headers["etag"]
    assert "version 2" in error_of(second)["message"]


async def test_a_write_without_if_match_gets_428(admin: httpx.AsyncClient) -> None:
    answer = await admin.put("/admin/v1/slo/batch", json=TARGETS)
    assert (answer.status_code, error_of(answer)["field"]) == (428, "if-match")


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        ("/slo", {"classes": {"interactive": {"ttft_ms": 0, "tpot_ms": 1}}}, "classes.interactive.ttft_ms", "0.1"),
        ("/slo", {"classes": {"interactive": {"ttft_ms": 5}}}, "classes.interactive.tpot_ms", "required"),
        ("/slo", {"classes": {"batch": TARGETS}}, "classes", "interactive"),
        ("/slo", {"classes": {"interactive": {**TARGETS, "ttft": 1}}}, "classes.interactive.ttft", "unknown field"),
        ("/slo", {"clases": {}}, "classes", "required"),
        ("/slo", {"classes": {"Up Per": TARGETS}}, "classes.Up Per.[key]", "pattern"),
        ("/slo/batch", {**TARGETS, "percentile": 1.0}, "percentile", "less than 1"),
        ("/slo/batch", {**TARGETS, "ttft_ms": "500"}, "ttft_ms", "valid number"),
        ("/slo/batch", {**TARGETS, "priority": 1000}, "priority", "100"),
        ("/slo/batch", {**TARGETS, "color": "red"}, "color", "unknown field"),
    ],
)
async def test_a_value_beyond_its_limit_gets_422_with_field_and_limit(
    admin: httpx.AsyncClient, path: str, body: dict[str, Any], field: str, words: str
) -> None:
    answer = await admin.put(f"/admin/v1{path}", json=body, headers={"if-match": "*"})
    assert answer.status_code == 422, answer.text
    assert error_of(answer)["field"] == field
    assert words in error_of(answer)["message"]
    assert (await admin.get("/admin/v1/slo")).json()["version"] == 1


@pytest.mark.parametrize("text", ["{", "[1", '{"ttft_ms": NaN, "tpot_ms": 1}', '{"ttft_ms": 1e999, "tpot_ms": 1}'])
async def test_what_is_not_json_or_not_finite_is_refused(admin: httpx.AsyncClient, text: str) -> None:
    headers = {"if-match": "*", "content-type": "application/json"}
    answer = await admin.put("/admin/v1/slo/batch", content=text, headers=headers)
    assert answer.status_code in (400, 422)
    assert (await admin.get("/admin/v1/slo")).json()["version"] == 1


async def test_one_class_is_read_put_patched_and_removed(admin: httpx.AsyncClient) -> None:
    any_version = {"if-match": "*"}
    put = await admin.put("/admin/v1/slo/gold", json={**TARGETS, "e2e_ms": 9000}, headers=any_version)
    assert put.json()["classes"]["gold"]["e2e_ms"] == 9000
    patched = await admin.patch("/admin/v1/slo/gold", json={"ttft_ms": 250, "e2e_ms": None}, headers=any_version)
    assert (await admin.get("/admin/v1/slo/gold")).json() == {
        "name": "gold",
        **TARGETS,
        "ttft_ms": 250,
        "itl_p99_ms": None,
        "e2e_ms": None,
        "percentile": 0.95,
        "weight": 1.0,
        "priority": 0,
    }
    assert patched.json()["version"] == 3
    removed = await admin.patch("/admin/v1/slo", json={"classes": {"gold": None}}, headers=any_version)
    assert "gold" not in removed.json()["classes"]
    assert (await admin.get("/admin/v1/slo/gold")).status_code == 404
    again = await admin.patch("/admin/v1/slo", json={"classes": {"gold": None}}, headers=any_version)
    assert again.status_code == 404


async def test_a_patch_may_not_empty_a_required_target(admin: httpx.AsyncClient) -> None:
    answer = await admin.patch("/admin/v1/slo/batch", json={"ttft_ms": None}, headers={"if-match": "*"})
    assert (answer.status_code, error_of(answer)["field"]) == (422, "ttft_ms")


async def test_rollback_puts_an_old_set_in_force_as_a_new_version(admin: httpx.AsyncClient) -> None:
    await admin.put("/admin/v1/slo", json={"classes": {"interactive": TARGETS}}, headers={"if-match": '"1"'})
    answer = await admin.post("/admin/v1/slo:rollback", json={"version": 1}, headers={"if-match": '"2"'})
    assert (answer.status_code, answer.json()["version"], answer.json()["reason"]) == (200, 3, "back to version 1")
    assert set(answer.json()["classes"]) == {slo.name for slo in DEFAULT_CLASSES}
    unknown = await admin.post("/admin/v1/slo:rollback", json={"version": 77}, headers={"if-match": "*"})
    assert unknown.status_code == 404


async def test_verdicts_and_the_version_in_force_at_each_router_are_shown(
    plane: ControlPlane, admin: httpx.AsyncClient
) -> None:
    verdicts = [control_pb2.ClassVerdicts(class_name="interactive", num_met=3, num_missed_tpot=1)]
    plane.controller.report(control_pb2.RouterReport(router_id="r", slo_version=1, verdicts=verdicts, pid=5))
    answer = (await admin.get("/admin/v1/slo")).json()
    assert answer["verdicts"]["interactive"] == {
        "met": 3,
        "ttft": 0,
        "tpot": 1,
        "itl": 0,
        "e2e": 0,
        "failed": 0,
        "attainment": 0.75,
    }
    [router] = answer["routers"]
    assert (router["router_id"], router["slo_version"], router["pid"]) == ("r", 1, 5)
    assert (await admin.get("/admin/v1/attainment")).json()["classes"] == answer["verdicts"]


async def test_workers_are_listed_drained_and_flipped(
    plane: ControlPlane, admin: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker("decode-0", "decode")
    await plane.until(lambda: plane.controller.view("decode-0") is not None)
    drained = await admin.post("/admin/v1/workers/decode-0:drain")
    assert (drained.status_code, drained.json()["state"]) == (200, "draining")
    assert (await admin.get("/admin/v1/pools")).json()["pools"]["decode"]["num_ready"] == 0
    assert (await admin.post("/admin/v1/workers/decode-0:undrain")).json()["state"] == "ready"
    flipped = await admin.post("/admin/v1/workers/decode-0:set_role", json={"role": "both"})
    assert (flipped.status_code, flipped.json()["role"]) == (200, "both")
    [worker] = (await admin.get("/admin/v1/workers")).json()["workers"]
    assert (worker["worker_id"], worker["role"], worker["load"]["role"]) == ("decode-0", "both", "both")
    assert (await admin.get("/readyz")).status_code == 200


async def test_a_busy_worker_s_refusal_and_an_unknown_worker_keep_their_codes(
    plane: ControlPlane, admin: httpx.AsyncClient, start_worker: StartWorker
) -> None:
    await start_worker("decode-0", "decode", "busy")
    await plane.until(lambda: plane.controller.view("decode-0") is not None)
    busy = await admin.post("/admin/v1/workers/decode-0:set_role", json={"role": "both"})
    assert (busy.status_code, error_of(busy)["message"]) == (429, "2 sequences are open")
    wrong = await admin.post("/admin/v1/workers/decode-0:set_role", json={"role": "poet"})
    assert (wrong.status_code, error_of(wrong)["field"]) == (422, "role")
    assert (await admin.post("/admin/v1/workers/nobody:drain")).status_code == 404


async def test_the_configuration_is_shown_without_secrets(admin: httpx.AsyncClient) -> None:
    answer = await admin.get("/admin/v1/config")
    assert answer.json()["router"]["http_port"] == ClusterConfig().router.http_port
    assert all(secret not in answer.text for secret in ("op-secret", "view-secret"))


async def test_a_worker_that_a_router_ejected_is_listed_with_router_and_reason(
    plane: ControlPlane, admin: httpx.AsyncClient
) -> None:
    for name in ("decode-0", "decode-1"):
        plane.controller.expect(name, Role.DECODE)
    views = [
        control_pb2.WorkerView(worker_id="decode-0", state="ejected", reason="3 calls in a row failed: boom"),
        control_pb2.WorkerView(worker_id="decode-1", state="ready"),
    ]
    plane.controller.report(control_pb2.RouterReport(router_id="r1", workers=views))
    bad, good = (await admin.get("/admin/v1/workers")).json()["workers"]
    assert bad["ejected"] == {"r1": "3 calls in a row failed: boom"}
    assert good["ejected"] == {}
