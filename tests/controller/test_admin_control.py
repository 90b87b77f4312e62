"""What an operator can do to targets, mode and budget over HTTP: on both kinds of database, with wrong input, all at once."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config import ClusterConfig, ControllerConfig, EmulationConfig, EngineConfig, KubernetesConfig
from baton.errors import ConfigError, Unavailable
from baton.request import Role
from baton.slo import SLO
from baton.v1 import worker_pb2
from engine.timing.step_time import Batch, step_time
from router.controller.admin_api import MAX_BODY_BYTES, make_app
from router.controller.admin_tokens import CHECK_S, Token, TokenFiles, parse_tokens
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import Database, open_database
from router.controller.decisions import Decision
from router.controller.feasibility import Floor, MeasuredFloor, Outlook, Prediction
from router.controller.settings import Mode

TOKENS = [Token.of("ann", "operator", "op-secret"), Token.of("dash", "viewer", "view-secret")]
TARGETS = {"ttft_ms": 500.0, "tpot_ms": 50.0}
ANY = {"if-match": "*"}


class FixedFloor:
    def floor(self) -> Floor:
        return Floor(ttft_ms=20.0, tpot_ms=2.7, source="a roofline")


class FixedForecast:
    async def predict(self, before: Sequence[SLO], after: Sequence[SLO]) -> Outlook:
        return Outlook(
            {slo.name: Prediction(0.97, 0.93, 0.99) for slo in after}, {"gold": "no calls"}, ("all else stays",)
        )


@asynccontextmanager
async def operator(database: Database, secret: str = "op-secret", **made: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of a controller of its own."""
    controller = Controller(ControllerConfig(), ControlStore(database, lambda: 7.0, {"prefill": 2, "decode": 2}))
    config = made.pop("config", ClusterConfig())
    app = make_app(controller, config, lambda: TOKENS, **made)
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers
    ) as client:
        yield client
    await controller.close()


@pytest.fixture
def lite(tmp_path: Path) -> Database:
    """For what is the same on every kind."""
    return open_database(f"sqlite://{tmp_path}/lite.sqlite")


@pytest.fixture
async def admin(lite: Database) -> AsyncIterator[httpx.AsyncClient]:
    async with operator(lite) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    return error


# -- SLO classes -------------------------------------------------------------------------------------------------------


async def test_of_writers_at_once_over_two_controllers_one_wins_and_the_others_get_412(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    async with operator(databases[0]) as first, operator(databases[1]) as second:
        writes = [
            (first, second)[number % 2].patch(
                "/admin/v1/slo/batch", json={"ttft_ms": 1000 + number}, headers={"if-match": '"1"'}
            )
            for number in range(8)
        ]
        answers = await asyncio.gather(*writes)
        assert sorted(answer.status_code for answer in answers) == [200] + [412] * 7
        [won] = [answer for answer in answers if answer.status_code == 200]
        assert won.json()["version"] == 2
        lost = [answer for answer in answers if answer.status_code == 412]
        assert {answer.headers["etag"] for answer in lost} == {'"2"'}
        assert {(await reader.get("/admin/v1/slo")).json()["version"] for reader in (first, second)} == {2}
        revisions = (await first.get("/admin/v1/slo/history")).json()["revisions"]
        assert [revision["version"] for revision in revisions] == [2, 1]
    for database in databases:
        database.close()


async def test_a_change_by_somebody_else_is_in_force_after_one_tick(database_url: str) -> None:
    databases = [open_database(database_url) for _ in range(2)]
    controller = Controller(ControllerConfig(), ControlStore(databases[0], lambda: 7.0))
    other = ControlStore(databases[1], lambda: 8.0)
    other.slo.replace(1, (SLO("interactive", 9.0, 1.0),), "eve", "")
    other.settings.replace(1, replace(other.settings.current().value, mode=Mode.FROZEN), "eve", "")
    await controller.in_force.tick()
    assert (controller.slo.version, controller.slo.value[0].ttft_ms) == (2, 9.0)
    assert controller.in_force.settings.revision.value.mode is Mode.FROZEN
    await controller.close()
    for database in databases:
        database.close()


async def test_targets_stay_in_force_while_the_database_is_away(tmp_path: Path) -> None:
    file = tmp_path / "store" / "slo.sqlite"
    file.parent.mkdir()
    database = open_database(f"sqlite://{file}")
    async with operator(database) as admin:
        file.parent.rename(tmp_path / "gone")
        failed = await admin.put("/admin/v1/slo/gold", json=TARGETS, headers=ANY)
        assert (failed.status_code, error_of(failed)["code"]) == (503, "unavailable")
        assert (await admin.get("/admin/v1/slo")).json()["version"] == 1
        (tmp_path / "gone").rename(file.parent)
        assert (await admin.put("/admin/v1/slo/gold", json=TARGETS, headers=ANY)).status_code == 200


async def test_history_says_what_changed_and_versions_are_compared(admin: httpx.AsyncClient) -> None:
    await admin.put("/admin/v1/slo/gold", json={**TARGETS, "reason": "a customer"}, headers=ANY)
    await admin.patch("/admin/v1/slo", json={"classes": {"gold": {"ttft_ms": 250}, "batch": None}}, headers=ANY)
    newest, middle, first = (await admin.get("/admin/v1/slo/history")).json()["revisions"]
    assert newest["changes"] == [
        {"class": "gold", "field": "ttft_ms", "old": 500.0, "new": 250.0},
        {"class": "batch", "field": "", "old": "removed", "new": None},
    ]
    assert middle["changes"][0] == {"class": "gold", "field": "", "old": None, "new": "added"}
    assert (middle["reason"], middle["who"], first["changes"]) == ("a customer", "ann", [])
    [page] = (await admin.get("/admin/v1/slo/history?before=3&limit=1")).json()["revisions"]
    assert page["version"] == 2
    diff = (await admin.get("/admin/v1/slo/diff?old=2")).json()
    assert (diff["old"], diff["new"], diff["changes"]) == (2, 3, newest["changes"])
    assert (await admin.get("/admin/v1/slo/diff?old=9")).status_code == 404


async def test_a_dry_run_says_what_would_change_and_changes_nothing(admin: httpx.AsyncClient) -> None:
    body = {"classes": {"interactive": {"ttft_ms": 900}, "gold": TARGETS}}
    dry = await admin.post("/admin/v1/slo:dryRun", json=body)
    assert (dry.status_code, dry.json()["version"]) == (200, 1)
    assert dry.json()["changes"][0] == {"class": "interactive", "field": "ttft_ms", "old": 2000.0, "new": 900.0}
    assert dry.json()["prediction"] == {
        "available": False,
        "reason": "no prediction is available: this controller has no planner",
    }
    assert (await admin.get("/admin/v1/slo")).json()["version"] == 1
    real = await admin.patch("/admin/v1/slo", json=body, headers=ANY)
    assert real.json()["classes"] == dry.json()["classes"]
    whole = await admin.post("/admin/v1/slo:dryRun", json={"classes": {"interactive": TARGETS}, "replace": True})
    assert set(whole.json()["classes"]) == {"interactive"}
    one = await admin.post("/admin/v1/slo/gold:dryRun", json={"tpot_ms": 40})
    assert one.json()["changes"] == [{"class": "gold", "field": "tpot_ms", "old": 50.0, "new": 40.0}]
    assert (await admin.post("/admin/v1/slo:dryRun", json=body, headers={"if-match": '"1"'})).status_code == 412


async def test_a_planner_s_prediction_is_part_of_the_dry_run(lite: Database) -> None:
    async with operator(lite, "view-secret", forecast=FixedForecast()) as viewer:
        dry = await viewer.post("/admin/v1/slo:dryRun", json={"classes": {"batch": {"ttft_ms": 9}}})
    prediction = dry.json()["prediction"]
    assert prediction["available"] is True
    assert prediction["classes"]["batch"] == {"attainment": 0.97, "low": 0.93, "high": 0.99}
    assert (prediction["unknown"], prediction["assumptions"]) == ({"gold": "no calls"}, ["all else stays"])


@pytest.mark.parametrize(
    ("targets", "field", "words"),
    [
        ({"tpot_ms": 2.6}, "classes.batch.tpot_ms", "2.6 is below the physical floor of 2.7 (a roofline)"),
        ({"ttft_ms": 19}, "classes.batch.ttft_ms", "19 is below the physical floor of 20"),
        ({"itl_p99_ms": 1}, "classes.batch.itl_p99_ms", "floor of 2.7"),
        ({"ttft_ms": 20, "e2e_ms": 19.5}, "classes.batch.e2e_ms", "cannot end before its first token"),
    ],
)
async def test_what_cannot_be_met_gets_422_with_the_floor(
    lite: Database, targets: dict[str, float], field: str, words: str
) -> None:
    async with operator(lite, floors=FixedFloor()) as admin:
        for path in ("/admin/v1/slo", "/admin/v1/slo:dryRun"):
            method = "PATCH" if path.endswith("slo") else "POST"
            answer = await admin.request(method, path, json={"classes": {"batch": targets}}, headers=ANY)
            assert (answer.status_code, error_of(answer)["field"]) == (422, field)
            assert words in error_of(answer)["message"]
        told = (await admin.get("/admin/v1/slo")).json()
    assert told["version"] == 1
    assert told["floor"] == {"ttft_ms": 20.0, "tpot_ms": 2.7, "source": "a roofline"}


async def test_a_set_that_comes_back_or_from_elsewhere_is_held_to_the_floor_of_now(lite: Database) -> None:
    low = {"interactive": {**TARGETS, "tpot_ms": 2.0}}
    async with operator(lite) as admin:  # nothing was measured yet: no floor
        assert (await admin.put("/admin/v1/slo", json={"classes": low}, headers=ANY)).is_success
        assert (await admin.patch("/admin/v1/slo/interactive", json={"tpot_ms": 5.0}, headers=ANY)).is_success
    async with operator(lite, floors=FixedFloor()) as admin:
        for path, body in (
            ("/slo:rollback", {"version": 2}),
            ("/slo:import", {"format": "baton.slo/1", "classes": low, "reason": "x"}),
            ("/slo:dryRun", {"classes": low, "replace": True}),
        ):
            answer = await admin.post(f"/admin/v1{path}", json=body, headers=ANY)
            assert (answer.status_code, error_of(answer)["code"]) == (422, "infeasible"), path
            assert "2 is below the physical floor of 2.7" in error_of(answer)["message"]
        assert (await admin.get("/admin/v1/slo")).json()["version"] == 3


class SlowFloor:
    def floor(self) -> Floor:
        return Floor(tpot_ms=150.0, source="slow workers")


async def test_a_target_that_is_below_the_floor_already_hinders_no_other_change(lite: Database) -> None:
    async with operator(lite, floors=SlowFloor()) as admin:  # the default of interactive is 100
        assert (await admin.patch("/admin/v1/slo/batch", json={"ttft_ms": 900}, headers=ANY)).status_code == 200
        assert (await admin.patch("/admin/v1/slo/interactive", json={"tpot_ms": 149}, headers=ANY)).status_code == 422
        assert (await admin.patch("/admin/v1/slo/interactive", json={"tpot_ms": 151}, headers=ANY)).status_code == 200


async def test_emulated_gpus_have_the_floor_of_their_timing_model(lite: Database) -> None:
    config = ClusterConfig()
    config = replace(
        config, emulation=replace(config.emulation, gpu="h100", model="llama-3.1-70b", tp=8, time_scale=10.0)
    )
    times = step_time("h100", "llama-3.1-70b", 8)
    async with operator(lite, config=config) as admin:
        floor = (await admin.get("/admin/v1/slo")).json()["floor"]
        assert floor["tpot_ms"] == pytest.approx(1e3 * times.decode_steps_s(1, 1, 1))
        assert floor["ttft_ms"] == pytest.approx(1e3 * times.step_s(Batch(((1, 0),), 0, 0)))
        below = await admin.patch("/admin/v1/slo/batch", json={"tpot_ms": floor["tpot_ms"] * 0.99}, headers=ANY)
        assert (below.status_code, error_of(below)["code"]) == (422, "infeasible")
        assert "llama-3.1-70b on 8 x h100" in error_of(below)["message"]
        at_it = await admin.patch("/admin/v1/slo/batch", json={"tpot_ms": floor["tpot_ms"]}, headers=ANY)
        assert at_it.status_code == 200


def test_the_measured_floor_is_the_quickest_step_of_a_lone_sequence_on_a_decode_worker() -> None:
    measured = MeasuredFloor()
    decode, prefill = (worker_pb2.Role.ValueType(role) for role in (Role.DECODE, Role.PREFILL))
    for role, running, step_ms in ((prefill, 1, 0.1), (decode, 2, 0.2), (decode, 1, 0.0)):
        measured.observe(worker_pb2.Load(role=role, num_running=running, step_ms=step_ms))
    assert measured.floor() == Floor()
    for step_ms in (8.0, 3.0, 5.0):
        measured.observe(worker_pb2.Load(role=decode, num_running=1, step_ms=step_ms))
    assert measured.floor().tpot_ms == 3.0


async def test_what_was_exported_can_be_imported_elsewhere(admin: httpx.AsyncClient, tmp_path: Path) -> None:
    await admin.put("/admin/v1/slo/gold", json={**TARGETS, "e2e_ms": 9000}, headers=ANY)
    exported = (await admin.get("/admin/v1/slo/export")).json()
    async with operator(open_database(f"sqlite://{tmp_path}/other.sqlite")) as other:
        without = await other.post("/admin/v1/slo:import", json=exported, headers=ANY)
        assert (without.status_code, error_of(without)["field"]) == (422, "reason")
        await other.post("/admin/v1/slo:import", json={**exported, "reason": "moved"}, headers=ANY)
        assert (await other.get("/admin/v1/slo/export")).json()["classes"] == exported["classes"]
        foreign = {**exported, "format": "baton.slo/2", "reason": "moved"}
        assert (await other.post("/admin/v1/slo:import", json=foreign, headers=ANY)).status_code == 422


async def test_a_reason_is_asked_for_where_the_cluster_wants_one(lite: Database) -> None:
    config = ClusterConfig(controller=ControllerConfig(require_reason=True))
    async with operator(lite, config=config) as admin:
        without = await admin.patch("/admin/v1/slo/batch", json={"ttft_ms": 5, "reason": "  "}, headers=ANY)
        assert (without.status_code, error_of(without)["field"]) == (422, "reason")
        assert (await admin.patch("/admin/v1/slo/batch", json={"ttft_ms": 5, "reason": "x"}, headers=ANY)).is_success


BAD_INPUT = (
    ("PATCH", "/slo", '{"classes": {"interactve": {"ttft_ms": 5}}}', 404, "nearest is 'interactive'"),
    ("PATCH", "/slo/bach", '{"ttft_ms": 5}', 404, "nearest is 'batch'"),
    ("PATCH", "/slo/batch", '{"ttft": 5}', 422, "unknown field; the nearest known is ttft_ms"),
    ("PATCH", "/slo/batch", '{"ttft_ms": -5}', 422, "greater than or equal to 0.1"),
    ("PATCH", "/slo/batch", '{"ttft_ms": NaN}', 422, "finite"),
    ("PATCH", "/slo/batch", '{"ttft_ms": 1e999}', 422, "finite"),
    ("PATCH", "/slo/batch", f'{{"ttft_ms": {"9" * 400}}}', 422, "ttft_ms"),
    ("PATCH", "/slo/batch", f'{{"ttft_ms": {"9" * 5000}}}', 400, "not JSON"),
    ("PATCH", "/slo/batch", '{"ttft_ms": true}', 422, "ttft_ms"),
    ("PATCH", "/slo/batch", f"{'[' * 100_000}", 400, "not JSON"),
    ("PUT", "/slo/history", json.dumps(TARGETS), 422, "the name is taken"),
    ("POST", "/slo:rollback", f'{{"version": {2**70}}}', 422, "version"),
    ("POST", "/slo:rollback", '{"version": 0}', 422, "version"),
    ("PUT", "/mode", '{"mode": "of", "reason": "x"}', 422, "auto"),
    ("PUT", "/mode", '{"mode": "frozen"}', 422, "reason"),
    (
        "PUT",
        "/budget",
        '{"max_gpus": 1, "prefill": {"min_workers": 2}, "reason": "x"}',
        422,
        "below the floor of 2",
    ),
    ("PATCH", "/budget", '{"max_gpus": 1, "reason": "x"}', 422, "smallest pools are 1 prefill + 1 decode"),
    ("PATCH", "/budget", '{"prefill": {"min_workers": 5, "max_workers": 3}, "reason": "x"}', 422, "is above"),
    ("PATCH", "/budget", '{"max_gpu": 1, "reason": "x"}', 422, "nearest known is max_gpus"),
    ("PATCH", "/budget", '{"max_gpus": -1, "reason": "x"}', 422, "max_gpus"),
    ("PATCH", "/budget", '{"max_gpus": 1.5, "reason": "x"}', 422, "max_gpus"),
    ("PUT", "/budget", '{"max_gpus": NaN, "reason": "x"}', 422, "max_gpus"),
    ("PUT", "/budget", '{"decode": {"min_workers": 3, "max_workers": 2}, "reason": "x"}', 422, "is above"),
    ("PATCH", "/budget", '{"both": {"min_workers": NaN}, "reason": "x"}', 422, "both.min_workers"),
    ("PUT", "/slo", '{"classes": {"interactive": {"ttft_ms": NaN, "tpot_ms": 5}}}', 422, "finite"),
    ("PUT", "/slo", '{"classes": {"gold": {"ttft_ms": 50, "tpot_ms": 5}}}', 422, "'interactive' must stay"),
    ("PATCH", "/slo", '{"classes": {"interactive": null}}', 422, "'interactive' must stay"),
    ("PATCH", "/slo", '{"classes": {"bach": null}}', 404, "nearest is 'batch'"),
    ("PATCH", "/slo", '{"classes": {"batch": {"percentile": 1.0}}}', 422, "less than 1"),
    ("PATCH", "/slo/batch", '{"ttft_ms": 900, "e2e_ms": 800}', 422, "cannot end before its first token"),
    ("POST", "/slo:import", '{"format": "baton.slo/1", "classes": {}, "reason": "x"}', 422, "classes"),
    (
        "POST",
        "/slo:import",
        '{"format": "baton.slo/1", "classes": {"interactive": {"ttft_ms": 5, "tpot_ms": -Infinity}}, "reason": "x"}',
        422,
        "finite",
    ),
    ("POST", "/slo:rollback", '{"version": 9}', 404, "9"),
    ("POST", "/slo:dryRun", '{"classes": {"interactve": {"ttft_ms": 5}}}', 404, "nearest is 'interactive'"),
)


async def test_bad_input_is_named_and_nothing_is_half_applied(admin: httpx.AsyncClient) -> None:
    headers = {**ANY, "content-type": "application/json"}
    for method, path, body, status, words in BAD_INPUT:
        answer = await admin.request(method, f"/admin/v1{path}", content=body, headers=headers)
        assert (answer.status_code, words in error_of(answer)["message"]) == (status, True), answer.text
        assert (await admin.get("/admin/v1/slo")).json()["version"] == 1
        assert (await admin.get("/admin/v1/mode")).json()["version"] == 1


async def test_one_bad_class_among_good_ones_changes_none(admin: httpx.AsyncClient) -> None:
    classes = {"interactive": {"ttft_ms": 900}, "gold": TARGETS, "batch": {"tpot_ms": -1}}
    assert (await admin.patch("/admin/v1/slo", json={"classes": classes}, headers=ANY)).status_code == 422
    told = (await admin.get("/admin/v1/slo")).json()
    assert (told["version"], told["classes"]["interactive"]["ttft_ms"], "gold" in told["classes"]) == (1, 2000.0, False)


# -- mode, budget, decisions -------------------------------------------------------------------------------------------


async def test_mode_and_budget_share_a_version_and_survive_a_restart(database_url: str) -> None:
    database = open_database(database_url)
    async with operator(database) as admin:
        before = await admin.get("/admin/v1/mode")
        assert (before.json()["mode"], before.headers["etag"]) == ("advisory", '"1"')
        body = {"mode": "auto", "reason": "after the first week"}
        assert (await admin.put("/admin/v1/mode", json=body)).status_code == 428
        mode = await admin.put("/admin/v1/mode", json=body, headers={"if-match": '"1"'})
        assert (mode.status_code, mode.json()["mode"], mode.json()["who"]) == (200, "auto", "ann")
        late = await admin.put("/admin/v1/mode", json={**body, "mode": "frozen"}, headers={"if-match": '"1"'})
        assert (late.status_code, late.headers["etag"]) == (412, '"2"')
        budget = {"max_gpus": 12, "prefill": {"min_workers": 0, "max_workers": 4}, "reason": "night"}
        patched = await admin.patch("/admin/v1/budget", json=budget, headers={"if-match": '"2"'})
        assert patched.json()["budget"]["prefill"] == {"min_workers": 0, "max_workers": 4}
        assert patched.json()["budget"]["decode"] == {"min_workers": 1, "max_workers": None}
        lifted = await admin.patch("/admin/v1/budget", json={"max_gpus": None, "reason": "day"}, headers=ANY)
        assert lifted.json()["budget"]["max_gpus"] is None
    async with operator(database) as again:
        told = (await again.get("/admin/v1/budget")).json()
        assert (told["version"], told["mode"], told["budget"]["prefill"]["max_workers"]) == (4, "auto", 4)
        whole = await again.put("/admin/v1/budget", json={"max_gpus": 3, "reason": "reset"}, headers=ANY)
        assert whole.json()["budget"]["prefill"] == {"min_workers": 0, "max_workers": None}
        history = (await again.get("/admin/v1/settings/history")).json()["revisions"]
    assert [(revision["version"], revision["reason"]) for revision in history][:2] == [(5, "reset"), (4, "day")]
    database.close()


@pytest.mark.parametrize(
    ("config", "gpus_each"),
    [
        (ClusterConfig(kubernetes=KubernetesConfig(fullname="chat", gpus_per_worker=4)), 4),
        (ClusterConfig(engine=EngineConfig(tensor_parallel_size=2)), 2),
        (ClusterConfig(emulation=EmulationConfig(gpu="h100", tp=8)), 8),
    ],
)
async def test_a_budget_counts_all_gpus_of_a_worker(lite: Database, config: ClusterConfig, gpus_each: int) -> None:
    async with operator(lite, config=config) as client:
        for spare, status in ((0, 200), (-1, 422)):
            body = {"max_gpus": 2 * gpus_each + spare, "reason": "x"}
            answer = await client.patch("/admin/v1/budget", json=body, headers=ANY)
            assert answer.status_code == status, answer.text
        assert f"below the floor of {2 * gpus_each}" in answer.text


async def test_decisions_are_read_by_time_and_page(database: Database) -> None:
    now_s = [100.0]
    controller = Controller(ControllerConfig(), ControlStore(database, lambda: now_s[0]))
    for number in range(4):
        await controller.decide(Decision("flip", f"flip {number}", "prefill is short", True, {"need": math.inf}))
        now_s[0] += 10.0
    app = make_app(controller, ClusterConfig(), lambda: TOKENS)
    headers = {"authorization": "Bearer view-secret"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://admin", headers=headers
    ) as viewer:
        found = (await viewer.get("/admin/v1/decisions?since=110&until=130")).json()["decisions"]
        assert [decision["action"] for decision in found] == ["flip 2", "flip 1"]
        assert (found[0]["inputs"], found[0]["applied"]) == ({"need": "inf"}, True)
        [page] = (await viewer.get("/admin/v1/decisions?before=3&limit=1")).json()["decisions"]
        assert page["number"] == 2
        assert (await viewer.get("/admin/v1/decisions?since=9&until=8")).status_code == 422
        assert (await viewer.get("/admin/v1/decisions?since=nan")).status_code == 422
    await controller.close()


# -- tokens and audit --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), [("PUT", "/mode"), ("PATCH", "/budget"), ("POST", "/slo:import")])
async def test_a_viewer_changes_nothing_and_strangers_see_nothing(lite: Database, method: str, path: str) -> None:
    async with operator(lite, "view-secret") as viewer:
        assert (await viewer.request(method, f"/admin/v1{path}", json={}, headers=ANY)).status_code in (403, 422)
        body = {"mode": "frozen", "reason": "x"}
        assert (await viewer.put("/admin/v1/mode", json=body, headers=ANY)).status_code == 403
    async with operator(lite, "op-secret ") as close:
        assert (await close.get("/admin/v1/decisions")).status_code == 200
    async with operator(lite, "op-secre") as stranger:
        refused = await stranger.get("/admin/v1/decisions")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")


async def test_changes_and_refused_callers_leave_a_line_without_secrets(
    lite: Database, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "baton.controller")
    async with operator(lite) as admin:
        await admin.patch("/admin/v1/slo/batch", json={"ttft_ms": 5, "reason": "a secret reason"}, headers=ANY)
        await admin.get("/admin/v1/slo")
    async with operator(lite, "wrong-secret") as stranger:
        await stranger.get("/admin/v1/slo")
    lines = [record.__dict__["baton_fields"] for record in caplog.records if record.name.endswith("audit")]
    assert lines == [
        {"who": "ann", "method": "PATCH", "path": "/admin/v1/slo/batch", "status": 200},
        {"who": "", "method": "GET", "path": "/admin/v1/slo", "status": 401},
    ]
    assert all("secret" not in str(record.__dict__) for record in caplog.records)


async def test_a_body_beyond_any_use_is_refused_unread(admin: httpx.AsyncClient) -> None:
    for headers in ({}, {"content-length": "9" * 5_000}, {"content-length": "-1"}):
        body = b" " * (MAX_BODY_BYTES + 1)
        answer = await admin.put("/admin/v1/slo", content=body, headers={**ANY, **headers})
        assert (answer.status_code, error_of(answer)["code"]) == (413, "too_large")


def token_file(folder: Path, *tokens: tuple[str, str, str]) -> Path:
    file = folder / "tokens.yaml"
    lines = [
        f"- {{name: {name}, role: {role}, sha256: {hashlib.sha256(secret.encode()).hexdigest()}}}"
        for name, role, secret in tokens
    ]
    file.write_text("\n".join(["tokens:", *lines]))
    return file


def test_named_tokens_come_from_a_file_that_is_followed(tmp_path: Path) -> None:
    drawn = tmp_path / "tokens.json"
    drawn.write_text('{"operator": {"role": "operator", "secret": "drawn"}}')
    file = token_file(
        tmp_path, ("ann", "operator", "first"), ("ann", "operator", "second"), ("dash", "viewer", "third")
    )
    now_s = [0.0]
    tokens = TokenFiles(drawn, str(file), lambda: now_s[0])
    assert [token.name for token in tokens.current()] == ["operator", "ann", "ann", "dash"]
    token_file(tmp_path, ("dash", "viewer", "third"))
    assert len(tokens.current()) == 4
    now_s[0] += CHECK_S
    assert [token.name for token in tokens.current()] == ["operator", "dash"]
    file.write_text("tokens: {")
    now_s[0] += CHECK_S
    assert [token.name for token in tokens.current()] == ["operator", "dash"]
    file.unlink()
    now_s[0] += CHECK_S
    assert [token.name for token in tokens.current()] == ["operator", "dash"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tokens: 5", "must hold `tokens:`"),
        ("- secret", "must hold `tokens:`"),
        ("tokens: [secret]", "admin token 1: entry must have name, role, sha256"),
        ("tokens: [{name: ann, role: operator, sha: secret}]", "nearest known is sha256"),
        ("tokens: [{name: 'a b', role: operator, sha256: secret}]", "name must match"),
        ("tokens: [{name: ann, role: secret, sha256: secret}]", "role must be viewer or operator"),
        ("tokens: [{name: ann, role: viewer, sha256: secret}]", "sha256 must be 64"),
        ("tokens: {secret", "not YAML"),
    ],
)
def test_a_wrong_token_file_names_the_entry_and_its_field_and_shows_no_value(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        parse_tokens([text])
    assert "secret" not in refused.value.message


def test_one_name_has_one_role_and_a_token_is_one_person_s(tmp_path: Path) -> None:
    for tokens, words in (
        ((("ann", "viewer", "x"), ("ann", "operator", "y")), "role differs"),
        ((("ann", "viewer", "x"), ("bob", "viewer", "x")), "sha256 is that of another one"),
    ):
        with pytest.raises(ConfigError, match=words):
            parse_tokens([token_file(tmp_path, *tokens).read_text()])


async def test_a_password_in_the_database_s_url_is_shown_nowhere(lite: Database) -> None:
    url = "postgresql://ann:hidden@db/x"
    config = ClusterConfig(controller=ControllerConfig(database=url))
    config = replace(config, router=replace(config.router, batch=replace(config.router.batch, database=url)))
    async with operator(lite, config=config) as admin:
        shown = await admin.get("/admin/v1/config")
    assert shown.json()["controller"]["database"] == "postgresql://ann:***@db/x"
    assert "hidden" not in shown.text


async def test_a_store_that_breaks_is_said_once_and_followed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = Controller(
        ControllerConfig(), ControlStore(open_database(f"sqlite://{tmp_path}/slo.sqlite"), lambda: 7.0)
    )
    slo = controller.in_force.slo

    async def away() -> None:
        raise Unavailable("away")

    with monkeypatch.context() as broken:
        broken.setattr(slo, "refresh", away)
        await controller.in_force.tick()
    await controller.in_force.tick()
    assert controller.slo.version == 1
    await controller.close()
