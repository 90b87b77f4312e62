"""A controller in the simulator: what it sees is what the product's would; what it asks for is done or refused; faults."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from baton.request import Role
from baton.slo import SLO
from bench.sim.arrivals import Constant, Rate, instants, synthetic
from bench.sim.control import ControlledOutcome, ControlledRun, Faults, Kill, Retarget
from bench.sim.delays import Delay, Delays
from bench.sim.deployment import Deployment, Layout
from bench.sim.simulation import Mix
from bench.sim.telemetry import Outage
from bench.traces import TraceRow
from bench.workload import Lengths
from router.controller.autoscaler.acts import (
    Act,
    Create,
    Drain,
    Flip,
    GiveUp,
    LocalPrefill,
    Proposal,
    Tune,
    Undrain,
    Wake,
)
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import FleetFacts, State, Tuning
from router.controller.autoscaler.scaler import Times
from router.controller.settings import Budget, PoolBounds
from tests.bench.test_sim_fast_forward import SAME, deployment

TIMES = Times(tick_s=5.0, start_up_s=8.0, flip_s=0.5, dwell_s=10.0, shrink_after_s=30.0)
CHAT = SLO("chat", 1_000.0, 30.0)
MIX = Mix((CHAT,))
PAIR = Layout(1, 1)
PAIRS = Budget(None, PoolBounds(1), PoolBounds(1))


def calls(rate: Rate | float, until_s: float, prompt: int = 600, answer: int = 30) -> list[TraceRow]:
    found = []
    rates = Constant(rate) if isinstance(rate, float) else rate
    for row in synthetic(instants(rates, 1), Lengths(prompt, prompt), Lengths(answer, answer), 1):
        if row.at_s > until_s:
            break
        found.append(row)
    return found


def _nothing(_facts: FleetFacts) -> Sequence[Act]:
    return ()


@dataclass
class Scripted:
    """A Scaler that asks for what it is told to, by number of the tick, and keeps what it saw."""

    script: dict[int, Callable[[FleetFacts], Sequence[Act]]] = field(default_factory=dict)
    seen: list[FleetFacts] = field(default_factory=list)

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        self.seen.append(facts)
        acts = self.script.get(len(self.seen), _nothing)(facts)
        return [Proposal(act, "as told", {"tick": len(self.seen)}) for act in acts]

    def states(self, worker_id: str) -> list[State | None]:
        """At each tick; None: it is not part of the fleet."""
        return [next((w.state for w in facts.workers if w.worker_id == worker_id), None) for facts in self.seen]


def run(
    scaler: Scripted | Autoscaler,
    rows: list[TraceRow],
    layout: Layout = PAIR,
    budget: Budget = PAIRS,
    *,
    fast: bool = True,
    faults: Faults | None = None,
    retargets: Sequence[Retarget] = (),
    machine_gpus: int | None = None,
    shape: Deployment | None = None,
) -> ControlledOutcome:
    controlled = ControlledRun(
        shape or deployment(layout),
        MIX,
        scaler,
        TIMES,
        budget,
        fast=fast,
        faults=faults,
        retargets=retargets,
        machine_gpus=machine_gpus,
    )
    return controlled.run(rows)


def applied(outcome: ControlledOutcome) -> list[tuple[float, str]]:
    return [(one.at_s, one.decision.lever) for one in outcome.decisions if one.decision.applied]


def refusals(outcome: ControlledOutcome) -> list[str]:
    return [str(one.decision.inputs["not_done"]) for one in outcome.decisions if not one.decision.applied]


# -- what it sees --------------------------------------------------------------------------------------------------------


def test_facts_tell_of_traffic_workers_and_steps_as_they_are() -> None:
    scaler = Scripted()
    run(scaler, calls(6.0, 60.0))
    facts = scaler.seen[-1]
    (traffic,) = facts.classes
    assert traffic.slo == CHAT
    assert traffic.rate == pytest.approx(6.0, rel=0.35)
    assert (traffic.prompt_tokens, traffic.output_tokens) == (600.0, 30.0)
    assert traffic.num_met == traffic.num_judged > 100
    assert {w.worker_id: (w.role, w.state, w.shape) for w in facts.workers} == {
        "prefill-0": (Role.PREFILL, State.READY, "1xh100"),
        "decode-0": (Role.DECODE, State.READY, "1xh100"),
    }
    assert facts.missing_s <= 1.0
    decode = facts.workers[1].load
    assert decode is not None
    assert decode.step_s == pytest.approx(0.005, rel=0.3)


def test_lost_reports_are_told_as_missing_and_a_nan_is_refused_like_one() -> None:
    for as_nan in (False, True):
        scaler = Scripted()
        outage = Outage(22.0, 48.0, as_nan=as_nan)
        run(scaler, calls(4.0, 62.0), faults=Faults(outages=(outage,)))
        missing = {facts.now_s: facts.missing_s for facts in scaler.seen}
        assert missing[20.0] <= 1.0
        assert missing[45.0] == pytest.approx(24.0)
        assert missing[60.0] <= 1.0
        blind = next(facts for facts in scaler.seen if facts.now_s == 45.0)
        assert blind.classes[0].rate is None
        loads = [w.load for w in blind.workers if w.load is not None]
        assert all(math.isnan(load.step_s) for load in loads) is as_nan


# -- what it asks for ----------------------------------------------------------------------------------------------------


def test_every_act_is_carried_out_and_told_in_the_next_facts() -> None:
    tuning = Tuning(8, 1_024, 256)
    scaler = Scripted(
        {
            1: lambda facts: [Create(Role.DECODE, facts.workers[0].shape), LocalPrefill(128), Tune("decode-0", tuning)],
            4: lambda _: [Flip("decode-1", Role.PREFILL)],
            6: lambda _: [Drain("decode-1", keep_standby=True)],
            8: lambda _: [Wake("decode-1", Role.DECODE)],
            10: lambda _: [Drain("decode-1")],
        }
    )
    outcome = run(scaler, calls(4.0, 62.0))
    assert refusals(outcome) == []
    pending, ready = State.PENDING, State.READY
    assert scaler.states("decode-1") == [
        None, pending, ready, ready, ready, ready, State.STANDBY, State.STANDBY, ready, ready, None, None,
    ]  # fmt: skip
    roles = [w.role for facts in scaler.seen for w in facts.workers if w.worker_id == "decode-1"]
    assert roles == [Role.DECODE] * 3 + [Role.PREFILL] * 4 + [Role.DECODE] * 2
    assert scaler.seen[1].local_prefill_tokens == 128
    assert scaler.seen[1].workers[1].tuning == tuning
    assert outcome.calls_in_slo == outcome.tokens_in_slo == 1.0
    assert outcome.gpu_hours == pytest.approx((2 * outcome.outcome.run_s + 45.0) / 3_600, rel=0.01)
    assert [sizes.num_gpus for sizes in outcome.timeline] == [3] * 9 + [2] * 3
    assert outcome.num_reversals == 4  # each change after the first turns a pool back


@pytest.mark.parametrize("keep_standby", [True, False])
def test_who_drains_is_told_with_what_becomes_of_it(keep_standby: bool) -> None:
    scaler = Scripted(
        {
            1: lambda facts: [Create(Role.DECODE, facts.workers[0].shape)],
            3: lambda _: [Drain("decode-0", keep_standby=keep_standby)],
        }
    )
    run(scaler, calls(1.0, 50.0, answer=4_000))
    told = [(w.state, w.stands_by) for facts in scaler.seen for w in facts.workers if w.worker_id == "decode-0"]
    assert (State.DRAINING, keep_standby) in told
    assert {stands_by for state, stands_by in told if state is not State.DRAINING} == {False}


def test_what_the_product_would_refuse_is_refused_and_written_down() -> None:
    scaler = Scripted(
        {
            1: lambda _: [Drain("decode-0"), Flip("prefill-0", Role.DECODE), Undrain("prefill-0"), GiveUp("nobody")],
            2: lambda _: [Create(Role.BOTH, "8xb200"), Create(Role.PREFILL, "1xh100"), Create(Role.DECODE, "1xh100")],
            3: lambda _: [Create(Role.DECODE, "1xh100"), Tune("decode-0", Tuning(8, 10**6, 256))],
        }
    )
    budget = Budget(3, PoolBounds(1, 1), PoolBounds(1))
    outcome = run(scaler, calls(4.0, 20.0), budget=budget)
    assert refusals(outcome) == [
        "decode must keep 1 workers, 1 are there",
        "prefill must keep 1 workers, 1 are there",
        "prefill-0 is ready, not draining",
        "there is no worker nobody",
        "there is no 8xb200 for both workers; there is 1xh100",
        "prefill.max_workers = 1: so many are there",
        "max_gpus = 3: one more worker makes 4",
        "max_num_batched_tokens = 1000000; the limit of this worker is 1 to 8192, which it was started with",
    ]
    assert applied(outcome) == [(10.0, "create")]


def test_no_worker_is_created_beyond_the_machines_there_are() -> None:
    scaler = Scripted({1: lambda _: [Create(Role.DECODE, "1xh100")]})
    outcome = run(scaler, calls(4.0, 10.0), machine_gpus=2)
    assert scaler.seen[0].spare_gpus == 0
    assert refusals(outcome) == ["the machines' GPUs = 2: one more worker makes 3"]


# -- faults --------------------------------------------------------------------------------------------------------------


def test_a_created_worker_that_is_stuck_stays_pending_until_it_is_given_up() -> None:
    scaler = Scripted({1: lambda _: [Create(Role.DECODE, "1xh100")], 10: lambda _: [GiveUp("decode-1")]})
    run(scaler, calls(4.0, 62.0), faults=Faults(num_stuck=1))
    assert scaler.states("decode-1") == [None, *[State.PENDING] * 9, None, None]


@pytest.mark.parametrize("restarts", [True, False])
def test_a_worker_that_dies_is_failed_until_somebody_brings_it_back_or_gone_where_nobody_does(restarts: bool) -> None:
    scaler = Scripted()
    faults = Faults(kills=(Kill(12.0, Role.DECODE),), restarts=restarts)
    outcome = run(scaler, calls(4.0, 40.0, answer=200), Layout(1, 2), faults=faults)
    ready = State.READY
    after = [State.FAILED, ready] if restarts else [None, None]
    assert scaler.states("decode-0")[:4] == [ready, ready, *after]
    assert outcome.outcome.num_moved > 0
    assert all(measure.verdicts.keys() <= {"met", "ttft", "tpot", "itl"} for measure in outcome.outcome.classes)


def test_new_targets_are_seen_at_the_next_tick() -> None:
    scaler, tight = Scripted(), SLO("chat", 500.0, 20.0)
    run(scaler, calls(4.0, 20.0), retargets=(Retarget(12.0, tight),))
    assert [facts.classes[0].slo for facts in scaler.seen[:4]] == [CHAT, CHAT, tight, tight]


# -- the product's own autoscaler -----------------------------------------------------------------------------------------


def slow_deployment() -> Deployment:
    """One call a second keeps a prefill worker busy for a quarter of its time."""
    return Deployment(Layout(1, 1), gpu="a100", weight_dtype="bf16", engine=deployment(Layout(1, 1)).engine)


def scaled(fast: bool = True) -> ControlledOutcome:
    rows = calls(3.0, 100.0, prompt=4_000, answer=60)
    return run(
        Autoscaler(TIMES), rows, shape=slow_deployment(), budget=Budget(8, PoolBounds(1), PoolBounds(1)), fast=fast
    )


def test_the_autoscaler_grows_a_pool_that_is_too_small_and_keeps_it() -> None:
    outcome = scaled()
    first, last = outcome.timeline[0], outcome.timeline[-1]
    assert first.num_prefill == 1
    assert last.num_prefill > 1
    assert outcome.num_reversals == 0
    late = [sizes.num_prefill for sizes in outcome.timeline if sizes.at_s > 60.0]
    assert len(set(late)) == 1


def test_a_controlled_run_is_the_same_step_by_step() -> None:
    fast, slow = scaled(), scaled(fast=False)
    assert [(one.at_s, one.decision.action) for one in fast.decisions] == [
        (one.at_s, one.decision.action) for one in slow.decisions
    ]
    assert fast.attainment == slow.attainment
    assert fast.gpu_hours == pytest.approx(slow.gpu_hours, rel=SAME)


def test_delays_are_fixed_or_drawn_and_read_as_they_are_written() -> None:
    assert Delay.parse("60").draw(random.Random(0)) == 60.0
    drawn = Delay.parse("60,180")
    times = sorted(drawn.draw(random.Random(seed)) for seed in range(2_000))
    assert times[1_000] == pytest.approx(60.0, rel=0.05)
    assert times[1_900] == pytest.approx(180.0, rel=0.1)
    assert [str(Delay.parse(text)) for text in ("60", "60,180")] == ["60", "60,180"]
    assert Delays().start_up == Delay(60.0)
    for wrong in ("-1", "nan", "5,1", "0,4", "soon", "1,2,3"):
        with pytest.raises(ValueError, match="delay"):
            Delay.parse(wrong)
