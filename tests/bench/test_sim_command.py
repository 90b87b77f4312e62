"""`baton sim` as a user meets it: one table, one JSON document, clear refusals, an honest end after Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.sim import cli as sim_cli
from bench.sim.sources import Source
from bench.traces import TraceRow
from cli.main import main

LOAD = ["--trace", "synthetic", "--rate", "8", "--num-requests", "120", "--warm-up", "2", "--output-len", "20"]
PAIR = ["--prefill", "1", "--decode", "1"]


def sim(*words: str) -> int:
    return main(["sim", *LOAD, *words])


def test_it_prints_a_table_and_writes_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sim.json"
    assert sim(*PAIR, "--json", str(path)) == 0
    shown = capsys.readouterr().out
    assert "1 prefill + 1 decode x 1 h100" in shown
    assert "goodput" in shown
    found = json.loads(path.read_text())
    (run,) = found["runs"]
    (one,) = run["classes"]
    assert found["complete"] is True
    assert found["options"]["rate"] == 8.0
    assert 0 < one["calls"] < 120
    assert one["attainment"] == run["attainment"] == 1.0
    assert one["ttft_s"]["p50"] < one["ttft_s"]["p99"] < 2.0
    assert one["handoff_gap_s"]["p50"] > one["tpot_s"]["p50"] > 0
    assert {worker["role"] for worker in run["workers"]} == {"prefill", "decode"}
    assert run["gpu_hours"] == pytest.approx(2 * run["run_s"] / 3_600)


def test_decode_workers_may_be_given_other_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mixed.json"
    assert sim(*PAIR, "--decode-gpu", "h200", "--decode-tp", "2", "--json", str(path)) == 0
    assert "1 prefill + 1 decode x 1 h100, decode on 2 h200" in capsys.readouterr().out
    (run,) = json.loads(path.read_text())["runs"]
    assert run["gpus"] == 3
    assert run["usd"] == pytest.approx(run["run_s"] / 3_600 * (3.99 + 2 * 4.99), rel=1e-6)


def test_an_autoscaled_fleet_shows_its_decisions_and_what_its_gpus_took(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "sim.json"
    load = ["--num-requests", "400", "--prefill", "3", "--decode", "1", "--tick", "2", "--json", str(path)]
    times = ["--start-up", "4,8", "--flip-time", "0.5", "--max-gpus", "4", "--slo", "chat:1000:50"]
    assert sim(*load, *times, "--autoscale") == 0
    assert "autoscaler: " in capsys.readouterr().out
    (run,) = json.loads(path.read_text())["runs"]
    assert 0 < run["gpu_hours"] <= 4 * run["run_s"] / 3_600
    assert len(run["timeline"]) == int(run["run_s"] / 2)
    assert all(decision["reason"] for decision in run["decisions"])
    assert run["work_in_slo"]["calls"] == run["attainment"]


def test_the_same_seed_gives_the_same_document_and_another_one_does_not(tmp_path: Path) -> None:
    def outcome(name: str, *words: str) -> object:
        assert sim("--json", str(tmp_path / name), *words) == 0
        (run,) = json.loads((tmp_path / name).read_text())["runs"]
        return run["classes"]

    assert outcome("a", "--seed", "3") == outcome("b", "--seed", "3")
    assert outcome("c", "--seed", "4") != outcome("a", "--seed", "3")


def test_several_seeds_and_classes_are_each_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("--runs", "2", "--slo", "chat:500:50:100@3", "--slo", "bulk:60000:1000") == 0
    shown = capsys.readouterr().out
    assert "goodput over 2 seeds" in shown
    assert shown.count(" chat ") == shown.count(" bulk ") == 2


def test_targets_that_no_call_meets_end_with_status_1() -> None:
    assert sim("--slo", "never:1:0.1", "--no-admission") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "h1000"], "h1000"),
        (["--model", "nobody"], "nobody"),
        (["--prefill", "2"], "give --both, or --prefill and --decode"),
        (["--model", "llama-3.1-70b", "--weight-dtype", "bf16"], "raise --tp"),
        (["--slo", "a:1:1", "--slo", "a:2:2"], "names a class twice"),
        (["--both", "4", "--autoscale", "--max-gpus", "3"], "--max-gpus is 3; the limit is at least the layout's 4"),
        (["--trace", "none.csv"], "trace none.csv is not there"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton sim: ")
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slo", "a:1"], "NAME:TTFT_MS:TPOT_MS"),
        (["--slo", "a:0:10"], "targets of at least"),
        (["--rate", "-1"], "above 0"),
        (["--warm-up", "nan"], "at least 0"),
        (["--start-up", "60,30"], "a delay of p50 60 s and p95 30 s makes no sense"),
    ],
)
def test_a_wrong_value_is_a_usage_error(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        sim(*words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_row_is_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,10,5\n2023-11-16 18:15:47.68,-3,5\n"
    )
    assert sim("--trace", str(path), "--json", str(tmp_path / "none.json")) == 2
    assert "line 3: ContextTokens is -3" in capsys.readouterr().err
    assert not (tmp_path / "none.json").exists()


def test_after_ctrl_c_what_was_simulated_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(_seed: int) -> Iterator[TraceRow]:
        for number in range(50):
            yield TraceRow(number / 2, 500, 5)
        raise KeyboardInterrupt

    monkeypatch.setattr(sim_cli, "source_of", lambda _args: Source(interrupted, 100, has_content=False))
    path = tmp_path / "part.json"
    assert sim("--json", str(path)) == 130
    shown = capsys.readouterr()
    assert "interrupted" in shown.err
    assert "goodput" in shown.out
    found = json.loads(path.read_text())
    assert found["complete"] is False
    assert 0 < found["runs"][0]["calls"] < 50


def test_help_says_what_it_is_and_names_the_traces(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sim", "--help"])
    shown = capsys.readouterr().out
    assert "mooncake" in shown
    assert "servegen" in shown
