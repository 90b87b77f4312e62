"""Tuning over the runners that serve: a torch model and emulated GPUs say the same as undisturbed, in smaller steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.config import EngineConfig
from baton.model_files import load_model_files
from engine.engine import LocalEngine
from engine.ports import Batch, Runner, Sample
from engine.torch_runner import load_torch_runner
from engine.tuning import Tuning
from tests.engine.engine_rig import make_request
from tests.engine.test_emulated_runner import FakeTime, StepsOf
from tests.engine.test_emulated_runner import runner as emulated_runner
from tests.tiny_models import make_tiny_model

CONFIG = EngineConfig(max_num_seqs=8, max_num_batched_tokens=128, chunk_tokens=64, prefix_cache=False)
NUM_CALLS, NUM_TOKENS = 6, 12


class Noting:
    """A Runner that notes how many tokens each step had."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.kv_cache = runner.kv_cache
        self.sizes: list[list[int]] = []

    def run(self, batch: Batch) -> list[Sample | None]:
        self.sizes.append([len(entry.token_ids) for entry in batch.entries])
        return self._runner.run(batch)


def answers(runner: Runner, *tunings: Tuning) -> dict[int, list[int]]:
    """Tokens by seq; each tuning is in force for three steps, the last one to the end."""
    engine = LocalEngine(
        CONFIG, runner, fingerprint="f", eos_token_ids=(), max_model_len=512, clock_s=lambda: 0.0, check_integrity=True
    )
    for seq in range(1, NUM_CALLS + 1):
        prompt = [token % 500 + 3 for token in make_request(seq, 30 + 11 * seq).token_ids]
        engine.add(make_request(seq, prompt, NUM_TOKENS), 0.0)
    left, tokens = list(tunings), dict[int, list[int]]()
    num_steps = 0
    while engine.has_work():
        if left and num_steps % 3 == 0:
            engine.tune(left.pop(0))
        for token in engine.step(0.0).tokens:
            tokens.setdefault(token.seq, []).append(token.token)
        num_steps += 1
    return tokens


def torch_runner(folder: Path) -> Runner:
    engine = EngineConfig(num_threads=1)  # tiny tensors: a second thread only waits
    return load_torch_runner(load_model_files(str(make_tiny_model(folder / "tiny"))), engine, "float32", 64)


@pytest.mark.parametrize("make", [torch_runner, lambda _: emulated_runner(FakeTime(), StepsOf())])
def test_an_engine_that_is_tuned_all_the_time_gives_the_same_answers(
    make: Callable[[Path], Runner], tmp_path: Path
) -> None:
    undisturbed = answers(make(tmp_path))
    assert [len(tokens) for tokens in undisturbed.values()] == [NUM_TOKENS] * NUM_CALLS
    noting = Noting(make(tmp_path))
    tuned = answers(noting, Tuning(2, 128, 64), Tuning(8, 16, 8), Tuning(1, 1, 1), Tuning(8, 40, 20))
    assert tuned == undisturbed
    assert {max(sizes) for sizes in noting.sizes[3:6]} == {8}
    assert max(map(max, noting.sizes[9:])) == 20
