"""GPUs as the roofline sees them: what their datasheets promise, never what a kernel reaches (engine/timing/step_time.py).

Pure data. Dense rates: NVIDIA prints tensor-core rates with 2:4 sparsity, halved here. GB and TB are powers of ten, as printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

DTYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "fp4": 0.5, "int4": 0.5}
)


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]  # dense, of one GPU, by the type that is multiplied
    link_bytes_per_s: float  # NVLink, one direction
    nic_bytes_per_s: float  # network card per GPU, one direction
    usd_per_hour: float

    def rate(self, dtype: str) -> float:
        """Return FLOP/s of the arithmetic that weights of `dtype` are multiplied in.

        A type without units of its own is widened to the next one that has them: fp8 on an A100, fp4 on an H100.
        """
        for wider in _WIDENED[dtype]:
            if wider in self.flops_per_s:
                return self.flops_per_s[wider]
        raise ValueError(f"dtype {dtype}: {self.name} has no rate for it")


# What weights are multiplied as, best first. Weight-only int4 and int8 kernels (Marlin) multiply in 16 bits.
_WIDENED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "fp32": ("fp32",),
        "bf16": ("bf16",),
        "fp16": ("bf16",),
        "fp8": ("fp8", "bf16"),
        "int8": ("bf16",),
        "fp4": ("fp4", "bf16"),
        "int4": ("bf16",),
    }
)


def _rates(**flops_per_s: float) -> Mapping[str, float]:
    return MappingProxyType(flops_per_s)


# Prices: DESIGN section 1 has the H100's (8 at $31.92/h). The others are assumed, near on-demand list prices of 2025; they are
# defaults, and a plan names its own.
_GPUS = (
    # NVIDIA A100 80GB SXM datasheet (2021): 80 GB, 2,039 GB/s, BF16 312 TFLOP/s dense, FP32 19.5, NVLink 600 GB/s both ways
    Gpu("a100", 80e9, 2.039e12, _rates(bf16=312e12, fp32=19.5e12), 300e9, 25e9, 1.79),
    # NVIDIA H100 SXM datasheet (2023): 80 GB, 3.35 TB/s, BF16 989.5 dense, FP8 1,979 dense, FP32 67, NVLink 900 GB/s both ways
    Gpu("h100", 80e9, 3.35e12, _rates(bf16=989.5e12, fp8=1979e12, fp32=67e12), 450e9, 50e9, 3.99),
    # NVIDIA H200 SXM datasheet (2024): an H100 with 141 GB at 4.8 TB/s
    Gpu("h200", 141e9, 4.8e12, _rates(bf16=989.5e12, fp8=1979e12, fp32=67e12), 450e9, 50e9, 4.99),
    # NVIDIA HGX B200 datasheet (2025): 180 GB, 7.7 TB/s, BF16 2,250, FP8 4,500, FP4 9,000 dense, FP32 75;
    # NVLink 1.8 TB/s both ways
    Gpu("b200", 180e9, 7.7e12, _rates(bf16=2250e12, fp8=4500e12, fp4=9000e12, fp32=75e12), 900e9, 50e9, 4.99),
    # H800 (DeepSeek-V3 technical report, section 3.1): an H100 whose NVLink is cut to 400 GB/s both ways; $2/h is what
    # DeepSeek's inference system overview (2025) assumes
    Gpu("h800", 80e9, 3.35e12, _rates(bf16=989.5e12, fp8=1979e12, fp32=67e12), 200e9, 50e9, 2.00),
)
_BY_NAME = {one.name: one for one in _GPUS}


def gpu(name: str) -> Gpu:
    """Return the GPU of that name; `h100_sxm` and `A100-80GB` are understood.

    Raises:
        ValueError: no such GPU.
    """
    known = _BY_NAME.get(name.lower().replace("_", "-").split("-")[0])
    if known is None:
        raise ValueError(f"gpu {name!r} is not known; known are {', '.join(gpu_names())}")
    return known


def gpu_names() -> tuple[str, ...]:
    return tuple(_BY_NAME)
