"""The real Helm against the fake API server: install, upgrade, rollback, uninstall, as an operator runs them.

Helm sends no token over plain HTTP, so whoever calls is the administrator here. It keeps its releases in Secrets that it writes
as protobuf, which the fake does not read: those bodies are turned into JSON on their way in.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chart.chart_rig import CHART, GO, HELM, Values
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_http import Handler
from tests.kube.fake_api_rbac import ADMIN
from tests.kube.fake_api_resources import Json

NAMESPACE = "baton"
_PROTOBUF = b"k8s\x00"


class HelmCluster:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        read_json = Handler._json
        patch.setattr(Handler, "_user", lambda handler: ADMIN)

        def read_body(handler: Handler) -> Any:
            return _object_of(handler._body) if handler._body.startswith(_PROTOBUF) else read_json(handler)

        patch.setattr(Handler, "_json", read_body)
        self.api = FakeApi(namespaces=("default", NAMESPACE))
        self._config = self.api.kubeconfig(folder / "kubeconfig", namespace=NAMESPACE)
        self._env = {"HOME": str(folder), "PATH": "/usr/bin:/bin", **GO}

    def __enter__(self) -> HelmCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.stop()

    def install(self, values: Values) -> None:
        self._run("install", "demo", str(CHART), "--values", "-", "--disable-openapi-validation", values=values)

    def upgrade(self, values: Values, *flags: str) -> None:
        self._run("upgrade", "demo", str(CHART), "--values", "-", "--disable-openapi-validation", *flags, values=values)

    def rollback(self, revision: int) -> None:
        self._run("rollback", "demo", str(revision))

    def uninstall(self) -> None:
        self._run("uninstall", "demo")

    def _run(self, verb: str, *args: str, values: Values | None = None) -> None:
        command = [str(HELM), verb, *args, "--namespace", NAMESPACE, "--kubeconfig", str(self._config)]
        done = subprocess.run(
            command,
            input=json.dumps(values or {}),
            capture_output=True,
            text=True,
            check=False,
            env=self._env,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


def _object_of(body: bytes) -> Json:
    """A Secret as k8s.io/api/core/v1/generated.proto writes it; of other kinds, which are options of a delete, nothing."""
    envelope = dict(_fields(body.removeprefix(_PROTOBUF)))
    if dict(_fields(envelope[1]))[2] != b"Secret":
        return {}
    secret = list(_fields(envelope[2]))
    meta = list(_fields(dict(secret)[1]))
    texts = {number: value.decode() for number, value in meta if number in (1, 3)}
    labels = [dict(_fields(entry)) for number, entry in meta if number == 11]
    data = [dict(_fields(entry)) for number, entry in secret if number == 2]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": texts[1], "labels": {one[1].decode(): one[2].decode() for one in labels}},
        "data": {one[1].decode(): base64.b64encode(one[2]).decode() for one in data},
        "type": dict(secret)[3].decode(),
    }


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Those that are bytes, text or messages; numbers are left out."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        size, at = _varint(message, at)
        if key & 7 == 2:
            yield key >> 3, message[at : at + size]
            at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
