"""The document of a bench: what it holds, and when a run may go on with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import ConfigError
from bench.control import cli as control_cli
from bench.control.book import Book, Settings
from bench.control.contest import Result, Row, Settling
from bench.control.jobs import Jobs
from bench.control.loads import Load
from bench.control.runs import digest
from bench.control.trial import Figures
from bench.traces import TraceRow
from cli.main import main
from tests.bench.control.test_control_command import at_once, short

SETTINGS = Settings((0, 1), 1.0, tunes=True, planner_version=None)
ONE, OTHER = Figures(0.97, 0.96, 4.1, 3.0, 4.6, 3_400), Figures(0.99, 0.98, 4.0, 2.0, 4.2, 3_410)
RESULT = Result(Figures(0.98, 0.97, 4.05, 2.5, 4.4, 3_405), (ONE, OTHER), "3+5")


def row_of(load: Load) -> Row:
    return Row(
        load=load,
        played=digest(load, SETTINGS.seeds),
        ours=RESULT,
        baselines={"static": RESULT, "scale-only": RESULT},
        oracle=RESULT,
        bound=3.5,
        static=(3, 5),
        settling=Settling(None, 1.25, 2.0),
        back_s=[60.0, None],
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.json"


def test_the_document_holds_what_was_asked_for(path: Path) -> None:
    Book(path, SETTINGS).add(row_of(short("mix swings", 60.0)))
    found = json.loads(path.read_text())
    assert {"tick_s", "start_up_s", "flip_s"} <= found["times"].keys()
    [one] = found["rows"]
    figures = {"in_slo", "gpu_hours", "reversals_per_hour"}
    assert {"load", "baselines", "oracle", *figures} <= one.keys()
    assert all(figures <= of.keys() for of in (*one["baselines"].values(), one["oracle"]))
    assert one["in_slo_range"] == [0.97, 0.99]


def test_rows_are_taken_over_as_they_were_and_others_stay_in_the_document(path: Path) -> None:
    first, second = short("mix swings", 60.0), short("worker dies", 60.0)
    before = Book(path, SETTINGS)
    before.add(row_of(second))
    before.add(row_of(first))
    after = Book(path, SETTINGS)
    after.go_on()
    assert after.has(first)
    after.take_over(first, digest(first, SETTINGS.seeds))
    assert after.rows == [row_of(first)]
    assert not after.has(short("rate swings", 60.0))
    after.add(row_of(short("rate swings", 60.0)))
    names = [one["load"] for one in json.loads(path.read_text())["rows"]]
    assert names == ["mix swings", "rate swings", "worker dies"]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (replace(SETTINGS, seeds=(0,)), "seeds"),
        (replace(SETTINGS, length=0.5), "length"),
        (replace(SETTINGS, tunes=False), "tuned"),
        (replace(SETTINGS, planner_version="1.6.1"), "ai_dynamo"),
    ],
)
def test_a_document_of_other_settings_is_refused_by_name(path: Path, settings: Settings, name: str) -> None:
    Book(path, SETTINGS).add(row_of(short("mix swings", 60.0)))
    with pytest.raises(ConfigError, match=f"{name} is"):
        Book(path, settings).go_on()


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 3}', '{"rows": [{}]}'])
def test_what_is_no_document_is_refused(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="no document of this bench"):
        Book(path, SETTINGS).go_on()


def test_a_row_of_another_load_of_that_name_is_refused(path: Path) -> None:
    Book(path, SETTINGS).add(row_of(short("mix swings", 60.0)))
    book = Book(path, SETTINGS)
    book.go_on()
    load = short("mix swings", 60.0)
    others = replace(load, max_workers=7), replace(load, caches=True), replace(load, events_s=(30.0,))
    for other in (short("mix swings", 90.0), *others):
        with pytest.raises(ConfigError, match="'mix swings' has other calls"):
            book.take_over(other, digest(other, SETTINGS.seeds))


def test_a_load_of_another_name_and_goal_is_the_same_and_one_with_other_calls_of_any_seed_is_not() -> None:
    load = short("mix swings", 60.0)

    def of_another_source(seed: int) -> Iterator[TraceRow]:
        return load.rows(seed if seed == SETTINGS.seeds[0] else seed + 7)

    was = digest(load, SETTINGS.seeds)
    assert digest(replace(load, name="x", goal="y"), SETTINGS.seeds) == was
    assert digest(replace(load, rows=of_another_source), SETTINGS.seeds) != was


def test_what_policies_and_fleets_are_made_of_is_among_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SETTINGS.document()
    monkeypatch.setattr("bench.control.book.HEADROOMS", (1.0,))
    monkeypatch.setattr("bench.control.book.SCALE_ONLY_SETTINGS", ())
    monkeypatch.setattr("bench.control.rig.SEATS", 3)
    after = SETTINGS.document()
    assert {name for name in before if before[name] != after[name]} == {
        "oracle_headrooms", "scale_only_settings", "deployment"
    }  # fmt: skip


def test_a_file_that_is_not_there_yet_is_begun(path: Path) -> None:
    book = Book(path, SETTINGS)
    book.go_on()
    assert not book.has(short("mix swings", 60.0))


def test_going_on_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "control", "--continue"]) == 2
    assert "--json" in capsys.readouterr().err


def test_a_row_that_does_not_fit_is_said_before_anything_is_measured(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Book(path, SETTINGS).add(row_of(short("NaN", 60.0)))
    monkeypatch.delattr(control_cli, "Contest")  # whoever measures fails
    monkeypatch.setattr(Jobs, "do", staticmethod(at_once))
    words = ["--loads", "mix swings,NaN", "--seeds", "2", "--json", str(path), "--continue", "--no-progress"]
    assert main(["bench", "control", *words]) == 2
    assert "'NaN' has other calls" in capsys.readouterr().err


def test_a_bench_that_is_complete_measures_nothing_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [load] = control_cli.chosen("NaN", 1.0)
    Book(path, SETTINGS).add(row_of(load))
    before = path.read_bytes()
    monkeypatch.delattr(control_cli, "Contest")  # whoever measures fails
    monkeypatch.setattr(Jobs, "do", staticmethod(at_once))
    words = ["--loads", "NaN", "--seeds", "2", "--json", str(path), "--continue", "--no-progress"]
    assert main(["bench", "control", *words]) == 0
    assert "98.0 %" in capsys.readouterr().out
    assert path.read_bytes() == before
