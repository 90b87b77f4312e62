"""Steps that load a machine as decoding does at batch 1: one thread reads a model's worth of weights for one vector."""

from __future__ import annotations

import time

import torch

WEIGHT_MIB = 256  # far above any cache; 14 ms of one core, 19 GB/s. A batch of 4 takes 50 ms: bound by arithmetic
COLUMNS = 4_096


class DecodeLoad:
    """Weights that are in memory; sets torch's threads to one, as an engine on one core has."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._weights = torch.ones(WEIGHT_MIB << 20 >> 2).view(-1, COLUMNS)  # [rows, COLUMNS], float32
        self._input = torch.ones(COLUMNS)
        self._output = torch.empty(self._weights.shape[0])

    @torch.inference_mode()
    def run(self, duration_s: float) -> tuple[float, ...]:
        """Seconds of each step; at least one is made."""
        step_s: list[float] = []
        ends_s = time.perf_counter() + duration_s
        while True:
            started_s = time.perf_counter()
            torch.mv(self._weights, self._input, out=self._output)
            ended_s = time.perf_counter()
            step_s.append(ended_s - started_s)
            if ended_s >= ends_s:
                return tuple(step_s)
