"""`python -m bench.timing_residuals GROUP...`: where a held-out group is missed, by campaign, prompt length and clients.

Prints predicted / measured of TPOT and TTFT from a fit that never saw the group. A term that is missing shows as a ratio that
leans one way along a column: with clients (waiting), with prompt length (prefill), or all over one campaign (its harness).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import numpy as np

from bench.timing_data import ServingRun, calibration_folder, load_serving_runs
from bench.timing_fit import as_arrays
from engine.timing.fit import fit, predict


def residuals(runs: Sequence[ServingRun], group: str) -> Iterator[str]:
    """Yield a table line per campaign, prompt length and clients. Runs are of one kind, dense or mixtures."""
    campaigns = sorted({run.campaign for run in runs})
    columns = as_arrays(runs, campaigns)
    out = np.array([run.group == group for run in runs])
    ttft, tpot = predict(columns, fit(columns.where(~out), len(campaigns)))
    cells: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for run, ttft_s, tpot_s in zip(runs, ttft, tpot, strict=True):
        if run.group == group:
            cell = cells.setdefault((run.campaign, run.loop.input_tokens, run.loop.num_clients), [])
            cell.append((tpot_s / run.tpot_s, ttft_s / run.ttft_s))
    for (campaign, input_tokens, clients), ratios in sorted(cells.items()):
        tpot_ratio, ttft_ratio = np.median(np.array(ratios), axis=0)
        yield f"| {group} | {campaign} | {input_tokens} | {clients} | {len(ratios)} | {tpot_ratio:.2f} | {ttft_ratio:.2f} |"


def main(groups: Sequence[str]) -> int:
    folder = calibration_folder()
    if not folder.is_dir():
        print("the calibration data is not here; name the folder of traces in BATON_TRACES", file=sys.stderr)
        return 2
    runs = load_serving_runs(folder / "aiconfigurator" / "silicon_sample.csv")
    mixtures = {run.group: run.loop.decode.shape.is_mixture for run in runs}
    if not groups or any(group not in mixtures for group in groups):
        print("name groups, which are: " + ", ".join(f'"{group}"' for group in sorted(mixtures)), file=sys.stderr)
        return 2
    print("| group | campaign | prompt | clients | n | TPOT ratio | TTFT ratio |\n|---|---|---:|---:|---:|---:|---:|")
    for group in groups:
        kind = [run for run in runs if run.loop.decode.shape.is_mixture == mixtures[group]]
        print("\n".join(residuals(kind, group)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
