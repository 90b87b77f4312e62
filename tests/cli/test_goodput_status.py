"""What `baton status` prints of attainment, one line per class."""

from __future__ import annotations

from typing import Any

from cli.goodput_status import goodput_lines


def window(**more: object) -> dict[str, Any]:
    plain = {
        "attainment": 0.975, "num_judged": 200.0, "met_per_s": 0.65, "handoff_gap_ms": 12.4, "ttft_ms": 240.2,
        "missed": {"ttft": 3.0, "tpot": 0.0, "itl": 2.0, "e2e": 0.0, "failed": 0.0},
        "ttft_parts_ms": {"admission": 10.0, "queue": 50.0, "prefill": 170.0, "network": 10.0},
    }  # fmt: skip
    return {**plain, **more}


def test_each_class_is_one_line_with_both_windows_its_misses_and_where_ttft_went() -> None:
    classes = {"chat": {"30s": window(attainment=1.0, num_judged=7.0), "300s": window()}}
    assert goodput_lines({"classes": classes}) == [
        "chat: 100.0% of 7 met, 0.65/s in 30 s; 97.5% of 200 met, 0.65/s in 5 min; missed by ttft 3, itl 2; "
        "TTFT 240 ms (admission 10, queue 50, prefill 170, network 10); handoff gap 12 ms"
    ]


def test_what_nobody_knows_is_left_out() -> None:
    unknown = window(
        attainment=None, num_judged=0.0, ttft_ms=None, handoff_gap_ms=None, missed={},
        ttft_parts_ms=dict.fromkeys(("admission", "queue", "prefill", "network")),
    )  # fmt: skip
    classes = {
        "batch": {"30s": unknown, "300s": unknown},
        "chat": {"30s": unknown, "300s": {**unknown, "ttft_ms": 9.0}},
    }
    assert goodput_lines({"classes": classes}) == [
        "batch: no call judged in 5 min",
        "chat: no call judged in 5 min; TTFT 9 ms",
    ]
    assert goodput_lines({"classes": {}}) == []
