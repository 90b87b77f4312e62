"""Whatever is wrong is one condition, with what the cluster says of it and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.request import Role
from router.controller.fleet_state import FAILED, Member
from router.controller.kube import conditions as kinds
from router.controller.kube.conditions import Condition, Short, Symptoms, conditions
from router.controller.kube.objects import Happened, Pod, pod_of


def told(*pods: Pod, **more: object) -> list[Condition]:
    return conditions(Symptoms({one.name: one for one in pods}, (), **({"now_unix_s": 0.0} | more)))  # type: ignore[arg-type]


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


def unready(containers: str, **ready: str) -> dict[str, Any]:
    of_containers = {"type": "ContainersReady", "status": containers}
    return {
        "phase": "Running",
        "podIP": "1",
        "conditions": [{"type": "Ready", "status": "False", **ready}, of_containers],
    }


@pytest.mark.parametrize("status", [unready("True"), unready("False", reason="NodeNotReady")])
def test_a_node_that_is_not_ready_is_named_at_once(status: dict[str, Any]) -> None:
    [one] = told(pod(**status))
    assert (one.kind, one.message) == (kinds.NODE_LOST, "node n1 does not answer")
    assert "kubectl delete node n1" in one.remedy


def test_a_pod_that_is_unready_by_itself_or_for_somebody_s_gate_says_nothing_of_its_node() -> None:
    gated = {
        "metadata": {"name": "a", "uid": "a"},
        "spec": {"nodeName": "n1", "readinessGates": [{"conditionType": "acme/ready"}]},
        "status": unready("True"),
    }
    assert not told(pod_of(gated), pod(**unready("False")))


def test_a_pod_that_is_well_or_only_starts_is_no_condition() -> None:
    assert not told(pod(phase="Running", podIP="10.0.0.1"), pod("b", **waiting("ContainerCreating")))


@pytest.mark.parametrize("kind", [kinds.OUT_OF_MEMORY, kinds.CRASHING])
def test_a_pod_that_has_been_ready_again_for_long_is_no_condition_however_it_ended_before(kind: str) -> None:
    reason = "OOMKilled" if kind == kinds.OUT_OF_MEMORY else "Error"
    last = {"terminated": {"reason": reason, "exitCode": 137, "finishedAt": "1970-01-01T01:00:00Z"}}
    restarted = [{"state": {"running": {}}, "lastState": last, "restartCount": 7}]

    def one(ready: str) -> Pod:
        conditions = [{"type": "Ready", "status": ready}]
        return pod(phase="Running", podIP="10.0.0.1", conditions=conditions, containerStatuses=restarted)

    def found(one: Pod, now_unix_s: float) -> list[str]:
        return [held.kind for held in told(one, now_unix_s=now_unix_s)]

    assert found(one("True"), 3_600.0 + kinds.RECENT_S - 1.0) == [kind]
    assert found(one("True"), 3_600.0 + kinds.RECENT_S) == []
    assert found(one("False"), 3_600.0 + kinds.RECENT_S) == [kind]


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
    [one] = conditions(Symptoms({running.name: running}, [member], 0.0))
    assert (one.kind, one.message) == (kinds.SICK, "no such model")


def all_conditions() -> list[Condition]:
    running = pod("demo-decode-9", phase="Running", podIP="10.0.0.1")
    quota = [Happened("FailedCreate", "exceeded quota", "demo-decode", 1, "2026-01-01T00:00:00Z")]
    pods = {kind: replace(one, name=kind) for kind, one in CASES.items()}
    return conditions(
        Symptoms(
            pods | {running.name: running},
            [Member(running.name, Role.DECODE, FAILED, "no such model")],
            0.0,
            [Short("demo-decode", 1, quota)],
            api_silence_s=60.0,
            head_away="away",
            over_budget="too many",
            upgrade_paused="why",
        )
    )


def paths(values: object, *above: str) -> Iterator[tuple[str, ...]]:
    """Of every value, and of every map of them."""
    yield above
    for key, value in values.items() if isinstance(values, dict) else ():
        yield from paths(value, *above, key)


VALUES = set(paths(yaml.safe_load((Path(__file__).parents[2] / "deploy/helm/baton/values.yaml").read_text())))


def is_value(said: str) -> bool:
    """Some path of the values ends so; `<role>` and `*` stand for any one name."""
    names = said.split(".")
    return any(
        len(path) >= len(names)
        and all(n in ("<role>", "*") or n == p for n, p in zip(names, path[-len(names) :], strict=True))
        for path in VALUES
    )


def values_named(text: str) -> list[str]:
    """Words that can be nothing else: with dots, or with capitals inside."""
    return re.findall(r"\b[a-z]+(?:[A-Z]\w*|(?:[A-Z]\w*)?(?:\.(?:<role>|\*|[a-z]\w*))+)", text)


def test_each_value_that_a_remedy_names_is_one_of_the_chart_s() -> None:
    found = all_conditions()
    assert {one.kind for one in found} == set(kinds.KINDS)
    named = {name for one in found for name in values_named(one.remedy)}
    assert {"image.registry", "image.pullSecrets", "pools.<role>.memory"} <= named
    assert [name for name in named if not is_value(name)] == []


def test_each_value_that_the_guide_names_as_a_remedy_is_one_of_the_chart_s() -> None:
    guide = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    tables = guide.partition("\n## Conditions")[2].partition("\n## When something is odd")[0]
    named = {name for quoted in re.findall(r"`([^`]+)`", tables) for name in values_named(quoted)}
    assert {"scaler.pendingSeconds", "pools.*.memory"} <= named
    assert [name for name in named if not is_value(name)] == []


@pytest.mark.parametrize("wrong", ["image.repository", "imagePullSecrets", "hostMemory", "pools.<role>.hostMemory"])
def test_a_value_that_the_chart_lacks_is_told_from_one_that_it_has(wrong: str) -> None:
    assert values_named(f"check {wrong}, or the tag") == [wrong]
    assert not is_value(wrong)
