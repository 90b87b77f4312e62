"""The live proof of dry runs: what counts as come true, what as refused, and that a run that is stopped leaves what it has."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from baton.slo import SLO
from bench.dry_run_live import (
    CLASSES,
    TPOT_MS,
    TTFT_MS,
    Call,
    Journal,
    Realised,
    Row,
    Said,
    attained,
    drawn,
    said_of,
    summary,
)

GOLD = SLO("gold", 300.0, 25.0)
TOLD = {
    "available": True,
    "classes": {"gold": {"attainment": 0.9, "low": 0.86, "high": 0.94}},
    "unknown": {"silver": "anything from 20% to 90%"},
}


def row(said: Said, realised: float, late: float = 0.02) -> Row:
    return Row(0, 3, "gold", 300.0, 25.0, said, Realised(realised, 400, 7), late)


def test_a_class_is_predicted_or_refused_with_its_own_reason_or_that_of_all() -> None:
    assert said_of(TOLD, "gold") == Said(0.9, 0.86, 0.94)
    assert said_of(TOLD, "silver").why == "anything from 20% to 90%"
    assert said_of({"available": False, "reason": "too little traffic"}, "gold") == Said(
        None, None, None, "too little traffic"
    )


def test_calls_of_the_class_that_came_in_the_window_count_and_who_was_turned_away_has_missed() -> None:
    calls = [
        Call(9.9, "gold", 100.0, 24.0),  # before it
        Call(10.0, "gold", 300.0, 25.0),
        Call(11.0, "gold", 300.1, 25.0),
        Call(12.0, "gold", 300.0, 25.1),
        Call(13.0, "gold", is_turned_away=True),
        Call(14.0, "silver", 100.0, 24.0),
        Call(20.0, "gold", 100.0, 24.0),  # after it
    ]
    assert attained(calls, GOLD, 10.0, 20.0) == Realised(0.25, 4, 1)
    assert attained([], GOLD, 10.0, 20.0) == Realised(0.0, 0, 0)


@pytest.mark.parametrize(("realised", "verdict"), [(0.86, True), (0.94, True), (0.8599, False), (0.9401, False)])
def test_the_interval_s_ends_belong_to_it(realised: float, verdict: bool) -> None:
    assert row(Said(0.9, 0.86, 0.94), realised).is_inside is verdict


def test_what_was_refused_is_neither_inside_nor_outside_and_the_summary_says_when_the_cluster_was_too_late() -> None:
    told, refused = Said(0.9, 0.86, 0.94), Said(None, None, None, "too few calls to be surer")
    assert row(refused, 0.9).is_inside is None
    rows = [row(told, 0.9), row(told, 0.7), row(refused, 0.9)]
    assert summary(rows).startswith("1 of 2 inside (50%), 1 not predicted; the widest interval is 8.0 points")
    assert "the emulation was true" in summary(rows)
    assert "NOT TRUE" in summary([row(told, 0.9, late=0.3)])
    assert summary([row(refused, 0.9)]) == "nothing was predicted of 1"
    assert "too few calls to be surer" in str(rows[2])
    assert "OUTSIDE" in str(rows[1])
    not_made = Row(0, 3, "gold", 300.0, 25.0, refused)
    assert (not_made.is_inside, "not made" in str(not_made)) == (None, True)


def test_a_run_that_is_stopped_leaves_the_rows_of_every_change_that_was_over(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    journal = Journal(file)
    for number in range(1, 3):
        journal.tell([row(Said(0.9, 0.86, 0.94), 0.9)])
        rows = json.loads(file.read_text())
        assert [(one["class_name"], one["said"]["low"], one["is_inside"]) for one in rows] == [
            ("gold", 0.86, True)
        ] * number


def test_targets_are_drawn_for_every_class_within_their_ranges_and_the_same_for_the_same_seed() -> None:
    rng = random.Random("0/targets")
    for _ in range(50):
        classes = drawn(rng)
        assert [slo.name for slo in classes] == list(CLASSES)
        assert all(
            TTFT_MS[0] <= slo.ttft_ms <= TTFT_MS[1] and TPOT_MS[0] <= slo.tpot_ms <= TPOT_MS[1] for slo in classes
        )
    assert drawn(random.Random(7)) == drawn(random.Random(7))
