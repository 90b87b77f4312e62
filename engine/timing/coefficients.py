"""Coefficients of step times, as fitted. Pure data; docs/timing.md says how good they are."""

from __future__ import annotations

from engine.timing.roofline import Efficiency


def efficiency(weight_dtype: str) -> Efficiency[float]:
    return Efficiency(
        compute=0.80 if weight_dtype in ("bf16", "fp16") else 0.55,
        memory=0.83,
        expert_compute=0.5,
        expert_memory=0.5,
        attention=0.5,
        kv=0.8,
        link=0.33,
        allreduce_s=5e-6,
        layer_s=40e-6,
        step_s=1e-3,
    )
