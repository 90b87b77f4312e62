"""The conformance tests go to the fake by a KUBECONFIG, in a process that knows no more of it than of a real cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.fake_api import FakeApi
from tests.kube.fake_kubelet import FakeKubelet
from tests.kube.fake_kubelet_pods import Pretend

FILE = Path(__file__).with_name("test_api_conformance.py")
SOME = "real and (json_patch or account or eviction_that or first_generation or quota)"


@pytest.mark.parametrize(
    ("which", "least"), [(SOME, 8), pytest.param("real", 55, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_whoever_has_a_kubeconfig_runs_them_and_nothing_is_left(tmp_path: Path, which: str, least: int) -> None:
    with FakeApi() as fake, FakeKubelet(fake, lambda pod: Pretend(), pace=0.01):
        before = everything(fake)
        told = os.environ | {"KUBECONFIG": str(fake.kubeconfig(tmp_path / "config"))}
        command = [sys.executable, "-m", "pytest", str(FILE), "-q", "-p", "no:cacheprovider", "-k", which]
        done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        passed = re.search(r"(\d+) passed", done.stdout)
        assert passed is not None, done.stdout
        assert int(passed[1]) >= least, done.stdout
        assert (
            sum(call.access.verb == "create" and call.access.resource.plural == "namespaces" for call in fake.calls)
            >= least
        )
        assert everything(fake) == before


def everything(fake: FakeApi) -> list[tuple[str, str, str]]:
    """Kind, namespace and name of all that is there."""
    return sorted(
        (resource.kind, found["metadata"].get("namespace", ""), found["metadata"]["name"])
        for resource in fake.resources
        for found in fake.verbs.objects(resource)
    )
