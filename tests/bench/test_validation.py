"""Validation: what DeepSeek published, two claims about disaggregation, and the emulated cluster beside the simulator."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.emulator_validation import TARGETS, deployment, planned, simulated, told
from bench.measure import Outcome, Record
from bench.sim.call import Call
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceRow
from bench.validation.__main__ import main
from bench.validation.claims import Effort, Fleet, Pair, Setting, divisions_near, fleets, pair
from bench.validation.deepseek import bounds

QUICK = Effort(num_calls=60, seeds=(1,))
LARGE = Setting("llama-3.1-70b", 2, 1_024, 64, ttft_ms=2_000, tpot_ms=25)


def test_deepseeks_nodes_did_between_what_is_possible_with_all_exchange_exposed_and_with_all_of_it_hidden() -> None:
    prefill, decode = bounds()
    assert prefill.published < prefill.exposed < prefill.hidden
    assert decode.exposed < decode.published < decode.hidden
    assert prefill.reached == pytest.approx(0.57, abs=0.01)
    assert prefill.reached_exposed == pytest.approx(0.87, abs=0.01)
    assert decode.reached == pytest.approx(0.68, abs=0.01)
    assert decode.reached_exposed == pytest.approx(1.05, abs=0.01)


def test_a_pair_of_two_kinds_of_gpu_is_weighed_against_each_of_them_alone() -> None:
    found = pair(LARGE, QUICK)
    assert 0 < found.h100 < found.h200 < found.disaggregated
    assert found.gain == found.disaggregated / (found.h100 + found.h200)
    assert found.gain < found.gain_over_one / 1.5, "two workers beside one"
    assert found.num_calls > 20 * QUICK.num_calls


def test_a_fleet_is_divided_as_serves_it_best() -> None:
    (two,) = fleets(LARGE, (2,), QUICK)
    assert (two.num_prefill, two.num_workers, two.num_gpus) == (1, 2, 4)
    assert 0 < two.colocated < two.disaggregated, "one worker prefills and one decodes answers of 64 tokens"


def test_divisions_near_the_last_best_one_leave_a_worker_on_either_side() -> None:
    assert divisions_near(0.5 * 2, 2) == [1]
    assert divisions_near(0.5 * 3, 3) == [1, 2]
    assert divisions_near(0.25 * 8, 8) == [1, 2, 3]
    assert divisions_near(0.75 * 8, 8) == [5, 6, 7]


def test_figures_of_a_pair_are_of_answers_within_their_targets() -> None:
    found = Pair(LARGE, disaggregated=10.0, h100=4.0, h200=5.0, whole_prompts=6.0, num_calls=1)
    assert found.tokens_per_s(10.0) == pytest.approx(576)
    assert found.gain == pytest.approx(10 / 9)
    assert found.gain_over_one == 2.0
    assert found.gain_over_whole_prompts == pytest.approx(10 / 6)
    assert Fleet(LARGE, 3, 1, 9.0, 10.0, 1).gain == 0.9


def test_the_tables_are_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    assert main(["deepseek", "--json", str(path)]) == 0
    assert "| decode, tok/s out | 14,800 | 21,896 | 68% | 14,161 | 105% |" in capsys.readouterr().out
    _, prefill, _ = json.loads(path.read_text())["deepseek"]
    assert prefill["published"] == 73_700


# -- the emulated cluster ----------------------------------------------------------------------------------------------

ROWS = [TraceRow(0.3 * number, 2_000, 40) for number in range(12)]
SLOW = 8.0


def test_what_clients_of_a_slow_cluster_saw_is_judged_as_the_simulator_judges() -> None:
    """Records made of the simulator's own calls, on a clock that is eight times slower, tell the same."""
    made, calls = deployment(1, 1), list[Call]()
    Simulation(made, Mix((TARGETS,)), on_call=calls.append).run(ROWS)
    seen = told(ROWS, [slowed(call) for call in calls], SLOW)
    assert asdict(seen) == pytest.approx(asdict(simulated(made, ROWS)))
    assert (seen.num_calls, seen.num_shed, seen.attainment) == (12, 0, 1.0)


def test_a_call_that_was_turned_away_counts_as_missed() -> None:
    made, calls = deployment(1, 1), list[Call]()
    Simulation(made, Mix((TARGETS,)), on_call=calls.append).run(ROWS)
    records = [slowed(call) for call in calls]
    records[3] = Record(3, Outcome.SHED, due_s=0.0, sent_s=0.0, end_s=0.0)
    seen = told(ROWS, records, SLOW)
    assert seen.num_shed == 1
    assert seen.attainment == pytest.approx(11 / 12)


def slowed(call: Call) -> Record:
    row = call.row
    assert call.first_s is not None
    assert call.end_s is not None
    step_s = (call.end_s - call.first_s) / (row.output_tokens - 1)
    times_s = tuple(SLOW * (call.first_s + place * step_s) for place in range(row.output_tokens - 1))
    whole = (*times_s, SLOW * call.end_s)
    return Record(0, Outcome.COMPLETED, SLOW * row.at_s, SLOW * row.at_s, SLOW * call.end_s, whole)


def test_both_are_given_the_same_calls_and_no_two_prompts_are_alike() -> None:
    calls = list(planned(ROWS, SLOW, seed=1))
    assert [call.at_s / SLOW for call in calls] == pytest.approx([row.at_s for row in ROWS])
    assert all(len(call.token_ids) == 2_000 and call.max_tokens == 40 for call in calls)
    assert len({call.token_ids[:16] for call in calls}) == len(ROWS)
