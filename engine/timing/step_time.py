"""The time of one engine step on a GPU: the door of this package. Pure.

`step_time` returns the best that is known for a model on a set of GPUs: what somebody measured on exactly that, else the
roofline with the efficiencies of real serving runs. docs/timing.md has both with their errors.
"""

from __future__ import annotations

from engine.timing.batch import Batch, StepTime
from engine.timing.coefficients import efficiency
from engine.timing.fitted import Fitted
from engine.timing.hardware import gpu
from engine.timing.roofline import Efficiency, Roofline
from engine.timing.shapes import model_shape

__all__ = ["Batch", "Efficiency", "Fitted", "Roofline", "StepTime", "step_time"]


def step_time(
    gpu_name: str, model_name: str, tp: int = 1, *, weight_dtype: str = "fp8", kv_dtype: str = "bf16"
) -> StepTime:
    """Return the best known step time of that model on `tp` GPUs.

    Raises:
        ValueError: unknown GPU or model.
    """
    return Roofline(gpu(gpu_name), model_shape(model_name), tp, weight_dtype, kv_dtype, efficiency(weight_dtype))
