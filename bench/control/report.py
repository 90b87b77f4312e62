"""What came of it, for people (a table) and for programs (one JSON document)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.control.contest import INTERVAL_S, MISS_FACTOR, Result, Row
from bench.control.rig import CHAT, SEATS, TIMES


def render(rows: Sequence[Row]) -> None:
    """On stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # a pipe has no width to wrap at
    table = Table(title="in SLO / GPU-hours / reversals per hour", title_justify="left")
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    for column in ("load", "ours", *names, "oracle", "recovered"):
        table.add_column(column)
    for row in rows:
        others = [_cell(row.baselines[name]) if name in row.baselines else "-" for name in names]
        recovered = "-" if row.recovered is None else f"{100 * row.recovered:.0f} %"
        table.add_row(row.load.name, _cell(row.ours), *others, _cell(row.oracle), recovered)
    console.print(table)
    for row in rows:
        for line in remarks(row):
            console.print(f"{row.load.name}: {line}", markup=False)


def _cell(result: Result) -> str:
    figures = result.figures
    return f"{100 * figures.in_slo:.1f} % / {figures.gpu_hours:.2f} / {figures.reversals_per_hour:.1f}"


def remarks(row: Row) -> list[str]:
    """What is not in the table."""
    found = []
    if (settling := row.settling) is not None:
        when = "never settled" if settling.settled_s is None else f"settled after {settling.settled_s:.0f} s at most"
        found.append(f"{when}, then {settling.gpus:.2f} of the best static size, {settling.num_turns:.1f} reversals")
    if row.back_s:
        times = ", ".join("never" if back is None else f"{back:.0f} s" for back in row.back_s)
        found.append(f"back at 90 % of a minute's calls after {times} at most")
    return found


def document(rows: Sequence[Row], seeds: Sequence[int], length: float, planner: str | None) -> str:
    found = {
        "times": asdict(TIMES),
        "slo": asdict(CHAT),
        "seats": SEATS,
        "seeds": list(seeds),
        "length": length,
        "miss_factor": MISS_FACTOR,
        "oracle_interval_s": INTERVAL_S,
        "ai_dynamo": planner,
        "rows": [_row(row) for row in rows],
    }
    return json.dumps(found, indent=1)


def _row(row: Row) -> dict[str, Any]:
    return {
        "load": row.load.name,
        "goal": row.load.goal,
        "duration_s": row.load.duration_s,
        "max_gpus": row.load.max_workers,
        **_result(row.ours),
        "recovered": row.recovered,
        "settling": asdict(row.settling) if row.settling is not None else None,
        "back_s": list(row.back_s),
        "baselines": {name: _result(result) for name, result in row.baselines.items()},
        "oracle": {**_result(row.oracle), "planned_loss": row.bound},
    }


def _result(result: Result) -> dict[str, Any]:
    spread = {
        f"{name}_range": [min(values), max(values)]
        for name in ("in_slo", "gpu_hours", "loss")
        for values in ([getattr(one, name) for one in result.by_seed],)
    }
    return {**asdict(result.figures), **spread, "setting": result.setting}
