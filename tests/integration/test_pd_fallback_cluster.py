"""`baton up --emulate --autoscale` falls back to prefilling on decode by itself while prefill apart does not pay, and comes back.

One prefill and one decode worker of a 70B on two A100, whose steps are long enough for two cores to keep up at full speed. Two
kinds of traffic, one after the other:

    forms   short answers to prompts that come faster than one worker computes them: the decode worker has time to help
    chat    longer answers at a pace that no prompt may disturb

Nobody touches a lever: the controller measures, has both layouts simulated, and switches. Every answer is compared token by token
with the one it must be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from baton.request import SamplingParams
from baton.v1 import serving_pb2
from engine.emulated_runner import emulated_answer
from router.controller.autoscaler.disaggregation import WHOLE_PROMPTS
from tests.integration.cluster_rig import Client, ClusterUnderTest, collect
from tests.integration.conftest import serve
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

PERIOD_S = 60.0  # between verdicts; a window is 300 s, so most of what a second one sees the first one has seen
PLANNER_S = 60  # for a verdict, at the lowest priority beside a busy cluster
# Between tunings of a worker, so one. A decode worker that is tuned to small chunks computes prompts within every stream's pace:
# on such GPUs both layouts are alike then, and it rightly stays where it is. docs/slo.md
DWELL_S = 3_600.0
LIMIT_S = 900.0  # for either change: a window of the new traffic, three verdicts of 2 min each, and a busy machine
# Of a call: until the cluster is back it serves chat more slowly than it comes, and none is to be turned away for its deadline
CALL_TIMEOUT_S = 3_600.0
TRIES = 3  # of the admin endpoint
SETTLE_S, MORE_S = 3.0, 15.0  # after a change: for calls on their way, and of the same traffic, some dozens of calls
POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Of traffic; lengths of prompts vary by a tenth."""

    slo_class: str
    ttft_ms: int
    tpot_ms: int
    rate: float  # calls a second
    prompt_tokens: int
    output_tokens: int


FORMS = Kind("forms", 2_500, 500, rate=4.5, prompt_tokens=600, output_tokens=8)
CHAT = Kind("chat", 5_000, 33, rate=6.5, prompt_tokens=250, output_tokens=50)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    home = tmp_path_factory.mktemp("home")
    settings = home / "settings.yaml"
    settings.write_text(
        f"controller:\n  pd_period_s: {PERIOD_S}\n  planner_seconds: {PLANNER_S}\n  dwell_s: {DWELL_S}\n"
        "router:\n  max_inflight: 8192\n",
        encoding="utf-8",
    )
    gpus = ("--emulate", "a100", "--emulate-model", "llama-3.1-70b", "--tp", "2")
    scaling = ("--autoscale", "--max-gpus", "4", "--config", str(settings))  # no more than there are: one lever is left
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "1", *gpus, *scaling, home=home)


class Admin:
    def __init__(self, cluster: ClusterUnderTest) -> None:
        secret = json.loads((cluster.run_folder / "tokens.json").read_text())["operator"]["secret"]
        url, headers = f"http://127.0.0.1:{cluster.admin_port}/admin/v1", {"authorization": f"Bearer {secret}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=120)

    async def __aenter__(self) -> Admin:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """Asked again where the connection broke: while it was idle the controller may have closed it."""
        for _ in range(TRIES):
            with contextlib.suppress(httpx.TransportError):
                return dict((await self._http.get(path)).json())
        raise AssertionError(f"{path} was not answered {TRIES} times")

    async def add_class(self, kind: Kind) -> None:
        body = {"ttft_ms": kind.ttft_ms, "tpot_ms": kind.tpot_ms}
        answer = await self._http.put(f"/slo/{kind.slo_class}", json=body, headers={"if-match": "*"})
        assert answer.is_success, answer.text

    async def switches(self) -> list[str]:
        """What was done with the limit of local prefill, oldest first."""
        told = (await self.get("/decisions?limit=200"))["decisions"]
        return [one["action"] for one in reversed(told) if one["lever"] == "local_prefill" and one["applied"]]

    async def lateness(self) -> float:
        """Of the latest worker's steps, p99, as a share of a step."""
        workers = (await self.get("/workers"))["workers"]
        return max(float((worker["load"] or {}).get("p99_lateness", 0.0)) for worker in workers)


class Traffic:
    """Calls at random, until they are told to stop; each is checked."""

    def __init__(self, client: Client) -> None:
        self._stub = client.stub
        self._rng = random.Random(0)
        self.calls: list[asyncio.Task[str]] = []

    async def play(self, kind: Kind) -> None:
        due_s = time.monotonic()
        while True:
            length = round(self._rng.uniform(0.9, 1.1) * kind.prompt_tokens)
            prompt = [self._rng.randrange(20, 420) for _ in range(length)]
            self.calls.append(asyncio.create_task(self._call(prompt, kind)))
            due_s += self._rng.expovariate(kind.rate)  # however late this loop is: the rate stays
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _call(self, prompt: list[int], kind: Kind) -> str:
        """Where it was prefilled."""
        num_tokens = kind.output_tokens
        request = serving_pb2.GenerateRequest(
            sampling=serving_pb2.Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        )
        request.token_ids.ids.extend(prompt)
        metadata = (("x-slo-class", kind.slo_class),)
        got = await collect(self._stub.Generate(request, timeout=CALL_TIMEOUT_S, metadata=metadata))
        assert got.code is grpc.StatusCode.OK, got.details
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        assert got.tokens == emulated_answer(prompt, sampling, num_tokens, VOCAB_SIZE, (EOS_TOKEN_ID,))
        assert got.done is not None
        return got.done.timings.prefill_worker

    async def until_switched(self, kind: Kind, admin: Admin, num: int) -> tuple[list[str], list[str]]:
        """Play until the limit was changed for the `num`th time. Returns where prompts were computed before that, and after."""
        began_s, first = time.monotonic(), len(self.calls)
        playing = asyncio.create_task(self.play(kind))
        try:
            while len(await admin.switches()) < num:
                assert time.monotonic() - began_s < LIMIT_S, await admin.get("/pd")
                await asyncio.sleep(POLL_S)
            switched = len(self.calls)
            said, late = (await admin.get("/pd"))["said"], await admin.lateness()
            print(
                f"\n{kind.slo_class}: switched after {time.monotonic() - began_s:.0f} s, steps {late:.0%} late: {said}"
            )
            await asyncio.sleep(SETTLE_S)
            settled = len(self.calls)
            await asyncio.sleep(MORE_S)
        finally:
            playing.cancel()
        where = await asyncio.gather(*self.calls[first:])
        return where[: switched - first], where[settled - first :]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 300)
async def test_a_cluster_falls_back_to_local_prefill_by_itself_and_comes_back_and_loses_nothing(
    cluster: ClusterUnderTest,
) -> None:
    async with Admin(cluster) as admin, Client(cluster) as client:
        traffic = Traffic(client)
        for kind in (FORMS, CHAT):
            await admin.add_class(kind)

        before, after = await traffic.until_switched(FORMS, admin, 1)
        assert set(before[: len(before) // 2]) == {"prefill-0"}, "as configured, nothing is prefilled on decode"
        assert await admin.switches() == [f"prefill up to {WHOLE_PROMPTS} tokens where they decode"]
        assert (await admin.get("/pd"))["verdict"] == "does_not_pay"
        print(f"{after.count('decode-0')} of the next {len(after)} prompts were computed where they are decoded")
        assert "decode-0" in after

        before, after = await traffic.until_switched(CHAT, admin, 2)
        assert (await admin.switches())[1] == "prefill up to 0 tokens where they decode"
        assert (await admin.get("/pd"))["less_apart"]["local"]["mean"] < 0
        print(f"{before.count('decode-0')} of {len(before)} prompts were computed on decode until then, none after it")
        assert set(after) == {"prefill-0"}
        await client.until_idle()
        print(f"{len(traffic.calls)} calls, none lost, no token wrong")
