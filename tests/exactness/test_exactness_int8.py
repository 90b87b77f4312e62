"""Weights in int8, in whole workers over UCX: two of them answer as one does, and one whose weights are whole is no peer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.model_files import load_model_files
from tests.exactness.pair_calls import PROMPTS, Calls, running
from tests.tiny_models import make_tiny_model
from worker.server import WorkerServer

WORKERS = {  # role and quantization
    "prefill": ("prefill", "int8"),
    "decode": ("decode", "int8"),
    "both": ("both", "int8"),
    "whole": ("both", "auto"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def workers(model_dir: Path) -> Iterator[dict[str, WorkerServer]]:
    engine = EngineConfig(num_blocks=128, prefix_cache=False, num_threads=1)
    configs = (
        WorkerConfig(name, role=role, model=ModelConfig(str(model_dir), quantization=quantization), engine=engine)
        for name, (role, quantization) in WORKERS.items()
    )
    with running(configs) as started:
        yield started


@pytest.fixture
async def calls(workers: dict[str, WorkerServer]) -> AsyncIterator[Calls]:
    async with Calls(workers) as calls:
        yield calls


async def test_a_pair_answers_as_a_colocated_worker_does(calls: Calls) -> None:
    differing = 0
    for prompt in PROMPTS:
        together, _ = await calls.answer("both", "both", prompt)
        apart, stats = await calls.answer("prefill", "decode", prompt)
        assert apart == together
        assert stats.kv_bytes > 0
        differing += together != (await calls.answer("whole", "whole", prompt))[0]
    assert differing, "int8 is another model: some of its answers are its own"


@pytest.mark.parametrize(("first", "last"), [("prefill", "whole"), ("whole", "decode")])
async def test_weights_as_the_files_have_them_are_another_model(calls: Calls, first: str, last: str) -> None:
    seq = await calls.submit(first, last, PROMPTS[2])
    session = calls.sessions[first]
    error = session.refused[seq] if seq in session.refused else session.ended[seq].error
    assert error.field == "quantization"
    assert "int8" in error.message
    assert "none" in error.message


def test_workers_say_so_in_their_fingerprint(workers: dict[str, WorkerServer], model_dir: Path) -> None:
    spec = load_model_files(str(model_dir)).spec
    assert workers["whole"].fingerprint == spec.fingerprint
    assert {workers[name].fingerprint for name in ("prefill", "decode", "both")} == {spec.quantized("int8").fingerprint}
