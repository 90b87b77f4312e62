"""More calls than the fleet can take, over the real front end: bounded, in fair order, refused in time, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import httpx
import pytest

from baton.errors import Overloaded
from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from router import turns
from router.admission import Admission
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair

BATCH = {"x-slo-class": "batch"}  # a minute to the first token: bounds decide, not forecasts
BODY: dict[str, object] = {"prompt": "hello", "max_tokens": 3}
KEYS = {name: f"bk-{name}" for name in ("heavy", "light", "narrow")}


async def slow_pair(tokens_per_s: int = 100) -> tuple[StubWorker, StubWorker]:
    """Workers of a known speed whose prompts come out when the test opens the gate."""
    prefill, decode = await start_pair()
    # A thousand tokens in a hundred steps: what the first report says is the first sample of its speed.
    prefill.kv_load = worker_pb2.Load(prompt_tokens_computed=1_000, num_steps=100, step_ms=1e4 / tokens_per_s)
    prefill.script.prefill_gate.clear()
    return prefill, decode


@contextlib.asynccontextmanager
async def slow_rig(files: ModelFiles, workers: Sequence[StubWorker], **settings: object) -> AsyncIterator[Rig]:
    """A router that has heard how fast they are: until it has, there is no reason to let calls wait.

    It looks at the fleet each time it lets calls in, whatever a look costs here. With an older look the prompt behind the
    closed gate seems done after its forecast time, and one more call goes.
    """
    with mock.patch.object(turns, "OBSERVE_SHARE", 1.0):
        async with running_rig(files, workers, missed_heartbeats=100, **settings) as rig:  # type: ignore[arg-type]
            await until(lambda: rig.front_end.fleet.endpoints[0].rates.has_computed, "the speed is known")
            yield rig


def admission(rig: Rig) -> Admission:
    return rig.front_end.calls._turns.admission


def key_file(folder: Path) -> str:
    def entry(name: str, **settings: object) -> dict[str, object]:
        return {"name": name, "sha256": hashlib.sha256(KEYS[name].encode()).hexdigest(), **settings}

    limits = {"max_concurrent": 2, "slo_classes": ["batch"], "requests_per_min": 100}
    path = folder / "keys.json"
    path.write_text(json.dumps({"keys": [entry("heavy"), entry("light", share_cache=True), entry("narrow", **limits)]}))
    return str(path)


def by(name: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}", **BATCH, **more}


async def post(rig: Rig, headers: dict[str, str] | None = None, **body: object) -> httpx.Response:
    return await rig.http.post("/v1/completions", json={**BODY, **body}, headers=headers or BATCH)


def background(tasks: list[asyncio.Task[Any]], coroutine: Any) -> None:
    tasks.append(asyncio.create_task(coroutine))


async def test_o1_a_burst_beyond_the_queue_is_refused_at_once_and_the_accepted_are_served(files: ModelFiles) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers, max_queued=8) as rig:
        calls = [asyncio.create_task(post(rig)) for _ in range(20)]
        streams = [
            asyncio.create_task(rig.generate(request(max_tokens=3), metadata=tuple(BATCH.items()))) for _ in range(20)
        ]
        await until(lambda: sum(task.done() for task in calls + streams) >= 30, "the surplus is refused")
        refused = [task.result() for task in calls if task.done()]
        statuses = [task.result().status for task in streams if task.done()]
        assert len(refused) + len(statuses) <= 31  # one at least is being computed, eight wait
        assert {response.status_code for response in refused} <= {429}
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert all(status is not None and status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for status in statuses)
        await until(lambda: len(workers[0].submits) == 2, "one is computed, the next is there")
        workers[0].script.prefill_gate.set()
        codes = [(await call).status_code for call in calls]
        answers = [await stream for stream in streams]
        assert set(codes) <= {200, 429}
        served = codes.count(200) + sum(answer.done is not None for answer in answers)
        assert served >= 9
        others = [answer.status for answer in answers if answer.done is None]
        assert all(status is not None and status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED for status in others)
        await rig.idle()
        assert (admission(rig).num_seqs, len(admission(rig).queue)) == (0, 0)


async def test_o1_where_decode_refuses_everything_prefill_is_told_to_stop(files: ModelFiles) -> None:
    workers = await start_pair()
    workers[0].script.fail_prefill = Overloaded("the decode queue is full", retry_after_s=1.0)
    async with running_rig(files, workers, max_retries=1) as rig:
        response = await post(rig)
        assert response.status_code == 429
        await rig.idle()


async def test_a_call_that_leaves_the_queue_frees_its_place_at_once_and_no_worker_hears_of_it(
    files: ModelFiles,
) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers) as rig:
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(6):
            background(tasks, post(rig))
        await until(lambda: admission(rig).num_seqs == 6, "all are inside")
        await until(lambda: len(workers[0].submits) == 2, "one is computed, the next is there")
        num_waiting = len(admission(rig).queue)
        assert num_waiting == 4
        tasks[-1].cancel()
        call = rig.stub.Generate(request(max_tokens=3), metadata=tuple(BATCH.items()))
        await until(lambda: admission(rig).num_seqs == 6, "one left, one came")
        call.cancel()
        await until(lambda: admission(rig).num_seqs == 5, "both have left")
        assert len(admission(rig).queue) == num_waiting - 1
        assert len(workers[0].submits) == 2
        workers[0].script.prefill_gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await rig.idle()
        assert len(workers[0].submits) == 5


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_a_deadline_that_passes_in_the_queue_ends_the_call_there(files: ModelFiles, way: str) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers) as rig:
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(3):
            background(tasks, post(rig))
        await until(lambda: len(workers[0].submits) == 2, "one is computed, the next is there, and one waits")
        assert admission(rig).num_seqs == 3
        if way == "http":
            response = await post(rig, {**BATCH, "x-request-timeout-ms": "800"})
            assert response.status_code == 504
        else:
            answer = await rig.generate(request(max_tokens=3), metadata=tuple(BATCH.items()), timeout=0.8)
            assert answer.status is not None
            assert answer.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: admission(rig).num_seqs == 3, "it has left")
        workers[0].script.prefill_gate.set()
        await asyncio.gather(*tasks)
        await rig.idle()
        assert len(workers[0].submits) == 3


async def test_a_call_that_would_miss_its_target_is_shed_while_one_with_more_patience_waits(files: ModelFiles) -> None:
    workers = await slow_pair(tokens_per_s=10)
    async with slow_rig(files, workers) as rig:
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(4):
            background(tasks, post(rig))
        await until(lambda: admission(rig).num_seqs == 4, "some wait")
        shed = await rig.http.post("/v1/completions", json=BODY, headers={**BATCH, "x-slo-ttft-ms": "900"})
        assert shed.status_code == 429
        assert int(shed.headers["retry-after"]) >= 1
        assert "TTFT" in shed.json()["error"]["message"]
        late = await rig.http.post("/v1/completions", json=BODY, headers={**BATCH, "x-request-timeout-ms": "700"})
        assert late.status_code in (429, 504)
        background(tasks, post(rig))
        await until(lambda: admission(rig).num_seqs == 5, "the patient one waits")
        page = (await rig.http.get("/metrics")).text
        assert 'baton_requests_shed_total{reason="ttft",slo_class="batch"} 1.0' in page
        assert f"baton_admission_queue_length {float(len(admission(rig).queue))}" in page
        workers[0].script.prefill_gate.set()
        assert {response.status_code for response in await asyncio.gather(*tasks)} == {200}
        await rig.idle()


async def test_a_tenant_that_takes_less_goes_before_the_backlog_of_another(files: ModelFiles, tmp_path: Path) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers, api_keys_file=key_file(tmp_path)) as rig:
        tasks: list[asyncio.Task[Any]] = []
        for number in range(10):
            background(tasks, post(rig, by("heavy", **{"x-request-id": f"heavy-{number}"})))
        await until(lambda: admission(rig).num_seqs == 10, "the backlog is there")
        background(tasks, post(rig, by("light", **{"x-request-id": "light"})))
        await until(lambda: admission(rig).num_seqs == 11, "the light one waits")
        num_before = len(workers[0].submits)
        workers[0].script.prefill_gate.set()
        await asyncio.gather(*tasks)
        order = [submit.request.request_id for submit in workers[0].submits]
        assert "light" in order[num_before : num_before + 2]  # one may have been on its way when it came
        salts = {submit.request.request_id[:5]: submit.request.tenant_salt for submit in workers[0].submits}
        assert salts == {"heavy": b"heavy", "light": b""}
        page = (await rig.http.get("/metrics")).text
        assert 'baton_tenant_tokens_total{tenant="light",kind="output"} 3.0' in page


async def test_keys_are_asked_for_on_both_apis_and_what_they_allow_is_kept(files: ModelFiles, tmp_path: Path) -> None:
    async with running_rig(files, api_keys_file=key_file(tmp_path)) as rig:
        for path, body in (("/v1/completions", BODY), ("/v1/tokenize", {"prompt": "a"})):
            for headers in ({}, {"authorization": "Bearer bk-guess"}):
                response = await rig.http.post(path, json=body, headers=headers)
                assert response.status_code == 401
                assert response.headers["x-request-id"]
                assert (response.json()["error"]["code"], response.json()["error"]["param"]) == (
                    "unauthenticated",
                    "authorization",
                )
        unknown = await rig.http.get("/v1/models", headers={"x-request-id": "mine"})
        assert (unknown.status_code, unknown.headers["x-request-id"]) == (401, "mine")
        assert (await rig.http.get("/v1/models", headers=by("light"))).status_code == 200
        assert (await rig.http.get("/readyz")).status_code == 200
        answer = await rig.generate(request())
        assert answer.status is not None
        assert answer.status.code() is grpc.StatusCode.UNAUTHENTICATED
        assert (await post(rig, by("light"))).status_code == 200
        metadata = (("x-api-key", KEYS["light"]),)
        assert (await rig.generate(request(max_tokens=2), metadata=metadata)).done is not None
        wrong_class = await post(rig, {**by("narrow"), "x-slo-class": "interactive"})
        assert wrong_class.status_code == 400
        assert wrong_class.json()["error"]["param"] == "slo.class_name"
        assert not any("bk-" in str(submit) for submit in rig.prefill.submits)


async def test_a_key_s_concurrency_is_in_sequences_and_comes_back(files: ModelFiles, tmp_path: Path) -> None:
    async with running_rig(files, api_keys_file=key_file(tmp_path)) as rig:
        three = await post(rig, by("narrow"), n=3)
        assert three.status_code == 400  # no waiting helps
        assert three.json()["error"]["param"] == "n"
        assert "the limit of this key is 2" in three.json()["error"]["message"]
        for _ in range(5):
            assert (await post(rig, by("narrow"), n=2)).status_code == 200
        assert (await post(rig, by("narrow"), max_tokens=10**6)).status_code == 400
        await rig.idle()
        quotas = rig.front_end.calls._turns.quotas
        assert quotas.num_seqs(rig.front_end.calls.keys.ring.tenants["narrow"]) == 0


async def test_what_a_key_may_not_do_is_no_miss_of_its_class(files: ModelFiles, tmp_path: Path) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers, api_keys_file=key_file(tmp_path)) as rig:
        tasks: list[asyncio.Task[Any]] = []
        background(tasks, post(rig, by("narrow"), n=2))
        await until(lambda: admission(rig).num_seqs == 2, "the key has what it may have")
        assert (await post(rig, by("narrow"))).status_code == 429
        workers[0].script.prefill_gate.set()
        await asyncio.gather(*tasks)
        await rig.idle()
        [verdicts] = [v for v in rig.front_end.calls._slo_watch.totals() if v.class_name == "batch"]
        assert (verdicts.num_met, verdicts.num_failed) == (1, 0)


async def test_a_prompt_that_misses_its_class_s_target_on_an_idle_fleet_waits_where_one_that_asks_is_refused(
    files: ModelFiles,
) -> None:
    """A laptop: 900 tokens take 9 s, and class interactive wants its first token within 2 s."""
    workers = await slow_pair(tokens_per_s=100)
    async with slow_rig(files, workers) as rig:
        long: dict[str, object] = {"prompt": [5] * 900, "max_tokens": 3}
        calls = [asyncio.create_task(rig.post("/v1/completions", long)) for _ in range(3)]
        await until(lambda: len(admission(rig).queue) == 2, "one is computed, two wait")
        asks = await rig.http.post("/v1/completions", json=long, headers={"x-slo-ttft-ms": "2000"})
        assert asks.status_code == 429
        in_time = await rig.http.post("/v1/completions", json=long, headers={"x-request-timeout-ms": "20000"})
        assert in_time.status_code == 429
        assert int(in_time.headers["retry-after"]) >= 1
        workers[0].script.prefill_gate.set()
        assert [(await call).status_code for call in calls] == [200] * 3
        await rig.idle()


async def test_counters_are_the_sum_of_what_clients_were_told_whatever_became_of_the_others(
    files: ModelFiles, tmp_path: Path
) -> None:
    """Calls that finish, of one answer and of two, and calls refused by body, by queue and by deadline in the queue."""
    workers = await slow_pair()
    async with slow_rig(files, workers, max_queued=2, api_keys_file=key_file(tmp_path)) as rig:
        calls = [asyncio.create_task(post(rig, by("heavy"))) for _ in range(2)]
        await until(lambda: len(workers[0].submits) == 2, "one is computed, and the next is there")
        calls.append(asyncio.create_task(post(rig, by("heavy"), n=2)))
        late = {"x-request-timeout-ms": "2000"}
        calls.append(asyncio.create_task(post(rig, by("heavy", **late))))
        await until(lambda: len(admission(rig).queue) == 2, "two wait")
        calls += [
            asyncio.create_task(post(rig, by("heavy"))),
            asyncio.create_task(post(rig, by("heavy"), max_tokens=-1)),
        ]
        await until(lambda: sum(call.done() for call in calls) == 3, "all but those that can be served have failed")
        workers[0].script.prefill_gate.set()
        answers = [await call for call in calls]
        await rig.idle()
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 400, 429, 504]
        usages = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
        text = (await rig.http.get("/metrics")).text
        for kind, name in (("prompt", "prompt"), ("completion", "generation")):
            expected = sum(usage[f"{kind}_tokens"] for usage in usages)
            assert f'baton_{name}_tokens_total{{slo_class="batch"}} {expected:.1f}' in text
        for kind, usage in (("prompt", "prompt"), ("output", "completion")):
            expected = sum(each[f"{usage}_tokens"] for each in usages)
            assert f'baton_tenant_tokens_total{{tenant="heavy",kind="{kind}"}} {expected:.1f}' in text
        outcomes = re.findall(r'baton_requests_total{api="completions",outcome="(\w+)"} (\S+)', text)
        assert sum(float(count) for _, count in outcomes) == len(calls)


async def test_a_tenant_aborts_its_own_calls_only_also_once_its_limits_are_others(
    files: ModelFiles, tmp_path: Path
) -> None:
    workers = await slow_pair()
    async with slow_rig(files, workers, api_keys_file=key_file(tmp_path)) as rig:
        task = asyncio.create_task(post(rig, by("heavy", **{"x-request-id": "mine"})))
        await until(lambda: len(workers[0].submits) == 1, "it runs")
        calls = rig.front_end.calls
        tenants = calls.keys.ring.tenants
        assert calls.abort(tenants["light"], "mine") == 0
        assert calls.abort(replace(tenants["heavy"], weight=2.0), "mine") == 1
        assert (await task).status_code == 499
        await rig.idle()


async def test_n1_n3_counts_come_back_after_cancels_rejects_and_retries(files: ModelFiles) -> None:
    rng = random.Random(3)
    workers = await slow_pair(tokens_per_s=1_000)
    async with slow_rig(files, workers, max_queued=16, max_retries=2) as rig:

        async def one(number: int) -> str:
            try:
                async with asyncio.timeout(rng.uniform(0.0, 0.3) if rng.random() < 0.5 else 30.0):
                    if number % 3 == 0:
                        answer = await rig.generate(request(max_tokens=3), metadata=tuple(BATCH.items()))
                        return "done" if answer.done is not None else "refused"
                    response = await post(rig, stream=number % 3 == 1)
                    return "done" if response.status_code == 200 else "refused"
            except TimeoutError:
                return "left"

        async def disturb() -> None:
            """Prompts come out in fits, and now and then the worker has no room."""
            for _ in range(40):
                workers[0].script.prefill_gate.set()
                workers[0].script.refuse = Overloaded("full", retry_after_s=0.1) if rng.random() < 0.3 else None
                await asyncio.sleep(0.005)
                workers[0].script.prefill_gate.clear()
                await asyncio.sleep(0.01)
            workers[0].script.refuse = None
            workers[0].script.prefill_gate.set()

        ends = await asyncio.gather(disturb(), *(one(number) for number in range(200)))
        assert len([end for end in ends if end == "refused"]) >= 20
        assert "done" in ends
        assert "left" in ends
        await rig.idle()
        policy = admission(rig)
        assert (policy.num_seqs, len(policy.queue), policy.queue.tokens) == (0, 0, 0.0)
        assert rig.front_end.calls.num_inflight == 0
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]
