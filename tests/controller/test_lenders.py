"""Whom the controller names to a worker that starts, and what it makes of how workers came up."""

from __future__ import annotations

from baton.request import Role
from baton.v1 import worker_pb2
from router.controller.autoscaler.scaler import Times
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY, STARTING, Member
from router.controller.lenders import lenders_for
from router.controller.live_times import LiveTimes
from router.controller.starts import Starts, StartUp
from router.series import Registry

LOAD = worker_pb2.Load(role=worker_pb2.ROLE_DECODE)


def member(name: str, state: str = READY, fingerprint: str = "f") -> Member:
    return Member(name, Role.DECODE, state=state, epoch=1, address=f"{name}:1", fingerprint=fingerprint)


def names(members: list[Member], asker: str = "new") -> list[str]:
    return [found.worker_id for found in lenders_for(members, asker, "f")]


def test_only_who_is_there_and_is_another_is_named() -> None:
    members = [member("a"), member("b", FAILED), member("c", STARTING), member("d", DRAINING), member("new")]
    assert sorted(names(members)) == ["a", "d"]


def test_those_of_the_same_model_come_first_and_standbys_before_those_that_serve() -> None:
    members = [member("other", fingerprint="x"), member("serves"), member("stands", STANDBY), member("serves-too")]
    assert names(members)[0] == "stands"
    assert names(members)[-1] == "other"


def test_workers_that_start_together_do_not_all_ask_the_same_one() -> None:
    members = [member(f"w{i}") for i in range(8)]
    first = {names(members, f"new-{i}")[0] for i in range(16)}
    assert len(first) > 2


def test_a_start_is_forecast_from_those_whose_weights_came_from_where_the_last_one_s_did() -> None:
    times = LiveTimes(Times(start_up_s=60.0))

    def start(name: str, took_s: float, weights_from: str) -> None:
        times.look([Member(name, Role.DECODE, state=STARTING)], {}, 0.0)
        times.look([member(name)], {name: LOAD}, took_s, {name: weights_from})

    start("a", 90.0, "files")
    start("b", 100.0, "files")
    assert times.times.start_up_s == 95.0
    start("c", 20.0, "peer")
    assert times.times.start_up_s == 20.0
    start("d", 110.0, "files")
    assert times.times.start_up_s == 100.0
    again = LiveTimes(Times())
    again.restore(times.kept())
    assert again.times.start_up_s == 100.0


def test_operators_see_starts_by_where_the_weights_came_from() -> None:
    registry = Registry()
    starts = Starts(registry)
    starts.came_up("a", StartUp("files", 30.0, 42.0))
    starts.came_up("b", StartUp("peer", 3.0, 9.0))
    starts.forget("a")
    assert starts.weights_from() == {"b": "peer"}
    text = "".join(registry.lines())
    assert 'baton_worker_start_seconds_sum{weights_from="files"} 42.0' in text
    assert 'baton_worker_weights_seconds_sum{weights_from="peer"} 3.0' in text
