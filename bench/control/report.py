"""What came of it, for people: a table, and what does not fit in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.control.contest import Result, Row


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
