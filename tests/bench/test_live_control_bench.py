"""The live proof, its short form: an emulated cluster left to its autoscaler, whose controller is killed, loses no call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.live_control import Call, Phase, Run, main, report
from tests.integration.conftest import demo_model

__all__ = ["demo_model"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_call_is_lost_while_the_pools_follow_the_load_and_the_controller_dies(
    demo_model: str, tmp_path: Path
) -> None:
    assert main(["--quick", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    [phase] = figures["phases"]
    assert (phase["lost"], phase["calls"] > 20) == (0, True)
    assert figures["num_created"] >= 1
    assert [kill["what"] for kill in figures["kills"]] == ["controller"]


def test_a_call_that_lost_a_token_is_counted_as_lost_and_not_as_met(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(
        calls=[
            Call("a", 0.0, ttft_s=0.1, tpot_s=0.1),
            Call("a", 1.0, ttft_s=0.1, tpot_s=0.1, lost="59 of 60 tokens, or others"),
            Call("a", 2.0, ttft_s=1e4, tpot_s=0.1),
            Call("a", 3.0, lost="UNAVAILABLE: gone"),
        ]
    )
    figures = report(run, [Phase("a", 1.0, 1.0, 1, 1)])
    assert figures["phases"] == [{"phase": "a", "calls": 4, "in_slo": 0.25, "lost": 2}]
    assert "59 of 60 tokens" in capsys.readouterr().out
