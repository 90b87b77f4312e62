"""The workers of one machine over a stand-in for Ray: who is started, tried again, given up, and what a stop leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.config import ClusterConfig, ControllerConfig, WorkerConfig
from baton.errors import ConfigError, InvalidRequest, Unavailable
from baton.request import Role
from router.controller import pools, ray_actors, ray_fleet
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.fleet_state import FAILED, AfterDrain, Announcement
from router.controller.fleet_store import FleetStore
from router.controller.pools import Placement, RayPools
from router.controller.ray_fleet import RayFleet

CLUSTER = ClusterConfig(prefill=1, decode=2, controller=ControllerConfig(standby=1))


class FakeRay:
    """Starts succeed at once, fail, or hang until their worker is killed."""

    def __init__(self) -> None:
        self.num = 8
        self.started: list[str] = []
        self.ended: list[str] = []
        self.hangs = False
        self.fails = False
        self.raises: Exception | None = None  # by each call
        self.slow: set[str] = set()  # workers whose start hangs, others' do not
        self._killed = threading.Event()

    def start(self, config: WorkerConfig) -> str:
        self.started.append(config.worker_id)
        if self.raises:
            raise self.raises
        if hangs := self.hangs or config.worker_id in self.slow:
            assert self._killed.wait(10)
        if hangs or self.fails:
            raise ConfigError("Ray cannot place it")
        return "127.0.0.1:1"

    def kill(self, worker_id: str, *, is_starting: bool) -> None:
        if self.raises:
            raise self.raises
        self.ended.append(worker_id)
        self._killed.set()

    def num_places(self) -> int:
        if self.raises:
            raise self.raises
        return self.num

    def check_fits(self, num_workers: int) -> None: ...

    def close(self) -> None: ...


def controller_of(folder: Path) -> Controller:
    return Controller(
        ControllerConfig(), ControlStore(SQLite(folder / "slo"), lambda: 7.0), FleetStore(folder / "fleet")
    )


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    made = controller_of(tmp_path)
    yield made
    await made.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def fleet_of(controller: Controller, ray: FakeRay, cluster: ClusterConfig = CLUSTER) -> RayFleet:
    return RayFleet(controller, cluster, "127.0.0.1:1", lambda _: ray)


async def test_a_new_fleet_is_the_configured_pools_and_their_standbys(controller: Controller) -> None:
    ray = FakeRay()
    fleet = fleet_of(controller, ray)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(ray.started) == 4)
    members = controller.fleet.members()
    assert [(m.worker_id, m.after_drain) for m in members if m.draining] == [("decode-2", AfterDrain.STANDBY)]
    assert sorted(ray.started) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert {m.shape for m in members} == {"cpu"}
    running.cancel()
    await fleet.stop()
    assert sorted(ray.ended) == sorted(ray.started)


async def test_a_successor_starts_what_there_was_and_not_what_is_configured(tmp_path: Path) -> None:
    first = controller_of(tmp_path)
    fleet_of(first, FakeRay())
    first.forget("decode-1")
    async with asyncio.timeout(10):
        while len(FleetStore(tmp_path / "fleet").load().members) != 3:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.01)
    await first.close()
    second, ray = controller_of(tmp_path), FakeRay()
    running = asyncio.create_task(fleet_of(second, ray).start_and_revive())
    await until(lambda: len(ray.started) == 3)
    assert sorted(ray.started) == ["decode-0", "decode-2", "prefill-0"]
    assert second.fleet.new_name(Role.DECODE) == "decode-3"
    running.cancel()
    await second.close()


async def test_one_more_worker_has_a_name_of_its_own_and_fits_or_is_refused(controller: Controller) -> None:
    ray = FakeRay()
    fleet = fleet_of(controller, ray)
    with pytest.raises(Unavailable, match="Ray is away"):
        await fleet.scale_up(Role.DECODE, "cpu")
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(ray.started) == 4)
    with pytest.raises(InvalidRequest, match="no '8xh100' here"):
        await fleet.scale_up(Role.DECODE, "8xh100")
    assert await fleet.scale_up(Role.DECODE, "cpu") == "decode-3"
    size = await fleet.get("cpu")
    assert (size.desired, size.spare, len(size.pending)) == (5, 3, 5)
    ray.num = 5
    with pytest.raises(Unavailable, match="no room"):
        await fleet.scale_up(Role.DECODE, "cpu")
    running.cancel()


async def test_while_ray_hangs_nobody_waits_for_it_long_and_the_same_is_asked_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actors, "_ASK_S", 0.05)
    ray, comes_back, num_asked = FakeRay(), threading.Event(), 0

    def hangs() -> int:
        nonlocal num_asked
        num_asked += 1
        assert comes_back.wait(10)
        return 8

    fleet = fleet_of(controller, ray)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(ray.started) == 4)
    monkeypatch.setattr(ray, "num_places", hangs)
    for _ in range(3):
        with pytest.raises(Unavailable, match="did not answer"):
            await fleet.get("cpu")
    comes_back.set()
    await until(lambda: not fleet._actors._open)
    assert ((await fleet.get("cpu")).spare, num_asked) == (4, 2)
    running.cancel()


async def test_a_configured_worker_is_tried_again_and_one_that_was_asked_for_is_not(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    ray = FakeRay()
    fleet = fleet_of(controller, ray, replace(CLUSTER, prefill=0, decode=1, controller=ControllerConfig()))
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: ray.started == ["decode-0"])
    ray.fails = True
    asked = await fleet.scale_up(Role.PREFILL, "cpu")
    await until(lambda: controller.fleet.get(asked).state == FAILED)
    controller.start_failed("decode-0", 0, "a test")
    await until(lambda: ray.started.count("decode-0") > 3)
    assert ray.started.count(asked) == 1
    controller.announce(Announcement("decode-0", 1, "127.0.0.1:1", Role.DECODE, pid=1))
    running.cancel()


async def test_a_stop_while_a_worker_is_being_started_ends_it_too(controller: Controller) -> None:
    ray = FakeRay()
    fleet = fleet_of(controller, ray, replace(CLUSTER, prefill=0, decode=1, controller=ControllerConfig()))
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: ray.started == ["decode-0"])
    ray.hangs = True
    asked = await fleet.scale_up(Role.PREFILL, "cpu")
    await until(lambda: asked in ray.started)
    running.cancel()
    await fleet.stop()
    assert asked in ray.ended


class RayOdd(Exception):
    """Of a class that nobody here knows."""


@pytest.mark.parametrize("raised", [RayOdd("the head hung up"), RuntimeError("no such actor"), ConnectionError("away")])
async def test_whatever_ray_raises_is_unavailable_and_ends_neither_reviving_nor_stopping(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    ray = FakeRay()
    fleet = fleet_of(controller, ray, replace(CLUSTER, prefill=0, decode=1, controller=ControllerConfig()))
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: ray.started == ["decode-0"])
    ray.raises = raised
    controller.start_failed("decode-0", 0, "a test")
    await until(lambda: ray.started.count("decode-0") > 3)
    assert str(raised) in controller.fleet.get("decode-0").reason
    for asked in (fleet.get("cpu"), fleet.scale_up(Role.DECODE, "cpu"), fleet.scale_down("decode-0")):
        with pytest.raises(Unavailable, match=str(raised)):
            await asked
    assert not running.done()
    running.cancel()
    await fleet.stop()


async def test_ray_that_cannot_be_connected_to_is_asked_again(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    ray, failures = FakeRay(), [RayOdd("no GCS"), ConnectionError("away"), RuntimeError("half")]

    def connect(_: ClusterConfig) -> FakeRay:
        if failures:
            raise failures.pop()
        return ray

    fleet = RayFleet(controller, CLUSTER, "127.0.0.1:1", connect)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(set(ray.started)) == 4)
    running.cancel()
    await fleet.stop()


async def test_a_start_that_ends_by_a_defect_is_a_failed_worker_and_is_tried_again(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    ray, make, num_defects = FakeRay(), ray_fleet.WorkerConfigs.__call__, 2

    def breaks(configs: ray_fleet.WorkerConfigs, worker_id: str, role: Role) -> WorkerConfig:
        nonlocal num_defects
        if worker_id == "decode-0" and num_defects:
            num_defects -= 1
            raise KeyError("a defect")
        return make(configs, worker_id, role)

    monkeypatch.setattr(ray_fleet.WorkerConfigs, "__call__", breaks)
    fleet = fleet_of(controller, ray)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: controller.fleet.get("decode-0").state == FAILED)
    assert "a defect" in controller.fleet.get("decode-0").reason
    await until(lambda: "decode-0" in ray.started)
    assert caplog.text.count("start_raised") == 2
    running.cancel()
    await fleet.stop()


async def test_a_connection_to_a_ray_that_is_too_small_is_closed_before_the_next_one(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    num_open = num_asked = 0

    class Small(FakeRay):
        def check_fits(self, num_workers: int) -> None:
            nonlocal num_asked
            num_asked += 1
            if num_asked < 3:
                raise ConfigError("Ray cannot place 4 workers")

        def close(self) -> None:
            nonlocal num_open
            num_open -= 1

    def connect(_: ClusterConfig) -> FakeRay:
        nonlocal num_open
        assert num_open == 0, "as ray.init, which refuses to be called twice"
        num_open += 1
        return Small()

    fleet = RayFleet(controller, CLUSTER, "127.0.0.1:1", connect)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: num_asked == 1 and controller.fleet.get("decode-0").state == FAILED)
    assert controller.fleet.get("decode-0").reason == "Ray cannot place 4 workers"
    await until(lambda: num_asked == 3)
    await fleet.scale_down("decode-0")
    running.cancel()
    await fleet.stop()
    assert num_open == 0


@pytest.mark.parametrize("raised", [ConnectionError("away"), RuntimeError("half"), TimeoutError("no answer")])
def test_a_connection_to_ray_that_fails_is_closed_whatever_it_failed_by(
    monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    num_closed = 0

    def init(**_: object) -> None:
        raise raised

    def shutdown() -> None:
        nonlocal num_closed
        num_closed += 1

    monkeypatch.setattr(pools, "ray", SimpleNamespace(init=init, shutdown=shutdown))
    with pytest.raises((ConnectionError, TimeoutError), match=str(raised)):
        RayPools("", "", Placement(1.0, "a:B", 5.0, ""))
    assert num_closed == 1


async def test_a_lost_worker_is_brought_back_while_another_one_s_start_takes_long(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_fleet, "REVIVE_S", 0.01)
    ray = FakeRay()
    fleet = fleet_of(controller, ray, replace(CLUSTER, controller=ControllerConfig()))
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(ray.started) == 3)
    ray.slow = {"decode-0"}
    controller.start_failed("decode-0", 0, "a test")
    await until(lambda: ray.started.count("decode-0") == 2)
    controller.start_failed("decode-1", 0, "a test")
    await until(lambda: ray.started.count("decode-1") > 3)
    assert ray.started.count("decode-0") == 2, "one start of it is under way"
    running.cancel()
    await fleet.stop()


async def test_what_is_asked_for_during_a_stop_and_after_it_is_refused_and_starts_nothing(
    controller: Controller,
) -> None:
    ray, killing, may_kill = FakeRay(), threading.Event(), threading.Event()
    fleet = fleet_of(controller, ray)
    running = asyncio.create_task(fleet.start_and_revive())
    await until(lambda: len(ray.started) == 4)
    kill = ray.kill

    def kill_late(worker_id: str, *, is_starting: bool) -> None:
        killing.set()
        assert may_kill.wait(10)
        kill(worker_id, is_starting=is_starting)

    ray.kill = kill_late  # type: ignore[method-assign]
    running.cancel()
    stopping = asyncio.create_task(fleet.stop())
    await until(killing.is_set)
    for _ in range(2):
        for asked in (fleet.scale_up(Role.DECODE, "cpu"), fleet.scale_down("decode-0"), fleet.get("cpu")):
            with pytest.raises(Unavailable, match="the controller stops"):
                await asked
        may_kill.set()
        await stopping
    assert sorted(ray.ended) == sorted(ray.started) == ["decode-0", "decode-1", "decode-2", "prefill-0"]


class Actor:
    """What `address.remote()` and `stop.remote()` of an actor handle take."""

    def __init__(self) -> None:
        self.address = self.stop = self

    def remote(self) -> None: ...


def test_a_worker_that_is_killed_while_it_is_started_is_killed_and_may_be_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Actor] = []
    fake = SimpleNamespace(
        init=lambda **_: None,
        get_actor=lambda *_: Actor(),
        get=lambda *_, timeout: "127.0.0.1:1",
        kill=lambda actor, *, no_restart: killed.append(actor),
    )
    monkeypatch.setattr(pools, "ray", fake)
    made = RayPools("", "", Placement(1.0, "a:B", 5.0, ""))
    monkeypatch.setattr(made, "_create", lambda _: Actor())
    made.kill("decode-0", is_starting=True)
    made.start(WorkerConfig("decode-0"))
    assert len(killed) == 2, "the one that was found, and the one that its start created"
    made.start(WorkerConfig("decode-0"))
    made.kill("decode-1", is_starting=False)
    made.start(WorkerConfig("decode-1"))
    assert len(killed) == 3
