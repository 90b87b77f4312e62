"""`baton bench router` as a command: its flags, its document, and a run over real processes too small to judge figures by."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import pytest

from bench import router_bench, router_bench_cases
from bench.router_bench_cases import PARTS, Effort, Figures
from bench.router_bench_peers import NOT_ALONE, PEERS, PeerRun, measure_peer
from bench.router_bench_report import Report, RouterRun, print_report, to_document
from bench.router_bench_rig import Features
from tests.tiny_models import make_tiny_model

TINY = Effort(10, 0.3, 1, (2, 8), (10, 40), 8, 8, 0.5, 2, 8, (2, 4))
FIGURES = ("added_ms", "cpu_us_per_token", "cpu_us_per_request", "tokens_per_s", "gap_ms_p99")


def run(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    router_bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["router", *flags])
    return int(args.run(args))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "added,nothing"], "--only nothing: known are added, cpu"),
        (["--peers", "envoy"], "--peers envoy: known are sglang, dynamo"),
    ],
)
def test_names_that_nobody_knows_are_refused(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*flags) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--processes", "0"], ["--endpoints", "-1"], ["--processes", "1,x"]])
def test_numbers_that_are_none_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*flags)
    assert caught.value.code == 2


def test_a_peer_that_does_not_run_is_a_line_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    ours = RouterRun(Features(), 1.0, 1.0, Figures(0.01), ())
    report = Report([ours], [PeerRun("dynamo", "does much", None, "no such interpreter")], 0.0)
    print_report(report)
    assert "does not run: no such interpreter" in capsys.readouterr().out
    assert to_document(report)["peers"] == {"dynamo": {"does": "does much", "reason": "no such interpreter"}}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here: the load generator cannot be built")
@pytest.mark.parametrize("name", sorted(PEERS))
def test_an_interpreter_without_the_peers_is_a_reason_not_a_failure(name: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "tiny")
    run = measure_peer(name, sys.executable, str(model), TINY, PARTS)
    assert run.figures is None
    if run.reason.startswith(NOT_ALONE):
        pytest.skip(run.reason)
    assert "No module named" in run.reason


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here: the load generator cannot be built")
def test_a_small_run_writes_every_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router_bench, "QUICK", TINY)
    monkeypatch.setattr(router_bench_cases, "WARM_UP_S", 0.3)
    monkeypatch.setattr(router_bench, "USUAL", Features(num_keys=20, num_classes=3))
    model = make_tiny_model(tmp_path / "tiny")
    out = tmp_path / "router.json"
    parts = "added,cpu,speed,gap,start"
    assert run("--quick", "--endpoints", "4", "--model", str(model), "--only", parts, "--json", str(out)) == 0
    document = json.loads(out.read_text())
    for figure in FIGURES:
        assert document[figure] is not None, figure
    assert set(document["added_ms"]) >= {"p50", "p99", "n"}
    assert document["tokens_per_s"] > 0
    assert document["start"]["started"] == TINY.start_streams
    assert document["processes"]["1"]["features"]["num_endpoints"] == 4
    assert document["peers"] == {}
    assert "us per token" in capfd.readouterr().out
