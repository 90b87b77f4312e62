"""Steps that load a machine as decoding a small batch does: one thread reads a model's worth of weights for a few vectors."""

from __future__ import annotations

import time

WEIGHT_MIB = 256  # per step; far above any cache, about 20 ms at one core's 14 GB/s (DESIGN section 7)
BATCH = 4  # rows; below ten the reads of the weights are what takes the time
COLUMNS = 4_096


def decode_steps(duration_s: float) -> tuple[float, ...]:
    """Seconds of each step, after one that is not counted."""
    import torch

    torch.set_num_threads(1)
    weights = torch.ones(WEIGHT_MIB << 20 >> 2, dtype=torch.float32).view(-1, COLUMNS)
    rows = torch.ones(COLUMNS, BATCH)
    out = torch.empty(weights.shape[0], BATCH)
    step_s: list[float] = []
    with torch.inference_mode():
        torch.mm(weights, rows, out=out)
        ends_s = time.perf_counter() + duration_s
        while (started_s := time.perf_counter()) < ends_s:
            torch.mm(weights, rows, out=out)
            step_s.append(time.perf_counter() - started_s)
    return tuple(step_s)
