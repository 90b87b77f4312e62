"""A closed-loop soak: many clients, mixed prompts, shared prefixes, random cancels; the same for every transport and API.

The caller gives `generate(prompt_ids, max_tokens, cancel_after)`, which sends one call and returns the tokens it saw; with
`cancel_after` set it leaves after that many tokens (0 = before the first). `soak` never raises for a call: what went wrong is
a line in `errors`, so a test asserts on one report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from bench.workload import SAFE_VOCABULARY, Lengths, PlannedCall, Workload

CALL_TIMEOUT_S = 60.0  # one call; longer than any queue that 16 clients can make on a small model


class Generate(Protocol):
    async def __call__(self, prompt_ids: Sequence[int], max_tokens: int, cancel_after: int | None) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Traffic:
    """The mix. Defaults: 16 clients, prompts of 32-2,000 tokens, 30 % shared prefixes, 10 % cancels."""

    num_clients: int = 16
    min_prompt_tokens: int = 32
    max_prompt_tokens: int = 2_000
    min_output_tokens: int = 4
    max_output_tokens: int = 32
    shared_prefix_ratio: float = 0.3
    cancel_ratio: float = 0.1
    scale: float = 1.0  # of the prompt lengths: 0.1 for a model with a short context
    vocabulary: range = SAFE_VOCABULARY
    exact_length: bool = True  # answers must have max_tokens tokens (ignore_eos)
    seed: int = 0

    def calls(self) -> Iterator[PlannedCall]:
        low, high = (max(1, round(self.scale * n)) for n in (self.min_prompt_tokens, self.max_prompt_tokens))
        workload = Workload(
            seed=self.seed,
            input_lengths=Lengths(low, high),
            output_lengths=Lengths(self.min_output_tokens, self.max_output_tokens),
            shared_prefix_ratio=self.shared_prefix_ratio,
            cancel_ratio=self.cancel_ratio,
            vocabulary=self.vocabulary,
        )
        return workload.calls()


@dataclass(slots=True)
class SoakReport:
    num_completed: int = 0
    num_cancelled: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    duration_s: float = 0.0
    errors: list[str] = field(default_factory=list)  # "call <index>: <what>"; cancels are none

    @property
    def num_calls(self) -> int:
        return self.num_completed + self.num_cancelled + len(self.errors)


async def soak(
    generate: Generate, traffic: Traffic, *, duration_s: float | None = None, num_calls: int | None = None
) -> SoakReport:
    """Run until `duration_s` is over or `num_calls` have been started; calls in flight are seen to their end."""
    assert duration_s is not None or num_calls is not None, "a soak needs an end"
    report = SoakReport()
    started_s = time.monotonic()
    ends_s = started_s + (duration_s if duration_s is not None else float("inf"))
    numbers = iter(range(num_calls)) if num_calls is not None else count()
    calls = (call for _, call in zip(numbers, traffic.calls(), strict=False))

    async def client() -> None:
        while time.monotonic() < ends_s and (call := next(calls, None)) is not None:
            await _one(generate, call, traffic, report)

    async with asyncio.TaskGroup() as group:
        for _ in range(traffic.num_clients):
            group.create_task(client())
    report.duration_s = time.monotonic() - started_s
    return report


async def _one(generate: Generate, call: PlannedCall, traffic: Traffic, report: SoakReport) -> None:
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            tokens = await generate(call.token_ids, call.max_tokens, call.cancel_after_tokens)
    except TimeoutError:
        report.errors.append(f"call {call.index}: no end within {CALL_TIMEOUT_S:g} s")
        return
    except asyncio.CancelledError:
        # grpc.aio raises this where the server ended the call as CANCELLED; then nobody has cancelled this task.
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        report.errors.append(f"call {call.index}: the server cancelled it")
        return
    except Exception as error:  # noqa: BLE001 - whatever a transport raises is a finding, not the end of the soak
        report.errors.append(f"call {call.index}: {type(error).__name__}: {error}")
        return
    report.num_prompt_tokens += len(call.token_ids)
    report.num_output_tokens += len(tokens)
    if call.cancel_after_tokens is not None:
        report.num_cancelled += 1
    elif problem := _problem(len(tokens), call.max_tokens, traffic.exact_length):
        report.errors.append(f"call {call.index}: {problem}")
    else:
        report.num_completed += 1


def _problem(num_tokens: int, max_tokens: int, exact_length: bool) -> str:
    """What is wrong with the length of an answer, "" if nothing."""
    if num_tokens == 0:
        return "an empty answer"
    if num_tokens > max_tokens or (exact_length and num_tokens < max_tokens):
        return f"{num_tokens} tokens where {max_tokens} were asked for"
    return ""
