"""Steps of single models that somebody measured alone: fits for engine/timing/measured.py, and a check of the roofline.

None of these runs was used to fit the roofline's efficiencies, and it never saw an A100, OPT, BLOOM or Llama 2.
`python -m bench.timing_measured` prints the fits and both errors.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.timing_data import calibration_folder
from engine.timing.batch import Batch
from engine.timing.coefficients import efficiency
from engine.timing.fitted import Fitted
from engine.timing.hardware import gpu
from engine.timing.linear_fit import MeasuredStep, fit_linear, relative_errors
from engine.timing.roofline import Roofline
from engine.timing.shapes import model_shape


@dataclass(frozen=True, slots=True)
class Setup:
    """What was measured; `source` is its folder's."""

    source: str
    gpu: str
    model: str
    tp: int
    weight_dtype: str

    @property
    def roofline(self) -> Roofline:
        shape = model_shape(self.model)
        return Roofline(gpu(self.gpu), shape, self.tp, self.weight_dtype, "bf16", efficiency(shape, self.weight_dtype))


def load_measured(folder: Path) -> dict[Setup, list[MeasuredStep]]:
    return _dynamo(folder / "dynamo_h200") | _splitwise(folder / "splitwise" / "perf_model.csv")


def _dynamo(folder: Path) -> dict[Setup, list[MeasuredStep]]:
    prefill = np.load(folder / "H200_TP1P_prefill_raw_data.npz")
    decode = np.load(folder / "H200_TP1D_decode_raw_data.npz")
    steps = [
        MeasuredStep(Batch(((int(length), 0),)), float(ms) / 1e3)
        for length, ms in zip(prefill["prefill_isl"], prefill["prefill_ttft"], strict=True)
    ]
    max_tokens = float(decode["max_kv_tokens"][0])
    for usage, length, ms in zip(decode["x_kv_usage"], decode["y_context_length"], decode["z_itl"], strict=True):
        tokens = usage * max_tokens
        steps.append(MeasuredStep(Batch((), max(1, round(tokens / length)), round(tokens)), float(ms) / 1e3))
    return {Setup("dynamo", "h200", "llama-3.1-8b", 1, "fp8"): steps}


def _splitwise(path: Path) -> dict[Setup, list[MeasuredStep]]:
    """Read rows without power caps. Prompts are batched; decodes are at the mean context of an answer."""
    steps: defaultdict[Setup, list[MeasuredStep]] = defaultdict(list)
    models = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["hardware"].endswith("pcap"):
                continue
            tp = int(row["tensor_parallel"])
            setup = Setup("splitwise", row["hardware"].split("-")[0], models[row["model"]], tp, "bf16")
            prompt, batch, tokens = int(row["prompt_size"]), int(row["batch_size"]), int(row["token_size"])
            context = batch * (prompt + tokens // 2)
            steps[setup] += [
                MeasuredStep(Batch(((prompt, 0),) * batch), float(row["prompt_time"]) / 1e3),
                MeasuredStep(Batch((), batch, context), float(row["token_time"]) / 1e3),
            ]
    return dict(steps)


def load_distserve(path: Path) -> dict[Setup, Fitted]:
    """Read the profile, which is itself a fit: ms, per token and token^2 of a prompt; ms, per KV token and sequence."""
    profile: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]] = json.loads(path.read_text(encoding="utf-8"))
    found = {}
    for model, by_tp in profile.items():
        for tp, entry in by_tp.items():
            small, large = entry["decoding_smallbs"], entry["decoding_largebs"]
            setup = Setup("distserve", "a100", model.removeprefix("facebook/"), int(tp), "bf16")
            start, token, square = (one / 1e3 for one in entry["prefill"])
            found[setup] = Fitted(
                (start, token, max(0.0, square)),
                _decode(small),
                _decode(large),
                large_from=int(float(str(entry["decoding_large_small_bs_threshold"]))),
            )
    return found


def _decode(fit: Sequence[float]) -> tuple[float, float, float]:
    start, kv, sequence = (one / 1e3 for one in fit)
    return start, sequence, kv


# Where the distserve profile is compared: lengths of its own data sets (ShareGPT to LongBench) that a 2,048-token OPT takes
_GRID = (
    *(Batch(((length, 0),)) for length in (128, 512, 1024, 2048)),
    *(Batch((), size, size * 1024) for size in (1, 8, 32, 64)),
)


def main() -> int:
    folder = calibration_folder()
    if not folder.is_dir():
        print("the calibration data is not here; name the folder of traces in BATON_TRACES", file=sys.stderr)
        return 2
    print("| source | model | GPUs | kind | n | linear fit median | roofline median | roofline bias |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    measured = load_measured(folder)
    fits = {setup: fit_linear(steps) for setup, steps in measured.items()}
    profile = load_distserve(folder / "distserve_a100" / "profiler-a100-80g.distserve.json")
    for setup, fitted in profile.items():
        measured[setup] = [MeasuredStep(batch, fitted.step_s(batch)) for batch in _GRID]
    for setup, steps in measured.items():
        for kind, some in (
            ("prompt", [step for step in steps if step.batch.prefills]),
            ("decode", [step for step in steps if not step.batch.prefills]),
        ):
            off = relative_errors(setup.roofline, some)
            linear = f"{np.median(np.abs(relative_errors(fits[setup], some))):.1%}" if setup in fits else "is one"
            where = f"{setup.source} | {setup.model} | {setup.tp} x {setup.gpu} | {kind} | {len(some)}"
            print(f"| {where} | {linear} | {np.median(np.abs(off)):.1%} | {1 + np.median(off):.2f} |")
    print()
    for setup, fitted in (fits | profile).items():
        print(setup, fitted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
