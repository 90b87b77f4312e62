"""`baton bench control` as a user meets it, and one small contest through the simulator."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import pytest

from bench.control import cli as control_cli
from bench.control.contest import Contest, Row
from bench.control.jobs import Do, Jobs
from bench.control.loads import Load, catalogue, until
from bench.control.report import remarks, render
from bench.control.trial import Figures, Trial
from cli.main import main

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def short(name: str, duration_s: float) -> Load:
    [load] = [load for load in catalogue() if load.name == name]
    return replace(load, rows=until(load.rows, duration_s), duration_s=duration_s, judge_from_s=20.0)


async def at_once(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Implements Do: here and now."""
    return function(*args)


async def measured(load: Load, seeds: Sequence[int], do: Do = at_once) -> Row:
    return await Contest(load, do, planner_python=None, tunes=False, say=lambda _: None).row(seeds)


@pytest.fixture(scope="module")
def row() -> Row:
    return asyncio.run(measured(short("mix swings", 150.0), [0]))


def test_every_policy_serves_the_same_calls(row: Row) -> None:
    results = [row.ours, *row.baselines.values(), row.oracle]
    assert set(row.baselines) == {"static", "scale-only"}
    assert len({result.figures.num_calls for result in results}) == 1
    assert all(0.0 < result.figures.in_slo <= 1.0 for result in results)
    assert all(result.figures.gpu_hours > 0 for result in results)
    assert row.baselines["static"].figures.reversals_per_hour == 0


def test_the_table_names_the_load(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    render([row])
    assert "mix swings" in capsys.readouterr().out


def test_an_unknown_load_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "control", "--loads", "mix swings,nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


def test_a_load_without_its_trace_is_left_out_and_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bench.traces._REPOSITORY", tmp_path)
    monkeypatch.delenv("BATON_TRACES", raising=False)
    monkeypatch.setattr(Jobs, "do", staticmethod(at_once))  # other processes see the real folder
    assert control_cli.main(_args("--loads", "azure conv", "--no-progress")) == 0
    assert "azure conv is left out: the public trace" in capsys.readouterr().err


def _args(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    control_cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["control", *words])


FIGURES = Figures(1.0, 1.0, 1.0, 0.0, 1.0, 100)


def test_a_fleet_has_settled_once_its_size_stays_within_a_tenth_for_ten_minutes() -> None:
    sizes = [3, 4, 5, 6, 7, *[6] * 100]
    trial = Trial(FIGURES, sizes, [])
    assert trial.settled_s(6) == 60.0  # the sixth tick
    assert trial.turns_after(60.0) == 0
    assert trial.turns_after(0.0) == 1
    assert Trial(FIGURES, [6, 7] * 100, []).settled_s(6) is None


def test_attainment_is_back_after_the_last_bad_minute() -> None:
    met = [(float(at_s), not 100 <= at_s < 200) for at_s in range(0, 600, 2)]
    trial = Trial(FIGURES, [], met)
    assert trial.back_s(100.0, 600.0) == 120.0
    assert trial.back_s(300.0, 600.0) == 0.0
    assert trial.back_s(0.0, 180.0) is None


def test_a_row_without_a_gap_recovers_nothing_and_says_nothing(row: Row) -> None:
    same = replace(row, oracle=row.baselines["static"])
    assert same.recovered is None
    assert remarks(replace(row, settling=None, back_s=[])) == []
