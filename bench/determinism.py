"""The price of deterministic numerics: tokens per second of one engine with and without, in the same run, on one core.

Prefill: a prompt of PREFILL_TOKENS. Decode: sequences with CONTEXT_TOKENS each, at every batch size. Seconds are CPU time of the
one thread that computes, so that who else uses the machine hardly enters. Rounds alternate between the two runners; a ratio is
taken within a round, and the table gives the median of rounds with their quartiles. `python -m bench.determinism --model
smollm2`: a process of its own, since it loads torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from baton.config import EngineConfig
from baton.model_files import load_model_files
from baton.request import SamplingParams
from engine.ports import Batch, BatchEntry
from engine.torch_runner import TorchRunner, load_torch_runner

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 300  # a chat turn; the demo cluster's mean
PREFILL_TOKENS = 512  # one default chunk
NUM_STEPS = 4  # per round and batch size
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


class Bench:
    """One runner and a sequence of tokens for as many sequences as the largest batch."""

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        layout = runner.kv_cache.layout
        self._vocab_size = runner.model.spec.vocab_size
        self._blocks_each = runner.kv_cache.num_blocks // BATCHES[-1]
        self._max_tokens = self._blocks_each * layout.block_size

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
        started_s = time.thread_time()
        for batch in batches:
            self._runner.run(batch)
        return (time.thread_time() - started_s) / num_steps


def engine_config(deterministic: bool = False) -> EngineConfig:
    """One thread, and room for what is measured."""
    num_blocks = BATCHES[-1] * -(-(max(PREFILL_TOKENS, CONTEXT_TOKENS + BATCHES[-1] + NUM_STEPS) + 1) // 16)
    return EngineConfig(num_blocks=num_blocks, num_threads=1, deterministic=deterministic)


def measure(runners: Mapping[str, TorchRunner], rounds: int) -> dict[str, dict[str, list[float]]]:
    """By what is measured, then by runner: tokens per second of every round."""
    benches = {name: Bench(runner) for name, runner in runners.items()}
    figures: dict[str, dict[str, list[float]]] = {}
    for round_ in range(rounds + 1):  # the first warms up
        for name, bench in benches.items() if round_ % 2 else reversed(benches.items()):
            rates = {"prefill": bench.prefill()} | {f"decode {batch}": bench.decode(batch) for batch in BATCHES}
            for what, rate in rates.items():
                if round_:
                    figures.setdefault(what, {}).setdefault(name, []).append(rate)
    return figures


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """Markdown; ratios are of the second runner to the first one."""
    first, second = next(iter(figures.values()))
    lines = [f"| tokens/s | {first} | {second} | ratio | n |", "|---|---|---|---|---|"]
    for what, rates in figures.items():
        ratios = [b / a for a, b in zip(rates[first], rates[second], strict=True)]
        cells = [_spread(rates[first], 1), _spread(rates[second], 1), _spread(ratios, 2)]
        lines.append(f"| {what} | {' | '.join(cells)} | {len(ratios)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float], digits: int) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.determinism", description="The price of determinism.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    files = load_model_files(args.model)
    runners = {
        name: load_torch_runner(files, engine_config(name == "deterministic"), args.dtype)
        for name in ("normal", "deterministic")
    }
    figures = measure(runners, args.rounds)
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
