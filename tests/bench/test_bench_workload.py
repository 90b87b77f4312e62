"""Planned calls: deterministic, of the lengths asked for, and sharing what they should share."""

from __future__ import annotations

import os
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest

from bench.traces import TraceError, load_trace, parse_azure, parse_mooncake, scale
from bench.workload import (
    SAFE_VOCABULARY,
    Lengths,
    Workload,
    limited,
    poisson_arrivals,
    trace_calls,
    uniform_arrivals,
    words_for,
)

REPOSITORY = Path(__file__).parents[2]
TRACE_FOLDERS = (os.environ.get("BATON_TRACES", ""), REPOSITORY / "shared/traces", REPOSITORY.parent / "shared/traces")


def real_trace(name: str) -> Path:
    for folder in TRACE_FOLDERS:
        if folder and (Path(folder) / name).is_file():
            return Path(folder) / name
    pytest.skip(f"the public trace {name} is not here; point BATON_TRACES at a folder that holds it")


def workload(**changes: object) -> Workload:
    fields: dict[str, object] = {
        "seed": 7,
        "input_lengths": Lengths(32, 64),
        "output_lengths": Lengths(8, 8),
        **changes,
    }
    return Workload(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("256", Lengths(256, 256)),
        ("fixed:5", Lengths(5, 5)),
        ("64:512", Lengths(64, 512)),
        ("uniform:1:2", Lengths(1, 2)),
        ("lognormal:200,900", Lengths(200, 900, lognormal=True)),
    ],
)
def test_lengths_are_read(text: str, expected: Lengths) -> None:
    assert Lengths.parse(text) == expected


@pytest.mark.parametrize("text", ["", "0", "-3", "5:2", "1:2:3", "a", "lognormal:5", "lognormal:9,3", "1.5"])
def test_a_wrong_length_is_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(ValueError, match="LOW:HIGH"):
        Lengths.parse(text)


def test_a_lognormal_has_the_percentiles_it_was_given() -> None:
    rng = random.Random(1)
    drawn = sorted(Lengths(200, 900, lognormal=True).sample(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(200, rel=0.05)
    assert drawn[19_000] == pytest.approx(900, rel=0.05)


def test_the_same_seed_gives_the_same_call_whatever_was_drawn_before() -> None:
    assert workload().call(5) == list(islice(workload().calls(), 6))[5]
    assert workload().call(5) != workload(seed=8).call(5)
    assert workload().call(5).token_ids != workload().call(6).token_ids


def test_lengths_and_ids_stay_in_their_ranges() -> None:
    for call in islice(workload(vocabulary=range(10, 20)).calls(), 50):
        assert 32 <= len(call.token_ids) <= 64
        assert call.max_tokens == 8
        assert set(call.token_ids) <= set(range(10, 20))


def test_long_draws_are_cut_to_the_context() -> None:
    call = workload(input_lengths=Lengths(500, 500), output_lengths=Lengths(80, 80), max_context_tokens=100).call(0)
    assert (len(call.token_ids), call.max_tokens) == (20, 80)


def test_the_share_of_calls_asked_for_begins_with_a_common_prefix() -> None:
    calls = list(islice(workload(shared_prefix_ratio=0.3).calls(), 1_000))
    first_16 = [call.token_ids[:16] for call in calls]
    shared = sum(first_16.count(start) > 1 for start in first_16)
    assert 250 <= shared <= 350
    assert len({call.token_ids for call in calls}) == 1_000


def test_the_share_of_calls_asked_for_is_cancelled_before_its_end() -> None:
    cancels = [call.cancel_after_tokens for call in islice(workload(cancel_ratio=0.1).calls(), 1_000)]
    planned = [cancel for cancel in cancels if cancel is not None]
    assert 70 <= len(planned) <= 130
    assert set(planned) == set(range(8))


def test_poisson_gaps_have_the_mean_and_the_spread_of_an_exponential() -> None:
    times = list(islice(poisson_arrivals(20.0, seed=1), 20_000))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert times == list(islice(poisson_arrivals(20.0, seed=1), 20_000))


def test_uniform_arrivals_are_evenly_spaced() -> None:
    assert list(islice(uniform_arrivals(4.0), 3)) == [0.0, 0.25, 0.5]


def test_a_plan_ends_at_the_first_limit_it_meets() -> None:
    assert len(list(limited(workload().calls(uniform_arrivals(10.0)), None, 1.0))) == 11
    assert len(list(limited(workload().calls(uniform_arrivals(10.0)), 5, 1.0))) == 5


def test_words_keep_equal_prefixes_equal() -> None:
    assert len(words_for(range(300, 350)).split()) == 50
    assert words_for([5, 6, 7, 8]).startswith(words_for([5, 6, 7]))


MOONCAKE = [
    '{"timestamp": 0, "input_length": 1000, "output_length": 24, "hash_ids": [0, 1]}',
    '{"timestamp": 0, "input_length": 700, "output_length": 12, "hash_ids": [0, 2]}',
    '{"timestamp": 3000, "input_length": 400, "output_length": 6, "hash_ids": [3]}',
]


def test_mooncake_rows_are_spread_over_their_grid_of_three_seconds() -> None:
    rows = parse_mooncake(MOONCAKE, seed=1)
    assert rows[0].at_s == 0
    assert rows[1].at_s > 0
    assert rows[2].at_s < 6.0
    assert rows == parse_mooncake(MOONCAKE, seed=1)


def test_a_scaled_trace_fits_the_context_and_still_shares_its_prefixes() -> None:
    trace = scale(parse_mooncake(MOONCAKE, seed=1), max_context_tokens=258, speed=2.0)
    assert trace.factor == pytest.approx(0.25)
    calls = list(trace_calls(trace.rows, trace.block_tokens, seed=3, vocabulary=SAFE_VOCABULARY))
    assert sorted((len(call.token_ids), call.max_tokens) for call in calls) == [(100, 2), (175, 3), (250, 6)]
    by_length = {len(call.token_ids): call.token_ids for call in calls}
    assert by_length[250][:128] == by_length[175][:128]
    assert by_length[250][128:175] != by_length[175][128:]
    assert by_length[100][:100] != by_length[250][:100]


def test_azure_rows_keep_their_spacing() -> None:
    lines = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:50.9951690,396,109",
    ]
    rows = parse_azure(lines, 0)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert rows[1].at_s == pytest.approx(4.314579, abs=1e-5)


@pytest.mark.parametrize("line", ["{", "{}", '{"timestamp": 0}', "[1]"])
def test_a_damaged_row_is_named(line: str) -> None:
    with pytest.raises(TraceError, match="line 2"):
        parse_mooncake([MOONCAKE[0], line], seed=0)


def test_a_missing_trace_and_an_unknown_kind_are_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is not there"):
        load_trace(tmp_path / "none.jsonl", seed=0)
    (tmp_path / "x.txt").write_text("")
    with pytest.raises(TraceError, match="neither"):
        load_trace(tmp_path / "x.txt", seed=0)
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(TraceError, match="no rows"):
        load_trace(tmp_path / "x.jsonl", seed=0)


def test_the_public_mooncake_trace_loads_and_fits_the_demo_models_context() -> None:
    rows = load_trace(real_trace("mooncake/conversation_trace.jsonl"), seed=0)
    trace = scale(rows, max_context_tokens=8_192)
    assert len(rows) == 12_031
    assert max(row.input_tokens + row.output_tokens for row in trace.rows) <= 8_192
    for call in islice(trace_calls(trace.rows, trace.block_tokens, seed=0, vocabulary=SAFE_VOCABULARY), 200):
        assert len(call.token_ids) == trace.rows[call.index].input_tokens


def test_the_public_azure_trace_loads_at_its_published_rate() -> None:
    rows = load_trace(real_trace("azure2023/AzureLLMInferenceTrace_conv.csv"), seed=0)
    assert len(rows) == 19_366
    assert len(rows) / rows[-1].at_s == pytest.approx(5.5, rel=0.02)
    assert statistics.median(row.input_tokens for row in rows) == pytest.approx(1_020, rel=0.01)
