"""P/D == colocated == transformers, for every combination of what could come between them.

Full product: prompt lengths at every block and chunk edge and one phrase repeated 60 times x prefix cache on/off x chunk
64/512 x alone/8 at once x greedy/seeded x plain/penalties with logprobs. Real engines, real gRPC, real UCX between them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.request import SamplingParams
from tests.exactness.pair_calls import Calls, running
from tests.exactness.transformers_reference import Reference, ReferenceAnswer
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from worker.server import WorkerServer

NUM_TOKENS = 10
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700)
PHRASE = [101, 57, 203, 88, 340, 19, 4]
PROMPTS = [[(37 * i * i + 11 * i + n) % (VOCAB_SIZE - 10) + 5 for i in range(n)] for n in LENGTHS] + [PHRASE * 60]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, top_k=50, top_p=0.9, seed=1234, ignore_eos=True)
PENALTIES = {
    "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": ((9, 2.0),),
    "num_logprobs": 3,
}  # fmt: skip
MODES = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "greedy+penalties": dataclasses.replace(GREEDY, **PENALTIES),  # type: ignore[arg-type]
    "seeded+penalties": dataclasses.replace(SEEDED, **PENALTIES),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def references(model_dir: Path) -> dict[tuple[int, str], ReferenceAnswer]:
    reference = Reference(model_dir)
    return {
        (n, mode): reference.answer(prompt, sampling)
        for n, prompt in enumerate(PROMPTS)
        for mode, sampling in MODES.items()
    }


@pytest.fixture(
    scope="module", params=itertools.product((True, False), (64, 512)), ids=lambda p: f"cache={p[0]}-chunk={p[1]}"
)
def trio(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[tuple[bool, dict[str, WorkerServer]]]:
    """A prefill, a decode and a colocated worker of one configuration."""
    prefix_cache, chunk_tokens = request.param
    engine = EngineConfig(num_blocks=512, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache, num_threads=1)
    configs = (
        WorkerConfig(role, role=role, model=ModelConfig(str(model_dir)), engine=engine)
        for role in ("prefill", "decode", "both")
    )
    with running(configs) as workers:
        yield prefix_cache, workers


PATHS = {False: ("prefill", "decode"), True: ("both", "both")}  # by whether it is colocated: who begins, who ends


@pytest.mark.parametrize("concurrency", [1, 8], ids=["alone", "eight-at-once"])
@pytest.mark.parametrize("mode", MODES)
async def test_pd_equals_colocated_equals_transformers(
    trio: tuple[bool, dict[str, WorkerServer]],
    references: dict[tuple[int, str], ReferenceAnswer],
    mode: str,
    concurrency: int,
) -> None:
    async with Calls(trio[1]) as calls:
        seats = asyncio.Semaphore(concurrency)

        async def compare(n: int, colocated: bool) -> bool:
            async with seats:
                tokens, _ = await calls.answer(*PATHS[colocated], PROMPTS[n], MODES[mode])
            return check(tokens, references[n, mode], f"prompt {n} colocated={colocated}")

        excuses = await asyncio.gather(
            *(compare(n, colocated) for colocated in (False, True) for n in range(len(PROMPTS)))
        )
    excused = sum(excuses)
    # 28 answers of 10 tokens: the reference is undecided about once in 500 tokens, so more than this is a fault.
    assert excused <= 4, f"{excused} answers differ where the reference was undecided"


def check(tokens: list[int], reference: ReferenceAnswer, what: str) -> bool:
    """Assert equality; True where a difference is excused because the reference itself was undecided there."""
    for index, (mine, theirs) in enumerate(zip(tokens, reference.tokens, strict=True)):
        if mine != theirs:
            assert reference.undecided[index], f"{what}: token {index} is {mine}, transformers has {theirs}"
            return True
    return False


async def test_with_the_cache_on_only_the_remainder_is_computed(trio: tuple[bool, dict[str, WorkerServer]]) -> None:
    prefix_cache, workers = trio
    async with Calls(workers) as calls:
        for n, length in enumerate((1, 15, 16, 17, 64, 65, 200)):
            prompt = [(7 * i + 13 * n) % 400 + 50 for i in range(length)]
            for colocated, path in PATHS.items():
                _, cold = await calls.answer(*path, prompt, GREEDY)
                _, warm = await calls.answer(*path, prompt, GREEDY)
                hit = (length - 1) // 16 * 16 if prefix_cache else 0
                assert (cold.cached_tokens, cold.computed_tokens) == (0, length)
                assert (warm.cached_tokens, warm.computed_tokens) == (hit, length - hit)
                if not colocated:
                    leading = (length - 1) // 16 if prefix_cache else 0
                    assert warm.kv_blocks == -(-length // 16) - leading, "only the blocks that decode lacks are shipped"


async def test_the_first_tokens_logprobs_cross_the_handoff(
    trio: tuple[bool, dict[str, WorkerServer]], references: dict[tuple[int, str], ReferenceAnswer]
) -> None:
    async with Calls(trio[1]) as calls:
        mode = "greedy+penalties"
        seen: set[int] = set()
        for n in (3, 10):
            await calls.answer(*PATHS[False], PROMPTS[n], MODES[mode])
            (seq,) = calls.sessions["decode"].logprobs.keys() - seen
            seen.add(seq)
            logprobs = calls.sessions["prefill"].logprobs[seq] | calls.sessions["decode"].logprobs[seq]
            assert sorted(logprobs) == list(range(NUM_TOKENS))
            for index, (logprob, top) in logprobs.items():
                assert logprob == pytest.approx(references[n, mode].logprobs[index], abs=1e-3)
                assert len(top) == 3
