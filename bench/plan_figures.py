"""Figures of the planner: is what it picks the best there is, and by how much does it beat colocated serving?

    python -m bench.plan_figures search --json PATH      against looking at every candidate, also where GPUs and calls differ
    python -m bench.plan_figures goals --json PATH       against tuned chunked and prefill-first colocated workers

The file is written anew after each row, so a run that is stopped leaves what it has. docs/planner.md has the results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.slo import SLO
from bench.plan.baselines import Perturbed, prefill_first
from bench.plan.judge import Effort, Judge
from bench.plan.plan import Question, space_of
from bench.plan.screen import Targets
from bench.plan.search import Found, Screened, Search
from bench.plan.space import Candidate, Offer
from bench.plan.traffic import Drawn, Load, Traffic, load_of, recorded
from bench.sim import arrivals, sources
from bench.sim.simulation import Mix
from bench.traces import find_trace
from bench.workload import Lengths

SEEDS = (0, 1, 2)
PERTURBED = 0.2
ALL_BETTER = 1.005  # what a candidate must hold to count as better than the best so far, where all are looked at


# -- search ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SearchRow:
    trace: str
    seed: int
    world: str  # as planned, or unseen
    picked: str
    picked_rate: float
    best: str
    best_rate: float
    candidates: int
    calls_of_plan: int
    calls: int
    share_of_best: float
    wall_s: float


def search_rows(num_gpus: int, widths: tuple[int, ...], num_calls: int) -> Iterator[SearchRow]:
    for seed in SEEDS:
        for name, seen, unseen, slo in _traces():
            effort = Effort(search_calls=num_calls, seed=seed)
            question = Question(
                "llama-3.1-8b", [Offer.parse("h100")], seen, Mix((slo,)), num_gpus, widths, effort=effort
            )
            load = load_of(seen)
            search = _search(question, load, Judge(seen, question.mix))
            found = search.best(num_gpus)
            if found is None:
                raise SystemExit(f"{name}: nothing holds {slo}")
            calls = search.judge.num_calls
            yield _against_all(search, found, num_gpus, name, seed, "as planned", calls)
            judge = Judge(unseen, question.mix, distort=Perturbed(PERTURBED, seed))
            elsewhere = _search(replace(question, effort=replace(effort, seed=seed + 100)), load, judge)
            there = elsewhere.race([Screened(found.candidate, found.guess)])
            assert there is not None, "one contender was given"
            yield _against_all(elsewhere, there, num_gpus, name, seed, "unseen", calls)


def _traces() -> Iterator[tuple[str, Traffic, Traffic, SLO]]:
    """What is planned for, and what comes: the other half of a trace, or other draws."""
    azure, mooncake = recorded("azure"), recorded("mooncake")
    yield "azure conv", azure.half(0), azure.half(1), SLO("chat", 1_000.0, 25.0)
    yield "mooncake conversation", mooncake.half(0), mooncake.half(1), SLO("long", 4_000.0, 40.0)
    rates, lengths = map(find_trace, sources.SERVEGEN)
    drawn = Drawn(arrivals.mean_rate(arrivals.read_rates(rates)), *arrivals.read_lengths(lengths))
    yield "servegen lengths", drawn, drawn, SLO("reasoning", 2_000.0, 25.0)


def _search(question: Question, load: Load, judge: Judge) -> Search:
    return Search(space_of(question, load), load, Targets.of(question.mix.classes), judge, question.effort)


def _against_all(
    search: Search, picked: Found, num_gpus: int, name: str, seed: int, world: str, calls: int
) -> SearchRow:
    started_s = time.perf_counter()
    everything = search.screen(num_gpus)
    best = search.race(everything, picked, better=ALL_BETTER)
    assert best is not None, "the picked one is there"
    return SearchRow(
        name,
        seed,
        world,
        describe(picked.candidate),
        picked.knee.rate,
        describe(best.candidate),
        best.knee.rate,
        len(everything),
        calls,
        search.judge.num_calls,
        picked.knee.rate / best.knee.rate,
        time.perf_counter() - started_s,
    )


def describe(one: Candidate) -> str:
    local = one.deployment.local_prefill_tokens
    extra = f", local up to {local}" if local else ""
    return f"{one.describe()}, budget {one.budget}{extra}, window {1e3 * one.window_s:g} ms"


# -- goals -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    num_gpus: int
    widths: tuple[int, ...]
    slo: SLO


# A chat, assumed: prompts of 735 tokens and answers of 200 on average, with the long tails that chats have
CHAT = Drawn(10.0, Lengths(500, 2_100, lognormal=True), Lengths(150, 520, lognormal=True))
CASES = (
    Case("8B chat, 15 ms", "llama-3.1-8b", 2, (1,), SLO("chat", 1_000.0, 15.0)),
    Case("8B chat, 8 ms", "llama-3.1-8b", 3, (1,), SLO("chat", 1_000.0, 8.0)),
    Case("70B chat, mean 25 ms", "llama-3.1-70b", 8, (2, 4), SLO("chat", 2_000.0, 25.0)),
    Case("70B chat, 25 ms, gaps 200 ms", "llama-3.1-70b", 8, (2, 4), SLO("chat", 2_000.0, 25.0, 200.0)),
)


@dataclass(frozen=True, slots=True)
class GoalRow:
    case: str
    seed: int
    kind: str
    layout: str
    rate: float
    calls: int


def goal_rows(num_calls: int, seeds: Iterable[int], wanted: str) -> Iterator[GoalRow]:
    for seed in seeds:
        for case in CASES:
            if wanted in case.name:
                yield from _goal(case, seed, num_calls)


def _goal(case: Case, seed: int, num_calls: int) -> Iterator[GoalRow]:
    effort = Effort(search_calls=num_calls, seed=seed)
    question = Question(
        case.model, [Offer.parse("h100")], CHAT, Mix((case.slo,)), case.num_gpus, case.widths, effort=effort
    )
    load, judge = load_of(CHAT), Judge(CHAT, question.mix)
    search = _search(question, load, judge)

    def row(kind: str, found: Found | None) -> GoalRow:
        layout = describe(found.candidate) if found is not None else "-"
        return GoalRow(case.name, seed, kind, layout, found.knee.rate if found is not None else 0.0, judge.num_calls)

    screened = search.screen(case.num_gpus)
    tuned = search.race([one for one in screened if one.candidate.is_colocated], better=ALL_BETTER)
    yield row("tuned chunked colocated", tuned)
    yield row("best with prefill workers", search.best(case.num_gpus, wanted=lambda one: not one.is_colocated))
    yield row("planner", search.best(case.num_gpus))
    guess = tuned.guess if tuned is not None else screened[0].guess
    for tokens in (2_048, 8_192):
        firsts = [one for one in prefill_first(space_of(question, load), case.num_gpus) if one.budget == tokens]
        yield row(f"prefill first, up to {tokens} tokens", search.race([Screened(one, guess) for one in firsts]))


# -- command -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "goals"))
    parser.add_argument("--gpus", type=int, default=2, help="search: of each plan (%(default)s)")
    parser.add_argument("--calls", type=int, default=400, help="of a trial, at least (%(default)s)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="goals: from 0 on (%(default)s)")
    parser.add_argument("--case", default="", help="goals: only cases whose name holds this")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "search":
        _write(args.json, search_rows(args.gpus, (1, 2), args.calls))
    else:
        _write(args.json, goal_rows(args.calls, range(args.seeds), args.case))


def _write(path: Path, rows: Iterable[SearchRow | GoalRow]) -> None:
    written: list[dict[str, object]] = []
    for row in rows:
        written.append(asdict(row))
        path.write_text(json.dumps({"rows": written}, indent=1))
        print(json.dumps(written[-1]), flush=True)


if __name__ == "__main__":
    main()
