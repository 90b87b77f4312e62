"""What our controller relies on in a Kubernetes API server, asserted of the fake one and, where KUBECONFIG is set, of a real one.

KUBECONFIG=~/.kube/config pytest tests/kube/test_api_conformance.py
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException

from tests.kube.conformance_clusters import (
    NAMES,
    PAUSE,
    Cluster,
    a_cluster,
    is_ready,
    refused,
    succeeds,
    until,
    until_nothing_is_left,
)

Json = dict[str, Any]
JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
APPLY = "application/apply-patch+yaml"


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing() -> Iterator[None]:
    yield
    if "real" in NAMES:
        until_nothing_is_left()


@pytest.fixture(params=NAMES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with a_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def core(cluster: Cluster) -> client.CoreV1Api:
    return client.CoreV1Api(cluster.api)


@pytest.fixture
def apps(cluster: Cluster) -> client.AppsV1Api:
    return client.AppsV1Api(cluster.api)


@pytest.fixture
def ns(cluster: Cluster) -> str:
    return cluster.namespace


def a_set(name: str = "decode", **spec: Any) -> Json:
    """Of pods that no node takes, so that a real cluster runs nothing."""
    labels = {"app": name}
    container = {"name": "main", "image": PAUSE}
    pod = {"containers": [container], "nodeSelector": {"baton.test/nowhere": "true"}}
    template = {"metadata": {"labels": labels}, "spec": pod}
    whole = {"serviceName": name, "selector": {"matchLabels": labels}, "template": template, **spec}
    metadata = {"name": name, "labels": dict(labels)}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": metadata, "spec": whole}


def a_map(name: str = "slo", **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def a_pod(name: str, **spec: Any) -> Json:
    whole = {"containers": [{"name": "main", "image": PAUSE}], "terminationGracePeriodSeconds": 1, **spec}
    return {"metadata": {"name": name, "labels": {"app": name}}, "spec": whole}


# Objects and their versions


def test_a_new_object_has_a_uid_a_version_and_its_first_generation(apps: client.AppsV1Api, ns: str) -> None:
    made = apps.create_namespaced_stateful_set(ns, a_set())
    assert made.metadata.uid
    assert made.metadata.resource_version
    assert made.metadata.generation == 1
    assert made.spec.replicas == 1, "the default where nobody says"
    assert apps.read_namespaced_stateful_set("decode", ns).metadata.uid == made.metadata.uid


def test_what_is_there_cannot_be_made_again_and_what_is_not_there_not_be_read(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(ns, a_map())
    with refused(409, "AlreadyExists", 'configmaps "slo" already exists'):
        core.create_namespaced_config_map(ns, a_map())
    with refused(404, "NotFound", 'configmaps "other" not found'):
        core.read_namespaced_config_map("other", ns)
    with refused(404, "NotFound", 'namespaces "nowhere-at-all" not found'):
        core.create_namespaced_config_map("nowhere-at-all", a_map())


def test_a_name_that_is_made_again_is_another_object(core: client.CoreV1Api, ns: str) -> None:
    first = core.create_namespaced_config_map(ns, a_map())
    core.delete_namespaced_config_map("slo", ns)
    second = core.create_namespaced_config_map(ns, a_map())
    assert second.metadata.uid != first.metadata.uid
    with refused(409, "Conflict", "Precondition failed: UID"):
        core.replace_namespaced_config_map("slo", ns, first)


def test_a_generation_counts_changes_of_the_spec_alone(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set())
    labelled = apps.patch_namespaced_stateful_set(
        "decode", ns, {"metadata": {"labels": {"role": "both"}}}, _content_type=MERGE_PATCH
    )
    assert labelled.metadata.generation == 1
    grown = apps.patch_namespaced_stateful_set("decode", ns, {"spec": {"replicas": 2}}, _content_type=MERGE_PATCH)
    assert grown.metadata.generation == 2


def test_a_write_that_changes_nothing_takes_no_version(core: client.CoreV1Api, ns: str) -> None:
    made = core.create_namespaced_config_map(ns, a_map(ttft="200"))
    again = core.patch_namespaced_config_map("slo", ns, {"data": {"ttft": "200"}}, _content_type=MERGE_PATCH)
    assert again.metadata.resource_version == made.metadata.resource_version
    replaced = core.replace_namespaced_config_map("slo", ns, again)
    assert replaced.metadata.resource_version == made.metadata.resource_version


def test_a_replace_with_a_version_that_is_not_the_last_is_refused(core: client.CoreV1Api, ns: str) -> None:
    old = core.create_namespaced_config_map(ns, a_map(ttft="200"))
    new = core.patch_namespaced_config_map("slo", ns, {"data": {"ttft": "100"}}, _content_type=MERGE_PATCH)
    assert int(new.metadata.resource_version) > int(old.metadata.resource_version)
    old.data = {"ttft": "900"}
    with refused(409, "Conflict", "the object has been modified"):
        core.replace_namespaced_config_map("slo", ns, old)
    assert core.read_namespaced_config_map("slo", ns).data == {"ttft": "100"}


def test_a_replace_without_a_version_is_for_some_kinds_only(cluster: Cluster, core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(ns, a_map(ttft="200"))
    assert core.replace_namespaced_config_map("slo", ns, a_map(ttft="300")).data == {"ttft": "300"}
    leases = client.CoordinationV1Api(cluster.api)
    lease = {"metadata": {"name": "controller"}, "spec": {"holderIdentity": "a"}}
    leases.create_namespaced_lease(ns, lease)
    with refused(422, "Invalid", "must be specified for an update"):
        leases.replace_namespaced_lease("controller", ns, lease)


def test_of_writers_that_saw_the_same_version_one_wins(cluster: Cluster, ns: str) -> None:
    leases = client.CoordinationV1Api(cluster.api)
    leases.create_namespaced_lease(ns, {"metadata": {"name": "controller"}, "spec": {"holderIdentity": ""}})
    seen = leases.read_namespaced_lease("controller", ns)
    outcomes: list[int] = []

    def take(holder: str) -> None:
        body = {
            "metadata": {"name": "controller", "resourceVersion": seen.metadata.resource_version},
            "spec": {"holderIdentity": holder},
        }
        try:
            leases.replace_namespaced_lease("controller", ns, body)
            outcomes.append(200)
        except ApiException as error:
            outcomes.append(error.status)

    threads = [threading.Thread(target=take, args=(f"holder-{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [200, 409, 409, 409, 409, 409]


def test_a_dry_run_answers_and_changes_nothing(apps: client.AppsV1Api, ns: str) -> None:
    assert apps.create_namespaced_stateful_set(ns, a_set(), dry_run="All").metadata.name == "decode"
    with refused(404, "NotFound"):
        apps.read_namespaced_stateful_set("decode", ns)


def test_what_a_set_is_made_of_cannot_change(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set())
    with refused(422, "Invalid", "Forbidden: updates to statefulset spec for fields other than"):
        apps.patch_namespaced_stateful_set("decode", ns, {"spec": {"serviceName": "x"}}, _content_type=MERGE_PATCH)
    with refused(422, "Invalid", "spec.template.metadata.labels"):
        apps.create_namespaced_stateful_set(ns, a_set("other", selector={"matchLabels": {"app": "third"}}))


# Patches


def test_a_merge_patch_sets_removes_and_minds_a_version_that_it_names(core: client.CoreV1Api, ns: str) -> None:
    old = core.create_namespaced_config_map(ns, a_map(ttft="200", tpot="50"))
    patch: Json = {"data": {"ttft": None, "e2e": "9"}}
    assert core.patch_namespaced_config_map("slo", ns, patch, _content_type=MERGE_PATCH).data == {
        "tpot": "50",
        "e2e": "9",
    }
    stale = {"metadata": {"resourceVersion": old.metadata.resource_version}, "data": {"e2e": "1"}}
    with refused(409, "Conflict", "the object has been modified"):
        core.patch_namespaced_config_map("slo", ns, stale, _content_type=MERGE_PATCH)


def test_a_json_patch_whose_test_fails_changes_nothing(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(ns, a_map(a="1", b="2"))
    failing = [{"op": "replace", "path": "/data/a", "value": "9"}, {"op": "test", "path": "/data/b", "value": "3"}]
    with refused(422, "Invalid"):
        core.patch_namespaced_config_map("slo", ns, failing, _content_type=JSON_PATCH)
    assert core.read_namespaced_config_map("slo", ns).data == {"a": "1", "b": "2"}


def test_a_json_patch_adds_replaces_and_removes_at_escaped_paths(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(
        ns, a_map(a="1", b="2") | {"metadata": {"name": "slo", "annotations": {"x/y": "1"}}}
    )
    patch = [
        {"op": "test", "path": "/metadata/annotations/x~1y", "value": "1"},
        {"op": "replace", "path": "/metadata/annotations/x~1y", "value": "2"},
        {"op": "add", "path": "/data/c", "value": "3"},
        {"op": "remove", "path": "/data/b"},
    ]
    patched = core.patch_namespaced_config_map("slo", ns, patch, _content_type=JSON_PATCH)
    assert patched.data == {"a": "1", "c": "3"}
    assert patched.metadata.annotations == {"x/y": "2"}


def test_a_json_patch_that_does_not_fit_is_refused(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(ns, a_map(a="1"))
    with refused(422, "Invalid"):
        core.patch_namespaced_config_map("slo", ns, [{"op": "remove", "path": "/data/z"}], _content_type=JSON_PATCH)


def test_a_strategic_merge_joins_containers_by_name(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set())
    containers = [{"name": "main", "env": [{"name": "A", "value": "1"}]}, {"name": "side", "image": PAUSE}]
    patch = {"spec": {"template": {"spec": {"containers": containers}}}}
    patched = apps.patch_namespaced_stateful_set("decode", ns, patch, _content_type=STRATEGIC)
    images = {c.name: c.image for c in patched.spec.template.spec.containers}
    assert images == {"main": PAUSE, "side": PAUSE}


def test_a_patch_of_an_unknown_kind_is_refused(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_config_map(ns, a_map())
    with refused(415, "UnsupportedMediaType"):
        core.patch_namespaced_config_map("slo", ns, {}, _content_type="application/json")


# Sizes


def test_a_scale_is_a_sets_size_and_a_change_of_it_a_change_of_the_set(apps: client.AppsV1Api, ns: str) -> None:
    made = apps.create_namespaced_stateful_set(ns, a_set(replicas=2))
    scale = apps.read_namespaced_stateful_set_scale("decode", ns)
    assert scale.spec.replicas == 2
    assert scale.status.selector == "app=decode"
    assert scale.metadata.uid == made.metadata.uid
    patched = apps.patch_namespaced_stateful_set_scale(
        "decode", ns, {"spec": {"replicas": 3}}, _content_type=MERGE_PATCH
    )
    assert patched.spec.replicas == 3
    after = apps.read_namespaced_stateful_set("decode", ns)
    assert after.spec.replicas == 3
    assert after.metadata.generation == 2


def test_a_scale_is_written_by_compare_and_swap(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set())
    scale = apps.read_namespaced_stateful_set_scale("decode", ns)
    apps.patch_namespaced_stateful_set("decode", ns, {"spec": {"replicas": 2}}, _content_type=MERGE_PATCH)
    scale.spec.replicas = 5
    with refused(409, "Conflict", "the object has been modified"):
        apps.replace_namespaced_stateful_set_scale("decode", ns, scale)
    fresh = apps.read_namespaced_stateful_set_scale("decode", ns)
    fresh.spec.replicas = 5
    assert apps.replace_namespaced_stateful_set_scale("decode", ns, fresh).spec.replicas == 5
    tested = [
        {"op": "test", "path": "/spec/replicas", "value": 4},
        {"op": "replace", "path": "/spec/replicas", "value": 6},
    ]
    with refused(422, "Invalid"):
        apps.patch_namespaced_stateful_set_scale("decode", ns, tested, _content_type=JSON_PATCH)


def test_a_size_below_nothing_is_refused(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set())
    with refused(422, "Invalid", "must be greater than or equal to 0"):
        apps.patch_namespaced_stateful_set_scale("decode", ns, {"spec": {"replicas": -1}}, _content_type=MERGE_PATCH)


# Who owns a field


def apply(apps: client.AppsV1Api, ns: str, body: Json, manager: str = "helm", force: bool | None = None) -> Any:
    name = body["metadata"]["name"]
    return apps.patch_namespaced_stateful_set(name, ns, body, field_manager=manager, force=force, _content_type=APPLY)


def grow(apps: client.AppsV1Api, ns: str, replicas: int) -> None:
    body = {"spec": {"replicas": replicas}}
    apps.patch_namespaced_stateful_set_scale("decode", ns, body, field_manager="baton", _content_type=MERGE_PATCH)


def test_an_upgrade_without_replicas_keeps_the_scalers_size(apps: client.AppsV1Api, ns: str) -> None:
    assert apply(apps, ns, a_set()).spec.replicas == 1
    grow(apps, ns, 4)
    upgraded = a_set()
    upgraded["metadata"]["labels"]["version"] = "2"
    assert apply(apps, ns, upgraded).spec.replicas == 4
    owners = [(m.manager, m.operation, m.subresource) for m in upgraded_fields(apps, ns)]
    assert ("helm", "Apply", None) in owners
    assert ("baton", "Update", "scale") in owners


def upgraded_fields(apps: client.AppsV1Api, ns: str) -> Any:
    return apps.read_namespaced_stateful_set("decode", ns).metadata.managed_fields


def test_an_upgrade_that_renders_replicas_conflicts_with_the_scaler(apps: client.AppsV1Api, ns: str) -> None:
    apply(apps, ns, a_set(replicas=1))
    grow(apps, ns, 4)
    with refused(409, "Conflict", 'conflict with "baton" with subresource "scale"', ".spec.replicas"):
        apply(apps, ns, a_set(replicas=1))
    assert apps.read_namespaced_stateful_set("decode", ns).spec.replicas == 4


def test_an_upgrade_that_forces_takes_the_size_from_the_scaler(apps: client.AppsV1Api, ns: str) -> None:
    apply(apps, ns, a_set())
    grow(apps, ns, 4)
    assert apply(apps, ns, a_set(replicas=1), force=True).spec.replicas == 1
    assert not any(m.subresource == "scale" for m in upgraded_fields(apps, ns)), "the scaler owns nothing any more"


def test_the_same_value_is_shared_and_dropping_it_leaves_it_to_the_other(apps: client.AppsV1Api, ns: str) -> None:
    apply(apps, ns, a_set())
    grow(apps, ns, 4)
    apply(apps, ns, a_set(replicas=4))
    assert apply(apps, ns, a_set()).spec.replicas == 4


def test_what_an_upgrade_no_longer_names_is_removed(apps: client.AppsV1Api, ns: str) -> None:
    first = a_set()
    first["metadata"]["labels"]["old"] = "1"
    env = [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]
    first["spec"]["template"]["spec"]["containers"][0]["env"] = env
    apply(apps, ns, first)
    second = a_set()
    second["spec"]["template"]["spec"]["containers"][0]["env"] = env[1:]
    upgraded = apply(apps, ns, second)
    assert "old" not in upgraded.metadata.labels
    assert [e.name for e in upgraded.spec.template.spec.containers[0].env] == ["B"]


def test_an_apply_needs_a_manager_and_makes_what_is_not_there(core: client.CoreV1Api, ns: str) -> None:
    with pytest.raises(ApiException) as caught:
        core.patch_namespaced_config_map("slo", ns, a_map(a="1"), _content_type=APPLY)
    assert caught.value.status in (400, 422)
    made = core.patch_namespaced_config_map("slo", ns, a_map(a="1"), field_manager="helm", _content_type=APPLY)
    assert made.data == {"a": "1"}


# Status


def test_a_status_is_written_through_its_subresource_alone(apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_set(replicas=0))
    condition = {"type": "Baton", "status": "True", "reason": "Test"}
    status = {"status": {"replicas": 0, "conditions": [condition]}}
    apps.patch_namespaced_stateful_set("decode", ns, status, _content_type=MERGE_PATCH)
    assert not apps.read_namespaced_stateful_set("decode", ns).status.conditions
    both = status | {"spec": {"replicas": 7}}
    written = apps.patch_namespaced_stateful_set_status("decode", ns, both, _content_type=MERGE_PATCH)
    assert [c.type for c in written.status.conditions] == ["Baton"]
    assert written.spec.replicas == 0
    assert written.metadata.generation == 1


# Ends


def test_a_delete_minds_its_preconditions(core: client.CoreV1Api, ns: str) -> None:
    made = core.create_namespaced_config_map(ns, a_map())
    with refused(409, "Conflict"):
        core.delete_namespaced_config_map("slo", ns, body={"preconditions": {"uid": "other"}})
    with refused(409, "Conflict"):
        core.delete_namespaced_config_map("slo", ns, body={"preconditions": {"resourceVersion": "1"}})
    core.delete_namespaced_config_map("slo", ns, body={"preconditions": {"uid": made.metadata.uid}})
    with refused(404, "NotFound"):
        core.delete_namespaced_config_map("slo", ns)


def test_a_finalizer_holds_an_object_until_it_is_taken_off(core: client.CoreV1Api, ns: str) -> None:
    body = a_map() | {"metadata": {"name": "slo", "finalizers": ["baton.test/hold"]}}
    core.create_namespaced_config_map(ns, body)
    core.delete_namespaced_config_map("slo", ns)
    assert core.read_namespaced_config_map("slo", ns).metadata.deletion_timestamp is not None
    core.patch_namespaced_config_map("slo", ns, {"metadata": {"finalizers": None}}, _content_type=MERGE_PATCH)
    with refused(404, "NotFound"):
        core.read_namespaced_config_map("slo", ns)


def test_a_pod_that_runs_nowhere_is_gone_at_once(core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_pod(ns, a_pod("lost", nodeSelector={"baton.test/nowhere": "true"}))
    core.delete_namespaced_pod("lost", ns)
    with refused(404, "NotFound"):
        core.read_namespaced_pod("lost", ns)


def test_a_pod_that_runs_is_told_to_end_and_has_its_grace(cluster: Cluster, core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_pod(ns, a_pod("worker", terminationGracePeriodSeconds=20))
    until(lambda: is_ready(core.read_namespaced_pod("worker", ns)), cluster.patience_s)
    told = core.delete_namespaced_pod("worker", ns)
    assert told.metadata.deletion_timestamp is not None
    assert told.metadata.deletion_grace_period_seconds == 20
    until(lambda: not succeeds(lambda: core.read_namespaced_pod("worker", ns), unless=404), cluster.patience_s)


def test_what_a_selector_names_is_deleted_together(core: client.CoreV1Api, ns: str) -> None:
    for name, pool in (("a", "decode"), ("b", "decode"), ("c", "prefill")):
        core.create_namespaced_config_map(ns, a_map(name) | {"metadata": {"name": name, "labels": {"pool": pool}}})
    core.delete_collection_namespaced_config_map(ns, label_selector="pool=decode")
    assert [m.metadata.name for m in core.list_namespaced_config_map(ns, label_selector="pool").items] == ["c"]


# Lists and watches


def labelled_maps(core: client.CoreV1Api, ns: str) -> None:
    for name, labels in (("a", {"pool": "decode"}), ("b", {"pool": "prefill"}), ("c", {"other": "x"})):
        core.create_namespaced_config_map(ns, a_map(name) | {"metadata": {"name": name, "labels": labels}})


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("pool=decode", "a"),
        ("pool!=decode,pool", "b"),
        ("pool in (decode, prefill)", "ab"),
        ("pool notin (decode),other=x", "c"),
        ("!pool,other", "c"),
        ("pool==decode,other", ""),
    ],
)
def test_a_list_selects_by_labels(core: client.CoreV1Api, ns: str, selector: str, names: str) -> None:
    labelled_maps(core, ns)
    listed = core.list_namespaced_config_map(ns, label_selector=selector)
    assert "".join(m.metadata.name for m in listed.items) == names


def test_a_list_selects_by_name(core: client.CoreV1Api, ns: str) -> None:
    labelled_maps(core, ns)
    listed = core.list_namespaced_config_map(ns, field_selector="metadata.name=b")
    assert [m.metadata.name for m in listed.items] == ["b"]


def test_the_pages_of_a_list_are_of_one_moment(core: client.CoreV1Api, ns: str) -> None:
    labelled_maps(core, ns)
    first = core.list_namespaced_config_map(ns, limit=2, label_selector="!x")
    core.delete_namespaced_config_map("c", ns)
    second = core.list_namespaced_config_map(ns, limit=5, _continue=first.metadata._continue, label_selector="!x")
    names = [m.metadata.name for m in [*first.items, *second.items] if m.metadata.name in "abc"]
    assert names == ["a", "b", "c"]
    assert second.metadata.resource_version == first.metadata.resource_version


def events(core: client.CoreV1Api, ns: str, since: str, count: int, **how: Any) -> list[Json]:
    """The first so many of a watch of ConfigMaps."""
    found: list[Json] = []
    for event in watch.Watch().stream(
        core.list_namespaced_config_map, ns, resource_version=since, timeout_seconds=10, **how
    ):
        found.append(event)
        if len(found) == count:
            break
    return found


def test_a_watch_tells_in_order_what_happened_since_a_version(core: client.CoreV1Api, ns: str) -> None:
    since = core.list_namespaced_config_map(ns).metadata.resource_version
    core.create_namespaced_config_map(ns, a_map(a="1"))
    core.patch_namespaced_config_map("slo", ns, {"data": {"a": "2"}}, _content_type=MERGE_PATCH)
    core.delete_namespaced_config_map("slo", ns)
    seen = [e for e in events(core, ns, since, 3) if e["object"].metadata.name == "slo"]
    assert [e["type"] for e in seen] == ["ADDED", "MODIFIED", "DELETED"]
    assert [e["object"].data["a"] for e in seen] == ["1", "2", "2"]
    versions = [int(e["object"].metadata.resource_version) for e in seen]
    assert versions == sorted(set(versions))


def test_a_watch_from_nowhere_begins_with_what_is_there(core: client.CoreV1Api, ns: str) -> None:
    labelled_maps(core, ns)
    seen = events(core, ns, "", 2, label_selector="pool")
    assert [(e["type"], e["object"].metadata.name) for e in seen] == [("ADDED", "a"), ("ADDED", "b")]


def test_a_watch_with_a_selector_sees_objects_come_and_go(core: client.CoreV1Api, ns: str) -> None:
    labelled_maps(core, ns)
    since = core.list_namespaced_config_map(ns).metadata.resource_version
    for labels in ({"pool": "prefill"}, {"pool": "decode"}):
        core.patch_namespaced_config_map("a", ns, {"metadata": {"labels": labels}}, _content_type=MERGE_PATCH)
    core.delete_namespaced_config_map("b", ns)
    assert [e["type"] for e in events(core, ns, since, 2, label_selector="pool=decode")] == ["DELETED", "ADDED"]


def test_a_watch_of_one_name_sees_no_other(core: client.CoreV1Api, ns: str) -> None:
    since = core.list_namespaced_config_map(ns).metadata.resource_version
    labelled_maps(core, ns)
    seen = events(core, ns, since, 1, field_selector="metadata.name=c")
    assert [e["object"].metadata.name for e in seen] == ["c"]


def test_a_watch_from_a_version_that_is_forgotten_is_told_so(core: client.CoreV1Api, ns: str) -> None:
    with pytest.raises(ApiException) as caught:
        events(core, ns, "1", 1)
    assert caught.value.status == 410
    assert "Expired" in caught.value.reason


def test_a_watch_ends_when_its_time_is_over_and_says_before_how_far_it_is(
    cluster: Cluster, core: client.CoreV1Api, ns: str
) -> None:
    since = core.list_namespaced_config_map(ns).metadata.resource_version
    ends_s = 1 if cluster.patience_s < 60 else 65  # a real server's bookmarks are a minute apart
    stream = watch.Watch().stream(
        core.list_namespaced_config_map,
        ns,
        resource_version=since,
        timeout_seconds=ends_s,
        allow_watch_bookmarks=True,
        field_selector="metadata.name=nobody",
    )
    bookmarks = [e["raw_object"]["metadata"]["resourceVersion"] for e in stream if e["type"] == "BOOKMARK"]
    assert bookmarks
    assert int(bookmarks[-1]) >= int(since)


# Evictions


def a_budget(cluster: Cluster, ns: str, **spec: Any) -> None:
    body = {"metadata": {"name": "decode"}, "spec": {"selector": {"matchLabels": {"app": "worker"}}, **spec}}
    client.PolicyV1Api(cluster.api).create_namespaced_pod_disruption_budget(ns, body)


def evict(core: client.CoreV1Api, ns: str, name: str) -> Any:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": ns}}
    return core.create_namespaced_pod_eviction(name, ns, body)


def test_an_eviction_that_a_budget_forbids_is_refused_and_the_pod_stays(
    cluster: Cluster, core: client.CoreV1Api, ns: str
) -> None:
    core.create_namespaced_pod(ns, a_pod("worker"))
    until(lambda: is_ready(core.read_namespaced_pod("worker", ns)), cluster.patience_s)
    a_budget(cluster, ns, minAvailable=1)
    with refused(429, "TooManyRequests", "Cannot evict pod as it would violate the pod's disruption budget."):
        evict(core, ns, "worker")
    assert core.read_namespaced_pod("worker", ns).metadata.deletion_timestamp is None


def test_an_eviction_that_a_budget_allows_ends_the_pod(cluster: Cluster, core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_pod(ns, a_pod("worker"))
    until(lambda: is_ready(core.read_namespaced_pod("worker", ns)), cluster.patience_s)
    a_budget(cluster, ns, minAvailable=0)

    since = core.list_namespaced_pod(ns).metadata.resource_version
    # the budget's controller may not have seen the pod yet
    until(lambda: succeeds(lambda: evict(core, ns, "worker"), unless=429), cluster.patience_s)
    until(lambda: not succeeds(lambda: core.read_namespaced_pod("worker", ns), unless=404), cluster.patience_s)
    last = [e["object"] for e in pod_events(core, ns, since)][-1]
    assert last.metadata.deletion_timestamp is not None
    assert ("DisruptionTarget", "EvictionByEvictionAPI") in [(c.type, c.reason) for c in last.status.conditions]


def pod_events(core: client.CoreV1Api, ns: str, since: str) -> Iterator[Json]:
    """Up to the end of the pod."""
    for event in watch.Watch().stream(core.list_namespaced_pod, ns, resource_version=since, timeout_seconds=10):
        yield event
        if event["type"] == "DELETED":
            return


def test_an_eviction_is_of_the_very_pod_that_it_names(cluster: Cluster, core: client.CoreV1Api, ns: str) -> None:
    core.create_namespaced_pod(ns, a_pod("worker"))
    until(lambda: is_ready(core.read_namespaced_pod("worker", ns)), cluster.patience_s)
    body = {"metadata": {"name": "worker", "namespace": ns}, "deleteOptions": {"preconditions": {"uid": "another"}}}
    with refused(409, "Conflict"):
        core.create_namespaced_pod_eviction("worker", ns, body)
    assert core.read_namespaced_pod("worker", ns).metadata.deletion_timestamp is None


def test_an_eviction_of_nobody_finds_nobody(core: client.CoreV1Api, ns: str) -> None:
    with refused(404, "NotFound"):
        evict(core, ns, "nobody")


# Rights


def an_account(cluster: Cluster, core: client.CoreV1Api, ns: str, *rules: Json) -> client.ApiClient:
    """A client that may do what the rules say."""
    core.create_namespaced_service_account(ns, {"metadata": {"name": "controller"}})
    rbac = client.RbacAuthorizationV1Api(cluster.api)
    rbac.create_namespaced_role(ns, {"metadata": {"name": "controller"}, "rules": list(rules)})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "controller"}
    subject = {"kind": "ServiceAccount", "name": "controller", "namespace": ns}
    rbac.create_namespaced_role_binding(
        ns, {"metadata": {"name": "controller"}, "roleRef": role, "subjects": [subject]}
    )
    body = {"spec": {"expirationSeconds": 3600, "audiences": []}}
    return cluster.as_account(core.create_namespaced_service_account_token("controller", ns, body).status.token)


def a_rule(verbs: str, resources: str, group: str = "", *names: str) -> Json:
    rule: Json = {"apiGroups": [group], "resources": resources.split(), "verbs": verbs.split()}
    return rule | ({"resourceNames": list(names)} if names else {})


def test_who_is_not_known_is_told_so(cluster: Cluster, ns: str) -> None:
    with cluster.as_account("nonsense") as nobody, refused(401, "Unauthorized"):
        client.CoreV1Api(nobody).list_namespaced_config_map(ns)


def test_an_account_may_do_what_its_role_says_and_nothing_else(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    for name in ("decode", "router"):
        apps.create_namespaced_stateful_set(ns, a_set(name))
    with an_account(cluster, core, ns, a_rule("get patch", "statefulsets/scale", "apps", "decode")) as api:
        mine = client.AppsV1Api(api)
        body = {"spec": {"replicas": 2}}

        def scale(name: str) -> Any:
            return mine.patch_namespaced_stateful_set_scale(name, ns, body, _content_type=MERGE_PATCH)

        # a real server takes a moment to see a new role
        until(lambda: succeeds(lambda: scale("decode"), unless=403), cluster.patience_s)
        with refused(403, "Forbidden", 'cannot patch resource "statefulsets/scale" in API group "apps"'):
            scale("router")
        with refused(
            403, "Forbidden", f'cannot get resource "statefulsets" in API group "apps" in the namespace "{ns}"'
        ):
            mine.read_namespaced_stateful_set("decode", ns)
        with refused(403, "Forbidden", 'cannot update resource "statefulsets/scale"'):
            mine.replace_namespaced_stateful_set_scale(
                "decode", ns, apps.read_namespaced_stateful_set_scale("decode", ns)
            )
        with refused(403, "Forbidden", "cannot list resource"):
            mine.list_namespaced_stateful_set(ns)
        with refused(403, "Forbidden"):
            client.CoreV1Api(api).read_namespaced_config_map("not-even-there", ns)


def test_a_right_to_one_name_is_one_to_watch_it_by_name(cluster: Cluster, core: client.CoreV1Api, ns: str) -> None:
    labelled_maps(core, ns)
    with an_account(cluster, core, ns, a_rule("get list watch", "configmaps", "", "a")) as api:
        mine = client.CoreV1Api(api)

        def named() -> list[str]:
            return [
                m.metadata.name for m in mine.list_namespaced_config_map(ns, field_selector="metadata.name=a").items
            ]

        until(lambda: succeeds(named, unless=403), cluster.patience_s)
        assert named() == ["a"]
        with refused(403, "Forbidden", "cannot list resource"):
            mine.list_namespaced_config_map(ns)
        assert events(mine, ns, "", 1, field_selector="metadata.name=a")[0]["type"] == "ADDED"
        review = {
            "spec": {"resourceAttributes": {"verb": "delete", "resource": "configmaps", "namespace": ns, "name": "a"}}
        }
        answer = client.AuthorizationV1Api(api).create_self_subject_access_review(review)
        assert answer.status.allowed is False


# A set's pods


def a_running_set(**spec: Any) -> Json:
    body = a_set(**spec)
    body["spec"]["template"]["spec"] = {
        "containers": [{"name": "main", "image": PAUSE}],
        "terminationGracePeriodSeconds": 1,
    }
    return body


def pods_of(core: client.CoreV1Api, ns: str) -> dict[str, client.V1Pod]:
    """By name; those that are to go are there still."""
    return {pod.metadata.name: pod for pod in core.list_namespaced_pod(ns, label_selector="app=decode").items}


def until_ready(cluster: Cluster, core: client.CoreV1Api, ns: str, *names: str) -> dict[str, client.V1Pod]:
    """These pods, once they are all that there are, ready and not to go."""

    def these() -> dict[str, client.V1Pod] | None:
        pods = pods_of(core, ns)
        settled = all(is_ready(pod) and pod.metadata.deletion_timestamp is None for pod in pods.values())
        return pods if settled and sorted(pods) == sorted(names) else None

    pods = until(these, cluster.patience_s)
    assert pods is not None
    return pods


def change_template(apps: client.AppsV1Api, ns: str, version: str) -> None:
    patch = {"spec": {"template": {"metadata": {"annotations": {"version": version}}}}}
    apps.patch_namespaced_stateful_set("decode", ns, patch, _content_type=MERGE_PATCH)


def versions(pods: dict[str, client.V1Pod]) -> list[str | None]:
    return [(pods[name].metadata.annotations or {}).get("version") for name in sorted(pods)]


def test_a_set_makes_pods_of_stable_names_and_says_how_many_are_ready(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    made = apps.create_namespaced_stateful_set(ns, a_running_set(replicas=2))
    pods = until_ready(cluster, core, ns, "decode-0", "decode-1")
    status = until(
        lambda: (s := apps.read_namespaced_stateful_set("decode", ns).status).ready_replicas == 2 and s,
        cluster.patience_s,
    )
    assert (status.replicas, status.updated_replicas, status.observed_generation) == (2, 2, 1)
    for ordinal, name in enumerate(sorted(pods)):
        meta = pods[name].metadata
        assert meta.labels["statefulset.kubernetes.io/pod-name"] == name
        assert meta.labels["apps.kubernetes.io/pod-index"] == str(ordinal)
        assert meta.labels["controller-revision-hash"] == status.update_revision
        assert [(o.kind, o.uid, o.controller) for o in meta.owner_references] == [
            ("StatefulSet", made.metadata.uid, True)
        ]


def test_a_smaller_set_ends_its_last_pods(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    apps.create_namespaced_stateful_set(ns, a_running_set(replicas=3, podManagementPolicy="Parallel"))
    before = until_ready(cluster, core, ns, "decode-0", "decode-1", "decode-2")
    grow(apps, ns, 1)
    after = until_ready(cluster, core, ns, "decode-0")
    assert after["decode-0"].metadata.uid == before["decode-0"].metadata.uid


def test_a_pod_that_is_deleted_comes_back_under_its_name(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    apps.create_namespaced_stateful_set(ns, a_running_set(replicas=1))
    before = until_ready(cluster, core, ns, "decode-0")["decode-0"].metadata.uid
    core.delete_namespaced_pod("decode-0", ns)
    until(lambda: until_ready(cluster, core, ns, "decode-0")["decode-0"].metadata.uid != before, cluster.patience_s)


@pytest.mark.parametrize(("policy", "names"), [("OrderedReady", ["decode-0"]), ("Parallel", ["decode-0", "decode-1"])])
def test_a_pod_that_cannot_run_holds_up_the_next_only_where_pods_come_in_order(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str, policy: str, names: list[str]
) -> None:
    apps.create_namespaced_stateful_set(ns, a_set(replicas=2, podManagementPolicy=policy))

    def are_unschedulable() -> bool:
        pods = pods_of(core, ns)
        reasons = [c.reason for pod in pods.values() for c in pod.status.conditions or () if c.type == "PodScheduled"]
        return sorted(pods) == names and reasons == ["Unschedulable"] * len(names)

    until(are_unschedulable, cluster.patience_s)


def test_a_pod_that_cannot_run_goes_when_the_set_shrinks(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    apps.create_namespaced_stateful_set(ns, a_set(replicas=2, podManagementPolicy="Parallel"))
    until(lambda: len(pods_of(core, ns)) == 2, cluster.patience_s)
    grow(apps, ns, 1)
    until(lambda: sorted(pods_of(core, ns)) == ["decode-0"], cluster.patience_s)


def test_with_on_delete_only_pods_that_are_made_anew_have_the_new_template(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    strategy = {"type": "OnDelete"}
    body = a_running_set(replicas=2, podManagementPolicy="Parallel", updateStrategy=strategy)
    apps.create_namespaced_stateful_set(ns, body)
    until_ready(cluster, core, ns, "decode-0", "decode-1")
    change_template(apps, ns, "2")
    until(lambda: apps.read_namespaced_stateful_set("decode", ns).status.observed_generation == 2, cluster.patience_s)
    assert versions(until_ready(cluster, core, ns, "decode-0", "decode-1")) == [None, None]
    core.delete_namespaced_pod("decode-0", ns)
    until(
        lambda: versions(until_ready(cluster, core, ns, "decode-0", "decode-1")) == ["2", None],
        cluster.patience_s,
    )
    status = apps.read_namespaced_stateful_set("decode", ns).status
    assert status.current_revision != status.update_revision


def test_a_rolling_update_goes_from_the_last_pod_down_to_the_partition(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": 1}}
    body = a_running_set(replicas=3, podManagementPolicy="Parallel", updateStrategy=strategy)
    apps.create_namespaced_stateful_set(ns, body)
    names = ("decode-0", "decode-1", "decode-2")
    until_ready(cluster, core, ns, *names)
    change_template(apps, ns, "2")
    until(lambda: versions(until_ready(cluster, core, ns, *names)) == [None, "2", "2"], cluster.patience_s)
    whole = {"spec": {"updateStrategy": {"rollingUpdate": {"partition": 0}}}}
    apps.patch_namespaced_stateful_set("decode", ns, whole, _content_type=MERGE_PATCH)
    until(lambda: versions(until_ready(cluster, core, ns, *names)) == ["2", "2", "2"], cluster.patience_s)

    def is_finished() -> bool:
        status = apps.read_namespaced_stateful_set("decode", ns).status
        return bool(status.current_revision == status.update_revision)

    until(is_finished, cluster.patience_s)


def test_a_set_takes_its_pods_along(cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str) -> None:
    apps.create_namespaced_stateful_set(ns, a_running_set(replicas=1))
    until_ready(cluster, core, ns, "decode-0")
    apps.delete_namespaced_stateful_set("decode", ns)
    until(lambda: not pods_of(core, ns), cluster.patience_s)


def test_a_set_that_is_deleted_alone_leaves_its_pods(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    apps.create_namespaced_stateful_set(ns, a_running_set(replicas=1))
    before = until_ready(cluster, core, ns, "decode-0")["decode-0"].metadata.uid
    apps.delete_namespaced_stateful_set("decode", ns, propagation_policy="Orphan")
    until(lambda: not succeeds(lambda: apps.read_namespaced_stateful_set("decode", ns), unless=404), cluster.patience_s)
    until(lambda: not pods_of(core, ns)["decode-0"].metadata.owner_references, cluster.patience_s)
    assert pods_of(core, ns)["decode-0"].metadata.uid == before


def test_a_quota_refuses_pods_and_the_set_says_so(
    cluster: Cluster, core: client.CoreV1Api, apps: client.AppsV1Api, ns: str
) -> None:
    core.create_namespaced_resource_quota(ns, {"metadata": {"name": "pods"}, "spec": {"hard": {"pods": "1"}}})
    # a real server begins to enforce it a moment later
    until(
        lambda: cluster.patience_s < 60 or core.read_namespaced_resource_quota("pods", ns).status.hard,
        cluster.patience_s,
    )
    apps.create_namespaced_stateful_set(ns, a_running_set(replicas=2, podManagementPolicy="Parallel"))

    def is_told() -> bool:
        events = core.list_namespaced_event(ns, field_selector="reason=FailedCreate").items
        return any("exceeded quota: pods" in e.message and e.involved_object.name == "decode" for e in events)

    until(is_told, cluster.patience_s)
    assert sorted(pods_of(core, ns)) == ["decode-0"]


# KubeRay


def a_ray_cluster(**decode: Any) -> Json:
    group = {"groupName": "decode", "replicas": 1, "minReplicas": 0, "maxReplicas": 8, "rayStartParams": {}, **decode}
    template = {"spec": {"containers": [{"name": "main", "image": PAUSE}]}}
    spec = {
        "headGroupSpec": {"rayStartParams": {}, "template": template},
        "workerGroupSpecs": [group | {"template": template}],
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "baton"}, "spec": spec}


@pytest.fixture
def rays(cluster: Cluster, ns: str) -> client.CustomObjectsApi:
    api = client.CustomObjectsApi(cluster.api)
    try:
        api.list_namespaced_custom_object("ray.io", "v1", ns, "rayclusters")
    except ApiException as error:
        if error.status != 404:
            raise
        pytest.skip("this cluster has no KubeRay")
    return api


RAYS = ("ray.io", "v1")


def test_a_group_of_a_ray_cluster_is_scaled_where_it_is_still_what_it_was(
    rays: client.CustomObjectsApi, ns: str
) -> None:
    rays.create_namespaced_custom_object(*RAYS, ns, "rayclusters", a_ray_cluster())
    path = "/spec/workerGroupSpecs/0"
    patch: list[Json] = [
        {"op": "test", "path": f"{path}/groupName", "value": "decode"},
        {"op": "test", "path": f"{path}/replicas", "value": 1},
        {"op": "replace", "path": f"{path}/replicas", "value": 0},
        {"op": "add", "path": f"{path}/scaleStrategy", "value": {"workersToDelete": ["baton-decode-x"]}},
    ]
    where = (*RAYS, ns, "rayclusters", "baton")
    patched = rays.patch_namespaced_custom_object(*where, patch, _content_type=JSON_PATCH)
    group = patched["spec"]["workerGroupSpecs"][0]
    assert (group["replicas"], group["scaleStrategy"]["workersToDelete"]) == (0, ["baton-decode-x"])
    assert patched["metadata"]["generation"] == 2
    with refused(422, "Invalid"):
        rays.patch_namespaced_custom_object(*where, patch, _content_type=JSON_PATCH)


def test_a_custom_object_has_a_status_of_its_own_and_must_be_replaced_by_version(
    rays: client.CustomObjectsApi, ns: str
) -> None:
    rays.create_namespaced_custom_object(*RAYS, ns, "rayclusters", a_ray_cluster())
    where = (*RAYS, ns, "rayclusters", "baton")
    status = {"status": {"desiredWorkerReplicas": 1}, "spec": {"suspend": True}}
    written = rays.patch_namespaced_custom_object_status(*where, status, _content_type=MERGE_PATCH)
    assert written["status"]["desiredWorkerReplicas"] == 1
    assert "suspend" not in written["spec"]
    with refused(422, "Invalid", "must be specified for an update"):
        rays.replace_namespaced_custom_object(*where, a_ray_cluster())
    with refused(415, "UnsupportedMediaType"):
        rays.patch_namespaced_custom_object(*where, {}, _content_type=STRATEGIC)
