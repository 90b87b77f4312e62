"""Nothing flaps, nothing leaves its bounds, whatever numbers come: any loads, any faults."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.acts import Create, Drain, Flip, Tune, Undrain, Wake
from router.controller.autoscaler.autoscaler import Autoscaler, Times
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, WorkerLoad
from router.controller.autoscaler.need import PACE_SHARE
from router.controller.settings import Budget, PoolBounds
from router.controller.step_model import StepWork, Terms
from tests.controller.autoscaler.fleets import CHAT, TERMS, chat, facts, fleet, worker
from tests.controller.autoscaler.fluid import Fluid

FEW = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIMES = Times()
HOLD_S = 2 * TIMES.start_up_s
MAX_GPUS = 12
BUDGET = Budget(MAX_GPUS, PoolBounds(1), PoolBounds(1, 8))
RATES = st.lists(st.sampled_from([0.0, 5.0, 40.0, 90.0, 110.0, 300.0]), min_size=2, max_size=8)
MIXES = st.lists(st.sampled_from([(16.0, 400.0), (1_000.0, 200.0), (4_000.0, 10.0)]), min_size=2, max_size=8)


def turns(fluid: Fluid, role: Role) -> list[tuple[float, int]]:
    """(when, +1 or -1) of everything that made the pool larger or smaller."""
    found: list[tuple[float, int]] = []
    roles = {f"{r.name.lower()}-{n}": r for r in Role for n in range(20)}
    for at_s, proposal in fluid.acts:
        match proposal.act:
            case Create(of, _) | Wake(_, of) if of is role:
                found.append((at_s, 1))
            case Flip(worker_id, to):
                roles[worker_id] = to
                found.append((at_s, 1 if to is role else -1))
            case Drain(worker_id, _) if roles.get(worker_id, role) is role:
                found.append((at_s, -1))
            case Undrain(worker_id) if roles.get(worker_id, role) is role:
                found.append((at_s, 1))
            case _:
                pass
    return found


@FEW
@given(RATES, MIXES, st.sampled_from([10.0, 30.0, 70.0, 200.0]))
def test_sizes_turn_no_more_often_than_dwell_and_hold_allow(
    rates: list[float], mixes: list[tuple[float, float]], period_s: float
) -> None:
    def traffic(at_s: float) -> list[ClassTraffic]:
        step = int(at_s / period_s)
        prompt, output = mixes[step % len(mixes)]
        return [chat(rates[step % len(rates)], prompt, output)]

    fluid = Fluid(Autoscaler(TIMES), fleet(2, 2), traffic, budget=BUDGET, times=TIMES)
    fluid.run(120)
    flips = [(at_s, p.act.role) for at_s, p in fluid.acts if isinstance(p.act, Flip)]
    for (before_s, one), (after_s, other) in pairwise(flips):
        assert one is other or after_s - before_s >= TIMES.dwell_s
    drains = fluid.times_of(Drain)
    grown = {at_s for role in Role for at_s, direction in turns(fluid, role) if direction > 0}
    for drained_s in drains:
        assert drained_s >= HOLD_S  # never before it has been seen for that long
    assert len(drains) <= 4 * (1 + 1_200 / HOLD_S) + len(grown)
    assert sum(w.num_gpus for w in fluid.workers) <= MAX_GPUS
    assert fluid.ready(Role.PREFILL) + fluid.ready(Role.DECODE) >= 2


@FEW
@given(st.floats(10.0, 300.0), st.floats(0.97, 1.03), st.integers(0, 6))
def test_a_load_that_hardly_moves_is_left_alone(rate: float, wobble: float, phase: int) -> None:
    fluid = Fluid(
        Autoscaler(TIMES),
        fleet(4, 4),
        lambda at_s: [chat(rate * (wobble if (int(at_s / 10) + phase) % 7 < 3 else 1.0))],
        times=TIMES,
    )
    fluid.run(120)
    settled = [act for act in fluid.acts if act[0] > 700.0]
    assert not [proposal.act for _, proposal in settled if isinstance(proposal.act, Create | Drain | Flip)]


NUMBERS: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.just(math.nan), st.just(math.inf), st.floats(-1e12, 1e12), st.floats(0, 1e4)
)


@st.composite
def any_facts(draw: st.DrawFn) -> FleetFacts:
    def load() -> WorkerLoad:
        values: list[Any] = [draw(NUMBERS) or 0 for _ in range(7)]
        return WorkerLoad(*values)

    workers = tuple(
        worker(f"w{n}", draw(st.sampled_from(list(Role))), draw(st.sampled_from(list(State))), 0.0, load())
        for n in range(draw(st.integers(0, 6)))
    )
    classes = [
        ClassTraffic(replace(CHAT, name=f"c{n}", priority=draw(st.integers(-2, 2))), *[draw(NUMBERS) for _ in range(6)])
        for n in range(draw(st.integers(0, 3)))
    ]
    now: Any = draw(st.one_of(st.floats(0, 1e6), st.just(math.nan)))
    return replace(
        facts(workers, *classes, now_s=now, budget=BUDGET),
        missing_s=draw(st.one_of(st.just(0.0), st.floats(0, 100), st.just(math.nan))),
        queued_tokens=draw(st.integers(-5, 10**9)),
        oldest_queued_s=draw(st.one_of(st.floats(0, 1e6), st.just(math.nan))),
        spare_gpus=draw(st.one_of(st.none(), st.integers(-3, 20))),
    )


@FEW
@given(st.lists(any_facts(), min_size=1, max_size=6))
def test_no_facts_whatever_raise_or_break_the_budget(looks: list[FleetFacts]) -> None:
    scaler = Autoscaler(TIMES)
    for now in looks:
        proposals = scaler.look(now)
        created = sum(isinstance(proposal.act, Create) for proposal in proposals)
        assert not created or created + sum(w.num_gpus for w in now.workers) <= MAX_GPUS
        named = [
            proposal.act.worker_id for proposal in proposals if isinstance(proposal.act, Drain | Flip | Wake | Undrain)
        ]
        assert len(named) == len(set(named))
        states = {w.worker_id: w.state for w in now.workers}
        assert all(states[p.act.worker_id] is State.READY for p in proposals if isinstance(p.act, Drain | Flip))
        assert all(proposal.reason for proposal in proposals)


@FEW
@given(st.data())
def test_what_cannot_be_believed_decides_nothing(data: st.DataObject) -> None:
    """The same looks, once with nonsense of one worker and once with nothing: the same decisions."""

    def nonsense(now_s: float) -> WorkerLoad:
        good: dict[str, Any] = {
            "at_s": now_s,
            "num_seqs": 9,
            "waiting_tokens": 5,
            "used_tokens": 150_000,
            "step_s": 0.01,
            "num_preemptions": 0,
        }
        name = data.draw(st.sampled_from(list(good)))
        good[name] = data.draw(
            st.sampled_from([math.nan, math.inf, -math.inf, -1e9] if name != "at_s" else [math.nan, -1e4, 1e9])
        )
        return WorkerLoad(**good)

    one, other = Autoscaler(TIMES), Autoscaler(TIMES)
    share = data.draw(st.floats(0, 1))
    for tick in range(40):
        now_s = 10.0 * tick
        load = WorkerLoad(now_s, 20, 0, int(share * 200_000), 0.01, 0)
        good = tuple(replace(w, load=load) for w in fleet(2, 4))
        now = facts(good, chat(30.0), now_s=now_s)
        spoilt = (*good[:-1], replace(good[-1], load=nonsense(now_s)))
        silent = (*good[:-1], replace(good[-1], load=None))
        assert list(one.look(replace(now, workers=spoilt))) == list(other.look(replace(now, workers=silent)))


def room_for(batch: float, prompt: float = 4_000.0, output: float = 1_000.0) -> SLO:
    """A class whose pace leaves room for so many sequences of such calls."""
    tokens = batch * (prompt + output / 2)
    return SLO("interactive", ttft_ms=4_000.0, tpot_ms=1e3 * TERMS.step_s(StepWork(batch, tokens)) / PACE_SHARE)


def test_steps_that_are_told_one_percent_longer_and_shorter_turn_no_pool_whose_batches_are_small() -> None:
    """One more or fewer in a batch of two is half the pool; steps swing over 20 minutes, so holds do not outlast them."""

    def told(now: FleetFacts) -> FleetFacts:
        longer = 1 + 0.01 * math.sin(2 * math.pi * now.now_s / 1_200.0)
        terms = Terms(*(longer * value for value in astuple(TERMS)))
        return replace(now, steps=dict.fromkeys(Role, terms))

    calls = chat(0.8, 4_000.0, 1_000.0, slo=room_for(2.0))
    fluid = Fluid(Autoscaler(TIMES), fleet(1, 1), lambda _: [calls], times=TIMES, change=told)
    fluid.run(240)
    assert not [act for at_s, act in fluid.acts if at_s > 600.0 and not isinstance(act.act, Tune)]
