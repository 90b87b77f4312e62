"""Figures of the planner: is what it picks the best there is, and by how much does it beat colocated serving?

    python -m bench.plan_figures search --json PATH      against looking at every candidate, also where GPUs and calls differ
    python -m bench.plan_figures goals --json PATH       against tuned chunked and prefill-first colocated workers

The file is written anew after each row, so a run that is stopped leaves what it has. docs/planner.md has the results.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

from baton.slo import SLO
from bench.plan.baselines import Perturbed, prefill_first
from bench.plan.judge import Effort, Judge, Knee, mean_and_half_width
from bench.plan.plan import NEARBY, Question, space_of
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
ALL_GUESSED = 0.6  # of the best guess, at least, to be one of "all": guesses are off by up to 30 % (docs/planner.md)


# -- search ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """A traffic, what comes in its place, and what serves it."""

    name: str
    model: str
    num_gpus: int
    widths: tuple[int, ...]
    seen: Traffic
    unseen: Traffic
    slo: SLO


def scenes() -> Iterator[Scene]:
    """Unseen: the other half of a trace, or other draws."""
    azure, mooncake = recorded("azure"), recorded("mooncake")
    rates, lengths = map(find_trace, sources.SERVEGEN)
    drawn = Drawn(arrivals.mean_rate(arrivals.read_rates(rates)), *arrivals.read_lengths(lengths))
    halves, small = (azure.half(0), azure.half(1)), ("llama-3.1-8b", 2, (1, 2))
    yield Scene("azure conv, 8B", *small, *halves, SLO("chat", 1_000.0, 25.0))
    yield Scene("azure conv, 70B", "llama-3.1-70b", 8, (2, 4), *halves, SLO("chat", 2_000.0, 25.0))
    yield Scene("mooncake conversation, 8B", *small, mooncake.half(0), mooncake.half(1), SLO("long", 4_000.0, 40.0))
    yield Scene("servegen lengths, 8B", *small, drawn, drawn, SLO("reasoning", 2_000.0, 25.0))


@dataclass(frozen=True, slots=True)
class SearchRow:
    scene: str
    seed: int
    world: str  # as planned, or unseen
    picked: str
    picked_rate: float
    best: str
    best_rate: float
    candidates: int  # that were looked at
    space: int  # that there are
    calls_of_plan: int
    calls: int
    share_of_best: float
    share_after_flip: float  # likewise, of the best of its flips, known on this seed: the most that one could win
    wall_s: float


def search_rows(num_calls: int, seeds: Sequence[int], wanted: str) -> Iterator[SearchRow]:
    for scene, seed in product(scenes(), seeds):
        if wanted not in scene.name:
            continue
        effort = Effort(search_calls=num_calls, seed=seed)
        question = Question(
            scene.model,
            [Offer.parse("h100")],
            scene.seen,
            Mix((scene.slo,)),
            scene.num_gpus,
            scene.widths,
            effort=effort,
        )
        load = load_of(scene.seen)
        search = _search(question, load, Judge(scene.seen, question.mix))
        found = search.best(scene.num_gpus)
        if found is None:
            raise SystemExit(f"{scene.name}: nothing holds {scene.slo}")
        calls = search.judge.num_calls
        yield _against_all(search, found, scene, seed, "as planned", calls)
        judge = Judge(scene.unseen, question.mix, distort=Perturbed(PERTURBED, seed))
        elsewhere = _search(replace(question, effort=replace(effort, seed=seed + 100)), load, judge)
        there = elsewhere.race([Screened(found.candidate, found.guess)])
        assert there is not None, "one contender was given"
        yield _against_all(elsewhere, there, scene, seed, "unseen", calls)


def _search(question: Question, load: Load, judge: Judge) -> Search:
    return Search(space_of(question, load), load, Targets.of(question.mix.classes), judge, question.effort)


def _against_all(search: Search, picked: Found, scene: Scene, seed: int, world: str, calls: int) -> SearchRow:
    started_s = time.perf_counter()
    space = search.screen(scene.num_gpus)
    everything = [one for one in space if one.value >= ALL_GUESSED * space[0].value]
    flips = [one for one in space if _is_flip(one.candidate, picked.candidate)]
    flipped = search.race(flips, picked, better=ALL_BETTER)
    best = search.race(everything, flipped, better=ALL_BETTER)
    assert flipped is not None, "the picked one is there"
    assert best is not None, "the picked one is there"
    return SearchRow(
        scene.name,
        seed,
        world,
        describe(picked.candidate),
        picked.knee.rate,
        describe(best.candidate),
        best.knee.rate,
        len(everything),
        len(space),
        calls,
        search.judge.num_calls,
        picked.knee.rate / best.knee.rate,
        flipped.knee.rate / best.knee.rate,
        time.perf_counter() - started_s,
    )


def _is_flip(one: Candidate, other: Candidate) -> bool:
    """The same GPUs and settings, with one worker in another role."""
    same = replace(one.deployment, layout=other.layout) == other.deployment and one.window_s == other.window_s
    before, after = other.layout, one.layout
    moved = abs(after.num_prefill - before.num_prefill) + abs(after.num_decode - before.num_decode)
    return same and after.num_both == before.num_both and moved == 2


def describe(one: Candidate) -> str:
    local = one.deployment.local_prefill_tokens
    extra = f", local up to {local}" if local else ""
    match one.window_s:
        case None:
            window = "learned window"
        case math.inf:
            window = "no admission"
        case window_s:
            window = f"window {1e3 * window_s:g} ms"
    return f"{one.describe()}, budget {one.budget}, seats {one.deployment.engine.max_num_seqs}{extra}, {window}"


# -- goals -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    model: str
    gpu: str
    num_gpus: int
    widths: tuple[int, ...]
    traffic: Traffic
    slo: SLO


# Like ShareGPT's in DistServe (OSDI 2024, section 6): prompts of 735 tokens and answers of 200 on average, with long tails
CHAT = Drawn(10.0, Lengths(500, 2_100, lognormal=True), Lengths(150, 520, lognormal=True))


def cases() -> Iterator[Case]:
    yield Case("8B chat, 15 ms", "llama-3.1-8b", "h100", 2, (1,), CHAT, SLO("chat", 1_000.0, 15.0))
    yield Case("8B chat, 15 ms, H200", "llama-3.1-8b", "h200", 4, (1,), CHAT, SLO("chat", 1_000.0, 15.0))
    strict = SLO("chat", 1_000.0, 15.0, percentile=0.99)
    yield Case("8B chat, 15 ms, H200, 99 %", "llama-3.1-8b", "h200", 4, (1,), CHAT, strict)
    yield Case("8B chat, 8 ms", "llama-3.1-8b", "h100", 3, (1,), CHAT, SLO("chat", 1_000.0, 8.0))
    mean, gaps = SLO("chat", 2_000.0, 25.0), SLO("chat", 2_000.0, 25.0, 200.0)
    yield Case("70B chat, mean 25 ms", "llama-3.1-70b", "h100", 8, (2, 4), CHAT, mean)
    yield Case("70B chat, gaps 200 ms", "llama-3.1-70b", "h100", 8, (2, 4), CHAT, gaps)
    yield Case("70B azure, gaps 200 ms", "llama-3.1-70b", "h100", 8, (2, 4), recorded("azure"), gaps)


@dataclass(frozen=True, slots=True)
class GoalRow:
    """One kind of serving at its best setting: found on one seed, measured on others."""

    case: str
    kind: str
    layout: str
    rates: list[float]  # of the knees, by seed
    mean: float
    half_width: float | None
    planner_over: tuple[
        float, float | None
    ]  # the planner's pick over it, seed by seed: mean, half of the 95 % interval
    missed: dict[str, int]  # beyond the knee of the first seed: why
    calls: int  # simulated for the case, so far


def goal_rows(effort: Effort, wanted: str) -> Iterator[GoalRow]:
    for case in cases():
        if wanted in case.name:
            yield from _goal(case, effort)


def _goal(case: Case, effort: Effort) -> Iterator[GoalRow]:
    question = Question(
        case.model, [Offer.parse(case.gpu)], case.traffic, Mix((case.slo,)), case.num_gpus, case.widths, effort=effort
    )
    load, judge = load_of(case.traffic), Judge(case.traffic, question.mix)
    search = _search(question, load, judge)
    picked = search.best(case.num_gpus)
    if picked is None:
        raise SystemExit(f"{case.name}: nothing holds {case.slo}")
    known = {picked.candidate: _knees(picked, judge, effort)}
    for kind, found in {"planner": picked, **_others(search, question, load)}.items():
        if found is None or found.knee.rate == 0:
            continue
        if found.candidate not in known:
            known[found.candidate] = _knees(found, judge, effort)
        knees = known[found.candidate]
        over = [
            mine.rate / other.rate for mine, other in zip(known[picked.candidate], knees, strict=True) if other.rate
        ]
        above = knees[0].above
        yield GoalRow(
            case.name,
            kind,
            describe(found.candidate),
            [knee.rate for knee in knees],
            *mean_and_half_width([knee.rate for knee in knees]),
            mean_and_half_width(over),
            {verdict.value: num for verdict, num in above.missed.items()} if above is not None else {},
            judge.num_calls,
        )


def _knees(found: Found, judge: Judge, effort: Effort) -> list[Knee]:
    """On seeds that the search has not seen."""
    return [
        judge.knee(found.candidate, found.knee.rate, num_calls=effort.final_calls, seed=seed, step=NEARBY)
        for seed in effort.final_seed_numbers
    ]


def _others(search: Search, question: Question, load: Load) -> dict[str, Found | None]:
    """What the pick is compared with, each at the best of its settings on the seed of the search."""
    assert question.num_gpus is not None, "every case has a number of GPUs"
    screened = [one for one in search.screen(question.num_gpus) if one.candidate.is_colocated]
    kinds = {
        "tuned chunked colocated": search.race(screened, better=ALL_BETTER),
        "best with prefill workers": search.best(question.num_gpus, wanted=lambda one: not one.is_colocated),
    }
    space = space_of(question, load)
    admitted, open_ = (list(prefill_first(space, question.num_gpus, admits=admits)) for admits in (True, False))
    rivals = {"prefill first": admitted}
    for tp in sorted({one.deployment.tp for one in open_}):
        rivals[f"prefill first, no admission, tp {tp}"] = [one for one in open_ if one.deployment.tp == tp]
    for kind, firsts in rivals.items():
        kinds[kind] = search.race([Screened(one, screened[-1].guess) for one in firsts], better=ALL_BETTER)
    return kinds


# -- command -----------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "goals"))
    parser.add_argument("--calls", type=int, default=400, help="of a trial, at least (%(default)s)")
    parser.add_argument("--seed", type=int, action="append", help=f"search: may be repeated {SEEDS}")
    parser.add_argument("--final-calls", type=int, default=1_600, help="goals: of a trial of the figures (%(default)s)")
    parser.add_argument(
        "--seeds", type=int, default=5, help="goals: of the figures, unseen by the search (%(default)s)"
    )
    parser.add_argument("--case", default="", help="only those whose name holds this")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    if args.what == "search":
        _write(args.json, search_rows(args.calls, args.seed or SEEDS, args.case))
    else:
        _write(args.json, goal_rows(Effort(args.calls, args.final_calls, args.seeds), args.case))


def _write(path: Path, rows: Iterable[SearchRow | GoalRow]) -> None:
    written: list[dict[str, object]] = []
    for row in rows:
        written.append(asdict(row))
        path.write_text(json.dumps({"rows": written}, indent=1))
        print(json.dumps(written[-1]), flush=True)


if __name__ == "__main__":
    main()
