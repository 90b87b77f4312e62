"""The time of one engine step on a GPU: the door of this package. Pure.

`step_time` returns the best that is known for a model on a set of GPUs: what somebody measured on exactly that, else the
roofline with the efficiencies of real serving runs. docs/timing.md has both with their errors.
"""

from __future__ import annotations

from engine.timing.batch import Batch, StepTime
from engine.timing.coefficients import efficiency
from engine.timing.fitted import Fitted
from engine.timing.hardware import DTYPE_BYTES, gpu
from engine.timing.measured import MEASURED
from engine.timing.roofline import Efficiency, Roofline
from engine.timing.shapes import model_shape

__all__ = ["Batch", "Efficiency", "Fitted", "Roofline", "StepTime", "step_time"]


def step_time(
    gpu_name: str,
    model_name: str,
    tp: int = 1,
    *,
    weight_dtype: str = "fp8",
    kv_dtype: str = "bf16",
    measured: bool = True,
) -> StepTime:
    """Return the best known step time of that model on `tp` GPUs; with `measured` off always the roofline, so that layouts
    are compared by one yardstick.

    Raises:
        ValueError: unknown GPU, model or type, or `tp` below 1.
    """
    device, shape = gpu(gpu_name), model_shape(model_name)
    if tp < 1:
        raise ValueError(f"tp {tp} is below 1")
    for dtype in (weight_dtype, kv_dtype):
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPE_BYTES)}")
    sixteen_bit_is_one = "bf16" if weight_dtype == "fp16" else weight_dtype
    exact = MEASURED.get((device.name, shape.name, tp, sixteen_bit_is_one))
    if measured and exact is not None and kv_dtype in ("bf16", "fp16"):
        return exact
    return Roofline(device, shape, tp, weight_dtype, kv_dtype, efficiency(shape, weight_dtype))
