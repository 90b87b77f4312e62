"""The live loop over a real controller and stand-in workers: modes, levers, refusals, deaths, successors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.errors import InvalidRequest
from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.acts import Create, Drain, Flip, GiveUp, LocalPrefill, Tune, Undrain, Wake
from router.controller.autoscaler.facts import State, Tuning
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY
from router.controller.fleet_store import FleetStore
from router.controller.pool_orders import Order
from router.controller.settings import Budget, Mode, PoolBounds
from tests.controller.control_rig import SHAPE, Machines, Rig, life

SMALL = Tuning(max_num_seqs=4, max_num_batched_tokens=256, chunk_tokens=64)
ANN = Order("ann")


@pytest.fixture
async def machines() -> AsyncIterator[Machines]:
    made = Machines()
    yield made
    await made.stop_all()


@pytest.fixture
async def rig(tmp_path: Path, machines: Machines) -> AsyncIterator[Rig]:
    async with life(tmp_path, machines) as made:
        yield made


# -- modes and budget --------------------------------------------------------------------------------------------------


async def test_in_mode_auto_each_lever_is_pulled_and_written_down_with_its_reason(rig: Rig) -> None:
    await rig.worker("decode-0")
    decode = await rig.worker("decode-1")
    rig.scaler.acts = [
        Tune("decode-0", SMALL),
        LocalPrefill(512),
        Flip("decode-1", Role.PREFILL),
        Create(Role.DECODE, SHAPE),
    ]
    await rig.decided("create decode-2")
    rig.scaler.acts = []
    state = await anext(rig.controller.watch())
    assert state.local_prefill_tokens == 512
    view = rig.controller.view("decode-0")
    assert view is not None
    assert (view.load.max_num_seqs, view.load.chunk_tokens) == (4, 64)
    assert decode.role is Role.PREFILL
    decisions = await rig.decisions()
    assert [d.action for d in decisions if d.applied][:4] == [
        "tune decode-0 to 4 sequences, 256 tokens a step, chunks of 64",
        "prefill up to 512 tokens where they decode",
        "flip decode-1 to prefill",
        "create decode-2",
    ]
    assert decisions[0].reason == "because the test says so"
    assert decisions[0].inputs == {"rate_per_s": 1.0}
    assert 'baton_autoscaler_decisions_total{lever="create",applied="true"} 1.0' in rig.metrics()
    assert 'baton_pool_size{role="decode",state="ready"} 2.0' in rig.metrics()


async def test_in_mode_advisory_nothing_is_done_and_what_stands_is_written_once(
    tmp_path: Path, machines: Machines
) -> None:
    async with life(tmp_path, machines, Mode.ADVISORY) as rig:
        await rig.worker("decode-0")
        rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
        await rig.ticks(3)
        [decision] = await rig.decisions()
        assert (decision.action, decision.applied) == ("create a decode worker on cpu", False)
        assert decision.inputs["not_done"] == "mode is advisory"
        rig.scaler.acts = [Flip("decode-0", Role.BOTH)]
        await rig.ticks(2)
        rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
        await rig.ticks(2)
        assert [d.lever for d in await rig.decisions()] == ["create", "flip", "create"]
        assert rig.ids() == ["decode-0"]


async def test_in_mode_frozen_nothing_is_done_or_written_but_the_scaler_is_told_of_each_tick(
    tmp_path: Path, machines: Machines
) -> None:
    async with life(tmp_path, machines, Mode.FROZEN) as rig:
        rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
        await rig.ticks(3)
        assert await rig.decisions() == []
        assert rig.ids() == []


async def test_a_change_of_mode_budget_or_targets_does_not_wait_for_the_next_tick(
    tmp_path: Path, machines: Machines
) -> None:
    async with life(tmp_path, machines, Mode.FROZEN, tick_s=1_000.0) as rig:
        rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
        await rig.until(lambda: len(rig.scaler.looks) == 1)
        await rig.controller.in_force.slo.put(1, (SLO("interactive", 10.0, 1.0),), "ann", "")
        await rig.until(lambda: len(rig.scaler.looks) == 2)
        assert [traffic.slo.ttft_ms for traffic in rig.scaler.looks[1].classes] == [10.0]
        live = rig.controller.in_force.settings
        await live.put(live.revision.version, replace(live.revision.value, budget=Budget(max_gpus=5)), "ann", "")
        await rig.until(lambda: len(rig.scaler.looks) == 3)
        assert rig.scaler.looks[2].budget.max_gpus == 5
        await rig.mode(Mode.AUTO)
        await rig.until(lambda: rig.ids() == ["decode-0"])


async def test_no_lever_goes_beyond_the_budget(rig: Rig) -> None:
    await rig.worker("decode-0")
    live = rig.controller.in_force.settings
    budget = Budget(max_gpus=1, decode=PoolBounds(min_workers=1))
    await live.put(live.revision.version, replace(live.revision.value, budget=budget), "ann", "night")
    rig.scaler.acts = [Create(Role.PREFILL, SHAPE), Flip("decode-0", Role.PREFILL), Drain("decode-0")]
    await rig.ticks(2)
    assert [d.inputs["not_done"] for d in await rig.decisions()] == [
        "max_gpus = 1: one more worker makes 2",
        "decode.min_workers = 1: 1 are there",
        "decode.min_workers = 1: 1 are there",
    ]
    assert (rig.ids(), rig.state("decode-0")) == (["decode-0"], READY)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_a_lever_that_fails_says_so_and_the_rest_goes_on(rig: Rig) -> None:
    await rig.worker("decode-0", behaviour="busy")
    rig.scaler.acts = [
        Flip("decode-0", Role.BOTH),
        Tune("decode-0", replace(SMALL, max_num_seqs=10_000)),
        Flip("nobody", Role.BOTH),
        LocalPrefill(64),
    ]
    await rig.until(lambda: rig.controller.fleet.local_prefill_tokens == 64)
    await rig.ticks(1)
    why = [d.inputs.get("not_done") for d in await rig.decisions()][:4]
    assert why[:2] == ["2 sequences are open", "max_num_seqs is too much"]
    assert str(why[2]).startswith("no worker 'nobody'")
    assert why[3] is None
    assert 'baton_autoscaler_decisions_total{lever="flip",applied="false"}' in rig.metrics()


async def test_an_error_of_one_tick_is_counted_and_the_loop_goes_on(rig: Rig) -> None:
    rig.scaler.failure = RuntimeError("a defect")
    await rig.ticks(2)
    assert rig.loop.tick_age_s > 0
    rig.scaler.failure = None
    rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
    await rig.until(lambda: "decode-0" in rig.ids())
    assert 'baton_autoscaler_failed_ticks_total{error="RuntimeError"}' in rig.metrics()


async def test_a_worker_that_never_comes_is_given_up_and_its_name_is_not_used_again(rig: Rig) -> None:
    rig.machines.starts = False
    rig.scaler.acts = [Create(Role.DECODE, SHAPE)]
    await rig.until(lambda: rig.ids() == ["decode-0"])
    rig.scaler.acts = []
    await rig.ticks(1)
    assert rig.scaler.looks[-1].workers[0].state is State.PENDING
    for worker_id in rig.ids():  # a second one may have been asked for meanwhile
        rig.controller.start_failed(worker_id, 0, "Ray cannot place it")
    await rig.until(lambda: rig.ids() == [])
    assert (await rig.decided("end decode-0")).reason == "it did not come up: Ray cannot place it"
    rig.machines.starts = True
    names = await rig.orders.scale(Role.DECODE, 1, ANN)
    assert names not in (["create decode-0"], [])
    with pytest.raises(Exception, match="decode-0 was ended"):
        await rig.machines.start("decode-0")


async def test_a_worker_that_dies_while_it_flips_comes_back_in_its_new_role(rig: Rig) -> None:
    flipping = await rig.worker("decode-0", behaviour="working")
    await rig.orders.carry_out(Flip("decode-0", Role.PREFILL), ANN)
    await rig.ticks(1)
    assert rig.scaler.looks[-1].workers[0].state is State.FLIPPING
    assert (flipping.role, rig.controller.fleet.get("decode-0").role) == (Role.DECODE, Role.PREFILL)
    await rig.machines.stop("decode-0")
    await rig.until(lambda: rig.state("decode-0") == "failed")
    again = await rig.machines.start("decode-0")
    await rig.until(lambda: rig.state("decode-0") == READY)
    assert again.role is Role.PREFILL


async def test_while_machines_are_away_what_they_must_do_waits_and_the_rest_goes_on(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    await rig.orders.carry_out(Drain("decode-0"), ANN)
    rig.machines.are_away = True
    worker.finish()
    rig.scaler.acts = [Create(Role.DECODE, SHAPE), LocalPrefill(7)]
    await rig.until(lambda: rig.controller.fleet.local_prefill_tokens == 7)
    await rig.ticks(2)
    assert (rig.ids(), rig.scaler.looks[-1].spare_gpus) == (["decode-0"], None)
    rig.scaler.acts = []
    rig.machines.are_away = False
    await rig.until(lambda: rig.ids() == [])


# -- drains ------------------------------------------------------------------------------------------------------------


async def test_a_drained_worker_ends_once_nothing_is_open_there(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    await rig.orders.carry_out(Drain("decode-0"), ANN)
    await rig.ticks(3)
    assert (rig.state("decode-0"), "decode-0" in rig.machines.servers) == (DRAINING, True)
    worker.finish()
    await rig.until(lambda: rig.ids() == [])
    assert rig.machines.servers == {}
    assert (await rig.decided("end decode-0")).reason == "it has drained"


async def test_a_worker_that_was_to_leave_is_kept_where_it_is_wanted_after_all(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    await rig.orders.carry_out(Drain("decode-0"), ANN)
    await rig.orders.carry_out(Undrain("decode-0"), ANN)
    worker.finish()
    await rig.ticks(3)
    assert (rig.state("decode-0"), worker.draining) == (READY, False)


async def test_a_standby_waits_without_work_and_wakes_in_the_role_that_is_wanted(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    await rig.orders.carry_out(Drain("decode-0", keep_standby=True), ANN)
    await rig.ticks(2)
    assert rig.state("decode-0") == DRAINING
    worker.finish()
    await rig.until(lambda: rig.state("decode-0") == STANDBY)
    await rig.ticks(1)
    assert rig.scaler.looks[-1].workers[0].state is State.STANDBY
    await rig.orders.carry_out(Wake("decode-0", Role.PREFILL), ANN)
    assert (rig.state("decode-0"), worker.role, worker.draining) == (READY, Role.PREFILL, False)


async def test_a_standby_that_nobody_needs_is_ended_at_once_and_one_that_serves_is_not(rig: Rig) -> None:
    await rig.worker("decode-0")
    await rig.worker("decode-1")
    await rig.orders.carry_out(Drain("decode-0", keep_standby=True), ANN)
    await rig.until(lambda: rig.state("decode-0") == STANDBY)
    await rig.orders.carry_out(GiveUp("decode-0"), ANN)
    with pytest.raises(InvalidRequest, match="drain it first"):
        await rig.orders.carry_out(GiveUp("decode-1"), ANN)
    assert rig.ids() == ["decode-1"]


async def test_a_worker_that_is_away_may_be_given_up_and_a_configured_one_that_is_only_late_may_not(rig: Rig) -> None:
    rig.controller.expect("late-0", Role.DECODE, SHAPE)
    await rig.worker("decode-0")
    await rig.machines.stop("decode-0")
    await rig.until(lambda: rig.state("decode-0") == FAILED)
    await rig.orders.carry_out(GiveUp("decode-0"), ANN)
    with pytest.raises(InvalidRequest, match="tried again for ever"):
        await rig.orders.carry_out(GiveUp("late-0"), ANN)
    assert rig.ids() == ["late-0"]


# -- other controllers -------------------------------------------------------------------------------------------------


async def test_a_drain_goes_on_under_the_next_controller(tmp_path: Path, machines: Machines) -> None:
    async with life(tmp_path, machines) as rig:
        port = int(machines.address.rpartition(":")[2])
        worker = await rig.worker("decode-0", behaviour="working")
        await rig.worker("decode-1")
        await rig.orders.carry_out(Drain("decode-0"), ANN)
        await rig.orders.carry_out(Tune("decode-1", SMALL), ANN)
        await rig.until(lambda: any(m.tuning == SMALL for m in FleetStore(tmp_path / "fleet.json").load().members))
    assert machines.servers.keys() == {"decode-0", "decode-1"}
    async with life(tmp_path, machines, port=port) as again:
        await again.until(lambda: again.controller.view("decode-0") is not None)
        assert again.state("decode-0") == DRAINING
        worker.finish()
        await again.until(lambda: again.ids() == ["decode-1"])
        assert machines.servers.keys() == {"decode-1"}
        assert again.controller.fleet.get("decode-1").tuning == SMALL
        assert again.controller.fleet.new_name(Role.DECODE) == "decode-2"


async def test_of_two_controllers_on_one_database_one_acts_and_the_other_takes_over_when_it_stops(
    tmp_path: Path, machines: Machines
) -> None:
    others = Machines()
    async with life(tmp_path, machines) as first:
        await first.until(lambda: first.loop.leads)
        async with life(tmp_path, others, holder="second") as second:
            second.scaler.acts = [Create(Role.DECODE, SHAPE)]
            await second.ticks(2)
            assert (second.loop.leads, second.ids()) == (False, [])
            assert "does not lead: first does" in str((await second.decisions())[-1].inputs["not_done"])
            await first.loop.close()
            await second.until(lambda: second.loop.leads or first.loop.leads)
    await others.stop_all()
