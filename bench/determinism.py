"""The price of deterministic numerics: tokens per second of one engine with and without (step_rates.py), on one core.

Seconds are CPU time of the one thread that computes. `python -m bench.determinism --model smollm2`: a process of its own, since
it loads torch.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from baton.config import EngineConfig
from baton.model_files import load_model_files
from bench.step_rates import NUM_BLOCKS, measure, table
from engine.torch_runner import load_torch_runner


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.determinism", description="The price of determinism.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
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
    print(table(figures))
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
