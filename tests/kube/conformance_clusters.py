"""The clusters that the conformance tests run against: the fake, and a real one where KUBECONFIG names it.

On a real cluster every test has a namespace of its own, which begins with `RUN` and is deleted after it; nothing is made outside
it, and the run ends only once all of them are gone. Whoever runs them needs the rights to make namespaces, roles and pods there.
Its pods run `PAUSE`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

import pytest
from kubernetes import client, config
from kubernetes.client import ApiClient, ApiException

from tests.kube.fake_api import FakeApi
from tests.kube.fake_kubelet import FakeKubelet
from tests.kube.fake_kubelet_pods import Pretend

PAUSE = "registry.k8s.io/pause:3.10"
NAMES = ["fake", *(["real"] if os.environ.get("KUBECONFIG") else [])]
RUN = f"baton-conformance-{secrets.token_hex(4)}"
GONE_S = 300.0  # a real cluster empties a namespace in 10 to 60 s
_NUMBERS = itertools.count(1)
T = TypeVar("T")


class Cluster(Protocol):
    api: ApiClient  # as the administrator
    namespace: str  # this test's own
    patience_s: float  # for what the cluster does in its own time

    def as_account(self, token: str) -> ApiClient: ...


@dataclass(slots=True)
class FakeCluster:
    fake: FakeApi
    api: ApiClient
    namespace: str
    patience_s: float = 10.0

    def as_account(self, token: str) -> ApiClient:
        return self.fake.client(token)


@dataclass(slots=True)
class RealCluster:
    api: ApiClient
    namespace: str
    patience_s: float = 120.0

    def as_account(self, token: str) -> ApiClient:
        settings = client.Configuration()
        config.load_kube_config(client_configuration=settings)
        settings.cert_file = settings.key_file = settings.refresh_api_key_hook = None  # else the administrator's again
        settings.api_key = {"authorization": f"Bearer {token}"}
        return ApiClient(settings)


@contextlib.contextmanager
def a_cluster(name: str) -> Iterator[Cluster]:
    namespace = f"{RUN}-{next(_NUMBERS)}"
    if name == "fake":
        with (
            FakeApi(namespaces=[namespace]) as fake,
            FakeKubelet(fake, lambda pod: Pretend(), pace=0.01),
            fake.client() as api,
        ):
            yield FakeCluster(fake, api, namespace)
        return
    with config.new_client_from_config() as api:
        core = client.CoreV1Api(api)
        core.create_namespace({"metadata": {"name": namespace}})
        try:
            until(lambda: _is_there(core, namespace), 30.0)
            yield RealCluster(api, namespace)
        finally:
            core.delete_namespace(namespace)


def until_nothing_is_left() -> None:
    """On the real cluster, of this run."""
    with config.new_client_from_config() as api:
        core = client.CoreV1Api(api)

        def is_clean() -> bool:
            return not any(found.metadata.name.startswith(RUN) for found in core.list_namespace().items)

        until(is_clean, GONE_S, every_s=0.5)


def _is_there(core: client.CoreV1Api, namespace: str) -> bool:
    return succeeds(lambda: core.read_namespaced_service_account("default", namespace), unless=404)


def until(probe: Callable[[], T], patience_s: float, every_s: float = 0.02) -> T:
    """The first answer that is true."""
    ends_s = time.monotonic() + patience_s
    while not (answer := probe()):
        assert time.monotonic() < ends_s, f"not within {patience_s:g} s: {probe}"
        time.sleep(every_s)
    return answer


@contextlib.contextmanager
def refused(code: int, reason: str, *words: str) -> Iterator[None]:
    """The server answers with a Status of this code and reason, whose message holds the words."""
    with pytest.raises(ApiException) as caught:
        yield
    assert caught.value.status == code, caught.value.body
    for word in (f'"reason":"{reason}"', *words):
        assert word.replace(" ", "") in (caught.value.body or "").replace(" ", "").replace("\\", ""), caught.value.body


def succeeds(call: Callable[[], object], unless: int) -> bool:
    """Whether it does; this one refusal is expected for a while, any other is an error."""
    try:
        call()
    except ApiException as error:
        if error.status != unless:
            raise
        return False
    return True


def is_ready(pod: client.V1Pod) -> bool:
    return any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
