"""Workers that say what makes no sense: it costs them, and nobody else."""

from __future__ import annotations

import math

import pytest

from baton.model_files import ModelFiles
from baton.v1 import worker_pb2
from router.rates import DEFAULT_KV_BYTES_PER_S, Rates
from tests.router.router_rig import running_rig, until
from tests.router.stub_worker import start_pair


@pytest.mark.parametrize("step_ms", [math.nan, math.inf, -math.inf, -5.0])
async def test_a_step_time_that_is_none_spoils_no_forecast(files: ModelFiles, step_ms: float) -> None:
    prefill, decode = await start_pair()
    odd = worker_pb2.Load(prompt_tokens_computed=1_000, num_steps=100, step_ms=step_ms, num_running=3)
    prefill.kv_load = decode.kv_load = odd
    async with running_rig(files, [prefill, decode]) as rig:
        body: dict[str, object] = {"prompt": "hello", "max_tokens": 3}
        assert (await rig.post("/v1/completions", body)).status_code == 200
        session = rig.front_end.fleet.endpoints[0].session
        for number in range(2, 5):
            odd.num_steps, odd.prompt_tokens_computed = 100 * number, 1_000 * number
            await until(
                lambda: session.view is not None and session.view.load.num_steps == odd.num_steps, "it is heard"
            )
        assert (await rig.post("/v1/completions", body)).status_code == 200
        table = rig.front_end.fleet.table
        for column in (table.step_s, table.prefill_tokens_per_s, table.step_s_per_seq):
            assert all(math.isfinite(value) and value >= 0 for value in column)
        assert all(rate > 0 for rate in table.prefill_tokens_per_s)


@pytest.mark.parametrize("pull_ms", [math.nan, math.inf, -1.0])
def test_a_pull_s_time_that_is_none_teaches_nothing(pull_ms: float) -> None:
    rates = Rates()
    rates.observe_pull(worker_pb2.SeqStats(pull_ms=pull_ms, pulled_bytes=1_000), 1_000)
    assert rates.kv_bytes_per_s == DEFAULT_KV_BYTES_PER_S
