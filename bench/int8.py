"""What int8 weights cost in time and save in memory: tokens per second of one engine with and without, in the same run.

What is measured and how: bench/step_rates.py, in CPU time of the one thread. Bytes are those that the model holds, a tied head's
packed copy among them.
`python -m bench.int8 --model smollm2`: a process of its own, since it loads torch.
"""

from __future__ import annotations

import time
from dataclasses import replace

from baton.config import EngineConfig
from baton.model_files import ModelFiles, load_model_files
from bench.step_rates import NUM_BLOCKS, measure, parser, show
from engine.models.linear import Linear
from engine.torch_runner import TorchRunner, load_torch_runner


def load(files: ModelFiles, quantization: str, dtype: str) -> TorchRunner:
    quantized = replace(files, spec=files.spec.quantized(quantization))
    return load_torch_runner(quantized, EngineConfig(num_blocks=NUM_BLOCKS, num_threads=1), dtype)


def weight_bytes(runner: TorchRunner) -> int:
    model = runner.model
    pieces = [piece for _, piece in model.held()]
    if model.spec.tie_embeddings and model.head.packed:
        pieces.append(model.head)
    tensors = [piece.dense() if isinstance(piece, Linear) else piece for piece in pieces]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def main() -> None:
    asked = parser("bench.int8", "The price of int8 weights.")
    args = asked.parse_args()
    files = load_model_files(args.model)
    runners = {
        name: load(files, quantization, args.dtype) for name, quantization in (("whole", "auto"), ("int8", "int8"))
    }
    for name, runner in runners.items():
        print(f"{name}: {weight_bytes(runner):,} bytes of weights")
    figures = measure(runners, args.rounds, time.thread_time)
    show(figures, args.json)


if __name__ == "__main__":
    main()
