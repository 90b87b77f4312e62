"""`baton up --emulate` as a user runs it: Ray, router and controller are real, times are the GPUs', answers are known."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import pytest

from baton.config import EmulationConfig
from baton.request import SamplingParams
from engine.emulated_model import emulated_model
from engine.emulated_runner import emulated_answer
from engine.timing.step_time import Batch
from tests.integration.cluster_rig import PATIENCE_S, Client, ClusterUnderTest
from tests.integration.conftest import serve
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

EMULATION = EmulationConfig(gpu="h100", model="llama-3.1-70b", tp=4, time_scale=5.0)
PROMPT = [(31 * i) % 400 + 20 for i in range(1_000)]
NUM_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
GENEROUS = 4.0  # how much longer a machine that is busy with other tests may make what should take a given time
NUM_LINES = 5


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterUnderTest]:
    """1 prefill + 1 decode. That it ends with nothing left is asserted when it does."""
    gpus = ("--emulate", EMULATION.gpu, "--emulate-model", EMULATION.model, "--tp", str(EMULATION.tp))
    speed = ("--time-scale", f"{EMULATION.time_scale:g}", "--chunk-tokens", "2048")
    home = tmp_path_factory.mktemp("home")
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "1", *gpus, *speed, home=home)


def emulated_ms(batch: Batch) -> float:
    return 1e3 * emulated_model(EMULATION).step_time().step_s(batch)


async def test_it_says_what_is_emulated_and_answers_in_the_time_that_the_gpus_would_take(
    cluster: ClusterUnderTest,
) -> None:
    said = "\n".join(cluster.output)
    assert "Emulated: llama-3.1-70b in fp8 on 4 x h100 per worker, 5 times slower than real" in said
    async with Client(cluster) as client:
        got = await client.generate(PROMPT, NUM_TOKENS)
        await client.until_idle()
    assert got.code is grpc.StatusCode.OK, got.details
    assert got.tokens == emulated_answer(PROMPT, GREEDY, NUM_TOKENS, VOCAB_SIZE, (EOS_TOKEN_ID,))
    assert got.done is not None
    timings = got.done.timings
    prefill_ms, decode_ms = emulated_ms(Batch(((len(PROMPT), 0),))), emulated_ms(Batch((), 1, len(PROMPT)))
    assert prefill_ms <= timings.ttft_ms <= GENEROUS * prefill_ms
    assert 0.98 * decode_ms <= timings.tpot_ms <= GENEROUS * decode_ms
    assert timings.transport.startswith("emulated over ")
    assert (timings.prefill_worker, timings.decode_worker) == ("prefill-0", "decode-0")


def test_a_batch_goes_through_the_file_and_batch_api(cluster: ClusterUnderTest, tmp_path: Path) -> None:
    with openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as client:
        lines = [
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": EMULATION.model, "prompt": f"call number {number}", "max_tokens": 4},
            }
            for number in range(NUM_LINES)
        ]
        lines[-1]["body"] = {"model": EMULATION.model, "prompt": "no room", "max_tokens": 0}
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = client.files.create(file=("calls.jsonl", content), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        started_s = time.monotonic()
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            assert time.monotonic() - started_s < PATIENCE_S, batch
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        print(f"{batch.status} after {time.monotonic() - started_s:.1f} s")
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (NUM_LINES - 1, 1)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        (error,) = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert {answer["custom_id"] for answer in answers} == {f"line-{number}" for number in range(NUM_LINES - 1)}
    assert all(answer["response"]["body"]["usage"]["completion_tokens"] == 4 for answer in answers)
    assert error["custom_id"] == f"line-{NUM_LINES - 1}"
    assert error["response"]["status_code"] == 400
    assert "max_tokens" in error["response"]["body"]["error"]["message"]


def test_status_tells_the_targets_and_what_they_were_held_to(cluster: ClusterUnderTest) -> None:
    shown = cluster.baton("status")
    assert shown.returncode == 0, shown.stderr
    assert "emulated over " in shown.stdout
    assert "interactive" in shown.stdout
