"""Whatever is wrong is one condition, with what the cluster says of it and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from baton.request import Role
from router.controller.fleet_state import FAILED, Member
from router.controller.kube import conditions as kinds
from router.controller.kube.conditions import Condition, Short, Symptoms, conditions
from router.controller.kube.objects import Happened, Pod, pod_of


def told(*pods: Pod, **more: object) -> list[Condition]:
    return conditions(Symptoms({one.name: one for one in pods}, (), **more))  # type: ignore[arg-type]


def pod(name: str = "demo-decode-0", **status: Any) -> Pod:
    return pod_of({"metadata": {"name": name, "uid": name}, "spec": {"nodeName": "n1"}, "status": status})


def waiting(reason: str, message: str = "", restarts: int = 0, **last: object) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"state": state, "lastState": last, "restartCount": restarts}], "phase": "Pending"}


CASES = {
    kinds.IMAGE: pod(**waiting("ImagePullBackOff", "Back-off pulling image x:1")),
    kinds.CONTAINER: pod(**waiting("CreateContainerConfigError", 'secret "hf" not found')),
    kinds.OUT_OF_MEMORY: pod(
        **waiting("CrashLoopBackOff", restarts=3, terminated={"reason": "OOMKilled", "exitCode": 137})
    ),
    kinds.CRASHING: pod(**waiting("CrashLoopBackOff", "back-off 5m0s restarting", restarts=5)),
    kinds.NODE_LOST: pod(
        phase="Running",
        podIP="1",
        conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}],
    ),
    kinds.EVICTED: pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
    kinds.UNSCHEDULABLE: pod(
        phase="Pending", conditions=[{"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}]
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
def test_each_cause_has_its_name_its_words_and_its_remedy(kind: str) -> None:
    [one] = told(CASES[kind])
    assert (one.kind, one.about) == (kind, ("demo-decode-0",))
    assert one.message
    assert one.remedy


def test_a_pod_that_is_well_or_only_starts_is_no_condition() -> None:
    assert not told(pod(phase="Running", podIP="10.0.0.1"), pod("b", **waiting("ContainerCreating")))


def test_many_pods_of_one_cause_are_one_condition() -> None:
    image = waiting("ErrImagePull", "no such tag")
    [one] = told(pod("demo-decode-0", **image), pod("demo-decode-1", **image), pod("demo-prefill-0", **image))
    assert one.about == ("demo-decode-0", "demo-decode-1", "demo-prefill-0")
    assert "no such tag" in one.message


def test_what_went_before_explains_a_pod_better_than_what_it_waits_for() -> None:
    assert [one.kind for one in told(CASES[kinds.OUT_OF_MEMORY])] == [kinds.OUT_OF_MEMORY]


def test_a_quota_says_itself_by_the_set_s_newest_event() -> None:
    events = [
        Happened("FailedCreate", "exceeded quota: gpus, used 8", "demo-decode", 3, "2026-01-01T00:00:02Z"),
        Happened("FailedCreate", "older", "demo-decode", 1, "2026-01-01T00:00:01Z"),
        Happened("SuccessfulCreate", "created", "demo-decode", 1, "2026-01-01T00:00:03Z"),
    ]
    [one] = told(short=[Short("demo-decode", 1, events)])
    assert (one.kind, one.message) == (kinds.QUOTA, "exceeded quota: gpus, used 8")
    assert not told(short=[Short("demo-decode", 1, events[2:])])


def test_server_head_budget_and_upgrade_say_themselves_the_worst_first() -> None:
    found = told(api_silence_s=60.0, head_away="Ray is away", over_budget="too many", upgrade_paused="why")
    assert [one.kind for one in found] == [kinds.API_AWAY, kinds.HEAD_AWAY, kinds.OVER_BUDGET, kinds.UPGRADE_PAUSED]
    assert not told(api_silence_s=kinds.AWAY_S)


def test_a_worker_that_fails_on_a_pod_that_runs_is_the_worker_s_own_condition() -> None:
    running = pod(phase="Running", podIP="10.0.0.1")
    member = Member("demo-decode-0", Role.DECODE, FAILED, "no such model")
    [one] = conditions(Symptoms({running.name: running}, [member]))
    assert (one.kind, one.message) == (kinds.SICK, "no such model")
