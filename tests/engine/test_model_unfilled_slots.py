"""What a slot held before a token filled it never shows: with every free block full of NaN the answers are the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from baton.config import EngineConfig
from baton.model_files import ModelFiles, load_model_files
from baton.request import Request
from engine.engine import LocalEngine
from engine.ports import ChunkDone, Reservation
from engine.torch_runner import load_torch_runner
from tests.engine.engine_rig import make_request
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

NUM_BLOCKS = 24  # of 16 tokens: the second half of the requests below reuses what the first half left
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 50, 64)
NAN = 0xFF  # bytes: a NaN in float32, float16, bfloat16, float8_e4m3, and as the scale of the last


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return load_model_files(str(make_tiny_model(tmp_path_factory.mktemp("model"))))


class Worker:
    """An engine over a tiny model; with `poison` every free block is NaN before each step."""

    def __init__(self, files: ModelFiles, kv_dtype: str, *, poison: bool) -> None:
        config = EngineConfig(chunk_tokens=24, kv_cache_dtype=kv_dtype)
        self.runner = load_torch_runner(files, config, "float32", NUM_BLOCKS)
        self.engine = LocalEngine(
            config, self.runner, fingerprint="tiny", eos_token_ids=(), max_model_len=4_096, check_integrity=True
        )
        self.poison = poison
        self.tokens: dict[int, list[int]] = {}
        self.chunks: dict[int, ChunkDone] = {}
        self.first: dict[int, int] = {}
        self.reserved: dict[int, Reservation] = {}
        self.num_cached_tokens = 0

    def run(self) -> None:
        while self.engine.has_work():
            if self.poison:
                self.blocks_as_bytes()[:, :, list(self.engine.free_block_ids())] = NAN
            result = self.engine.step(0.0)
            for token in result.tokens:
                self.tokens.setdefault(token.seq, []).append(token.token)
            self.chunks |= {chunk.seq: chunk for chunk in result.chunks}
            self.first |= {ended.seq: ended.first.token for ended in result.prefilled}
            self.reserved |= {reservation.seq: reservation for reservation in result.reserved}
            self.num_cached_tokens += sum(ended.stats.num_cached_tokens for ended in result.ended)
            assert [ended.error for ended in result.ended if ended.error] == []

    def answer(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        for request in requests:
            self.engine.add(request, 0.0)
        self.run()
        return self.tokens

    def blocks_as_bytes(self) -> torch.Tensor:
        return self.runner.kv_cache.blocks.view(torch.uint8)


every_kv_dtype = pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float8_e4m3"])


@every_kv_dtype
def test_answers_beside_blocks_full_of_nan_are_those_beside_zeros(files: ModelFiles, kv_dtype: str) -> None:
    requests = [make_request(seq, prompt(length, seq), max_tokens=20) for seq, length in enumerate(LENGTHS)]
    clean = Worker(files, kv_dtype, poison=False).answer(requests)
    assert sorted(clean) == list(range(len(LENGTHS)))
    assert Worker(files, kv_dtype, poison=True).answer(requests) == clean


@every_kv_dtype
def test_a_prefix_from_the_cache_goes_on_into_blocks_full_of_nan(files: ModelFiles, kv_dtype: str) -> None:
    shared = prompt(40)
    first = make_request(1, shared, max_tokens=3)
    others = [make_request(seq, [*shared, *prompt(seq, seq)], max_tokens=20) for seq in (2, 3, 9)]
    clean, poisoned = (Worker(files, kv_dtype, poison=poison) for poison in (False, True))
    for worker in (clean, poisoned):
        worker.answer([first])
        worker.answer(others)
    assert poisoned.num_cached_tokens == clean.num_cached_tokens > 0
    assert poisoned.tokens == clean.tokens


@every_kv_dtype
@pytest.mark.parametrize("length", LENGTHS)
def test_adopted_blocks_may_come_with_nan_behind_their_last_token(
    files: ModelFiles, kv_dtype: str, length: int
) -> None:
    request = make_request(1, prompt(length), max_tokens=20)
    [clean] = Worker(files, kv_dtype, poison=False).answer([request]).values()
    prefill, decode = (Worker(files, kv_dtype, poison=True) for _ in range(2))
    decode.engine.reserve(request, 0.0)
    decode.run()
    prefill.engine.add(request, 0.0, prefill_only=True)
    prefill.run()
    layout = prefill.runner.kv_cache.layout
    source, target = prefill.chunks[1].block_ids, decode.reserved[1].block_ids
    frame = memoryview(bytearray(len(source) * layout.block_bytes))
    prefill.runner.kv_cache.gather(source, 0, layout.num_layers, frame)
    decode.runner.kv_cache.scatter(target, 0, layout.num_layers, frame)
    if length % layout.block_size:
        assert (decode.blocks_as_bytes()[:, :, target[-1], -1] == NAN).all(), "nothing to be found out"
    decode.engine.adopt(1, prefill.first[1], 0.0)
    decode.run()
    assert [prefill.first[1], *decode.tokens[1]] == clean
