"""A run's outcome for people (tables) and for programs (one JSON document)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bench.sim.control import ControlledOutcome
from bench.sim.deployment import Deployment
from bench.sim.measures import ClassMeasure, Histogram
from bench.sim.simulation import Outcome

if TYPE_CHECKING:
    from bench.sim.cli import Run

PERCENTS = (50, 90, 95, 99)
_SHOWN = (50, 99)
_SHOWN_ACTS = 20  # a screenful


def render(deployment: Deployment, runs: Sequence[Run]) -> None:
    """On stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # a pipe has no width to wrap at
    layout = deployment.layout
    parts = ((layout.num_prefill, "prefill"), (layout.num_decode, "decode"), (layout.num_both, "both"))
    workers = " + ".join(f"{num} {name}" for num, name in parts if num)
    title = f"{deployment.model} {deployment.weight_dtype}, {workers} x {deployment.tp} {deployment.gpu}"
    if (decode := deployment.decode_hardware) is not None:
        title += f", decode on {decode.tp} {decode.gpu}"
    table = Table(title=title, title_justify="left")
    for column in (
        "seed",
        "class",
        "calls",
        "in SLO",
        "shed",
        "TTFT p50/p99",
        "TPOT p50/p99",
        "handoff p50/p99",
        "steady",
    ):
        table.add_column(column)
    for run in runs:
        for measure in run.outcome.classes:
            table.add_row(str(run.seed), *_class_row(measure))
    console.print(table)
    for run in runs:
        console.print(_line(run), markup=False)
        if run.controlled is not None:
            for line in _control_lines(run.controlled):
                console.print(line, markup=False)
    if len(runs) > 1:
        mean, half = _mean([run.outcome.goodput for run in runs])
        console.print(f"goodput over {len(runs)} seeds: {mean:.3f} ± {half:.3f} calls/s (95 %)", markup=False)


def _class_row(measure: ClassMeasure) -> list[str]:
    shares = measure.attained
    attained = "-" if shares.mean is None else f"{100 * shares.mean:.1f} %"
    if shares.half_width is not None:
        attained += f" ± {100 * shares.half_width:.1f}"
    steady = {True: "yes", False: "no", None: "too few calls to say"}[measure.is_steady]
    times = [_times(histogram) for histogram in (measure.ttft, measure.tpot, measure.handoff_gap)]
    return [measure.slo.name, str(measure.num), attained, str(measure.num_shed), *times, steady]


def _times(histogram: Histogram) -> str:
    if not histogram.num:
        return "-"
    return " / ".join(f"{1e3 * (histogram.percentile(percent) or 0.0):.3g}" for percent in _SHOWN) + " ms"


def _line(run: Run) -> str:
    outcome = run.outcome
    used: dict[str, list[float]] = {}
    for worker in outcome.workers:
        used.setdefault(worker.role.name.lower(), []).append(worker.busy_share)
    busy = ", ".join(f"{name} {100 * sum(shares) / len(shares):.0f} %" for name, shares in used.items())
    return (
        f"seed {run.seed}: goodput {outcome.goodput:.3f} calls/s, {outcome.gpu_hours:.2f} GPU-hours, busy: {busy}; "
        f"{outcome.run_s:.0f} s simulated in {run.wall_s:.1f} s"
    )


def _control_lines(controlled: ControlledOutcome) -> Iterator[str]:
    done = [decided for decided in controlled.decisions if decided.decision.applied]
    yield (
        f"  autoscaler: {len(done)} acts, {len(controlled.decisions) - len(done)} refused,"
        f" {controlled.reversals_per_hour:.1f} reversals per hour; GPUs {_span(controlled)}"
    )
    for decided in done[:_SHOWN_ACTS]:
        yield f"  {decided.at_s:7.0f} s  {decided.decision.action}: {decided.decision.reason}"
    if len(done) > _SHOWN_ACTS:
        yield f"  and {len(done) - _SHOWN_ACTS} more; all are in the --json document"


def _span(controlled: ControlledOutcome) -> str:
    gpus = [sizes.num_gpus for sizes in controlled.timeline]
    return f"{min(gpus)} to {max(gpus)}" if gpus else "as at the start: no tick came"


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """And the half width of its 95 % interval, Student's t as in bench/sim/measures.py."""
    mean, df = sum(values) / len(values), len(values) - 1
    variance = sum((value - mean) ** 2 for value in values) / df
    return mean, (1.96 + 2.37 / df) * math.sqrt(variance / len(values))


def document(options: Mapping[str, object], deployment: Deployment, runs: Sequence[Run], *, complete: bool) -> str:
    kept = {name: value for name, value in options.items() if isinstance(value, str | int | float | None)}
    found = {
        "options": kept,
        "deployment": asdict(deployment),
        "complete": complete,
        "runs": [_run(run) for run in runs],
    }
    return json.dumps(found, indent=1, default=str)


def _run(run: Run) -> dict[str, object]:
    outcome = run.outcome
    return {
        "seed": run.seed,
        "wall_s": run.wall_s,
        **_totals(outcome),
        "usd": outcome.usd,
        "classes": [_class(measure) for measure in outcome.classes],
        "workers": [asdict(worker) | {"role": worker.role.name.lower()} for worker in outcome.workers],
        **(_control(run.controlled) if run.controlled is not None else {}),
    }


def _control(controlled: ControlledOutcome) -> dict[str, object]:
    return {
        "work_in_slo": {"calls": controlled.calls_in_slo, "tokens": controlled.tokens_in_slo},
        "reversals_per_hour": controlled.reversals_per_hour,
        "decisions": [{"at_s": decided.at_s, **asdict(decided.decision)} for decided in controlled.decisions],
        "timeline": [asdict(sizes) for sizes in controlled.timeline],
    }


def _totals(outcome: Outcome) -> dict[str, object]:
    return {
        "calls": outcome.num_calls,
        "attainment": outcome.attainment,
        "goodput_rps": outcome.goodput,
        "gpus": outcome.num_gpus,
        "gpu_hours": outcome.gpu_hours,
        "measured_s": outcome.measured_s,
        "run_s": outcome.run_s,
        "events": outcome.num_events,
        "moved": outcome.num_moved,
    }


def _class(measure: ClassMeasure) -> dict[str, object]:
    return {
        "slo": asdict(measure.slo),
        "calls": measure.num,
        "attainment": measure.attained.mean,
        "attainment_half_width": measure.attained.half_width,
        "attainment_halves": measure.attained.halves,
        "mean_ttft_s": measure.mean_ttft.mean,
        "mean_ttft_halves_s": measure.mean_ttft.halves,
        "steady": measure.is_steady,
        "verdicts": {verdict.value: num for verdict, num in measure.verdicts.items()},
        "shed": measure.num_shed,
        "local": measure.num_local,
        "prompt_tokens": measure.prompt_tokens,
        "output_tokens": measure.output_tokens,
        "ttft_s": _percentiles(measure.ttft),
        "tpot_s": _percentiles(measure.tpot),
        "handoff_gap_s": _percentiles(measure.handoff_gap),
    }


def _percentiles(histogram: Histogram) -> dict[str, float | None]:
    return {f"p{percent}": histogram.percentile(percent) for percent in PERCENTS}
