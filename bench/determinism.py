"""The price of deterministic numerics: tokens per second of one engine with and without (step_rates.py), on one core.

Seconds are CPU time of the one thread that computes. `python -m bench.determinism --model smollm2`: a process of its own, since
it loads torch.
"""

from __future__ import annotations

import time

from baton.config import EngineConfig
from baton.model_files import load_model_files
from bench.step_rates import NUM_BLOCKS, measure, parser, show
from engine.torch_runner import load_torch_runner


def main() -> None:
    asked = parser("bench.determinism", "The price of determinism.")
    args = asked.parse_args()
    files = load_model_files(args.model)
    runners = {
        name: load_torch_runner(
            files,
            EngineConfig(num_blocks=NUM_BLOCKS, num_threads=1, deterministic=name == "deterministic"),
            args.dtype,
        )
        for name in ("normal", "deterministic")
    }
    figures = measure(runners, args.rounds, time.thread_time)
    show(figures, args.json)


if __name__ == "__main__":
    main()
