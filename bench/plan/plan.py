"""Makes a plan: the question, its checks, the search, and the figures that go with the answer.

    1 targets below what any hardware on offer can do are refused, with the floor
    2 search: the best layout, and the best of the other kind (with or without prefill workers)
    3 both are measured again with seeds that the search has not seen; their knees, pair by pair, say whether disaggregation pays
Runs for seconds to minutes in the thread that asks. Never looks at a clock, a file or a socket.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from baton.errors import ConfigError
from baton.slo import SLO
from bench.plan.judge import Effort, Judge, Knee, Trial, mean_and_half_width
from bench.plan.regime import Regime, Remedy, regime_of, remedies
from bench.plan.screen import Guess, Targets, guess
from bench.plan.search import Found, Search, Structure, structure
from bench.plan.space import MAX_WORKERS, WIDTHS, Candidate, Offer, Space
from bench.plan.traffic import Load, Traffic, load_of
from bench.sim.call import Call
from bench.sim.simulation import Mix
from bench.sim.worker import HOP_S
from engine.timing.batch import Batch
from engine.timing.economics import usd_per_million_tokens
from engine.timing.step_time import step_time


class PlanError(ConfigError):
    """There is no plan: the message says what is in the way."""


@dataclass(frozen=True)
class Question:
    model: str
    offers: Sequence[Offer]
    traffic: Traffic
    mix: Mix
    num_gpus: int | None = None  # None: as few as hold the traffic's rate; else the most traffic on exactly so many
    widths: Sequence[int] = WIDTHS
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        if not self.mix.classes:
            raise ConfigError("classes are none; give at least one")
        if self.num_gpus is not None and self.num_gpus < 1:
            raise ConfigError(f"num_gpus is {self.num_gpus}; the limit is at least 1")
        for slo in self.mix.classes:
            _check_class(slo)


class Pays(enum.StrEnum):
    PAYS = "pays"
    DOES_NOT = "does not pay"
    UNSURE = "too close to say"


@dataclass(frozen=True, slots=True)
class Gain:
    """Of the best layout with prefill workers over the best without, goodput per dollar; 0.1 = a tenth more."""

    mean: float
    half_width: float | None  # of the 95 % interval; None: one seed

    @property
    def verdict(self) -> Pays:
        if self.half_width is None or abs(self.mean) <= self.half_width:
            return Pays.UNSURE
        return Pays.PAYS if self.mean > 0 else Pays.DOES_NOT


@dataclass(frozen=True)
class Measured:
    """One layout, on seeds that its search has not seen."""

    candidate: Candidate
    guess: Guess
    knees: Sequence[Knee]  # by seed
    at_rate: Sequence[Trial]  # at the rate that was asked for; empty where none was
    points: Sequence[Trial]  # of attainment against rate, in order of rate

    @property
    def structure(self) -> Structure:
        return structure(self.candidate)

    @property
    def goodput(self) -> tuple[float, float | None]:
        """Calls per second at the knee, and half of the 95 % interval."""
        return mean_and_half_width([knee.goodput for knee in self.knees])

    @property
    def is_cut(self) -> bool:
        """Whether any of its figures is of a trial that was."""
        knees = [trial for knee in self.knees for trial in (knee.below, knee.above) if trial is not None]
        return any(trial.is_cut for trial in (*knees, *self.at_rate))

    @property
    def usd_per_million_tokens(self) -> float:
        """Prompt and answer, with all GPUs at the knee."""
        rates = [knee.below.tokens_per_s * knee.rate / knee.below.rate for knee in self.knees if knee.below is not None]
        return usd_per_million_tokens(self.candidate.usd_per_hour, sum(rates) / len(rates)) if rates else math.inf

    @property
    def usd_per_million_output_tokens(self) -> float:
        found = [knee.below.output_tokens_per_s for knee in self.knees if knee.below is not None]
        return usd_per_million_tokens(self.candidate.usd_per_hour, sum(found) / len(found)) if found else math.inf


@dataclass(frozen=True)
class Plan:
    question: Question
    replicas: int  # of the layout, each with an equal part of the traffic
    best: Measured
    other: Measured | None  # the best of the other kind; None: there is none that holds anything
    gain: Gain | None  # of disaggregation; None: there is nothing to compare
    regime: Regime
    remedies: Sequence[Remedy]
    load: Load
    num_calls: int  # simulated
    num_trials: int

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.best.candidate.num_gpus

    @property
    def usd_per_hour(self) -> float:
        return self.replicas * self.best.candidate.usd_per_hour


def make_plan(question: Question, *, on_call: Callable[[Call], None] | None = None) -> Plan:
    """Raises: PlanError: nothing on offer meets the targets. ConfigError: a GPU, model or number that makes no sense."""
    load = load_of(question.traffic)
    check_floor(question, load)
    replicas, question = _parted(question, load)
    judge = Judge(question.traffic, question.mix, on_call=on_call)
    search = Search(space_of(question, load), load, Targets.of(question.mix.classes), judge, question.effort)
    best = _best(search, question, lambda _: True)
    if best is None:
        raise PlanError(_none_holds(search, question))
    other_kind = _best(search, question, lambda one: one.is_colocated is not best.candidate.is_colocated)
    measured = _measure(best, judge, question)
    other = _measure(other_kind, judge, question) if other_kind is not None else None
    return Plan(
        question,
        replicas,
        measured,
        other,
        _gain(measured, other),
        regime_of(measured.guess, Targets.of(question.mix.classes)),
        remedies(best.candidate, load, Targets.of(question.mix.classes)),
        load,
        judge.num_calls,
        judge.num_trials,
    )


def space_of(question: Question, load: Load) -> Space:
    return Space(
        question.model,
        question.offers,
        question.widths,
        question.weight_dtype,
        question.kv_dtype,
        question.traffic.has_content,
        load.held_tokens,
    )


def _parted(question: Question, load: Load) -> tuple[int, Question]:
    """A cluster beyond one plan's size is several of a smaller one, as DistServe (OSDI 2024) replicates its unit."""
    space, targets = space_of(question, load), Targets.of(question.mix.classes)
    widest = MAX_WORKERS * min(where.tp for where in space.hardware)
    if question.num_gpus is not None:
        parts = _parts(question.num_gpus, widest)
        traffic = question.traffic.at(question.traffic.rate / parts)
        return parts, replace(question, num_gpus=question.num_gpus // parts, traffic=traffic)
    most = max(guess(one, load, targets).rate for one in space.of_size(widest))
    parts = max(1, math.ceil(question.traffic.rate / max(most, question.traffic.rate / 1_000)))
    return parts, replace(question, traffic=question.traffic.at(question.traffic.rate / parts))


def _parts(num_gpus: int, most: int) -> int:
    """The fewest equal parts of at most so many GPUs."""
    return next(parts for parts in range(1, num_gpus + 1) if not num_gpus % parts and num_gpus // parts <= most)


def _best(search: Search, question: Question, wanted: Callable[[Candidate], bool]) -> Found | None:
    if question.num_gpus is not None:
        found = search.best(question.num_gpus, wanted=wanted)
        return found if found is not None and found.knee.rate > 0 else None
    return search.cheapest(question.traffic.rate, wanted=wanted)


NEARBY = 1.06  # knees of other seeds are some percent away from that of the search's


def _measure(found: Found, judge: Judge, question: Question) -> Measured:
    effort = question.effort
    rate = question.traffic.rate if question.num_gpus is None else None
    knees = [
        judge.knee(found.candidate, found.knee.rate, num_calls=effort.search_calls, seed=seed, step=NEARBY)
        for seed in effort.final_seed_numbers
    ]
    at_rate = [
        judge.trial(found.candidate, rate, num_calls=effort.final_calls, seed=seed) for seed in effort.final_seed_numbers
    ] if rate is not None else []  # fmt: skip
    points = [
        judge.trial(found.candidate, part * found.knee.rate, num_calls=effort.search_calls, seed=effort.seed)
        for part in (0.6, 0.9, 1.0, 1.1, 1.4)  # where it is flat, where it bends, where it has fallen
    ]
    return Measured(found.candidate, found.guess, knees, at_rate, points)


def _gain(best: Measured, other: Measured | None) -> Gain | None:
    if other is None:
        return None
    colocated, split = (best, other) if best.candidate.is_colocated else (other, best)
    return gain_of(
        [knee.rate / split.candidate.usd_per_hour for knee in split.knees],
        [knee.rate / colocated.candidate.usd_per_hour for knee in colocated.knees],
    )


def gain_of(split: Sequence[float], colocated: Sequence[float]) -> Gain | None:
    """Of values at the same seeds: each pair saw the same calls."""
    ratios = [mine / theirs - 1 for mine, theirs in zip(split, colocated, strict=True) if theirs > 0]
    return Gain(*mean_and_half_width(ratios)) if ratios else None


# -- what cannot be ----------------------------------------------------------------------------------------------------


def check_floor(question: Question, load: Load) -> None:
    """Raises: PlanError: a target that no hardware on offer can meet, with the floor."""
    space = space_of(question, load)
    times = [
        (
            step_time(
                one.gpu, space.model, one.tp, weight_dtype=space.weight_dtype, kv_dtype=space.kv_dtype, measured=False
            ),
            one,
        )
        for one in space.hardware
    ]
    step_s, step_on = min((one.decode_steps_s(1, 1, 1), f"{where.tp} x {where.gpu}") for one, where in times)
    for slo in question.mix.classes:
        for name, target_ms in (("tpot_ms", slo.tpot_ms), ("itl_p99_ms", slo.itl_p99_ms)):
            if target_ms is not None and target_ms < 1e3 * step_s:
                raise PlanError(
                    f"classes.{slo.name}.{name} is {target_ms:g}; the floor is {1e3 * step_s:.2f}, a decode step of one sequence "
                    f"alone on {step_on}"
                )
        tokens = (
            1
            if question.traffic.has_content
            else load.prompts[min(len(load.prompts) - 1, int(slo.percentile * len(load.prompts)))]
        )
        first_s, first_on = min(
            (one.step_s(Batch(((tokens, 0),))), f"{where.tp} x {where.gpu}") for one, where in times
        )
        floor_ms = 1e3 * (first_s + 2 * HOP_S)
        for name, target_ms in (("ttft_ms", slo.ttft_ms), ("e2e_ms", slo.e2e_ms)):
            if target_ms is not None and target_ms < floor_ms:
                raise PlanError(
                    f"classes.{slo.name}.{name} is {target_ms:g}; the floor is {floor_ms:.2f}, a prompt of {tokens} tokens (its "
                    f"percentile of the traffic's) alone on {first_on}"
                )


def _none_holds(search: Search, question: Question) -> str:
    size = f"{question.num_gpus} GPUs" if question.num_gpus is not None else f"up to {MAX_WORKERS} workers"
    return (
        f"no layout of {size} that was simulated holds every class's percentile"
        f"{f' at {question.traffic.rate:g} calls/s' if question.num_gpus is None else ' at any rate'}; "
        f"{search.judge.num_trials} trials. Loosen the targets, or offer other GPUs"
    )


def _check_class(slo: SLO) -> None:
    targets = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms, "itl_p99_ms": slo.itl_p99_ms, "e2e_ms": slo.e2e_ms}
    for name, target_ms in targets.items():
        if target_ms is not None and not 0 < target_ms < math.inf:
            raise ConfigError(f"classes.{slo.name}.{name} is {target_ms}; it must be a number above 0")
    if not 0 < slo.percentile < 1:
        raise ConfigError(f"classes.{slo.name}.percentile is {slo.percentile}; it must be between 0 and 1")
