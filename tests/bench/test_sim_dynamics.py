"""Fleets that change while calls run: nothing is lost, GPUs are counted, and many steps at once stay the same as single ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from baton.request import Role
from baton.slo import SLO, Verdict
from bench.sim.call import Call
from bench.sim.clock import Event
from bench.sim.delays import Delay, Delays
from bench.sim.deployment import Deployment, Layout
from bench.sim.fleet import Refused
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceRow
from engine.tuning import Tuning
from router.controller.autoscaler.facts import State
from tests.bench.test_sim_fast_forward import LOOSE, MIX, SAME, TIGHT, deployment, instants, load

DELAYS = Delays(
    start_up=Delay(0.8, 2.0),
    wake=Delay(0.05),
    flip=Delay(0.02, 0.05),
    detect=Delay(0.05, 0.2),
    restart=Delay(1.0, 2.0),
    drain_limit_s=0.6,  # below the longest answers, so that some are moved
)
ONE = Mix((SLO("one", 60_000.0, 10_000.0),))


class Run:
    """One simulation, with acts at given moments; every call that is over."""

    def __init__(self, deployment: Deployment, mix: Mix = ONE, *, fast: bool = True, delays: Delays = DELAYS) -> None:
        self.calls: list[Call] = []
        self.simulation = Simulation(
            deployment, mix, fast=fast, delays=delays, bounds=None, on_call=self.calls.append, seed=3
        )
        self.fleet, self.router = self.simulation.fleet, self.simulation.router

    def at(self, at_s: float, act: Callable[[float], Iterable[Event]]) -> None:
        self.simulation.at(at_s, act)

    def watch(self, worker_id: str, *instants_s: float) -> list[State]:
        """Its states then, once the run is over."""
        seen: list[State] = []

        def look(_now_s: float) -> Iterable[Event]:
            seen.append(self.states()[worker_id])
            return ()

        for at_s in instants_s:
            self.at(at_s, look)
        return seen

    def retarget(self, at_s: float, slo: SLO) -> None:
        def change(_now_s: float) -> Iterable[Event]:
            self.simulation.set_slo(slo)
            return ()

        self.at(at_s, change)

    def states(self) -> dict[str, State]:
        return {name: member.state for name, member in self.fleet.members.items()}

    def end(self, rows: Iterable[TraceRow]) -> None:
        outcome = self.simulation.run(rows)
        self.gpu_hours, self.num_moved, self.workers = outcome.gpu_hours, outcome.num_moved, outcome.workers
        for worker in self.simulation.workers:
            worker.engine.scheduler.check_integrity()
            assert not worker.open


def whole(calls: Iterable[Call]) -> bool:
    return all(call.end_s is not None and call.verdict is not Verdict.FAILED for call in calls)


ROWS = load(80, rate=60.0)


# -- single acts ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_is_created_serves_from_the_end_of_its_start_up_and_costs_from_its_beginning() -> None:
    run = Run(deployment(Layout(num_both=1)), delays=replace(DELAYS, start_up=Delay(0.5)))
    run.at(0.2, lambda now_s: run.fleet.create(Role.BOTH, now_s))
    seen = run.watch("both-1", 0.6, 0.8)
    run.end(ROWS)
    assert seen == [State.PENDING, State.READY]
    assert {use.worker_id: use.num_served > 0 for use in run.workers} == {"both-0": True, "both-1": True}
    run_s = run.simulation.clock.now_s
    assert run.gpu_hours == pytest.approx((run_s + run_s - 0.2) / 3_600)


def test_a_drained_worker_ends_what_it_has_and_then_costs_nothing() -> None:
    run = Run(deployment(Layout(num_both=2)), delays=replace(DELAYS, drain_limit_s=600.0))
    run.at(0.5, lambda now_s: run.fleet.drain("both-0", now_s))
    seen = run.watch("both-0", 0.5001)
    run.end(ROWS)
    assert seen == [State.DRAINING]
    assert list(run.states()) == ["both-1"]
    assert whole(run.calls)
    assert run.num_moved == 0
    gone_s = 3_600 * run.gpu_hours - run.simulation.clock.now_s
    assert 0.5 < gone_s < run.simulation.clock.now_s


def test_a_worker_kept_as_a_standby_costs_on_and_serves_again_when_it_is_woken() -> None:
    run = Run(deployment(Layout(1, 2)), delays=replace(DELAYS, drain_limit_s=600.0))
    run.at(0.0, lambda now_s: run.fleet.drain("decode-0", now_s, keep_standby=True))
    seen = run.watch("decode-0", 0.01)
    run.at(0.5, lambda now_s: run.fleet.wake("decode-0", Role.PREFILL, now_s))
    run.end(ROWS)
    assert seen == [State.STANDBY]
    assert run.states()["decode-0"] is State.READY
    (woken,) = [use for use in run.workers if use.worker_id == "decode-0"]
    assert (woken.role, woken.num_served > 0) == (Role.PREFILL, True)
    assert run.gpu_hours == pytest.approx(3 * run.simulation.clock.now_s / 3_600)


def test_a_flip_waits_until_what_runs_is_over_and_takes_the_limits_of_its_new_role() -> None:
    run = Run(deployment(Layout(1, 2)))
    run.at(0.5, lambda now_s: run.fleet.flip("decode-0", Role.PREFILL, now_s))
    seen = run.watch("decode-0", 0.5001)
    run.end(ROWS)
    assert seen == [State.FLIPPING]
    workers = {worker.worker_id: worker for worker in run.simulation.workers}
    assert workers["decode-0"].role is Role.PREFILL
    assert workers["decode-0"].tuning == workers["prefill-0"].tuning
    assert whole(run.calls)
    assert run.num_moved == 0


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_calls_of_a_worker_that_dies_go_on_elsewhere_and_none_is_lost(victim: str) -> None:
    run = Run(deployment(Layout(2, 2)))
    run.at(0.7, lambda now_s: run.fleet.kill(victim, now_s))
    seen = run.watch(victim, 1.0)
    run.end(ROWS)
    assert seen == [State.FAILED]
    assert run.states()[victim] is State.READY
    assert run.num_moved > 0
    assert len(run.calls) == len(ROWS)
    assert whole(run.calls)


def test_a_moved_call_pays_for_what_is_computed_again_in_one_long_gap() -> None:
    """It had some of its 300 tokens; the pause is the detection and a prefill of prompt and tokens."""
    slo = SLO("one", 60_000.0, 10_000.0, itl_p99_ms=150.0)
    run = Run(deployment(Layout(num_both=2)), Mix((slo,)), delays=replace(DELAYS, detect=Delay(0.2)))
    run.at(0.5, lambda now_s: run.fleet.kill("both-0", now_s))
    run.end([TraceRow(0.0, 1_000, 300)])
    (call,) = run.calls
    undisturbed = Run(deployment(Layout(num_both=2)), Mix((slo,)))
    undisturbed.end([TraceRow(0.0, 1_000, 300)])
    (whole_call,) = undisturbed.calls
    assert (call.num_moves, call.num_long_gaps, whole_call.num_long_gaps) == (1, 1, 0)
    assert call.end_s is not None
    assert whole_call.end_s is not None
    assert 0.2 < call.end_s - whole_call.end_s < 0.3
    assert call.first_s == whole_call.first_s


def test_calls_wait_for_a_worker_where_there_is_none_and_fail_at_their_deadline_where_none_comes() -> None:
    run = Run(deployment(Layout(num_both=1)), delays=replace(DELAYS, start_up=Delay(2.0), drain_limit_s=600.0))
    run.at(0.5, lambda now_s: run.fleet.drain("both-0", now_s))
    run.at(0.5, lambda now_s: run.fleet.create(Role.BOTH, now_s))
    run.end([TraceRow(0.0, 100, 5), TraceRow(1.0, 100, 5)])
    assert whole(run.calls)
    assert run.calls[1].first_s == pytest.approx(2.5, abs=0.1)
    alone = Run(deployment(Layout(num_both=1)))
    alone.at(0.5, lambda now_s: alone.fleet.drain("both-0", now_s))
    alone.end([TraceRow(0.0, 100, 5), TraceRow(1.0, 100, 5)])
    assert [call.verdict for call in alone.calls] == [Verdict.MET, Verdict.FAILED]
    assert alone.simulation.clock.now_s == pytest.approx(601.0)


def test_a_lowered_limit_holds_new_sequences_back_and_a_raised_one_lets_them_in() -> None:
    def most_at_once(limit: int) -> int:
        run, seen = Run(deployment(Layout(num_both=1))), [0]
        run.at(0.0, lambda now_s: run.fleet.tune("both-0", Tuning(limit, 2_048, 512), now_s))

        def look(now_s: float) -> list[Event]:
            seen.append(run.simulation.workers[0].num_running)
            return [Event(now_s + 0.01, look)]

        run.at(0.0, look)
        run.end(ROWS)
        return max(seen)

    assert most_at_once(4) == 4
    assert most_at_once(64) > 4


def test_new_targets_judge_the_calls_that_come_after_them() -> None:
    run = Run(deployment(Layout(num_both=1)))
    run.retarget(0.5, SLO("one", 1.0, 0.1))
    run.end([TraceRow(0.0, 500, 400), TraceRow(1.0, 500, 20)])
    assert {call.row.at_s: call.verdict for call in run.calls} == {0.0: Verdict.MET, 1.0: Verdict.TTFT}


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    run = Run(deployment(Layout(1, 1)))
    now_s, fleet = 0.0, run.fleet
    refused: list[tuple[Callable[[], Iterable[Event]], str]] = [
        (lambda: fleet.drain("nobody", now_s), "there is no worker nobody"),
        (lambda: fleet.wake("decode-0", Role.DECODE, now_s), "decode-0 is ready, not standby"),
        (lambda: fleet.undrain("decode-0", now_s), "not draining"),
        (lambda: fleet.flip("decode-0", Role.DECODE, now_s), "has the role decode already"),
        (lambda: fleet.give_up("decode-0", now_s), "not pending or standby or failed"),
        (lambda: fleet.tune("decode-0", Tuning(1_000, 2_048, 512), now_s), "max_num_seqs = 1000"),
    ]
    for act, message in refused:
        with pytest.raises(Refused, match=message):
            act()
    assert set(run.states().values()) == {State.READY}


# -- exactness -----------------------------------------------------------------------------------------------------------


@dataclass
class Acts:
    """A random schedule. What is done to whom is drawn from what is there at that moment."""

    seed: int
    done: list[str] = field(default_factory=list)

    def schedule(self, run: Run, num_acts: int, until_s: float) -> None:
        times = random.Random(f"{self.seed}/times")
        for number in range(num_acts):
            run.at(times.uniform(0.05, until_s), partial(self._act, run, number))

    def _act(self, run: Run, number: int, now_s: float) -> Iterable[Event]:
        rng, fleet = random.Random(f"{self.seed}/{number}"), run.fleet
        worker_id, role = rng.choice([*sorted(fleet.members), "nobody"]), rng.choice(list(Role))
        acts: dict[str, Callable[[], Iterable[Event]]] = {
            "create": lambda: fleet.create(role, now_s),
            "drain": lambda: fleet.drain(worker_id, now_s, keep_standby=rng.random() < 0.5),
            "undrain": lambda: fleet.undrain(worker_id, now_s),
            "flip": lambda: fleet.flip(worker_id, role, now_s),
            "wake": lambda: fleet.wake(worker_id, role, now_s),
            "give_up": lambda: fleet.give_up(worker_id, now_s),
            "kill": lambda: fleet.kill(worker_id, now_s),
            "tune": lambda: fleet.tune(worker_id, _tuning(rng), now_s),
            "local": lambda: self._local(run, rng),
            "slo": lambda: self._slo(run, rng),
        }
        name = rng.choice(["create", "drain", "drain", "wake", "flip", "flip", "kill", "tune", "tune", *acts])
        try:
            events = [*acts[name]()]
        except Refused as refused:
            self.done.append(f"{name}: {refused}")
            return ()
        self.done.append(f"{name} {worker_id} {role.name}")
        return events

    def _local(self, run: Run, rng: random.Random) -> Iterable[Event]:
        run.router.local_prefill_tokens = rng.choice((0, 300, 2_000))
        return ()

    def _slo(self, run: Run, rng: random.Random) -> Iterable[Event]:
        changed = replace(
            rng.choice((TIGHT, LOOSE)), itl_p99_ms=rng.choice((6.0, 9.0, 30.0)), ttft_ms=rng.choice((200.0, 900.0))
        )
        run.simulation.set_slo(changed)
        return ()


def _tuning(rng: random.Random) -> Tuning:
    tokens = rng.choice((256, 1_024, 2_048))
    return Tuning(rng.choice((4, 16, 64)), tokens, rng.choice((64, tokens // 2, tokens)))


def changing(layout: Layout, seed: int, *, fast: bool, num_calls: int, caches: bool) -> tuple[Run, Acts]:
    rows = load(num_calls, rate=50.0, seed=seed)
    shape = deployment(layout, max_pool_tokens=20_000)
    shape = replace(shape, engine=replace(shape.engine, prefix_cache=caches))
    run, acts = Run(shape, MIX, fast=fast), Acts(seed)
    acts.schedule(run, num_calls // 6, rows[-1].at_s + 1.0)
    run.end(rows)
    return run, acts


LAYOUTS = {"prefill and decode": Layout(2, 3), "colocated": Layout(num_both=3), "mixed": Layout(2, 2, 2)}


def assert_exact(layout: Layout, seed: int, num_calls: int, *, caches: bool = False) -> set[str]:
    """Returns what was done."""
    (fast, acts), (slow, others) = (
        changing(layout, seed, fast=fast, num_calls=num_calls, caches=caches) for fast in (True, False)
    )
    assert acts.done == others.done
    assert len(fast.calls) == num_calls
    assert sorted(call.seq for call in fast.calls) == sorted(call.seq for call in slow.calls)
    others_by_seq = {call.seq: call for call in slow.calls}
    for call in fast.calls:
        other = others_by_seq[call.seq]
        assert instants(call) == pytest.approx(instants(other), rel=SAME, abs=0.0)
        assert (call.verdict, call.num_long_gaps, call.num_moves) == (
            other.verdict,
            other.num_long_gaps,
            other.num_moves,
        )
    for one, two in zip(fast.workers, slow.workers, strict=True):
        assert (one.worker_id, one.role, one.num_steps, one.num_served, one.num_preemptions) == (
            two.worker_id,
            two.role,
            two.num_steps,
            two.num_served,
            two.num_preemptions,
        )
    assert fast.states() == slow.states()
    assert fast.gpu_hours == pytest.approx(slow.gpu_hours, rel=SAME)
    assert fast.simulation.clock.num_handled < slow.simulation.clock.num_handled
    moved = {"moved"} if fast.num_moved else set()
    return moved | {done.split()[0] for done in acts.done if ":" not in done}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_many_steps_at_once_stay_exact_while_the_fleet_changes(layout: Layout) -> None:
    done: set[str] = set()
    for seed in range(3):
        done |= assert_exact(layout, seed, 90, caches=seed % 2 == 1)
    assert done >= {"moved", "create", "drain", "flip", "kill", "tune"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.timeout(1_200)
def test_many_steps_at_once_stay_exact_over_sixty_schedules(layout: Layout) -> None:
    for seed in range(400, 460):
        assert_exact(layout, seed, 120, caches=seed % 2 == 1)
