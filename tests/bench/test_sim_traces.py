"""Loads of the simulator: traces read row by row, faster, repeated, refused where a row is wrong; and drawn ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

import pytest

from bench.agentic import stream_agentic
from bench.sim import arrivals, sources
from bench.traces import TraceError, TraceRow, find_trace, read_azure, read_mooncake, stream_trace
from bench.workload import Lengths

AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
]


def mooncake(**changes: object) -> str:
    row = {"timestamp": 3000, "input_length": 10, "output_length": 5, "hash_ids": [1], **changes}
    return json.dumps({name: value for name, value in row.items() if value is not None})


def named(name: str) -> str:
    try:
        return str(find_trace(name))
    except TraceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_length": None}, "line 2: input_length is missing"),
        ({"input_length": -4}, "line 2: input_length is -4; it must be a whole number of at least 1"),
        ({"output_length": 1.5}, "line 2: output_length is 1.5"),
        ({"output_length": "many"}, "line 2: output_length is 'many'; it must be a number"),
        ({"timestamp": float("nan")}, "line 2: timestamp is nan"),
        ({"timestamp": -1}, "line 2: timestamp is -1; it must be at least 0"),
        ({"timestamp": 2_000}, "line 2: timestamp is 2000, before 3000; rows must be in order"),
        ({"hash_ids": [-1]}, "line 2: hash_ids must be a list"),
        ({"hash_ids": None}, "line 2: hash_ids is missing"),
    ],
)
def test_a_mooncake_row_that_is_not_as_it_should_be_is_named_with_its_field(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        list(read_mooncake([mooncake(), mooncake(**changes)], 0))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2023-11-16 18:15:56.6805900,,44", "line 4: ContextTokens is missing"),
        ("2023-11-16 18:15:56.6805900,12,-1", "line 4: GeneratedTokens is -1"),
        ("yesterday,12,1", "line 4: TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46.0000000,12,1", "line 4: TIMESTAMP is .* before that of the row ahead"),
    ],
)
def test_an_azure_row_that_is_not_as_it_should_be_is_named_with_its_field(row: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        list(read_azure([*AZURE, row], 0))


def test_readers_hold_no_more_rows_than_they_need() -> None:
    def endless() -> Iterator[str]:
        yield from AZURE
        while True:
            yield AZURE[-1]

    assert len(list(islice(read_azure(endless(), 0), 1_000))) == 1_000


def test_mooncake_rows_stay_in_order_where_stamps_are_close() -> None:
    lines = [mooncake(timestamp=stamp) for stamp in (0, 0, 0, 500, 500, 3_500, 3_600)]
    times = [row.at_s for row in read_mooncake(lines, 3)]
    assert times == sorted(times)


def agentic(path: Path, *rows: dict[str, object]) -> Path:
    whole = [{"s": "a", "t": 0.0, "in": 130, "out": 5, "p": 0, "h": [1, 2]} | row for row in rows]
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in whole)
    return path


def test_agentic_requests_share_blocks_within_their_session_alone(tmp_path: Path) -> None:
    path = agentic(
        tmp_path / "x.jsonl.gz",
        {},
        {"s": "b", "t": 1.0},
        {"t": 9.0, "p": 2, "h": [3], "in": 200},
    )
    one, two, other = stream_agentic(path, gap_s=300.0)
    assert [row.at_s for row in (one, two, other)] == [0.0, 9.0, 301.0]
    assert two.block_ids[:2] == one.block_ids
    assert len(two.block_ids) == 3
    assert not set(other.block_ids) & {*one.block_ids, *two.block_ids}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"p": -1}, "line 2: p is -1"),
        ({"t": -2}, "line 2: t is -2"),
        ({"in": 0}, "line 2: in is 0"),
        ({"h": 4}, "line 2: h"),
    ],
)
def test_an_agentic_row_that_is_not_as_it_should_be_is_named(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        list(stream_agentic(agentic(tmp_path / "x.jsonl.gz", {}, changes)))


def azure_file(folder: Path) -> str:
    path = folder / "t.csv"
    path.write_text("\n".join(AZURE) + "\n")
    return str(path)


def test_a_trace_is_played_again_and_again_at_the_rate_asked_for(tmp_path: Path) -> None:
    source = sources.trace_source(azure_file(tmp_path), rate=4.0, speed=1.0, num_calls=401)
    rows = list(source.stream(0))
    assert len(rows) == source.num_calls == 401
    assert rows[-1].at_s == pytest.approx(100.0, rel=0.02)
    assert all(before.at_s <= after.at_s for before, after in pairwise(rows))


def test_what_has_content_comes_back_as_other_conversations(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(mooncake(timestamp=stamp, hash_ids=[7, 8]) for stamp in (0, 3_000)))
    rows = list(sources.trace_source(str(path), rate=None, speed=1.0, num_calls=4).stream(0))
    assert rows[0].block_ids == rows[1].block_ids
    assert not set(rows[0].block_ids) & set(rows[2].block_ids)


def test_a_trace_that_cannot_be_repeated_so_often_says_how_often(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("\n".join(mooncake(timestamp=stamp, hash_ids=[1_000_000_000]) for stamp in (0, 3_000)))
    with pytest.raises(TraceError, match="the limit is 4"):
        sources.trace_source(str(path), rate=None, speed=1.0, num_calls=6)


@pytest.mark.parametrize(
    ("name", "num_rows", "input_p50"),
    [("azure", 19_366, 1_020), ("mooncake", 12_031, 6_400)],
    ids=["azure", "mooncake"],
)
def test_the_public_traces_have_the_rows_that_they_are_known_for(name: str, num_rows: int, input_p50: int) -> None:
    path = Path(named({"azure": sources.AZURE, "mooncake": sources.MOONCAKE}[name]))
    rows = list(stream_trace(path, seed=0))
    assert len(rows) == num_rows
    assert sorted(row.input_tokens for row in rows)[num_rows // 2] == pytest.approx(input_p50, rel=0.1)
    assert all(before.at_s <= after.at_s for before, after in pairwise(rows))


@pytest.mark.slow
def test_the_public_agentic_trace_repeats_most_of_what_it_says() -> None:
    seen: set[int] = set()
    num_rows = num_blocks = num_known = 0
    for row in stream_agentic(Path(named(sources.AGENTIC))):
        num_rows += 1
        num_blocks += len(row.block_ids)
        num_known += sum(block_id in seen for block_id in row.block_ids)
        seen.update(row.block_ids)
    assert num_rows == 49_334
    assert num_known / num_blocks == pytest.approx(0.96, abs=0.03)


def test_servegen_comes_at_the_recorded_rates_with_the_recorded_lengths() -> None:
    for name in sources.SERVEGEN:
        named(name)
    rows = list(sources.servegen_source(rate=10.0, speed=1.0, num_calls=2_000).stream(0))
    assert len(rows) == 2_000
    assert 1 <= min(row.input_tokens for row in rows) < max(row.input_tokens for row in rows) < 60_000


def test_a_table_of_rates_must_be_even(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("t_s,rate_rps\n0,1\n600,2\n900,1\n")
    with pytest.raises(TraceError, match="line 4: t_s is 900; rows must be 600 s apart"):
        arrivals.read_rates(path)


@pytest.mark.parametrize(
    "rate",
    [arrivals.Constant(5.0), arrivals.Sinusoid(5.0, 0.6, 100.0), arrivals.Bursts(5.0, 4.0, 20.0, 100.0)],
    ids=["poisson", "sinusoid", "bursts"],
)
def test_drawn_calls_come_at_the_mean_rate(rate: arrivals.Rate) -> None:
    times = list(islice(arrivals.instants(rate, 1), 10_000))
    assert 10_000 / times[-1] == pytest.approx(5.0, rel=0.05)
    assert times == list(islice(arrivals.instants(rate, 1), 10_000))


def test_bursts_come_as_often_and_as_hard_as_asked_for() -> None:
    rate = arrivals.Bursts(mean=5.0, factor=4.0, burst_s=20.0, period_s=100.0)
    times = islice(arrivals.instants(rate, 2), 20_000)
    inside = sum(at_s % 100.0 >= 80.0 for at_s in times)
    assert inside / 20_000 == pytest.approx(4 * 20 / (4 * 20 + 80), rel=0.03)


def test_drawn_lengths_are_those_asked_for() -> None:
    rows: list[TraceRow] = list(islice(arrivals.synthetic(arrivals.evenly(2.0), Lengths(5, 9), Lengths(3, 3), 0), 50))
    assert rows[4].at_s == 2.0
    assert {row.output_tokens for row in rows} == {3}
    assert all(5 <= row.input_tokens <= 9 for row in rows)
