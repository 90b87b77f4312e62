"""Limits of engines go where calls keep their pace, from any start, and stay."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, replace

import pytest

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler import need, tune
from router.controller.autoscaler.acts import Tune
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, Tuning, WorkerLoad
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.traffic import ClassLoad, Load
from router.controller.step_model import StepWork, Terms
from tests.controller.autoscaler.fleets import CHAT, MOST, TERMS, chat, facts, fleet

TIGHT = replace(CHAT, tpot_ms=20.0)
SEATS, BUDGETS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 256), (128, 256, 512, 1_024, 2_048, 4_096, 8_192)


def load(rate: float, slo: SLO = TIGHT) -> Load:
    return Load((ClassLoad(slo, rate, 1_000.0, 1_000.0, 500_000.0, 200.0),))


def served(terms: Terms, of: Load, tuning: Tuning) -> tuple[float, float]:
    """Of an overloaded worker of both: calls a second that keep their pace, and its step's time. Its seats are full, and each
    step takes as many prompt tokens as its budget leaves, or as those seats need. Written without need.py's formulas."""
    [of_class] = of.classes
    per_step = tuning.max_num_seqs * of_class.lacking_tokens / of_class.output_tokens
    room = tuning.max_num_batched_tokens - tuning.max_num_seqs
    seats = tuning.max_num_seqs * min(1.0, room / per_step)
    prompts = seats * of_class.lacking_tokens / of_class.output_tokens
    step_s = terms.step_s(StepWork(seats + prompts, seats * 1_100.0, prompts * 500.0))
    in_time = 1e3 * step_s <= of_class.slo.tpot_ms
    return in_time * seats / step_s / of_class.output_tokens, step_s


def goodput(terms: Terms, of: Load, tuning: Tuning) -> float:
    return served(terms, of, tuning)[0]


class Engine:
    """One worker of both under more load than it can carry, and what its calls feel."""

    def __init__(self, terms: Terms, start: Tuning) -> None:
        self.terms = terms
        self.tuning = start

    def facts(self, now_s: float, known: Terms) -> FleetFacts:
        [worker] = fleet(both=1)
        felt, step_s = served(self.terms, load(30.0), self.tuning)
        traffic: Sequence[ClassTraffic] = [
            replace(
                chat(30.0, slo=TIGHT),
                num_judged=300.0,
                num_missed_tpot=0.0 if felt else 200.0,
                num_missed_ttft=100.0,
            )
        ]
        seats = self.tuning.max_num_seqs
        says = WorkerLoad(now_s, seats + 5, 10_000, seats * 1_100, step_s, 0, num_waiting=5)
        workers = (replace(worker, tuning=self.tuning, load=says, kv_tokens=2_000_000),)
        return replace(facts(workers, *traffic, now_s=now_s), steps={Role.BOTH: known})

    def run(self, known: Terms, num_ticks: int) -> None:
        scaler = Autoscaler()
        for tick in range(num_ticks):
            for proposal in scaler.look(self.facts(10.0 * tick, known)):
                if isinstance(proposal.act, Tune):
                    proposal.act.tuning.check(MOST)
                    self.tuning = proposal.act.tuning


def best_fixed(terms: Terms) -> float:
    settings = (Tuning(s, b, b) for s, b in itertools.product(SEATS, BUDGETS) if s < b)
    return max(goodput(terms, load(30.0), setting) for setting in settings)


STARTS = [MOST, Tuning(1, 128, 128), Tuning(256, 256, 64), Tuning(4, 8_192, 512), Tuning(64, 512, 512)]


@pytest.mark.parametrize("start", STARTS)
def test_from_any_start_a_worker_comes_within_five_percent_of_the_best_fixed_setting(start: Tuning) -> None:
    engine = Engine(TERMS, start)
    engine.run(TERMS, 12)
    assert goodput(TERMS, load(30.0), engine.tuning) >= 0.95 * best_fixed(TERMS)


@pytest.mark.parametrize("error", [0.85, 1.15])
def test_where_the_step_model_is_off_what_calls_felt_corrects_it(error: float) -> None:
    wrong = Terms(*(error * value for value in (1e-3, 2e-5, 4e-3, 2e-8, 1e-10)))
    engine = Engine(TERMS, MOST)
    engine.run(wrong, 120)
    assert goodput(TERMS, load(30.0), engine.tuning) >= 0.9 * best_fixed(TERMS)


def test_a_setting_that_is_right_is_left_alone() -> None:
    kind = Kind(Role.DECODE, TERMS, MOST, 200_000)
    right = tune.best(kind, load(30.0), 2, MOST)
    workers = tuple(replace(w, tuning=right) if w.role is Role.DECODE else w for w in fleet(1, 2))
    scaler = Autoscaler()
    for tick in range(60):
        proposals = scaler.look(facts(workers, chat(30.0, slo=TIGHT), now_s=10.0 * tick))
        assert not [p for p in proposals if isinstance(p.act, Tune) and p.act.worker_id.startswith("decode")]


def test_a_decode_worker_s_budget_stays_where_it_computes_no_prompts_and_fits_its_pace_where_it_does() -> None:
    kind, now = Kind(Role.DECODE, TERMS, MOST, 200_000), Tuning(256, 2_048, 512)
    alone = tune.best(kind, load(30.0), 2, now)
    assert (alone.max_num_batched_tokens, alone.chunk_tokens) == (2_048, 512)
    beside = tune.best(kind, load(30.0), 2, now, local_prefill=True)
    batch = need.steady_batch(kind, load(30.0), load(30.0).outputs_per_s / 2)
    prompts = beside.max_num_batched_tokens - batch
    step_s = TERMS.step_s(StepWork(beside.max_num_batched_tokens, batch * 1_100.0, prompts * 500.0))
    assert 0.9 * 19.4e-3 <= step_s <= 19.4e-3


def test_seats_end_where_the_strictest_pace_does_unless_a_looser_class_is_worth_more() -> None:
    kind = Kind(Role.DECODE, TERMS, MOST, 0)
    strict, loose = replace(CHAT, name="strict", tpot_ms=8.0), replace(CHAT, name="loose", tpot_ms=12.0)

    def seats(strict_rate: float, loose_rate: float) -> int:
        of = Load((*load(strict_rate, strict).classes, *load(loose_rate, loose).classes))
        return tune.best(kind, of, 1, MOST).max_num_seqs

    def batch(slo: SLO) -> int:
        return int(need.batch_within(kind, load(1.0, slo), tune.PACE * slo.tpot_ms / 1e3))

    assert seats(60.0, 60.0) == batch(strict)
    assert seats(1.0, 400.0) == batch(loose)


def test_a_step_of_prompts_is_no_longer_than_a_part_of_the_strictest_first_token() -> None:
    kind = Kind(Role.PREFILL, TERMS, MOST, 0)
    quick = tune.best(kind, load(10.0, replace(CHAT, ttft_ms=200.0)), 1, MOST)
    assert TERMS.step_s(StepWork(quick.max_num_batched_tokens)) <= 0.25 * 0.2
    assert quick.max_num_batched_tokens >= 200  # where weights and compute take equally long
    assert tune.best(kind, load(10.0), 1, MOST) == MOST


def test_nobody_is_told_of_limits_before_long_answers_have_ended() -> None:
    engine = Engine(TERMS, MOST)
    engine.run(TERMS, 6)
    assert engine.tuning == MOST


def test_a_decode_worker_with_more_seats_than_a_step_has_tokens_is_told_what_it_takes() -> None:
    most = Tuning(max_num_seqs=512, max_num_batched_tokens=64, chunk_tokens=64)
    goal = tune.best(Kind(Role.DECODE, TERMS, most, 0), load(30.0), 2, most)
    assert goal.max_num_seqs > 64
    goal.check(most)


@pytest.mark.parametrize("role", list(Role))
def test_steps_that_cost_nothing_but_their_weights_allow_all_there_is(role: Role) -> None:
    free = Terms(fixed_s=1e-3, s_per_token=0.0, weights_s=4e-3, s_per_context_token=0.0, s_per_pair=0.0)
    assert tune.best(Kind(role, free, MOST, 0), load(30.0), 1, MOST, local_prefill=True) == MOST


@pytest.mark.parametrize("room", [2.0, 4.0, 5.0])
def test_seats_near_a_whole_batch_do_not_turn_with_steps_that_are_told_one_percent_longer_and_shorter(
    room: float,
) -> None:
    tokens = room * 1_100.0
    tpot_ms = 1e3 * TERMS.step_s(StepWork(room, tokens)) / tune.PACE
    of = load(1.0, replace(CHAT, tpot_ms=tpot_ms))
    now, seats = Tuning(64, 2_048, 512), []
    for tick in range(40):
        longer = 1.01 if tick % 2 else 0.99
        kind = Kind(Role.DECODE, Terms(*(longer * value for value in astuple(TERMS))), MOST, 200_000)
        now = tune.best(kind, of, 1, now)
        seats.append(now.max_num_seqs)
    assert len(set(seats[2:])) == 1
    surely = Kind(Role.DECODE, Terms(*(0.9 * value for value in astuple(TERMS))), MOST, 200_000)
    assert tune.best(surely, of, 1, now).max_num_seqs >= room
