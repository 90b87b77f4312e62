"""`baton plan` as a user meets it: a table, a document, a picture, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main

SMALL = ["--input-len", "1000", "--output-len", "8", "--calls", "60", "--seeds", "2", "--tp", "1", "--no-progress"]
CHAT = ["--slo", "chat:500:20"]


def test_it_prints_a_table_and_writes_a_document_and_a_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    assert main(["plan", *SMALL, *CHAT, "--gpus", "2", "--json", str(document), "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "calls simulated" in shown
    assert "were cut" not in shown
    assert "Bound:" in shown
    found = json.loads(document.read_text())
    assert found["gpus"] == found["best"]["gpus"] == 2
    assert found["best"]["goodput_rps"] > 0
    assert found["best"]["usd_per_million_tokens"] > 0
    assert found["disaggregation"]["verdict"] in ("pays", "does not pay", "too close to say")
    assert found["simulated"]["calls"] > 600
    assert picture.read_text().startswith("<svg")


def test_figures_of_trials_that_were_cut_say_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.plan.judge.MAX_CALLS", 20)
    document = tmp_path / "plan.json"
    assert main(["plan", *SMALL, *CHAT, "--gpus", "1", "--calls", "1", "--seeds", "1", "--json", str(document)]) == 0
    assert "before their fleets were full" in capsys.readouterr().out
    assert any(trial["cut"] for trial in json.loads(document.read_text())["best"]["curve"])


def test_for_a_rate_it_finds_the_fewest_gpus_that_hold_it(tmp_path: Path) -> None:
    document = tmp_path / "plan.json"
    assert main(["plan", *SMALL, *CHAT, "--rate", "60", "--json", str(document)]) == 0
    found = json.loads(document.read_text())
    best, (chat,) = found["best"], found["classes"]
    assert found["gpus"] == best["gpus"] < 4
    assert all(trial["attainment"]["chat"] >= chat["percentile"] - 0.05 for trial in best["at_rate"])
    assert best["goodput_rps"] > 0.9 * 60


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--slo", "chat:500:1"], 1, "classes.chat.tpot_ms is 1; the floor is"),
        (["--slo", "chat:1:20"], 1, "classes.chat.ttft_ms is 1; the floor is"),
        (["--model", "nobody"], 2, "nobody"),
        (["--gpu", "h1000"], 2, "h1000"),
        (["--gpu", "h100=nan"], 2, "above 0"),
        (["--plot", "plan.png"], 2, "only .svg"),
        (["--trace", "none.csv"], 2, "none.csv"),
        (["--slo", "a:500:20", "--slo", "a:600:20"], 2, "names a class twice"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *SMALL, *words]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton plan: ")
    assert message in line


@pytest.mark.parametrize("words", [["--rate", "nan"], ["--rate", "-1"], ["--gpus", "0"], ["--slo", "chat:nan:20"]])
def test_numbers_out_of_range_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *SMALL, *words])
    assert ended.value.code == 2
