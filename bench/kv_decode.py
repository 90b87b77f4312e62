"""Steps that load a machine as decoding a small batch does: one thread reads a model's worth of weights for a few vectors."""

from __future__ import annotations

import time

import torch

WEIGHT_MIB = 256  # per step; far above any cache, about 20 ms at one core's 14 GB/s (DESIGN section 7)
BATCH = 4  # rows; below ten the reads of the weights are what takes the time
COLUMNS = 4_096


class DecodeLoad:
    """Weights that are in memory; sets torch's threads to one, as an engine on one core has."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._weights = torch.ones(WEIGHT_MIB << 20 >> 2).view(-1, COLUMNS)  # [rows, COLUMNS], float32
        self._inputs = torch.ones(COLUMNS, BATCH)
        self._outputs = torch.empty(self._weights.shape[0], BATCH)

    @torch.inference_mode()
    def run(self, duration_s: float) -> tuple[float, ...]:
        """Seconds of each step; at least one is made."""
        step_s: list[float] = []
        ends_s = time.perf_counter() + duration_s
        while True:
            started_s = time.perf_counter()
            torch.mm(self._weights, self._inputs, out=self._outputs)
            ended_s = time.perf_counter()
            step_s.append(ended_s - started_s)
            if ended_s >= ends_s:
                return tuple(step_s)
