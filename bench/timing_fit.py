"""`python -m bench.timing_fit`: fit step times to published serving runs and show their error on groups that were held out.

A group is a model on a number of GPUs, whatever engine served it; its rows are held out together, so nothing is known of that
pair. Dense models and mixtures are fitted apart; disaggregated runs, all of one mixture, are held out as a group of those.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.timing_data import ServingRun, calibration_folder, load_serving_runs
from engine.timing.closed_loop import loop_terms
from engine.timing.coefficients import Coefficients
from engine.timing.fit import Parameters, Runs, fit, predict, stack
from engine.timing.roofline import common_dtype


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, and which way they lean."""

    name: str
    num_runs: int
    tpot_median: float
    tpot_p90: float
    tpot_bias: float  # median of predicted / measured
    ttft_median: float
    ttft_p90: float
    ttft_bias: float


@dataclass(frozen=True, slots=True)
class Kind:
    """One fit: what it found in all runs, and how well fits without a group predict that group."""

    name: str
    coefficients: Coefficients
    held_out: tuple[Errors, ...]
    campaigns: tuple[Errors, ...]  # in sample


def fit_kind(name: str, runs: Sequence[ServingRun], hold_out: str) -> Kind:
    """Fit all runs, and once more without each `group` or `campaign`; hold out `nothing` to fit once."""
    campaigns = sorted({run.campaign for run in runs})
    columns = as_arrays(runs, campaigns)
    groups = np.array([run.campaign if hold_out == "campaign" else run.group for run in runs])
    whole = fit(columns, len(campaigns))
    held = []
    for group in () if hold_out == "nothing" else sorted(set(groups)):
        out = groups == group
        held.append(errors(str(group), columns.where(out), fit(columns.where(~out), len(campaigns))))
    inside = [errors(campaign, columns.where(columns.campaign == i), whole) for i, campaign in enumerate(campaigns)]
    return Kind(name, whole.coefficients, tuple(held), tuple(inside))


def errors(name: str, runs: Runs, parameters: Parameters) -> Errors:
    ttft, tpot = predict(runs, parameters)
    return Errors(name, len(tpot), *_spread(tpot / runs.tpot_s), *_spread(ttft / runs.ttft_s))


def _spread(ratio: NDArray[np.float64]) -> tuple[float, float, float]:
    error = np.abs(ratio - 1)
    return float(np.median(error)), float(np.quantile(error, 0.9)), float(np.median(ratio))


def as_arrays(runs: Sequence[ServingRun], campaigns: Sequence[str]) -> Runs:
    return Runs(
        stack([loop_terms(run.loop) for run in runs]),
        np.array([run.ttft_s for run in runs]),
        np.array([run.tpot_s for run in runs]),
        np.array([common_dtype(run.loop.decode.shape, run.loop.decode.weight_dtype) == "fp8" for run in runs]),
        np.array([campaigns.index(run.campaign) for run in runs]),
    )


def kinds(runs: Sequence[ServingRun], hold_out: str = "group") -> tuple[Kind, ...]:
    mixtures = [run for run in runs if run.loop.decode.shape.is_mixture]
    dense = [run for run in runs if not run.loop.decode.shape.is_mixture]
    return fit_kind("dense", dense, hold_out), fit_kind("mixture", mixtures, hold_out)


def table(kind: Kind) -> str:
    lines = [
        f"## {kind.name}",
        "",
        "| held out | n | TPOT median | p90 | bias | TTFT median | p90 | bias |",
        "|---|" + "---:|" * 7,
    ]
    lines += [_line(one) for one in kind.held_out]
    lines += [
        "",
        "| campaign, in sample | n | TPOT median | p90 | bias | TTFT median | p90 | bias |",
        "|---|" + "---:|" * 7,
    ]
    lines += [_line(one) for one in kind.campaigns]
    lines += ["", *(f"    {f.name}={getattr(kind.coefficients, f.name):.4g}," for f in fields(Coefficients)), ""]
    return "\n".join(lines)


def _line(one: Errors) -> str:
    tpot = f"{one.tpot_median:.1%} | {one.tpot_p90:.0%} | {one.tpot_bias:.2f}"
    return (
        f"| {one.name} | {one.num_runs} | {tpot} | {one.ttft_median:.1%} | {one.ttft_p90:.0%} | {one.ttft_bias:.2f} |"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.timing_fit", description=__doc__)
    parser.add_argument("--calibration", type=Path, default=None, help="folder with the calibration data")
    parser.add_argument(
        "--hold-out",
        choices=["group", "campaign"],
        default="group",
        help="what is predicted by a fit that never saw it: a model on a number of GPUs, or an engine in one harness",
    )
    parser.add_argument("--json", type=Path, default=None, help="write everything that is printed here as well")
    options = parser.parse_args(arguments)
    folder = options.calibration or calibration_folder()
    if not folder.is_dir():
        print("the calibration data is not here; name its folder with --calibration", file=sys.stderr)
        return 2
    found = kinds(load_serving_runs(folder / "aiconfigurator" / "silicon_sample.csv"), options.hold_out)
    for kind in found:
        print(table(kind))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(kind) for kind in found], indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
