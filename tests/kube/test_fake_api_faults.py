"""What a test can do to the fake API server, and what a client then sees."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from kubernetes import client, config, watch
from kubernetes.client import ApiException

from tests.kube.conformance_clusters import refused, until
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_faults import Fault
from tests.kube.fake_api_resources import Resource, custom_resource

MERGE_PATCH = "application/merge-patch+json"
NS = "baton"
CONNECTION_LOST = (urllib3.exceptions.HTTPError, OSError)


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api


@pytest.fixture
def core(api: FakeApi) -> Iterator[client.CoreV1Api]:
    with api.client() as whole:
        yield client.CoreV1Api(whole)


def a_map(name: str = "slo", **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "data": data}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (409, "Conflict"),
        (410, "Expired"),
        (429, "TooManyRequests"),
        (500, "InternalError"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ],
)
def test_a_call_that_a_fault_meets_is_refused_so_often_as_it_says(
    api: FakeApi, core: client.CoreV1Api, code: int, reason: str
) -> None:
    fault = api.faults.add(Fault(verb="create", resource="configmaps", code=code, times=2))
    for _ in range(2):
        with refused(code, reason):
            core.create_namespaced_config_map(NS, a_map())
    assert core.list_namespaced_config_map(NS).items == [], "other verbs pass, and nothing was done"
    core.create_namespaced_config_map(NS, a_map())
    assert fault.hits == 2


def test_a_fault_says_when_to_come_again(api: FakeApi, core: client.CoreV1Api) -> None:
    api.faults.add(Fault(resource="configmaps", code=429, retry_after_s=7))
    with pytest.raises(ApiException) as caught:
        core.list_namespaced_config_map(NS)
    assert caught.value.headers["Retry-After"] == "7"
    assert json.loads(caught.value.body)["details"]["retryAfterSeconds"] == 7


def test_a_fault_meets_one_name_or_one_subresource(api: FakeApi, core: client.CoreV1Api) -> None:
    core.create_namespaced_config_map(NS, a_map("slo"))
    core.create_namespaced_config_map(NS, a_map("fleet"))
    api.faults.add(Fault(name="slo", code=500))
    api.faults.add(Fault(resource="pods/eviction", code=503))
    with refused(500, "InternalError"):
        core.read_namespaced_config_map("slo", NS)
    assert core.read_namespaced_config_map("fleet", NS).metadata.name == "fleet"
    with refused(503, "ServiceUnavailable"):
        core.create_namespaced_pod_eviction("x", NS, {"metadata": {"name": "x"}})


def test_an_answer_that_is_lost_leaves_the_write_done(api: FakeApi, core: client.CoreV1Api) -> None:
    api.faults.add(Fault(verb="create", drop_answer=True, times=1))
    with pytest.raises(CONNECTION_LOST):
        core.create_namespaced_config_map(NS, a_map())
    with refused(409, "AlreadyExists"):
        core.create_namespaced_config_map(NS, a_map())


def test_a_call_that_is_dropped_leaves_nothing_done(api: FakeApi, core: client.CoreV1Api) -> None:
    api.faults.add(Fault(verb="create", drop=True, times=1))
    with pytest.raises(CONNECTION_LOST):
        core.create_namespaced_config_map(NS, a_map())
    assert core.list_namespaced_config_map(NS).items == []


def test_a_call_that_hangs_goes_on_when_the_fault_is_removed(api: FakeApi, core: client.CoreV1Api) -> None:
    hang = api.faults.add(Fault(verb="list", delay_s=3600))
    with pytest.raises(CONNECTION_LOST):
        core.list_namespaced_config_map(NS, _request_timeout=0.2)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(core.list_namespaced_config_map(NS)))
    waiting.start()
    until(lambda: hang.hits == 2, 10.0)
    assert not answers
    api.faults.remove(hang)
    waiting.join()
    assert answers[0].items == []


def test_a_watch_can_end_in_the_middle_of_a_line(api: FakeApi, core: client.CoreV1Api) -> None:
    for name in "abc":
        core.create_namespaced_config_map(NS, a_map(name))
    api.faults.add(Fault(verb="watch", cut_after=2, times=1))
    events = watch.Watch().stream(core.list_namespaced_config_map, NS, resource_version="0", timeout_seconds=5)
    assert [next(events)["object"].metadata.name for _ in range(2)] == ["a", "b"]
    with pytest.raises(CONNECTION_LOST):
        next(events)


def test_a_server_that_is_away_refuses_and_comes_back_with_what_it_knew(api: FakeApi, core: client.CoreV1Api) -> None:
    made = core.create_namespaced_config_map(NS, a_map(ttft="200"))
    with api.away(), pytest.raises(CONNECTION_LOST):
        core.read_namespaced_config_map("slo", NS)
    back = core.read_namespaced_config_map("slo", NS)
    assert back.metadata.resource_version == made.metadata.resource_version
    assert back.data == {"ttft": "200"}


def test_a_watch_ends_with_its_server_and_its_version_may_be_forgotten_after(
    api: FakeApi, core: client.CoreV1Api
) -> None:
    since = core.create_namespaced_config_map(NS, a_map()).metadata.resource_version
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in watch.Watch().stream(
                core.list_namespaced_config_map, NS, resource_version=since, timeout_seconds=60
            ):
                pass
        except (*CONNECTION_LOST, ApiException) as error:
            ended.append(error)

    watching = threading.Thread(target=follow)
    watching.start()
    until(lambda: any(call.verb == "watch" for call in api.in_flight()), 10.0)
    core.create_namespaced_config_map(NS, a_map("fleet"))
    with api.away(compact=True):
        watching.join()
    assert ended
    with pytest.raises(ApiException) as caught:
        list(watch.Watch().stream(core.list_namespaced_config_map, NS, resource_version=since, timeout_seconds=5))
    assert caught.value.status == 410


def test_the_calls_of_an_account_are_noted_with_their_answers(api: FakeApi, core: client.CoreV1Api) -> None:
    role = {"metadata": {"name": "reader"}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]}
    subject = {"kind": "ServiceAccount", "name": "controller", "namespace": NS}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reader"}
    binding = {"metadata": {"name": "reader"}, "roleRef": reference, "subjects": [subject]}
    kinds = {"apiVersion": "rbac.authorization.k8s.io/v1"}
    api.load([kinds | {"kind": "Role"} | role, kinds | {"kind": "RoleBinding"} | binding], NS)
    with api.client(api.token_for(NS, "controller")) as mine:
        client.CoreV1Api(mine).list_namespaced_pod(NS)
        with refused(403, "Forbidden"):
            client.CoreV1Api(mine).delete_namespaced_pod("x", NS)
    calls = [(call.access.verb, call.access.path, call.code) for call in api.calls_of(NS, "controller")]
    assert calls == [("list", "pods", 200), ("delete", "pods", 403)]


def test_kinds_of_other_operators_can_be_served() -> None:
    widgets: Resource = custom_resource("example.org", "v1alpha1", "widgets", "Widget")
    with FakeApi(custom=[widgets]) as api, api.client() as whole:
        custom = client.CustomObjectsApi(whole)
        where = ("example.org", "v1alpha1", NS, "widgets")
        custom.create_namespaced_custom_object(*where, {"metadata": {"name": "a"}, "spec": {"size": 1}})
        assert [w["spec"] for w in custom.list_namespaced_custom_object(*where)["items"]] == [{"size": 1}]


def test_a_kubeconfig_leads_other_programs_to_it(api: FakeApi, tmp_path: Path) -> None:
    path = api.kubeconfig(tmp_path / "config", namespace=NS)
    assert path.stat().st_mode & 0o077 == 0, "it holds a token"
    with config.new_client_from_config(str(path)) as whole:
        assert client.VersionApi(whole).get_code().major == "1"
