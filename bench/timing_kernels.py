"""`python -m bench.timing_kernels`: what single kernels reach of the datasheet, from aiconfigurator's measured latencies.

These are the priors of the serving fit (engine/timing/fit.py) and a check that its results are possible. Every kernel is
fitted as the longest of its ideal times, each over an efficiency, plus a fixed time; the errors are weighed as there.
"""

from __future__ import annotations

import csv
import gzip
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.timing_data import calibration_folder
from engine.timing.fit import SCALE, gauss_newton
from engine.timing.hardware import Gpu, gpu

Array = NDArray[np.float64]
HEAD_DIM = 128  # of Llama and Qwen; the tables have 64 as well


@dataclass(frozen=True, slots=True)
class KernelFit:
    kernel: str
    num_points: int
    efficiencies: tuple[float, ...]
    fixed_s: float
    median_error: float


def fit_kernels(folder: Path, gpu_name: str) -> list[KernelFit]:
    device, tables = gpu(gpu_name), folder / "aiconfigurator" / f"{gpu_name}_sxm"
    return [
        *(_gemm(tables / "gemm.csv.gz", device, dtype, name) for dtype, name in (("bfloat16", "bf16"), ("fp8", "fp8"))),
        _prefill_attention(tables / "context_attention.csv.gz", device),
        _decode_attention(tables / "generation_attention.csv.gz", device),
        *(_allreduce(tables / "custom_allreduce.csv.gz", device, ranks) for ranks in (2, 4, 8)),
    ]


def _gemm(path: Path, device: Gpu, dtype: str, name: str) -> KernelFit:
    """Fit matrices of the size that models have; the fastest of the kernels where several were tried."""
    best: dict[tuple[float, float, float], float] = {}
    for row in _rows(path, lambda row: row["gemm_dtype"] == dtype):
        m, n, k = float(row["m"]), float(row["n"]), float(row["k"])
        if 1_000 <= n <= 60_000 and 1_000 <= k <= 30_000:
            seconds = float(row["latency_ms"]) / 1e3
            best[m, n, k] = min(seconds, best.get((m, n, k), seconds))
    m, n, k = np.array(list(best)).T
    compute_s = 2 * m * n * k / device.rate(name)
    weight_bytes = 2 if name == "bf16" else 1
    memory_s = (weight_bytes * (n * k + m * k) + 2 * m * n) / device.memory_bytes_per_s
    return _fit(f"gemm {name}", np.array(list(best.values())), [compute_s, memory_s])


def _prefill_attention(path: Path, device: Gpu) -> KernelFit:
    rows = _rows(path, _is_grouped_bf16)
    batch, length, heads = (np.array([float(row[name]) for row in rows]) for name in ("batch_size", "isl", "num_heads"))
    flops = batch * heads * 4 * HEAD_DIM * length * length / 2
    return _fit("prefill attention", _seconds(rows), [flops / device.rate("bf16")])


def _decode_attention(path: Path, device: Gpu) -> KernelFit:
    rows = _rows(path, _is_grouped_bf16)
    batch, heads = (np.array([float(row[name]) for row in rows]) for name in ("batch_size", "num_key_value_heads"))
    context = np.array([float(row["isl"]) + float(row["step"]) for row in rows])
    nbytes = batch * context * heads * 2 * HEAD_DIM * 2
    return _fit("decode attention", _seconds(rows), [nbytes / device.memory_bytes_per_s])


def _allreduce(path: Path, device: Gpu, ranks: int) -> KernelFit:
    rows = _rows(path, lambda row: row["backend"] == "vllm_graph" and int(row["num_gpus"]) == ranks)
    moved_bytes = 2 * (ranks - 1) / ranks * np.array([float(row["message_size"]) for row in rows])
    return _fit(f"all-reduce of {ranks}", _seconds(rows), [moved_bytes / device.link_bytes_per_s])


def _is_grouped_bf16(row: dict[str, str]) -> bool:
    grouped = int(row["num_key_value_heads"]) < int(row["num_heads"])
    return grouped and row["kv_cache_dtype"] == "bfloat16" and int(row["head_dim"]) == HEAD_DIM


def _rows(path: Path, wanted: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if wanted(row)]


def _seconds(rows: Sequence[dict[str, str]]) -> Array:
    return np.array([float(row["latency_ms"]) for row in rows]) / 1e3


def _fit(kernel: str, seconds: Array, ideal: Sequence[Array]) -> KernelFit:
    def predicted(at: Array) -> Array:
        parts = np.stack([part / x for part, x in zip(ideal, np.exp(at[:-1]), strict=True)])
        fixed_s: Array = np.exp(at[-1])
        return np.asarray(parts.max(axis=0) + fixed_s)

    def residuals(at: Array) -> Array:
        return np.log(predicted(at) / seconds) / SCALE

    start = np.log([*[0.7] * len(ideal), 1e-5])
    found = gauss_newton(residuals, start, len(seconds))
    error = float(np.median(np.abs(predicted(found) / seconds - 1)))
    *efficiencies, fixed_s = (float(x) for x in np.exp(found))
    return KernelFit(kernel, len(seconds), tuple(efficiencies), fixed_s, error)


def main() -> int:
    folder = calibration_folder()
    if not folder.is_dir():
        print("the calibration data is not here; name the folder of traces in BATON_TRACES", file=sys.stderr)
        return 2
    print("| GPU | kernel | n | of the datasheet | fixed us | median error |\n|---|---|---:|---|---:|---:|")
    for name in ("h100", "h200"):
        for one in fit_kernels(folder, name):
            reached = ", ".join(f"{x:.2f}" for x in one.efficiencies)
            print(
                f"| {name} | {one.kernel} | {one.num_points} | {reached} | {1e6 * one.fixed_s:.1f} | {one.median_error:.0%} |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
