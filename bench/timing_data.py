"""Calibration data read into typed rows: published serving runs of aiconfigurator's silicon_sample.csv. Pure but for reading.

The table's model_path, quantisation and parallelism columns become shapes and layouts here. Where a value is not in the table
it is said why we assume it. Rows repeated under another model name (R1 as V3) count once.
"""

from __future__ import annotations

import csv
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from engine.timing.closed_loop import Loop
from engine.timing.hardware import gpu
from engine.timing.roofline import Roofline
from engine.timing.shapes import ModelShape, model_shape

_MODELS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2.5",
    "zhipuai/GLM-5": "glm-5",
}
_WEIGHTS = {
    "fp8": "fp8",
    "fp8_block": "fp8",
    "nvfp4": "fp4",
    "int4_wo": "int4",
    "": "bf16",
}  # routed experts are most of them
_NODE_GPUS = 8  # HGX H100 and H200
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


@dataclass(frozen=True, slots=True)
class ServingRun:
    """Means of one closed-loop run."""

    campaign: str  # engine, its version and whose harness: what a run shares that no GPU explains
    loop: Loop
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> str:
        """What is held out together: a model on a number of GPUs, whatever engine ran it."""
        kind = " P/D" if self.loop.disaggregated else ""
        return f"{self.loop.decode.shape.name} x{self.loop.decode.tp}{kind}"


def calibration_folder() -> Path:
    """Return where the calibration data is: in BATON_TRACES, else in `shared/traces` in the repository or beside it."""
    repository = Path(__file__).parents[1]
    named = os.environ.get("BATON_TRACES")
    places = [Path(named)] if named else [repository / "shared" / "traces", repository.parent / "shared" / "traces"]
    folders = [place / "calibration" for place in places]
    return next((folder for folder in folders if folder.is_dir()), folders[-1])


def load_serving_runs(path: Path) -> list[ServingRun]:
    """Read silicon_sample.csv; rows without a known concurrency are left out."""
    runs: dict[tuple[str, str], ServingRun] = {}  # by what was measured: no two runs agree in nine digits
    with path.open(encoding="utf-8") as lines:
        rows = sorted(
            csv.DictReader(lines), key=lambda row: row["decode_num_workers"] == ""
        )  # those that tell more first
        for row in rows:
            run = _run(row)
            if run is not None:
                runs.setdefault((f"{run.ttft_s:.9g}", f"{run.tpot_s:.9g}"), run)
    return list(runs.values())


def _run(row: dict[str, str]) -> ServingRun | None:
    clients = _clients(row)
    if clients is None:
        return None
    model = model_shape(_MODELS[row["model_path"]])
    disaggregated = row["mode"] == "disagg"
    decode = _roofline(row, model, "decode_" if disaggregated else "")
    return ServingRun(
        campaign=_campaign(row, model.name),
        loop=Loop(
            prefill=_roofline(row, model, "prefill_") if disaggregated else decode,
            decode=decode,
            disaggregated=disaggregated,
            # Where the table does not count workers we assume one of each
            decode_per_prefill=_number(row, "decode_num_workers") / _number(row, "prefill_num_workers"),
            num_clients=clients,
            input_tokens=int(row["isl"]),
            output_tokens=int(row["osl"]),
        ),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def _roofline(row: dict[str, str], model: ModelShape, prefix: str) -> Roofline:
    weights = _WEIGHTS[row["moe_quant_mode"]]
    # TensorRT-LLM's FP8 checkpoints carry FP8 KV scales; vLLM and SGLang keep "auto", the compute type
    kv = "fp8" if row["backend"] == "trtllm" and weights == "fp8" else "bf16"
    tp, replicas = _layout(row, prefix)
    return Roofline(gpu(row["system"]), model, tp, weights, kv, attention_replicas=replicas)


def _campaign(row: dict[str, str], model: str) -> str:
    """Name engine, version and harness: runs named by a file per model were made model by model, dated ones by one harness."""
    own = f" {model}" if "measured=" not in row["silicon_data_source"] and row["mode"] == "agg" else ""
    return f"{row['backend']} {row['backend_version']}{own}{' P/D' if row['mode'] == 'disagg' else ''}"


def _clients(row: dict[str, str]) -> int | None:
    """Return the clients of one (decode) worker; None where the table tells what was planned, not what was run."""
    named = _CONCURRENCY.search(row["silicon_data_source"])
    if named is None:
        return None
    if row["batch_size"]:  # of one attention replica
        return round(float(row["batch_size"])) * _number(row, "attention_dp_size")
    return round(int(named[1]) / _number(row, "decode_num_workers"))


def _layout(row: dict[str, str], prefix: str) -> tuple[int, int]:
    """Return (GPUs of a worker, attention replicas among them)."""
    replicas = _number(row, prefix + "attention_dp_size")
    expert_tp, expert_ways = _number(row, prefix + "moe_tp_size"), _number(row, prefix + "moe_ep_size")
    attention_ranks = _number(row, prefix + "tp_size") * replicas
    gpus = max(attention_ranks, expert_tp * expert_ways)
    dated = "measured=" in row["silicon_data_source"] and not prefix
    if dated and (gpus > _NODE_GPUS or (expert_tp == expert_ways and expert_tp > 1)):
        # This source writes n GPUs with tensor and expert (or data) parallelism n as n x n; its workers are single nodes
        gpus = math.isqrt(gpus)
        return gpus, gpus if replicas > 1 else 1
    return gpus, max(replicas, gpus // attention_ranks * replicas)


def _number(row: dict[str, str], column: str) -> int:
    return max(1, round(float(row[column] or 1)))
