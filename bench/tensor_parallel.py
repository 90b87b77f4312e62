"""What ranks gain and cost on this machine: tokens per second of an engine of several processes beside one of a single process
with as many threads in all (step_rates.py).

`python -m bench.tensor_parallel --model PATH --ranks 2`. Of a model whose KV heads these divide; the demo model has three.
"""

from __future__ import annotations

import os

from baton.config import EngineConfig
from baton.model_files import load_model_files
from bench.step_rates import NUM_BLOCKS, measure, parser, show
from engine.torch_runner import load_torch_runner


def main() -> None:
    asked = parser("bench.tensor_parallel", "What ranks gain and cost.")
    asked.add_argument("--ranks", type=int, default=3, help="that divide the model's KV heads (%(default)s)")
    asked.add_argument("--threads", type=int, default=os.cpu_count(), help="of all ranks together (%(default)s)")
    args = asked.parse_args()
    if args.ranks < 2:
        asked.error(f"--ranks {args.ranks}: the other engine has one; ask for 2 or more")
    files = load_model_files(args.model)
    names = {ranks: f"{ranks} of {max(1, args.threads // ranks)} threads" for ranks in (1, args.ranks)}
    runners = {
        name: load_torch_runner(
            files,
            EngineConfig(num_blocks=NUM_BLOCKS, num_threads=args.threads, tensor_parallel_size=ranks),
            args.dtype,
        )
        for ranks, name in names.items()
    }
    try:
        figures = measure(
            runners, args.rounds, num_threads={name: max(1, args.threads // ranks) for ranks, name in names.items()}
        )
    finally:
        for runner in runners.values():
            if runner.ranks is not None:
                runner.ranks.close()
    show(figures, args.json)


if __name__ == "__main__":
    main()
