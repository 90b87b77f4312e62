"""Why a sequence went where it went can be told in JSON, and played through again with the same end."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import Role
from router.explain import (
    MAX_CHOICES,
    MAX_KEPT,
    NUM_BEST,
    Explanation,
    Explanations,
    Rules,
    brief_json,
    explain,
    replay,
)
from router.flow_back import plan
from router.placement import Choice, Demand, NoPlace, choose, look
from router.prefix_index import PrefixRoot, hash_prompt
from router.worker_table import LinkView, WorkerSnapshot, table_of

ROOT = PrefixRoot("f", "float32", 16)


NO_RULES = Rules()


def explained(
    workers: Sequence[WorkerSnapshot], demand: Demand, rules: Rules = NO_RULES, num_best: int = NUM_BEST
) -> Explanation:
    outlook = look(table_of(workers), demand, rules.avoid)
    found = choose(outlook, local_prefill_tokens=rules.local_prefill_tokens, avoid=rules.avoid, prefer=rules.prefer)
    return explain(outlook, found, plan(found, outlook) if isinstance(found, Choice) else None, rules, num_best)


def again(told: Explanation) -> Choice | NoPlace:
    return replay(json.loads(json.dumps(told.to_json())))


NUM_WORKERS = 14
PROMPT = 1_000


@st.composite
def fleets(draw: st.DrawFn) -> list[WorkerSnapshot]:
    """Any mix of roles, states, models, links, loads and caches, with many ties."""
    names = [f"w{number}" for number in range(draw(st.integers(1, NUM_WORKERS)))]
    few = st.sampled_from

    def worker(name: str) -> WorkerSnapshot:
        fingerprint = draw(few(["f", "f", "f", "g"]))
        links = {
            peer: LinkView(draw(few([1, 1, 1, 2])), draw(few(["ready", "ready", "connecting", "lost", "refused"])))
            for peer in draw(st.lists(few(names), unique=True))
        }
        return WorkerSnapshot(
            name,
            1,
            draw(few(list(Role))),
            draw(few(["ready"] * 5 + ["connecting", "draining", "ejected"])),
            fingerprint,
            pool_tokens=draw(few([900, 2_000, 10_000])),
            waiting_tokens=draw(few([0, 0, 40, 500, 5_000])),
            used_tokens=draw(few([0, 100, 450, 1_900, 9_000])),
            num_running=draw(few([0, 1, 30])),
            last_chosen=draw(st.integers(0, 5)),
            root=PrefixRoot(fingerprint, "float32", 16),
            cached_tokens=draw(few([0, 0, 160, 496, 992])),
            token_bytes=50_000,
            step_s=draw(few([0.0, 0.02, 0.07, 0.2])),
            step_s_per_seq=draw(few([0.0, 0.001])),
            step_s_per_token=draw(few([0.0, 1e-6])),
            prefill_tokens_per_s=draw(few([1_000.0, 1_030.0, 3_000.0])),
            kv_bytes_per_s=draw(few([1e8, 1e9])),
            chunk_tokens=draw(few([16, 512])),
            fabric=draw(few(["", "east", "west"])),
            links=links,
        )

    return [worker(name) for name in names]


@settings(max_examples=80, deadline=None)
@given(
    workers=fleets(),
    output_tokens=st.sampled_from([50, 1_200]),
    fingerprint=st.sampled_from(["", "", "f"]),
    tpot_ms=st.sampled_from([0.0, 30.0]),
    home=st.sampled_from(["", "w1", "w9", "gone"]),
    local=st.sampled_from([0, 100, 2_000]),
    avoid=st.frozensets(st.sampled_from(["w0", "w1", "w2"])),
    prefer=st.sampled_from(["", "w0", "w3"]),
)
def test_the_few_candidates_that_are_told_lead_to_the_same_choice(
    workers: list[WorkerSnapshot],
    output_tokens: int,
    fingerprint: str,
    tpot_ms: float,
    home: str,
    local: int,
    avoid: frozenset[str],
    prefer: str,
) -> None:
    demand = Demand(PROMPT, PROMPT + output_tokens, fingerprint=fingerprint, tpot_ms=tpot_ms, home=home)
    told = explained(workers, demand, Rules(local, avoid, prefer), num_best=0)  # only what it hangs on
    found, repeated = told.found, again(told)
    if isinstance(found, NoPlace):
        assert isinstance(repeated, NoPlace)
        return
    assert isinstance(repeated, Choice)
    assert (repeated.prefill, repeated.decode, repeated.shape) == (found.prefill, found.decode, found.shape)
    assert (repeated.ttft_s, repeated.tpot_s, repeated.score) == (found.ttft_s, found.tpot_s, found.score)


def test_a_prompt_with_hashes_is_explained_without_them() -> None:
    hashes = hash_prompt(tuple(range(PROMPT)), b"", [PrefixRoot("f", "float32", 16)])
    told = explained(pair_fleet(2), Demand(PROMPT, PROMPT + 8, hashes), Rules())
    demand = json.loads(brief_json(told))["demand"]
    assert demand["prompt_tokens"] == PROMPT
    assert "hashes" not in demand


def pair_fleet(num: int) -> list[WorkerSnapshot]:
    links = {f"d{number}": LinkView(1, "ready") for number in range(num)}
    prefills = [
        WorkerSnapshot(f"p{n}", 1, Role.PREFILL, "ready", "f", pool_tokens=9_000, waiting_tokens=100 * n, links=links)
        for n in range(num)
    ]
    decodes = [
        WorkerSnapshot(f"d{n}", 1, Role.DECODE, "ready", "f", pool_tokens=9_000, used_tokens=100 * n)
        for n in range(num)
    ]
    away = [WorkerSnapshot("away", 0, Role.DECODE, "connecting", reason="connecting: not connected yet")]
    return prefills + decodes + away


def test_an_explanation_is_bounded_and_counts_who_was_left_out() -> None:
    told = explained(pair_fleet(200), Demand(500, 600)).to_json()
    assert (told["choice"]["prefill"], told["choice"]["decode"]) == ("p0", "d0")
    assert len(told["candidates"]) <= 16
    assert told["left_out"]["takes_no_calls"] == 1
    assert told["left_out"]["not_better"] == 400 - len(told["candidates"])
    assert "p0 gives the first token soonest" in told["reason"]
    assert len(json.dumps(told)) < 32_000


def test_where_nobody_can_have_it_the_reason_is_told() -> None:
    told = explained(pair_fleet(3)[:3], Demand(500, 600)).to_json()
    assert told["choice"] == {"none": "no decode worker is part of the fleet", "hopeless": True}


def test_only_the_last_requests_are_kept_and_of_one_the_last_choices() -> None:
    kept = Explanations()
    for number in range(MAX_KEPT + 5):
        kept.add(explained(pair_fleet(1), Demand(500, 600, request_id=f"r{number}")))
    assert kept.get("r4") == []
    assert len(kept.get("r5")) == 1
    for _ in range(2 * MAX_CHOICES):
        kept.add(explained(pair_fleet(1), Demand(500, 600, request_id="r9")))
    assert len(kept.get("r9")) == MAX_CHOICES


def test_a_busy_second_is_explained_by_its_first_twenty_choices() -> None:
    kept = Explanations()
    assert sum(kept.has_room(5.0) for _ in range(150)) == 20
    assert sum(kept.has_room(5.5) for _ in range(150)) == 10
    assert sum(kept.has_room(60.0) for _ in range(150)) == 20
