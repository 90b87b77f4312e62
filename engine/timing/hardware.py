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


# Looked up on 2026-11-30 where NVIDIA's own sheets are quoted, since those were out of reach:
#   [garden]  glennklockwood.com/garden/processors/{A100,h100,B200}, which cites the datasheets and architecture briefs
#   [table]   stas00/ml-engineering, compute/accelerator/README.md @b9e2972: dense rates of A100, H100, H200, B200
#   [mlperf]  mlcommons/inference_results_v4.1, closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json: 141 GB, 900 GB/s, 400G cards
# Prices: DESIGN section 1 has the H100's (8 at $31.92/h). The others are assumed and only defaults: a plan names its own. Lists
# of March 2026 ask 1.39-2.49 for an A100, 2.49-3.99 for an H100, 3.59 for an H200 and 5.98 for a B200 (pricegpu.pages.dev,
# deploybase.ai)
_GPUS = (
    # A100 SXM [garden, table]: 80 GB, 2,039 GB/s, BF16 312 TFLOP/s dense, FP32 19.5, NVLink 300 GB/s each way. 200G cards: DGX
    Gpu("a100", 80e9, 2.039e12, _rates(bf16=312e12, fp32=19.5e12), 300e9, 25e9, 1.79),
    # H100 SXM [garden, table]: 80 GB, 3.35 TB/s, BF16 989.4 dense (1,979 sparse on the sheet), FP8 1,979 dense, FP32 67,
    # NVLink 900 GB/s both ways. 400G cards, one per GPU: DGX H100
    Gpu("h100", 80e9, 3.35e12, _rates(bf16=989.5e12, fp8=1979e12, fp32=67e12), 450e9, 50e9, 3.99),
    # H200 SXM [garden, table, mlperf]: an H100 with 141 GB at 4.8 TB/s
    Gpu("h200", 141e9, 4.8e12, _rates(bf16=989.5e12, fp8=1979e12, fp32=67e12), 450e9, 50e9, 4.99),
    # B200 as on HGX boards, 8 together 1.4 TB, FP32 600 TFLOP/s, NVLink 14.4 TB/s both ways (fibermall.com/blog/?p=17161); BF16
    # 2,250, FP8 4,500, FP4 9,000 dense [garden, table]; 180 GB and 400G cards: mlcommons/inference_results_v6.0, Nebius. Sheets
    # print 8 TB/s; drivers say 7,680 bits at 3,996 MHz, twice a clock: 7.67 (pytorch/ao pull request 4002)
    Gpu("b200", 180e9, 7.7e12, _rates(bf16=2250e12, fp8=4500e12, fp4=9000e12, fp32=75e12), 900e9, 50e9, 4.99),
    # H800: an H100 whose NVLink is cut to 400 GB/s both ways (philisun.com, "NVIDIA H800 vs H100"; DeepSeek-V3 technical report,
    # section 3.1, has its nodes); $2/h is what DeepSeek's inference system overview (2025) assumes
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
