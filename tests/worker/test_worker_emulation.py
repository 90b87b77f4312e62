"""A worker on emulated GPUs: its start, its flips, its deaths, and what it says of its pace."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
import time
from pathlib import Path

import pytest

from baton.config import EmulationConfig, EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.errors import ConfigError
from baton.request import Request, SamplingParams
from baton.v1 import worker_pb2
from engine.emulated_runner import emulated_answer
from engine.scripted_runner import ScriptedRunner
from kv_transfer.emulated_link import EmulatedTransport
from kv_transfer.plane import make_transport
from tests.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_model
from tests.worker.scripted_worker import LAYOUT, SPEC, ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient
from worker.emulation import emulated_link, load_emulated_model, next_death_s
from worker.loading import LoadedModel
from worker.server import WorkerServer

MEAN_S = 100.0
DYING = EmulationConfig(gpu="h100", failure_mean_s=MEAN_S, failure_seed=3, origin=1_000.0)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ROUTER = 0x77


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def config_of(model_dir: Path, **emulation: object) -> WorkerConfig:
    return WorkerConfig(
        "both-0",
        model=ModelConfig(path=str(model_dir)),
        engine=EngineConfig(num_blocks=64),
        kv=KVTransferConfig(transport="loopback", mode="staged"),
        emulation=dataclasses.replace(EmulationConfig(gpu="h100"), **emulation),  # type: ignore[arg-type]
    )


def allocate(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def deaths(worker_id: str, emulation: EmulationConfig, num_deaths: int) -> list[float]:
    """The instants at which a worker dies that is started again each time."""
    at_s, found = emulation.origin, []
    for _ in range(num_deaths):
        at_s = next_death_s(worker_id, emulation, at_s)
        found.append(at_s)
    return found


def test_deaths_repeat_with_their_seed_and_differ_between_workers() -> None:
    assert deaths("decode-0", DYING, 5) == deaths("decode-0", DYING, 5)
    assert deaths("decode-0", DYING, 5) != deaths("decode-1", DYING, 5)
    assert deaths("decode-0", DYING, 5) != deaths("decode-0", dataclasses.replace(DYING, failure_seed=4), 5)


def test_a_worker_that_starts_again_dies_at_its_next_instant_however_long_the_start_took() -> None:
    first, second = deaths("decode-0", DYING, 2)
    assert next_death_s("decode-0", DYING, (first + second) / 2) == second


def test_lives_last_their_mean() -> None:
    lives = [next_death_s(f"w-{n}", DYING, DYING.origin) - DYING.origin for n in range(2_000)]
    assert sum(lives) / len(lives) == pytest.approx(MEAN_S, rel=0.1)  # 4 standard errors of an exponential


def test_a_worker_whose_time_has_come_kills_itself(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: queue.Queue[tuple[int, int]] = queue.Queue()
    monkeypatch.setattr("worker.emulation.os.kill", lambda pid, number: killed.put((pid, number)))
    load_emulated_model(config_of(model_dir, failure_mean_s=1e-3), allocate)
    assert killed.get(timeout=60.0) == (os.getpid(), signal.SIGKILL)


def test_loading_takes_the_start_time_that_is_set(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("worker.emulation.clock.sleep", slept.append)
    load_emulated_model(config_of(model_dir, start_s=42.0), allocate)
    assert slept == [42.0]


def test_workers_of_one_emulated_model_fit_each_other_and_no_others(model_dir: Path) -> None:
    def fingerprint(**emulation: object) -> str:
        return load_emulated_model(config_of(model_dir, **emulation), allocate).spec.fingerprint

    assert fingerprint(gpu="h100") == fingerprint(gpu="h200")
    assert fingerprint(model="llama-3.1-8b") != fingerprint(model="qwen3-8b")


def test_a_network_card_per_gpu_carries_the_emulated_bytes(model_dir: Path) -> None:
    config = config_of(model_dir, model="llama-3.1-70b", tp=4)
    transport = emulated_link(config, make_transport(config.kv, "card"))
    assert isinstance(transport, EmulatedTransport)
    # 16 tokens of 327,680 bytes over 4 cards of 50 GB/s
    assert transport.link.layer_block_s == pytest.approx(16 * 327_680 / (4 * 50e9))
    transport.close()


def test_an_unknown_gpu_ends_the_start_with_one_line(model_dir: Path) -> None:
    server = WorkerServer(config_of(model_dir, gpu="h1000"))
    with pytest.raises(ConfigError, match="h1000"):
        server.start()


async def test_a_whole_worker_answers_as_the_sequence_says(model_dir: Path) -> None:
    server = WorkerServer(config_of(model_dir))
    server.start()
    try:
        async with SessionClient(server.address, ROUTER) as router:
            seq, prompt = ROUTER << 32 | 1, tuple(range(20, 60))
            router.submit(Request(seq, prompt, GREEDY))
            await router.until(lambda: seq in router.ended)
            assert router.output(seq) == emulated_answer(prompt, GREEDY, 6, VOCAB_SIZE, (EOS_TOKEN_ID,))
    finally:
        server.stop()


async def test_routers_hear_how_late_steps_end() -> None:
    runner = ScriptedRunner(LAYOUT, 16)
    server = WorkerServer(worker_config("both-0", "both"), None, lambda *_: LoadedModel(SPEC, runner, lambda: 0.25))
    server.start()
    try:
        async with SessionClient(server.address, ROUTER) as router:
            await router.until(lambda: router.load.p99_lateness == 0.25)
    finally:
        server.stop()


async def test_a_flip_that_takes_time_refuses_new_work_until_it_is_done() -> None:
    config = dataclasses.replace(worker_config("both-0", "decode"), emulation=EmulationConfig(flip_s=0.3))
    worker = ScriptedWorker(config)
    async with running(worker), SessionClient(worker.server.address, ROUTER) as router:
        asked_s = time.monotonic()
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_PREFILL))
        await router.until(lambda: router.load.draining)
        assert router.load.role == worker_pb2.ROLE_DECODE
        router.send(set_role=worker_pb2.SetRole(role=worker_pb2.ROLE_PREFILL))  # asked again: it does not begin anew
        await router.until(lambda: router.load.role == worker_pb2.ROLE_PREFILL and not router.load.draining)
        assert time.monotonic() - asked_s >= 0.3
