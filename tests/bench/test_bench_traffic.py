"""The soak driver sends the mix it promises and reports everything that goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.traffic import Traffic, soak


class Fake:
    def __init__(self) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self.cancels: list[int | None] = []
        self.inflight = 0
        self.max_inflight = 0

    async def __call__(self, prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> Sequence[int]:
        self.prompts.append(tuple(prompt_ids))
        self.cancels.append(cancel_after)
        self.inflight += 1
        self.max_inflight = max(self.max_inflight, self.inflight)
        await asyncio.sleep(0)
        self.inflight -= 1
        return range(max_tokens if cancel_after is None else cancel_after)


async def test_the_mix_is_the_one_promised() -> None:
    fake = Fake()
    report = await soak(fake, Traffic(), num_calls=600)
    assert (report.num_calls, report.errors, fake.max_inflight) == (600, [], 16)
    assert 30 <= report.num_cancelled <= 90
    assert min(map(len, fake.prompts)) >= 32
    assert 1_500 < max(map(len, fake.prompts)) <= 2_000
    starts = [prompt[:16] for prompt in fake.prompts]
    assert 130 <= sum(starts.count(start) > 1 for start in starts) <= 230


async def test_scale_shrinks_the_prompts() -> None:
    fake = Fake()
    await soak(fake, Traffic(scale=0.1, vocabulary=range(10, 50)), num_calls=100)
    assert max(map(len, fake.prompts)) <= 200
    assert set().union(*fake.prompts) <= set(range(10, 50))


async def test_short_long_empty_and_raising_calls_are_errors_and_the_rest_goes_on() -> None:
    async def faulty(prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> Sequence[int]:
        match len(prompt_ids) % 6:
            case 0:
                raise ConnectionResetError("gone")
            case 1:
                return []
            case 2:
                return range(max_tokens + 1)
            case 3:
                return range(max_tokens - 1)
            case 4:
                raise asyncio.CancelledError  # as grpc.aio does where the server cancels
        return range(max_tokens)

    report = await soak(faulty, Traffic(cancel_ratio=0.0), num_calls=100)
    assert report.num_completed + len(report.errors) == report.num_calls == 100
    assert report.num_completed > 0
    told = "\n".join(report.errors)
    for words in ("ConnectionResetError: gone", "an empty answer", "tokens where", "the server cancelled it"):
        assert words in told


async def test_a_soak_ends_after_its_duration() -> None:
    async def slow(prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> Sequence[int]:
        await asyncio.sleep(0.01)
        return range(max_tokens)

    report = await soak(slow, Traffic(num_clients=2), duration_s=0.1)
    assert 2 <= report.num_calls < 100
