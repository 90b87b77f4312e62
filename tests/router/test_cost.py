"""What calls cost: every busy second is some call's, tenants pay for what was done for them, a price is a setting."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from baton.config import CostConfig
from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from router.cost import Costs
from router.gpu_time import FADE_S, GpuTime
from router.series import Registry
from tests.router.router_rig import request, running_rig, until
from tests.router.stub_worker import start_pair
from tests.router.test_router_grpc_identity import key_file, of
from tests.router.test_router_metrics import scraped

PROMPT_S, STEP_S, PER_SEQ_S = 5e-5, 5e-3, 1e-4  # of an H100, about


class Worker:
    """Totals of a worker that does what it is told."""

    def __init__(self) -> None:
        self.load = worker_pb2.Load()

    def step(self, num_prompt: int, num_decodes: int) -> None:
        self.load.busy_s += PROMPT_S * num_prompt + (STEP_S + PER_SEQ_S * num_decodes) * bool(num_decodes)
        self.load.step_tokens += num_prompt + num_decodes
        self.load.prompt_tokens_computed += num_prompt


@pytest.mark.parametrize(("most_prompt", "most_decodes"), [(512, 0), (0, 64), (512, 64)])
def test_what_tokens_are_charged_is_what_the_worker_was_busy(most_prompt: int, most_decodes: int) -> None:
    rng, worker, time = random.Random(3), Worker(), GpuTime()
    charged_s = 0.0
    for second in range(120):
        before = worker_pb2.Load()
        before.CopyFrom(worker.load)
        for _ in range(100):
            worker.step(rng.randint(0, most_prompt), rng.randint(0, most_decodes))
        time.observe(worker.load, 1 / PROMPT_S)
        num_prompt = worker.load.prompt_tokens_computed - before.prompt_tokens_computed
        num_output = worker.load.step_tokens - before.step_tokens - num_prompt
        charged_s += time.prompt_s * num_prompt + time.output_s * num_output
        assert second or charged_s == pytest.approx(worker.load.busy_s)
    assert charged_s == pytest.approx(worker.load.busy_s, rel=0.02)
    if most_prompt:
        assert time.prompt_s == pytest.approx(PROMPT_S, rel=0.02)


def test_a_token_of_a_fuller_batch_costs_less_soon_after_it_fills() -> None:
    worker, time = Worker(), GpuTime()
    for _ in range(1_000):
        worker.step(0, 1)
    time.observe(worker.load, 1.0)
    assert time.output_s == pytest.approx(STEP_S + PER_SEQ_S)
    for _ in range(int(3 * FADE_S / STEP_S)):
        worker.step(0, 50)
    time.observe(worker.load, 1.0)
    assert time.output_s == pytest.approx(STEP_S / 50 + PER_SEQ_S, rel=0.01)


def test_totals_that_are_no_news_or_no_numbers_teach_nothing() -> None:
    worker, time = Worker(), GpuTime()
    worker.step(0, 4)
    time.observe(worker.load, 1.0)
    before = time.output_s
    time.observe(worker.load, 1.0)
    for busy_s in (0.0, -1.0, math.nan, math.inf):
        time.observe(worker_pb2.Load(busy_s=busy_s, step_tokens=99), 1.0)
    assert time.output_s == before


@pytest.mark.parametrize(("config", "gpus", "usd"), [(CostConfig(), 1.0, 0.0), (CostConfig(3.6, 8), 8.0, 3.6)])
async def test_each_tenant_is_charged_for_its_own_tokens(
    files: ModelFiles, tmp_path: Path, config: CostConfig, gpus: float, usd: float
) -> None:
    prefill, decode = await start_pair()
    prefill.kv_load.MergeFrom(worker_pb2.Load(busy_s=1.0, step_tokens=10_000, prompt_tokens_computed=10_000))
    decode.kv_load.MergeFrom(worker_pb2.Load(busy_s=2.0, step_tokens=1_000))
    async with running_rig(files, [prefill, decode], cost=config, api_keys_file=key_file(tmp_path, "a", "b")) as rig:
        await until(lambda: len(rig.front_end.calls.costs._lives) == 2, "the workers have told what tokens take")
        for name, num_output in (("a", 11), ("b", 31), ("b", 1)):
            answer = await rig.generate(request("hello there", max_tokens=num_output), metadata=of(name))
            assert answer.done is not None
            assert answer.done.usage.cached_tokens == 0
            num_prompt = answer.done.usage.prompt_tokens
        await rig.idle()
        said = await scraped(rig)
    for name, prompts_s, outputs_s in (("a", 1e-4 * num_prompt, 2e-3 * 10), ("b", 2 * 1e-4 * num_prompt, 2e-3 * 30)):
        series = 'baton_tenant_gpu_seconds_total{tenant="%s",kind="%s"}'
        assert said[series % (name, "prompt")] == pytest.approx(gpus * prompts_s)
        assert said[series % (name, "output")] == pytest.approx(gpus * outputs_s)
        cost = said.get(f'baton_tenant_cost_usd_total{{tenant="{name}"}}')
        assert cost == (pytest.approx(gpus * (prompts_s + outputs_s) * usd / 3_600) if usd else None)
    assert said["baton_usd_per_gpu_hour"] == usd


async def test_a_million_tokens_cost_what_all_workers_cost_while_they_are_made(files: ModelFiles) -> None:
    """DESIGN section 1: two GPUs of $4.00 an hour at 4,200 tokens a second make a million for $0.53."""
    prefill, decode = await start_pair()
    async with running_rig(files, [prefill, decode], cost=CostConfig(usd_per_gpu_hour=4.0)) as rig:
        fleet = rig.front_end.fleet
        costs = Costs(CostConfig(usd_per_gpu_hour=4.0), fleet, Registry(), rig.front_end.metrics.admission)
        loads = [endpoint.session.view.load for endpoint in fleet.endpoints if endpoint.session.view is not None]
        assert len(loads) == 2
        for second in range(30):
            for load, per_s in zip(loads, (200, 4_000), strict=True):
                load.output_tokens = 10**6 + per_s * second
            costs.look(float(second))  # what was made before the router came is none of its business
        price = costs.usd_per_million_tokens
        assert price == pytest.approx(0.53, abs=0.005)
        assert f"baton_fleet_usd_per_million_tokens {price!r}\n" in "".join(costs.lines())
        for second in range(30, 60):
            costs.look(float(second))
        assert (costs.usd_per_million_tokens or 0.0) > 0.7, "idle time is paid for, too"
