"""Ranks as processes: what becomes of a model of which one ends, fails to load, or loses rank 0. None is ever left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.model_files import load_model_files
from baton.request import Request, SamplingParams
from engine.engine import LocalEngine
from engine.ports import BatchEntry, RunnerLost
from engine.tensor_parallel.degree import RANK_BYTES
from engine.tensor_parallel.ranks import Job, Ranks
from engine.tensor_parallel.shard import Shard
from engine.torch_runner import TorchRunner, load_torch_runner
from tests.tiny_models import make_tiny_model

ENGINE = EngineConfig(num_blocks=32, num_threads=2, tensor_parallel_size=2)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
GONE_S = 20.0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def runner(model_dir: Path) -> Iterator[TorchRunner]:
    made = load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    yield made
    others(made).close()


def others(runner: TorchRunner) -> Ranks:
    assert runner.ranks is not None
    return runner.ranks


def pid_of(runner: TorchRunner) -> int:
    (process,) = others(runner)._processes
    return process.pid


def engine_of(runner: TorchRunner) -> LocalEngine:
    engine = LocalEngine(ENGINE, runner, fingerprint="f", eos_token_ids=(), max_model_len=256)
    engine.add(Request(1, tuple(range(20, 60)), GREEDY), 0.0)
    return engine


def to_the_end(engine: LocalEngine) -> None:
    while engine.has_work():
        engine.step(0.0)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + GONE_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


def test_a_rank_that_ended_ends_the_engine_and_not_one_sequence(runner: TorchRunner) -> None:
    engine = engine_of(runner)
    engine.step(0.0)
    os.kill(pid_of(runner), signal.SIGKILL)
    with pytest.raises(RunnerLost):
        to_the_end(engine)


def test_a_rank_that_ends_while_nothing_runs_is_told_of_once(runner: TorchRunner) -> None:
    told: list[BaseException] = []
    heard = threading.Event()

    def tell(error: BaseException) -> None:
        told.append(error)
        heard.set()

    others(runner).watch(tell)
    os.kill(pid_of(runner), signal.SIGKILL)
    assert heard.wait(GONE_S)
    others(runner).close()
    assert [type(error) for error in told] == [RunnerLost]


def test_closing_leaves_no_rank_and_is_no_loss(runner: TorchRunner) -> None:
    told: list[BaseException] = []
    others(runner).watch(told.append)
    pid = pid_of(runner)
    others(runner).close()
    until_gone(pid)
    others(runner).close()
    assert not told


def test_a_rank_that_hangs_is_ended_all_the_same(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tensor_parallel.ranks._END_S", 0.1)
    pid = pid_of(runner)
    os.kill(pid, signal.SIGSTOP)
    others(runner).close()
    until_gone(pid)


def test_signals_to_the_whole_group_are_rank_0s_to_take(runner: TorchRunner) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid_of(runner), number)
    to_the_end(engine_of(runner))


def test_so_are_those_that_come_while_a_rank_starts(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Signalled(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            for number in (signal.SIGINT, signal.SIGTERM):
                self.send_signal(number)

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    runner = load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    others(runner).close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask  # of a worker, which takes them


def test_an_error_within_a_step_of_several_ranks_is_the_end(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(runner.model, "forward", broken)
    with pytest.raises(RunnerLost, match="MemoryError"):
        engine_of(runner).step(0.0)


def test_an_error_once_some_ranks_were_told_of_a_step_is_the_end(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(others(runner), "begin", broken)
    with pytest.raises(RunnerLost, match="MemoryError"):
        engine_of(runner).step(0.0)


def test_a_rank_that_takes_no_orders_is_lost(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.tensor_parallel.ranks._END_S", 0.1)
    monkeypatch.setattr("engine.tensor_parallel.ranks.PATIENCE_S", 0.1)
    runner = load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    try:
        os.kill(pid_of(runner), signal.SIGSTOP)
        long = BatchEntry(0, list(range(1 << 20)), 0, (), True, GREEDY)  # more than a socket holds
        with pytest.raises(RunnerLost, match=r"took no order for 0\.1 s"):
            others(runner).begin([long])
    finally:
        others(runner).close()


def test_ranks_end_with_a_rank_0_that_is_killed(model_dir: Path) -> None:
    code = (
        "import sys, json, time; from baton.model_files import load_model_files; from baton.config import EngineConfig\n"
        "from engine.torch_runner import load_torch_runner\n"
        f"runner = load_torch_runner(load_model_files({str(model_dir)!r}), EngineConfig(num_blocks=8, num_threads=2,"
        " tensor_parallel_size=2), 'float32')\n"
        "print(json.dumps(runner.ranks._processes[0].pid), flush=True); time.sleep(600)"
    )
    lead = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert lead.stdout is not None
    pid = json.loads(lead.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    lead.kill()
    lead.communicate(timeout=GONE_S)  # a rank that cannot end yet does not hold its stdout
    os.kill(pid, signal.SIGCONT)
    until_gone(pid)


def test_a_rank_that_still_loads_ends_with_rank_0(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.tensor_parallel.ranks._END_S", GONE_S)
    os.mkfifo(never := tmp_path / "never.gguf")  # whoever opens it waits
    files = replace(load_model_files(str(model_dir)), kind="gguf", weights=(never,))
    ranks = Ranks(Job(files, ENGINE, "float32", 1, Shard(0, 2)), 1 << 20)
    ranks.close()
    assert [process.returncode for process in ranks._processes] == [0]


def test_a_rank_that_is_lost_before_the_first_step_fails_the_start(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = Ranks._tell

    def lose_it(ranks: Ranks, order: None) -> None:
        for process in ranks._processes:
            process.kill()
            process.wait()
        tell(ranks, order)

    monkeypatch.setattr(Ranks, "_tell", lose_it)
    with pytest.raises(ConfigError, match="cannot begin: a rank is gone"):
        load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    assert not children()


def test_a_rank_that_cannot_load_says_why_and_none_is_left(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Damaged(Connection):
        """Of a rank that finds no weights where rank 0 found some."""

        def send(self, obj: object) -> None:
            if isinstance(obj, Job):
                obj = replace(obj, files=replace(obj.files, weights=(Path("/nowhere.safetensors"),)))
            super().send(obj)

    monkeypatch.setattr("engine.tensor_parallel.ranks.Connection", Damaged)
    with pytest.raises(ConfigError, match="rank 1 cannot load the model: FileNotFoundError"):
        load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    assert not children()


@pytest.mark.parametrize(("size", "wrong"), [(3, "KV heads = 2"), (4, "KV heads = 2"), (64, "use 1, 2$")])
def test_a_model_that_cannot_be_cut_so_is_refused_before_anything_starts(
    model_dir: Path, size: int, wrong: str
) -> None:
    engine = EngineConfig(num_blocks=8, tensor_parallel_size=size)
    with pytest.raises(ConfigError, match=wrong) as refused:
        load_torch_runner(load_model_files(str(model_dir)), engine, "float32")
    assert refused.value.field == "engine.tensor_parallel_size"
    assert not children()


def test_processes_that_memory_is_too_little_for_are_not_started(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.torch_runner.available_memory_bytes", lambda: RANK_BYTES)
    load_torch_runner(load_model_files(str(model_dir)), replace(ENGINE, tensor_parallel_size=1), "float32")
    with pytest.raises(ConfigError, match="are free"):
        load_torch_runner(load_model_files(str(model_dir)), ENGINE, "float32")
    assert not children()
