"""The arithmetic, parsing and JSON of `baton bench kv`; no process."""

from __future__ import annotations

import argparse
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import foreign_load
from bench.kv import UsageError, add_parser, make_plan
from bench.kv_limits import Limit, Perftest, PerftestError, limit_of, parse_perftest
from bench.kv_plan import LAYOUTS, Case, Sample, Spread, block_tables, figures, spread
from bench.kv_report import Report, Row, best_of_peers, notes, to_document
from bench.peers.process import Copy, merge_adjacent
from bench.peers.runs import PeerRow
from bench.report import dump

CASE = Case("default", 4_096, 1, warm=True)
PERFTEST_OUTPUT = """
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                    10      0.190 61358.809 61358.809     4172.18    4000.00          16          16
"""


def test_the_default_case_moves_512_mib_however_many_transfers_share_it() -> None:
    assert CASE.nbytes == 512 << 20
    assert {Case("default", 4_096, transfers, True).nbytes for transfers in (1, 4, 16)} == {512 << 20}


def test_the_demo_case_has_the_demo_models_bytes_per_token() -> None:
    assert LAYOUTS["demo"].token_bytes == 46_080  # EngineConfig.kv_memory_bytes


def test_block_tables_are_permuted_and_share_no_block() -> None:
    case = Case("default", 1_024, 4, True)
    tables = block_tables(case, case.pool_blocks, seed=3)
    ids = [block for table in tables for block in table]
    assert [len(table) for table in tables] == [16] * 4
    assert len(set(ids)) == len(ids)
    assert max(ids) < case.pool_blocks
    assert ids != sorted(ids)
    assert tables == block_tables(case, case.pool_blocks, seed=3) != block_tables(case, case.pool_blocks, seed=4)


def test_rates_are_payload_over_the_time_to_the_last_ack_and_cpu_is_per_gb_of_all_rounds() -> None:
    samples = [
        Sample(0.5, (0.4, 0.5), 0.3, 0.1),
        Sample(1.0, (0.2, 1.0), 0.5, 0.3),
        Sample(0.25, (0.25, 0.25), 0.1, 0.2),
    ]
    result = figures(2_000_000_000, samples)
    assert result.gb_per_s == Spread(n=3, median=4.0, min=2.0, max=8.0)
    assert result.commit_ms == spread([400.0, 500.0, 200.0, 1000.0, 250.0, 250.0])
    assert result.sender_cpu_s_per_gb == pytest.approx(0.15)
    assert result.receiver_cpu_s_per_gb == pytest.approx(0.1)
    assert result.cpu_s_per_gb == pytest.approx(0.25)


def test_perftests_overall_bandwidth_is_turned_from_mib_into_gb() -> None:
    assert parse_perftest(PERFTEST_OUTPUT) == pytest.approx(4000 * 2**20 / 1e9)


def test_a_failed_perftest_gives_ucxs_first_error_and_not_a_figure() -> None:
    output = "[1.0] [vm:1:0]  select.c:657  UCX  ERROR   no active messages transport\n[1.0] UCX  ERROR second\n"
    with pytest.raises(PerftestError, match=r"^no active messages transport$"):
        parse_perftest(output)
    with pytest.raises(PerftestError, match="no result"):
        parse_perftest("Final: nonsense")


def test_the_limit_of_tcp_is_the_put_without_error_handling() -> None:
    assert limit_of("shm") == Perftest("shm", "ucp_put_bw", error_handling=True)
    assert limit_of("tcp") == Perftest("tcp", "ucp_put_bw", error_handling=False)


def peer_row(setting: str, rate: float | None, *, paged: bool = True) -> PeerRow:
    measured = None if rate is None else Spread(3, rate, rate, rate)
    return PeerRow("nixl", "shm", setting, paged, CASE, measured, "" if measured else "cannot be imported")


def test_the_better_setting_of_a_library_counts_and_contiguous_blocks_count_apart() -> None:
    rows = [peer_row("a", 2.0), peer_row("b", 3.0), peer_row("a", 9.0, paged=False)]
    assert best_of_peers(rows, paged=True) == {"nixl": 3.0}
    assert best_of_peers(rows, paged=False) == {"nixl": 9.0}


def test_a_library_that_does_not_run_has_no_figure_but_a_line_that_says_why() -> None:
    row = peer_row("a", None)
    assert best_of_peers([row], paged=True) == {}
    assert "shm: nixl does not run here: cannot be imported" in list(notes(Report([], [], [row, row], 0.0)))
    assert len(list(notes(Report([], [], [row, row], 0.0)))) == 3


def test_the_json_names_what_each_result_is_held_against() -> None:
    limit = Limit("shm", limit_of("shm").name, Spread(3, 10.0, 9.0, 11.0))
    moved = figures(CASE.nbytes, [Sample(0.1, (0.1,), 0.05, 0.05)])
    report = Report([limit], [Row("shm", "direct", CASE, moved, limit, (peer_row("a", 4.0),))], [], foreign_cores=0.5)
    document = json.loads(dump(to_document(report)))
    (result,) = document["results"]
    wanted = {
        "transport",
        "mode",
        "case",
        "gb_per_s",
        "limit_gb_per_s",
        "limit",
        "cpu_s_per_gb",
        "peers",
        "n",
        "min",
        "max",
    }
    assert wanted <= result.keys()
    assert result["gb_per_s"] == pytest.approx(5.36870912)
    assert result["limit_gb_per_s"] == 10.0
    assert result["limit"] == "perftest ucp_put_bw with error handling"
    assert result["peers"] == {"nixl": 4.0}
    assert document["foreign_cores"] == 0.5
    assert document["machine"]["num_cores"] >= 1


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["kv", *flags])


def test_by_default_each_transport_runs_the_full_case_cold_and_warm_and_shared_by_more_transfers() -> None:
    plan = make_plan(parse())
    assert plan.transports == ("shm", "tcp")
    assert [(case.transfers, case.warm) for case in plan.cases] == [(1, False), (1, True), (4, True), (16, True)]
    assert {case.tokens for case in plan.cases} == {4_096}


def test_direct_over_tcp_and_an_unknown_library_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"direct.*tcp"):
        make_plan(parse("--mode", "direct", "--transport", "tcp"))
    with pytest.raises(UsageError, match=r"nixel.*nixl, mooncake"):
        make_plan(parse("--peers", "nixel"))


@given(st.permutations(range(12)), st.permutations(range(12)))
def test_joined_copies_move_the_same_bytes_and_none_that_continue_each_other_stay_apart(
    source: list[int], target: list[int]
) -> None:
    run = 8
    copies = [Copy(a * run, b * run, run) for a, b in zip(source, target, strict=True)]
    merged = list(merge_adjacent(iter(copies)))
    moved = [(copy.source + i, copy.target + i) for copy in merged for i in range(copy.nbytes)]
    assert moved == [(copy.source + i, copy.target + i) for copy in copies for i in range(run)]
    for first, second in pairwise(merged):
        assert (first.source + first.nbytes, first.target + first.nbytes) != (second.source, second.target)


def test_foreign_load_is_what_the_machine_did_beyond_us(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"busy": 100.0, "own": 10.0, "now": 50.0}
    monkeypatch.setattr(foreign_load, "busy_s", lambda: clock["busy"])
    monkeypatch.setattr(foreign_load, "own_s", lambda: clock["own"])
    monkeypatch.setattr("bench.foreign_load.time.monotonic", lambda: clock["now"])
    load = foreign_load.ForeignLoad()
    clock.update(busy=116.0, own=22.0, now=60.0)  # 16 s busy in 10 s, 12 of them ours
    assert load.cores() == pytest.approx(0.4)


def test_the_machines_busy_seconds_hold_our_own() -> None:
    own, busy = foreign_load.own_s(), foreign_load.busy_s()
    while foreign_load.own_s() - own < 0.1:
        pass
    assert foreign_load.busy_s() - busy >= 0.05  # in ticks of 10 ms
