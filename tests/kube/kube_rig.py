"""The objects of one release "demo" on the fake API server, and our own client of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.config import KubernetesConfig
from router.controller.kube.api import KubeApi
from router.controller.kube.client import Client
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import Json

NAMESPACE = "baton"
FULLNAME = "demo"


class Clock:
    """Both clocks of a process; they only move when told."""

    def __init__(self) -> None:
        self.monotonic_s = 100.0
        self.unix_s = 1_700_000_000.0

    def pass_s(self, seconds: float) -> None:
        self.monotonic_s += seconds
        self.unix_s += seconds

    def now_s(self) -> float:
        return self.monotonic_s

    def now_unix_s(self) -> float:
        return self.unix_s


def config_of(fake: FakeApi, folder: Path, **more: object) -> KubernetesConfig:
    """Of a controller that is the administrator there; what its Role has to grant is another test's matter."""
    token = folder / "token"
    token.write_text(fake.admin_token)
    return KubernetesConfig(
        fullname=FULLNAME,
        namespace=NAMESPACE,
        api_server=fake.url,
        token_file=str(token),
        **more,  # type: ignore[arg-type]
    )


@contextmanager
def kube_api(fake: FakeApi, folder: Path, now_s: Callable[[], float] | None = None) -> Iterator[KubeApi]:
    config = config_of(fake, folder)
    client = Client(config, now_s) if now_s else Client(config)
    try:
        yield KubeApi(client)
    finally:
        client.close()


def config_map(name: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}}


def lease(name: str) -> Json:
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}


def stateful_set(home: str, replicas: int | None = None) -> Json:
    """As the chart renders it, without a size unless one is given."""
    labels = {"baton.dev/fleet": FULLNAME, "baton.dev/home": home}
    spec: Json = {
        "serviceName": FULLNAME,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "selector": {"matchLabels": labels},
        "template": {
            "metadata": {"labels": {**labels, "baton.dev/role": home}},
            "spec": {"containers": [{"name": "worker", "image": "baton-worker:1"}]},
        },
    }
    if replicas is not None:
        spec["replicas"] = replicas
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": f"{FULLNAME}-{home}"}, "spec": spec}


def pod(name: str, home: str, *, ip: str = "10.0.0.1", phase: str = "Running", ready: bool = True) -> Json:
    labels = {"baton.dev/fleet": FULLNAME, "baton.dev/home": home, "baton.dev/role": home}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": "node-1", "containers": [{"name": "worker", "image": "baton-worker:1"}]},
        "status": {
            "phase": phase,
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def release(prefill: int = 1, decode: int = 1) -> list[Json]:
    """All that a controller finds."""
    return [
        stateful_set("prefill", prefill),
        stateful_set("decode", decode),
        config_map(f"{FULLNAME}-slo"),
        config_map(f"{FULLNAME}-fleet"),
        lease(f"{FULLNAME}-controller"),
    ]
