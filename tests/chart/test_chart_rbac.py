"""The controller's Role against what the controller calls: every call of its client is allowed, and nothing else is granted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config import KubernetesConfig
from baton.errors import BatonError
from router.controller.kube.api import KubeApi
from router.controller.kube.client import Client
from router.controller.kube.objects import FLEET_LABEL
from tests.chart.chart_rig import Release, merged, needs_helm, render
from tests.chart.chart_values import MATRIX
from tests.kube.fake_api import FakeApi

pytestmark = needs_helm

NAMESPACE = "baton"  # that the fake knows
FULLNAME = "demo-baton"
LISTED = {("", "pods")}  # of these all are read: no names
Granted = set[tuple[str, str]]  # resource, verb


@pytest.fixture
def fake() -> Iterator[FakeApi]:
    with FakeApi() as fake:
        yield fake


def release(name: str) -> Release:
    return render(merged(MATRIX[name], {"fullnameOverride": FULLNAME}), "demo", "--namespace", NAMESPACE)


def controller(fake: FakeApi, folder: Path) -> KubeApi:
    token = folder / "token"
    token.write_text(fake.token_for(NAMESPACE, FULLNAME), encoding="utf-8")
    config = KubernetesConfig(FULLNAME, NAMESPACE, api_server=fake.url, token_file=str(token))
    return KubeApi(Client(config))


def granted(release: Release) -> Granted:
    rules = release.get("Role", f"{FULLNAME}-controller")["rules"]
    return {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}


def used(fake: FakeApi) -> Granted:
    calls = [call.access for call in fake.calls_of(NAMESPACE, FULLNAME)]
    return {("/".join(filter(None, (one.resource.plural, one.subresource))), one.verb) for one in calls}


def call_everything_of_any_cluster(fake: FakeApi, api: KubeApi) -> None:
    pod = {
        "metadata": {"name": "p-0", "labels": {FLEET_LABEL: FULLNAME}},
        "spec": {"containers": [{"name": "worker", "image": "x"}]},
    }
    fake.load([{"apiVersion": "v1", "kind": "Pod", **pod}], NAMESPACE)
    (found,), version = api.pods(f"{FLEET_LABEL}={FULLNAME}")
    list(api.pod_events(f"{FLEET_LABEL}={FULLNAME}", version, 1))
    api.evict(api.label(found, {"baton.dev/role": "decode"}))
    for name in ("slo", "fleet"):
        api.put_config_map(f"{FULLNAME}-{name}", api.config_map(f"{FULLNAME}-{name}"), {"a": "b"})
    api.put_lease(f"{FULLNAME}-controller", api.lease(f"{FULLNAME}-controller"), {"holderIdentity": "me"})
    api.events_about("p-0")
    api.write_event(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": "x-", "namespace": NAMESPACE},
            "involvedObject": {"kind": "Pod", "name": "p-0", "namespace": NAMESPACE},
        }
    )


def test_each_call_is_allowed_and_no_more_is_granted(fake: FakeApi, tmp_path: Path) -> None:
    chart = release("least")
    fake.load(chart.manifests, NAMESPACE)
    api = controller(fake, tmp_path)
    call_everything_of_any_cluster(fake, api)
    for pool in ("prefill", "decode"):
        api.pod_set(f"{FULLNAME}-{pool}")
        api.put_scale(api.scale(f"{FULLNAME}-{pool}"), 2)
    assert used(fake) == granted(chart)
    api.client.close()


def test_under_kuberay_it_is_the_ray_cluster_instead_of_the_sets(fake: FakeApi, tmp_path: Path) -> None:
    chart = release("kuberay")
    fake.load(chart.manifests, NAMESPACE)
    api = controller(fake, tmp_path)
    call_everything_of_any_cluster(fake, api)
    api.ray_cluster(FULLNAME)
    api.patch_ray_cluster(FULLNAME, [{"op": "add", "path": "/spec/workerGroupSpecs/0/replicas", "value": 2}])
    assert used(fake) == granted(chart)
    api.client.close()


def test_what_is_not_its_own_is_refused(fake: FakeApi, tmp_path: Path) -> None:
    fake.load(release("least").manifests, NAMESPACE)
    api = controller(fake, tmp_path)
    with pytest.raises(BatonError, match="forbidden"):
        api.config_map(f"{FULLNAME}-config")
    with pytest.raises(BatonError, match="forbidden"):
        api.scale(f"{FULLNAME}-head")
    api.client.close()
