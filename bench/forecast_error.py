"""How far off arrival forecasts are on real traffic: `python -m bench.forecast_error [--hours H] [--seed N] [--json PATH]`.

azure and mooncake: the recorded arrivals, counted per tick. servegen: Poisson draws around its rates, which are means of ten
minutes joined by lines; what is slower than that is real there, what is quicker is drawn. Holes in a record are ticks without
data. Each candidate is told every tick and asked at every lead; error = sum of |forecast - realised| / sum of realised. The
first five minutes are left out. `season` is a candidate that was not taken over.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from bench.traces import Fields, TraceError, find_trace, load_trace
from router.controller.arrivals import LEADS_S, TARGET_TICKS, TICK_S, Filter, Forecaster, Level, new_bank

WARM_UP_TICKS = 30
LINE_S = 600.0  # between two rows of servegen; further apart is a hole
DAY_SLOTS = 144  # of ten minutes
DAY_TICKS = round(86_400 / TICK_S)
MAX_SEASON = 3.0  # by which time of day may move a forecast; more is a slot that saw too little

Rates = list[float | None]  # one per tick, calls a second; None = no data


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate on one trace at one lead."""

    trace: str
    num_ticks: int
    lead_s: float
    candidate: str
    error: float
    coverage: float | None  # of the interval; None: it has none


@dataclass(slots=True)
class Season:
    """The best level, times what this time of day was by what now is, as means of all days so far."""

    base: Level
    _sums: list[float]
    _counts: list[int]
    _tick: int = 0

    @staticmethod
    def new() -> Season:
        return Season(Level(0.03), [0.0] * DAY_SLOTS, [0] * DAY_SLOTS)

    def update(self, rate: float) -> None:
        self.base.update(rate)
        slot = self._tick * DAY_SLOTS // DAY_TICKS % DAY_SLOTS
        self._sums[slot] += rate
        self._counts[slot] += 1
        self._tick += 1

    def predict(self, num_ticks: int) -> float:
        if self._tick < DAY_TICKS:
            return self.base.predict(num_ticks)
        now, then = self._usual(self._tick), self._usual(self._tick + num_ticks)
        return self.base.predict(num_ticks) * min(MAX_SEASON, max(1 / MAX_SEASON, then / now if now else 1.0))

    def _usual(self, tick: int) -> float:
        """Between the middles of two slots."""
        place = tick * DAY_SLOTS / DAY_TICKS - 0.5
        low, high = (self._sums[s % DAY_SLOTS] / self._counts[s % DAY_SLOTS] for s in (int(place), int(place) + 1))
        return low + place % 1 * (high - low)


# -- series ------------------------------------------------------------------------------------------------------------


def recorded(name: str, seed: int) -> Rates:
    """Arrivals of a trace. Raises: TraceError."""
    times_s = [row.at_s for row in load_trace(find_trace(name), seed=seed)]
    counts, _ = np.histogram(times_s, np.arange(0.0, times_s[-1], TICK_S))
    return [float(count) / TICK_S for count in counts]


def drawn(name: str, seed: int) -> Rates:
    """Poisson arrivals around a record of rates. Raises: TraceError."""
    draw = np.random.default_rng(seed)
    rates: Rates = []
    for (start_s, start), (end_s, end) in pairwise(_read_rates(find_trace(name))):
        num_ticks = round((end_s - start_s) / TICK_S)
        if end_s - start_s > LINE_S:
            rates += [None] * num_ticks
            continue
        means = start + (end - start) * (np.arange(num_ticks) + 0.5) / num_ticks
        rates += [float(count) / TICK_S for count in draw.poisson(means * TICK_S)]
    return rates


def _read_rates(path: Path) -> Iterator[tuple[float, float]]:
    last_s = 0.0
    with path.open(encoding="utf-8") as lines:
        for number, found in enumerate(csv.DictReader(lines), 2):
            row = Fields(number, found)
            last_s = row.instant("t_s", last_s)
            yield last_s, row.instant("rate_rps", 0.0)


SERIES: dict[str, Callable[[int], Rates]] = {
    "azure conv": lambda seed: recorded("azure2023/AzureLLMInferenceTrace_conv.csv", seed),
    "mooncake": lambda seed: recorded("mooncake/conversation_trace.jsonl", seed),
    "deepseek-r1": lambda seed: drawn("servegen/deepseek-r1_total_rate.csv", seed),
    "m-mid": lambda seed: drawn("servegen/m-mid_total_rate.csv", seed),
}

# -- errors ------------------------------------------------------------------------------------------------------------


def measure(trace: str, rates: Rates) -> list[Row]:
    """Every candidate at every lead, and "chosen": what the controller would have said."""
    bank: dict[str, Filter] = {**new_bank(), "season": Season.new()}
    forecaster = Forecaster()
    said: dict[tuple[float, str], list[float]] = {}
    intervals: dict[float, list[tuple[float, float]]] = {lead_s: [] for lead_s in LEADS_S}
    for rate in rates:
        forecaster.observe(rate)
        if rate is not None:
            for candidate in bank.values():
                candidate.update(rate)
        for forecast in forecaster.forecasts():
            said.setdefault((forecast.lead_s, "chosen"), []).append(forecast.rate)
            intervals[forecast.lead_s].append((forecast.low, forecast.high))
            for name, candidate in bank.items():
                told = candidate.predict(round(forecast.lead_s / TICK_S))
                said.setdefault((forecast.lead_s, name), []).append(told)
    return [
        _row(trace, rates, lead_s, name, forecasts, intervals[lead_s] if name == "chosen" else None)
        for (lead_s, name), forecasts in sorted(said.items())
    ]


def _row(
    trace: str,
    rates: Rates,
    lead_s: float,
    name: str,
    forecasts: Sequence[float],
    intervals: Sequence[tuple[float, float]] | None,
) -> Row:
    off = total = 0.0
    num_inside = num_told = 0
    for tick in range(WARM_UP_TICKS, len(rates) - round(lead_s / TICK_S)):
        end = tick + round(lead_s / TICK_S) + 1
        known = [rate for rate in rates[end - TARGET_TICKS : end] if rate is not None]
        if len(known) < TARGET_TICKS or rates[tick] is None:
            continue
        realised = sum(known) / TARGET_TICKS
        off, total, num_told = off + abs(forecasts[tick] - realised), total + realised, num_told + 1
        if intervals is not None:
            num_inside += intervals[tick][0] <= realised <= intervals[tick][1]
    coverage = num_inside / num_told if intervals is not None and num_told else None
    return Row(trace, len(rates), lead_s, name, off / total if total else math.nan, coverage)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.forecast_error")
    parser.add_argument("--hours", type=float, default=336.0, help="of each trace, at most; all take a minute")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows there")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    for trace, read in SERIES.items():
        try:
            rates = read(args.seed)[: round(args.hours * 3_600 / TICK_S)]
        except TraceError as error:
            print(f"{trace}: {error}", file=sys.stderr)
            return 1
        found = measure(trace, rates)
        _show(found)
        rows += found
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def _show(rows: Sequence[Row]) -> None:
    print(f"{rows[0].trace}: {rows[0].num_ticks * TICK_S / 3600:.1f} h")
    for lead_s in LEADS_S:
        of_lead = [row for row in rows if row.lead_s == lead_s]
        errors = "  ".join(f"{row.candidate} {100 * row.error:.2f} %" for row in of_lead)
        [inside] = [row.coverage for row in of_lead if row.coverage is not None]
        print(f"  lead {lead_s:.0f} s: {errors}; {inside:.0%} inside the interval")


if __name__ == "__main__":
    sys.exit(main())
