"""Tokens per second of engines beside each other, in one run: rounds alternate between them, ratios are taken within a round.

Prefill: a prompt of PREFILL_TOKENS. Decode: sequences with CONTEXT_TOKENS each, at every batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from baton.request import SamplingParams
from engine.ports import Batch, BatchEntry
from engine.torch_runner import TorchRunner

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 300  # a chat turn; the demo cluster's mean
PREFILL_TOKENS = 512  # one default chunk
NUM_STEPS = 4  # per round and batch size
NUM_BLOCKS = BATCHES[-1] * -(-(max(PREFILL_TOKENS, CONTEXT_TOKENS + BATCHES[-1] + NUM_STEPS) + 1) // 16)  # it takes
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
Figures = dict[str, dict[str, list[float]]]  # by what is measured, then by engine: tokens per second of every round


class _Rates:
    """One runner and a sequence of tokens for as many sequences as the largest batch."""

    def __init__(self, runner: TorchRunner, now_s: Callable[[], float]) -> None:
        self._runner = runner
        self._now_s = now_s
        self._vocab_size = runner.model.spec.vocab_size
        self._blocks_each = runner.kv_cache.num_blocks // BATCHES[-1]

    def prefill(self) -> float:
        """Tokens per second of one prompt."""
        return PREFILL_TOKENS / self._time(lambda _: [self._entry(0, 0, PREFILL_TOKENS)], num_steps=1)

    def decode(self, batch: int) -> float:
        """Tokens per second of `batch` sequences, one step after another."""
        return batch / self._time(lambda step: [self._entry(n, CONTEXT_TOKENS + n + step, 1) for n in range(batch)])

    def _entry(self, n: int, start: int, length: int) -> BatchEntry:
        ids = [(31 * (start + i) + n) % self._vocab_size for i in range(length)]
        table = range(n * self._blocks_each, (n + 1) * self._blocks_each)
        return BatchEntry(n, ids, start, table, True, GREEDY, (), ())

    def _time(self, entries: Callable[[int], list[BatchEntry]], num_steps: int = NUM_STEPS) -> float:
        """Seconds per step."""
        batches = [Batch(entries(step)) for step in range(num_steps)]
        started_s = self._now_s()
        for batch in batches:
            self._runner.run(batch)
        return (self._now_s() - started_s) / num_steps


def measure(
    runners: Mapping[str, TorchRunner],
    rounds: int,
    now_s: Callable[[], float] = time.perf_counter,
    num_threads: Mapping[str, int] | None = None,
) -> Figures:
    """Alternate between `runners`.

    Args:
        now_s: time.thread_time for engines of one thread, so that who else uses the machine hardly enters.
        num_threads: of this process while each computes; None = one.
    """
    engines = {name: _Rates(runner, now_s) for name, runner in runners.items()}
    figures: Figures = {}
    for round_ in range(rounds + 1):  # the first warms up
        for name, engine in engines.items() if round_ % 2 else reversed(engines.items()):
            torch.set_num_threads(1 if num_threads is None else num_threads[name])
            rates = {"prefill": engine.prefill()} | {f"decode {batch}": engine.decode(batch) for batch in BATCHES}
            for what, rate in rates.items():
                if round_:
                    figures.setdefault(what, {}).setdefault(name, []).append(rate)
    return figures


def parser(prog: str, description: str) -> argparse.ArgumentParser:
    """What every such bench asks for."""
    made = argparse.ArgumentParser(prog=f"python -m {prog}", description=description)
    made.add_argument(
        "--model", default="smollm2", help="a known name, a Hugging Face directory or a .gguf file (%(default)s)"
    )
    made.add_argument("--dtype", default="float32", help="compute dtype (%(default)s)")
    made.add_argument("--rounds", type=_rounds, default=15, help="two or more (%(default)s)")
    made.add_argument("--json", type=Path, default=None, metavar="PATH", help="write the rates of all rounds there")
    return made


def _rounds(text: str) -> int:
    if (rounds := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{rounds}: a spread takes two rounds at least")
    return rounds


def show(figures: Figures, file: Path | None) -> None:
    print(table(figures))
    if file is not None:
        file.write_text(json.dumps(figures, indent=1))


def table(figures: Figures) -> str:
    """Markdown: median and quartiles of rounds; ratios of the second engine to the first."""
    first, second = next(iter(figures.values()))
    lines = [f"| tokens/s | {first} | {second} | ratio | n |", "|---|---|---|---|---|"]
    for what, rates in figures.items():
        ratios = [new / old for old, new in zip(rates[first], rates[second], strict=True)]
        cells = [_spread(rates[first], 1), _spread(rates[second], 1), _spread(ratios, 2)]
        lines.append(f"| {what} | {' | '.join(cells)} | {len(ratios)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
