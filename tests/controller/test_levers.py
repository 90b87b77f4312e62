"""Levers where workers are away, deaf or still flipping, machines slow, and orders come at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.request import Role
from baton.v1 import control_pb2
from router.controller import controller as controller_module
from router.controller.autoscaler.acts import Act, Create, Drain, Flip, GiveUp, Tune, Undrain, Wake
from router.controller.autoscaler.facts import Tuning
from router.controller.fleet_state import DRAINING, READY, STANDBY, STARTING, AfterDrain, Member
from router.controller.fleet_store import FleetStore
from router.controller.levers import Waits
from router.controller.pool_orders import Order
from router.controller.settings import Budget, Mode, PoolBounds
from tests.controller.control_rig import SHAPE, Machines, Rig, life, shape_of

SMALL = Tuning(max_num_seqs=4, max_num_batched_tokens=256, chunk_tokens=64)
ANN = Order("ann")
RESUMED_S = 0.4


@pytest.fixture
async def machines() -> AsyncIterator[Machines]:
    made = Machines()
    yield made
    await made.stop_all()


@pytest.fixture
async def rig(tmp_path: Path, machines: Machines) -> AsyncIterator[Rig]:
    async with life(tmp_path, machines, Mode.FROZEN) as made:
        yield made


@pytest.fixture
async def patient(tmp_path: Path, machines: Machines) -> AsyncIterator[Rig]:
    """One that waits before it ends a worker."""
    async with life(tmp_path, machines, Mode.FROZEN, waits=Waits(resumed_s=RESUMED_S)) as made:
        yield made


@pytest.fixture
def short_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_module, "_ORDER_S", 0.2)


def heard_by_a_router(rig: Rig, worker_id: str, state: str) -> None:
    view = control_pb2.WorkerView(worker_id=worker_id, state=state)
    rig.controller.report(control_pb2.RouterReport(router_id="router-0", workers=[view]))


async def pulled(rig: Rig, budget: Budget, *acts: Act) -> list[str]:
    """What came of acts at once: what was done, or why not."""
    outcomes = await asyncio.gather(*(rig.levers.pull(act, budget) for act in acts), return_exceptions=True)
    return [outcome.message if isinstance(outcome, BatonError) else str(outcome) for outcome in outcomes]


# -- away --------------------------------------------------------------------------------------------------------------


async def test_a_hiccup_of_its_session_does_not_end_a_draining_worker_with_its_calls(patient: Rig) -> None:
    worker = await patient.worker("decode-0", behaviour="working")
    await patient.orders.carry_out(Drain("decode-0"), ANN)
    await patient.hang_up("decode-0")
    await patient.ticks(2)
    worker.pick_up()
    await patient.until(lambda: patient.state("decode-0") == DRAINING)
    await asyncio.sleep(2 * RESUMED_S)
    assert (patient.ids(), worker.draining) == (["decode-0"], True)


async def test_a_worker_that_stays_away_is_ended_unless_a_router_hears_it(patient: Rig) -> None:
    await patient.worker("decode-0", behaviour="working")
    await patient.orders.carry_out(Drain("decode-0"), ANN)
    heard_by_a_router(patient, "decode-0", "draining")
    await patient.hang_up("decode-0")
    await asyncio.sleep(3 * RESUMED_S)
    assert patient.ids() == ["decode-0"]
    heard_by_a_router(patient, "decode-0", "connecting")
    await patient.until(lambda: patient.ids() == [])
    assert (await patient.decided("end decode-0")).reason.startswith("it was to leave, and is away")


async def test_who_has_only_just_gone_away_is_not_given_up(patient: Rig) -> None:
    await patient.worker("decode-0", behaviour="working")
    await patient.hang_up("decode-0")
    with pytest.raises(InvalidRequest, match="may come back"):
        await patient.orders.carry_out(GiveUp("decode-0"), ANN)
    heard_by_a_router(patient, "decode-0", "ready")
    await asyncio.sleep(2 * RESUMED_S)
    with pytest.raises(InvalidRequest, match="may come back"):
        await patient.orders.carry_out(GiveUp("decode-0"), ANN)
    heard_by_a_router(patient, "decode-0", "connecting")
    await patient.orders.carry_out(GiveUp("decode-0"), ANN)
    assert patient.ids() == []


async def test_an_undrain_while_its_session_is_away_is_told_when_it_is_back(rig: Rig) -> None:
    worker = await rig.worker("decode-0")
    await rig.controller.drain("decode-0", True)
    await rig.hang_up("decode-0")
    assert "told as soon as it answers" in await rig.orders.carry_out(Undrain("decode-0"), ANN)
    worker.pick_up()
    await rig.until(lambda: rig.state("decode-0") == READY and not worker.draining)
    assert (await rig.decisions())[-1].applied


async def test_who_was_let_go_while_away_drains_when_it_is_back(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    heard_by_a_router(rig, "decode-0", "ready")
    await rig.hang_up("decode-0")
    await rig.orders.carry_out(Drain("decode-0"), ANN)
    worker.pick_up()
    await rig.until(lambda: rig.state("decode-0") == DRAINING and worker.draining)


@pytest.mark.usefixtures("short_orders")
async def test_a_drain_that_is_not_heeded_in_time_is_said_to_be_under_way_and_told_again(rig: Rig) -> None:
    worker = await rig.worker("decode-0", behaviour="working")
    worker.is_deaf = True
    done = await rig.orders.carry_out(Drain("decode-0"), ANN)
    assert done.startswith("drain decode-0, then end it; it is told as soon as it answers (decode-0 did not comply")
    assert (rig.state("decode-0"), worker.draining, (await rig.decisions())[-1].applied) == (DRAINING, False, True)
    worker.is_deaf = False
    await rig.until(lambda: worker.draining)


@pytest.mark.usefixtures("short_orders")
async def test_a_standby_that_does_not_heed_its_wake_in_time_is_told_again(rig: Rig) -> None:
    worker = await rig.worker("decode-0")
    await rig.orders.carry_out(Drain("decode-0", keep_standby=True), ANN)
    await rig.until(lambda: rig.state("decode-0") == STANDBY)
    worker.is_deaf = True
    with pytest.raises(Unavailable):
        await rig.orders.carry_out(Wake("decode-0", Role.PREFILL), ANN)
    assert (rig.state("decode-0"), rig.controller.fleet.get("decode-0").role) == (STANDBY, Role.DECODE)
    await rig.orders.carry_out(Wake("decode-0", Role.DECODE), ANN)
    worker.is_deaf = False
    await rig.until(lambda: not worker.draining)


@pytest.mark.usefixtures("short_orders")
async def test_a_worker_that_does_not_heed_its_tuning_in_time_is_told_to_keep_what_it_had(rig: Rig) -> None:
    worker = await rig.worker("decode-0")
    worker.is_deaf = True
    before = worker.heard_tunes[:]
    with pytest.raises(Unavailable):
        await rig.orders.carry_out(Tune("decode-0", SMALL), ANN)
    await rig.until(lambda: len(worker.heard_tunes) == len(before) + 2)
    assert [tune.max_num_seqs for tune in worker.heard_tunes[-2:]] == [SMALL.max_num_seqs, worker._load.max_num_seqs]
    assert rig.controller.fleet.get("decode-0").tuning is None


async def test_role_and_tuning_are_told_again_where_reports_do_not_show_them(rig: Rig) -> None:
    worker = await rig.worker("decode-0")
    rig.controller.fleet.want_role("decode-0", Role.PREFILL)
    rig.controller.fleet.want_tuning("decode-0", SMALL)

    def is_told() -> bool:
        view = rig.controller.view("decode-0")
        return view is not None and view.load.chunk_tokens == 64 and worker.role is Role.PREFILL

    await rig.until(is_told)


async def test_a_worker_that_drains_by_itself_is_not_told_otherwise(rig: Rig) -> None:
    worker = await rig.worker("decode-0")
    await rig.until(lambda: not rig.controller._undrained)
    worker._load.draining = worker._wants_drain = True  # its platform stops it
    await asyncio.sleep(2.5)  # two rounds of reminders
    assert worker.draining


# -- at once -----------------------------------------------------------------------------------------------------------


async def slow_get(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    get = machines.get

    async def slowly(shape: str) -> object:
        await asyncio.sleep(0.05)
        return await get(shape)

    monkeypatch.setattr(machines, "get", slowly)


async def test_two_drains_at_once_leave_as_many_as_have_to_serve(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.worker("decode-0", behaviour="working")
    await rig.worker("decode-1", behaviour="working")
    await slow_get(rig.machines, monkeypatch)
    budget = Budget(decode=PoolBounds(min_workers=1))
    done = await pulled(rig, budget, Drain("decode-0"), Drain("decode-1"))
    assert done == ["drain decode-0, then end it", "decode.min_workers = 1: 1 are there"]
    assert [rig.state(name) for name in rig.ids()] == [DRAINING, READY]


async def test_two_creates_at_once_keep_within_the_budget(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await slow_get(rig.machines, monkeypatch)
    create = Create(Role.PREFILL, SHAPE)
    done = await pulled(rig, Budget(max_gpus=1), create, create)
    assert done == ["create prefill-0", "max_gpus = 1: one more worker makes 2"]


async def test_two_orders_to_one_size_at_once_make_that_size(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await slow_get(rig.machines, monkeypatch)
    done = await asyncio.gather(*(rig.orders.scale(Role.DECODE, 2, ANN) for _ in range(2)))
    assert done == [["create decode-0", "create decode-1"], []]


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_an_end_under_way_is_not_taken_back_and_goes_on_where_machines_do_not_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.worker("decode-0")
    await rig.worker("decode-1")
    asked = asyncio.Event()
    scale_down, is_away = rig.machines.scale_down, True

    async def slowly(worker_id: str) -> None:
        asked.set()
        if is_away:
            raise Unavailable("machines are away")
        await scale_down(worker_id)

    monkeypatch.setattr(rig.machines, "scale_down", slowly)
    await rig.orders.carry_out(Drain("decode-0"), ANN)
    await asyncio.wait_for(asked.wait(), 10)
    for act in (Undrain("decode-0"), Wake("decode-0", Role.DECODE), Flip("decode-0", Role.BOTH), Drain("decode-0")):
        with pytest.raises(InvalidRequest, match="is being ended"):
            await rig.orders.carry_out(act, ANN)
    for draining in (True, False):
        with pytest.raises(InvalidRequest, match="is being ended"):
            await rig.controller.drain("decode-0", draining)
    assert worker.draining
    assert await rig.orders.scale(Role.DECODE, 2, ANN) == ["create decode-2"], "it does not come back for that either"
    is_away = False
    await rig.until(lambda: rig.ids() == ["decode-1", "decode-2"])


async def test_a_standby_given_up_while_machines_are_away_is_ended_when_they_are_back(rig: Rig) -> None:
    await rig.worker("decode-0")
    await rig.orders.carry_out(Drain("decode-0", keep_standby=True), ANN)
    await rig.until(lambda: rig.state("decode-0") == STANDBY)
    rig.machines.are_away = True
    assert "as soon as machines answer" in await rig.orders.carry_out(GiveUp("decode-0"), ANN)
    rig.machines.are_away = False
    await rig.until(lambda: rig.ids() == [])


async def test_an_end_that_fails_does_not_hold_up_the_others(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_down = rig.machines.scale_down

    async def of_one_only(worker_id: str) -> None:
        if worker_id == "decode-0":
            raise Unavailable("its machine does not answer")
        await scale_down(worker_id)

    monkeypatch.setattr(rig.machines, "scale_down", of_one_only)
    for name in ("decode-0", "decode-1"):
        await rig.worker(name)
        await rig.orders.carry_out(Drain(name), ANN)
    await rig.until(lambda: rig.ids() == ["decode-0"])
    await rig.until(lambda: 'failed_ticks_total{error="Unavailable"}' in rig.metrics())


async def test_a_second_drain_has_all_of_its_time(tmp_path: Path, machines: Machines) -> None:
    async with life(tmp_path, machines, Mode.FROZEN, waits=Waits(drain_s=1.0, resumed_s=0.0)) as rig:
        await rig.worker("decode-0", behaviour="working")
        await rig.orders.carry_out(Drain("decode-0"), ANN)
        await asyncio.sleep(0.7)
        async with rig.levers.alone:  # no look falls in between
            budget = Budget()
            await rig.levers.pull_alone(Undrain("decode-0"), budget)
            await rig.levers.pull_alone(Drain("decode-0"), budget)
        await asyncio.sleep(0.7)
        assert rig.ids() == ["decode-0"]
        await rig.until(lambda: rig.ids() == [])


async def test_each_role_has_a_drain_of_its_own(tmp_path: Path, machines: Machines) -> None:
    waits = Waits(drain_s=600.0, resumed_s=0.0, drain_s_by_role={Role.PREFILL: 0.0})
    async with life(tmp_path, machines, Mode.FROZEN, waits=waits) as rig:
        for role in ("decode", "prefill"):
            await rig.worker(f"{role}-0", role, behaviour="working")
            await rig.orders.carry_out(Drain(f"{role}-0"), ANN)
        await rig.until(lambda: rig.ids() == ["decode-0"])


async def test_configured_workers_that_are_not_up_yet_leave_first_when_a_pool_shrinks(rig: Rig) -> None:
    await rig.worker("decode-0")
    rig.controller.expect("decode-1", Role.DECODE, SHAPE)
    assert rig.state("decode-1") == STARTING
    assert await rig.orders.scale(Role.DECODE, 1, ANN) == ["drain decode-1, then end it"]
    await rig.until(lambda: rig.ids() == ["decode-0"])
    assert rig.state("decode-0") == READY


# -- limits ------------------------------------------------------------------------------------------------------------


async def test_who_still_flips_in_does_not_count_as_serving(rig: Rig) -> None:
    await rig.worker("decode-0", behaviour="working")
    flipping = await rig.worker("prefill-0", "prefill", "working")
    await rig.levers.pull(Flip("prefill-0", Role.DECODE), Budget())
    budget = Budget(decode=PoolBounds(min_workers=1))
    with pytest.raises(InvalidRequest, match="1 are there"):
        await rig.levers.pull(Drain("decode-0"), budget)
    flipping.finish()
    await rig.until(lambda: flipping.role is Role.DECODE)
    await asyncio.sleep(0.3)  # until it has said so
    await rig.levers.pull(Drain("decode-0"), budget)


async def test_flips_wakes_and_undrains_keep_to_the_taker_s_limits_and_shape(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.worker("decode-0")
    await rig.worker("decode-1", behaviour="working")
    await rig.worker("decode-2")
    await rig.levers.pull(Drain("decode-2", keep_standby=True), Budget())
    await rig.until(lambda: rig.state("decode-2") == STANDBY)
    no_prefill = Budget(prefill=PoolBounds(max_workers=0))
    with pytest.raises(InvalidRequest, match=r"prefill\.max_workers = 0"):
        await rig.levers.pull(Flip("decode-0", Role.PREFILL), no_prefill)
    with pytest.raises(InvalidRequest, match=r"prefill\.max_workers = 0"):
        await rig.levers.pull(Wake("decode-2", Role.PREFILL), no_prefill)
    await rig.levers.pull(Drain("decode-1"), Budget())
    with pytest.raises(InvalidRequest, match=r"decode\.max_workers = 1"):
        await rig.levers.pull(Undrain("decode-1"), Budget(decode=PoolBounds(max_workers=1)))
    with pytest.raises(InvalidRequest, match="max_gpus = 2: with this worker 3 stay"):
        await rig.levers.pull(Undrain("decode-1"), Budget(max_gpus=2))
    monkeypatch.setattr(rig.machines, "shape_of", lambda role: "fp8" if role is Role.PREFILL else shape_of(role))
    for act in (Flip("decode-0", Role.PREFILL), Wake("decode-2", Role.PREFILL)):
        with pytest.raises(InvalidRequest, match="prefill workers are 'fp8'"):
            await rig.levers.pull(act, Budget())
    await rig.levers.pull(Undrain("decode-1"), Budget(max_gpus=3))
    await rig.levers.pull(Wake("decode-2", Role.DECODE), Budget(max_gpus=3))


async def test_who_does_not_lead_takes_no_orders(tmp_path: Path, machines: Machines) -> None:
    others = Machines()
    async with life(tmp_path, machines, Mode.FROZEN), life(tmp_path, others, Mode.FROZEN, holder="second") as second:
        with pytest.raises(Unavailable, match="does not lead"):
            await second.orders.carry_out(Create(Role.DECODE, SHAPE), ANN)
        with pytest.raises(Unavailable, match="does not lead"):
            await second.orders.scale(Role.DECODE, 1, ANN)
        assert second.ids() == []


async def test_who_does_not_lead_tells_workers_nothing_by_whatever_way(
    tmp_path: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "_MEASURE_S", 0.02)  # and what is wanted is told again
    others = Machines()
    async with life(tmp_path, machines, Mode.FROZEN), life(tmp_path, others, Mode.FROZEN, holder="second") as second:
        worker, controller = await second.worker("decode-0"), second.controller
        orders = (
            controller.drain("decode-0", True),
            controller.drain("decode-0", False),
            controller.set_role("decode-0", Role.PREFILL),
            controller.tune("decode-0", SMALL),
        )
        for order in orders:
            with pytest.raises(Unavailable, match="does not lead: first does"):
                await order
        for end in (controller.let_go, controller.begin_end):
            with pytest.raises(Unavailable, match="does not lead: first does"):
                end("decode-0")
        assert not controller.is_ending("decode-0")
        member = controller.fleet.get("decode-0")
        assert (member.draining, member.role, member.tuning) == (False, Role.DECODE, None)
        controller.fleet.want_tuning("decode-0", SMALL)  # as from a file that is old by now
        await asyncio.sleep(0.2)
        assert worker.heard_tunes == []
    await others.stop_all()


async def test_what_was_answered_is_on_disk_and_a_disk_that_takes_nothing_stops_no_order(
    tmp_path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = FleetStore(tmp_path / "fleet.json")
    await rig.worker("prefill-0", "prefill")
    await rig.worker("decode-0")
    await rig.levers.pull(Create(Role.DECODE, SHAPE), Budget())
    assert "decode-1" in {m.worker_id for m in fleets.load().members}

    def kept(worker_id: str) -> Member:
        return next(m for m in fleets.load().members if m.worker_id == worker_id)

    await rig.levers.pull(Tune("decode-0", SMALL), Budget())
    assert kept("decode-0").tuning == SMALL
    await rig.levers.pull(Drain("decode-0", keep_standby=True), Budget())
    assert kept("decode-0").after_drain is AfterDrain.STANDBY
    await rig.levers.pull(Flip("prefill-0", Role.BOTH), Budget())
    assert kept("prefill-0").role is Role.BOTH

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(controller_module, "_KEEP_S", 0.05)
    monkeypatch.setattr(FleetStore, "save", full)
    await rig.levers.pull(Drain("prefill-0"), Budget())
    assert rig.state("prefill-0") == DRAINING
