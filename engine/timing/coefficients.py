"""Coefficients of step times, as fitted. Pure data: what they were fitted to is not in the repository.

Efficiencies: `python -m bench.timing_fit`, 2026-11-30, on calibration/aiconfigurator/silicon_sample.csv (aiconfigurator-core
0.12.0, Apache-2.0), all groups. Measured models: see each. docs/timing.md has the error of both on what was held out.
tests/engine/test_timing_fit.py fits again where the data is there and compares.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.timing.roofline import Efficiency, common_dtype
from engine.timing.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Efficiencies of one kind of model, for every weight type."""

    compute_16bit: float  # kernels of 4-bit weights widen them to this as they read
    compute_8bit: float
    memory: float
    expert_compute: float
    expert_memory: float
    attention: float
    kv: float
    link: float
    allreduce_s: float
    layer_s: float
    step_s: float

    def efficiency(self, weight_dtype: str) -> Efficiency[float]:
        return Efficiency(
            compute=self.compute_8bit if weight_dtype == "fp8" else self.compute_16bit,
            memory=self.memory,
            expert_compute=self.expert_compute,
            expert_memory=self.expert_memory,
            attention=self.attention,
            kv=self.kv,
            link=self.link,
            allreduce_s=self.allreduce_s,
            layer_s=self.layer_s,
            step_s=self.step_s,
        )


DENSE = Coefficients(
    compute_16bit=0.780,
    compute_8bit=0.509,
    memory=0.971,
    expert_compute=0.5,  # no dense run has experts: the prior
    expert_memory=0.5,
    attention=0.835,
    kv=0.808,
    link=0.524,
    allreduce_s=2.70e-6,
    layer_s=44.1e-6,
    step_s=891e-6,
)
MIXTURE = Coefficients(
    compute_16bit=0.858,
    compute_8bit=0.437,
    memory=0.901,
    expert_compute=0.296,
    expert_memory=0.887,
    attention=0.550,
    kv=0.807,
    link=0.220,
    allreduce_s=3.35e-6,
    layer_s=149e-6,
    step_s=147e-6,
)


def efficiency(shape: ModelShape, weight_dtype: str) -> Efficiency[float]:
    return (MIXTURE if shape.is_mixture else DENSE).efficiency(common_dtype(shape, weight_dtype))
