"""The full exactness run on the demo model: `make exact`, minutes long, not part of `make test`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tests.integration.cluster_rig import Client, ClusterUnderTest

NUM_TOKENS = 32
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700)
PHRASE = "the tide comes in and the tide goes out again, "


def prompts() -> list[list[int]]:
    """50 prompts: every edge length four times over with other tokens, less two, and one phrase 60 times."""
    made = [[(37 * i * i + 11 * i + 101 * k) % 45_000 + 100 for i in range(n)] for k in range(4) for n in LENGTHS]
    return made[:49]


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "seeded"])
async def test_exact_fifty_prompts_of_32_tokens(
    pd_cluster: ClusterUnderTest, colocated_cluster: ClusterUnderTest, sampling: dict[str, Any]
) -> None:
    excused: list[str] = []
    async with Client(pd_cluster) as pd, Client(colocated_cluster) as colocated:
        inputs: list[Sequence[int] | str] = [*prompts(), PHRASE * 60]
        for n, prompt in enumerate(inputs):
            apart = await pd.generate(prompt, NUM_TOKENS, logprobs=2, timeout_s=300, **sampling)
            together = await colocated.generate(prompt, NUM_TOKENS, logprobs=2, timeout_s=300, **sampling)
            assert apart.code is together.code is grpc.StatusCode.OK, (apart.details, together.details)
            assert len(apart.tokens) == len(together.tokens) == NUM_TOKENS
            if apart.tokens != together.tokens:
                first = next(i for i in range(NUM_TOKENS) if apart.tokens[i] != together.tokens[i])
                best, second = together.logprobs[first].top[:2]
                gap = best.logprob - second.logprob
                assert gap <= 1e-3 or sampling["temperature"], f"prompt {n} token {first}: gap {gap:g}"
                excused.append(f"prompt {n} token {first}: gap {gap:.2g}")
    print(f"50 prompts x {NUM_TOKENS} tokens {sampling}: {len(excused)} excused {excused}")
    assert len(excused) <= 1, "one difference at an undecided token in 1,600 is numerics, more is a fault"
