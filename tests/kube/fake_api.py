"""A Kubernetes API server in the test process, which the official client talks to over HTTP.

    with FakeApi() as api:
        core = kubernetes.client.CoreV1Api(api.client())                # as the cluster's administrator
        apps = kubernetes.client.AppsV1Api(api.client(api.token_for("baton", "controller")))  # as a service account, by its Roles
        api.faults.add(Fault(verb="patch", resource="statefulsets/scale", code=409, times=2))
        with api.away(compact=True): ...                                # nobody listens; old watches get 410 after

What it promises is written as tests in test_api_conformance.py, which runs against a real cluster too. Kinds beyond those of
`RESOURCES` are given as `custom_resource(...)`. Nothing runs pods here: that is fake_kubelet.py.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

import yaml
from kubernetes import client as kubernetes_client

from tests.kube.fake_api_faults import Faults
from tests.kube.fake_api_http import Call, Listener
from tests.kube.fake_api_rbac import ADMIN, Access, User
from tests.kube.fake_api_resources import NAMESPACES, RESOURCES, Json, Resource
from tests.kube.fake_api_store import Store
from tests.kube.fake_api_verbs import Verbs


class FakeApi:
    def __init__(self, *, namespaces: Iterable[str] = ("default", "baton"), custom: Iterable[Resource] = ()) -> None:
        self.store = Store()
        self.verbs = Verbs(self.store)
        self.faults = Faults()
        self.resources = (*RESOURCES, *custom)
        self.calls: list[Call] = []
        self.admin_token = secrets.token_urlsafe()
        self._users = {self.admin_token: ADMIN}
        self._in_flight: list[Access] = []
        self._lock = threading.Lock()
        for name in namespaces:
            self.verbs.create(NAMESPACES, "", {"metadata": {"name": name}})
        self._listener: Listener | None = Listener(self, 0)
        self.port: int = self._listener.server_address[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def up(self) -> bool:
        return self._listener is not None

    def stop(self) -> None:
        """Break every connection and refuse new ones; what was stored stays."""
        if self._listener is not None:
            listener, self._listener = self._listener, None
            self.faults.clear()
            listener.end()

    def start(self) -> None:
        """Listen again on the same port."""
        assert self._listener is None, "already up"
        self._listener = Listener(self, self.port)

    @contextlib.contextmanager
    def away(self, *, compact: bool = False) -> Iterator[None]:
        self.stop()
        if compact:
            self.store.compact()
        try:
            yield
        finally:
            self.start()

    def client(self, token: str | None = None) -> kubernetes_client.ApiClient:
        """Of the official client; the caller closes it."""
        settings = kubernetes_client.Configuration(host=self.url)
        settings.retries = False  # urllib3's: what a test makes fail is to be seen
        settings.api_key = {"authorization": f"Bearer {self.admin_token if token is None else token}"}
        return kubernetes_client.ApiClient(settings)

    def kubeconfig(self, path: Path, token: str | None = None, namespace: str = "default") -> Path:
        """For processes: `kubectl`, `helm`, a controller."""
        name = "fake"
        user = {"token": self.admin_token if token is None else token}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "clusters": [{"name": name, "cluster": {"server": self.url}}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": namespace}}],
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path

    def load(self, manifests: Iterable[Json], namespace: str = "default") -> list[Json]:
        """Create what a rendered chart says, as its installer does; a kind that is not served is an error."""
        served = {(r.api_version, r.kind): r for r in self.resources}
        created = []
        for manifest in manifests:
            resource = served[manifest["apiVersion"], manifest["kind"]]
            where = manifest["metadata"].get("namespace", namespace) if resource.namespaced else ""
            created.append(self.verbs.create(resource, where, manifest))
        return created

    def calls_of(self, namespace: str, service_account: str) -> list[Call]:
        name = User.service_account(namespace, service_account).name
        with self._lock:
            return [call for call in self.calls if call.user == name]

    def in_flight(self) -> list[Access]:
        """Calls that have been read and not answered yet; watches that go on."""
        with self._lock:
            return list(self._in_flight)

    # What the handlers ask

    def user_of(self, token: str) -> User | None:
        with self._lock:
            return self._users.get(token)

    def token_for(self, namespace: str, name: str) -> str:
        """Of a service account, which need not exist: it can do what Roles in the store grant it."""
        token = secrets.token_urlsafe()
        with self._lock:
            self._users[token] = User.service_account(namespace, name)
        return token

    def begin(self, access: Access) -> None:
        with self._lock:
            self._in_flight.append(access)

    def note(self, call: Call) -> None:
        with self._lock:
            self._in_flight.remove(call.access)
            self.calls.append(call)
