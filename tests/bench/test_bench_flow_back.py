"""Conversations replayed under the router's policy: what is computed, what moves, and what is forecast."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.flow_back import (
    POLICIES,
    PROFILES,
    Outcome,
    Profile,
    SessionCache,
    Turn,
    always_compute,
    always_pull,
    main,
    parse_agentic,
    replay,
)
from bench.traces import TraceError
from router.flow_back import best

ROOMY = replace(PROFILES[0], pool_tokens=10_000_000)
SLOW_WIRE = replace(ROOMY, kv_bytes_per_s=1e6)


def talk(num_sessions: int = 3, num_turns: int = 4) -> list[Turn]:
    """Sessions by turns: 1,000 tokens of prompt, then the answer of 200 and 100 tokens more each time."""
    return [
        Turn(
            at_s=float(turn),
            session=f"s{session}",
            prompt_tokens=1_000 + 300 * turn,
            output_tokens=200,
            shared_tokens=0 if turn == 0 else 1_000 + 300 * (turn - 1),
            repeats_all=turn > 0,
        )
        for turn in range(num_turns)
        for session in range(num_sessions)
    ]


def outcome_of(profile: Profile, name: str) -> Outcome:
    return replay(talk(), profile, POLICIES[name])


def test_pulling_computes_the_first_prompts_and_the_new_messages_only() -> None:
    pulling, computing = outcome_of(ROOMY, "always pull"), outcome_of(ROOMY, "always compute")
    per_later_turn = 100 + 1, 300  # the message and the answer's last token; without pulling the whole answer too
    for outcome, tokens in ((pulling, per_later_turn[0]), (computing, per_later_turn[1])):
        surplus = outcome.computed_tokens - 3 * (1_000 + 3 * tokens)
        assert 0 <= surplus < 3 * 3 * 16, "what is cached ends at a block"
    assert computing.pulled_bytes == 0
    moved = computing.computed_tokens - pulling.computed_tokens
    assert pulling.pulled_bytes == moved * ROOMY.token_bytes


@pytest.mark.parametrize("profile", [*PROFILES, ROOMY, SLOW_WIRE], ids=lambda profile: profile.name)
def test_the_policy_is_never_forecast_slower_than_either_rule(profile: Profile) -> None:
    by_name = {name: sum(outcome_of(profile, name).ttft_s) for name in POLICIES}
    assert by_name["policy"] <= min(by_name.values()) + 1e-9


def test_on_a_slow_wire_nothing_is_moved() -> None:
    assert replay(talk(), SLOW_WIRE, best).pulled_bytes == 0
    assert replay(talk(), SLOW_WIRE, always_pull).pulled_bytes > 0


def test_what_was_evicted_is_computed_again() -> None:
    tight = replace(ROOMY, pool_tokens=2_300)  # one session on each worker
    many = talk(num_sessions=20)
    assert replay(many, tight, best).computed_tokens > 2 * replay(many, ROOMY, best).computed_tokens


def test_a_session_that_began_anew_shares_only_what_the_trace_says() -> None:
    turns = talk(1, 2)
    turns[1] = replace(turns[1], shared_tokens=480, repeats_all=False)
    assert replay(turns, ROOMY, always_compute).computed_tokens == 1_000 + 1_300 - 480


def test_a_cache_forgets_whole_sessions_used_longest_ago() -> None:
    cache = SessionCache(100)
    cache.put("a", 60)
    cache.put("b", 30)
    cache.put("a", 65)
    cache.put("c", 20)
    assert [cache.get(name) for name in "abc"] == [65, 0, 20]


def test_the_trace_is_read_in_order_and_a_missing_one_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"s": "a", "t": 0.0, "in": 200, "out": 50, "p": 0},
        {"s": "a", "t": 400.0, "in": 400, "out": 50, "p": 3},
        {"s": "a", "t": 500.0, "in": 300, "out": 50, "p": 2},
        {"s": "b", "t": 0.0, "in": 100, "out": 50, "p": 0},
    ]
    turns = parse_agentic(map(json.dumps, rows))
    assert [(turn.session, turn.shared_tokens, turn.repeats_all) for turn in turns] == [
        ("a", 0, False),
        ("b", 0, False),
        ("a", 192, True),
        ("a", 128, False),
    ]
    path = tmp_path / "trace.jsonl.gz"
    assert main(path) == 2
    assert "is not there" in capsys.readouterr().err
    with gzip.open(path, "wt") as out:
        out.writelines(f"{json.dumps(row)}\n" for row in rows)
    assert main(path) == 0
    assert "4 requests, 2 sessions" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"t": -1.0}, "line 2: t"),
        ({"t": "soon"}, "line 2: t"),
        ({"in": 0}, "line 2: in"),
        ({"in": None}, "line 2: in"),
        ({"out": -5}, "line 2: out"),
        ({"p": 1.5}, "line 2: p"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_line_and_field(
    change: dict[str, object], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, object] = {"s": "a", "t": 1.0, "in": 200, "out": 50, "p": 0}
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as out:
        out.writelines(f"{json.dumps(one)}\n" for one in (row, row | change))
    assert main(path) == 2
    assert named in capsys.readouterr().err


def test_a_session_whose_time_goes_back_is_refused() -> None:
    rows = [{"s": "a", "t": t, "in": 200, "out": 50, "p": 0} for t in (5.0, 4.0)]
    with pytest.raises(TraceError, match="line 2: t"):
        parse_agentic(map(json.dumps, rows))
