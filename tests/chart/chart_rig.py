"""Renders the chart with the real Helm, each set of values once, and takes the manifests apart.

`python -m tests.chart.helm_binary .venv/bin` brings Helm; without it these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
HELM = Path(sys.executable).parent / "helm"
# A render ends before a collection would pay: 0.07 s of CPU instead of 0.13 on a busy machine.
GO = {"GOGC": "off", "GOMAXPROCS": "1"}
needs_helm = pytest.mark.skipif(not HELM.exists(), reason="no helm: python -m tests.chart.helm_binary .venv/bin")

Values = Mapping[str, Any]
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Release:
    """What one `helm template` printed."""

    manifests: tuple[Manifest, ...]
    text: str

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def get(self, kind: str, name: str) -> Manifest:
        (found,) = [manifest for manifest in self.of_kind(kind) if manifest["metadata"]["name"] == name]
        return found

    def has(self, kind: str, name: str) -> bool:
        return any(manifest["metadata"]["name"] == name for manifest in self.of_kind(kind))

    def file(self, config_map: str, name: str) -> str:
        return str(self.get("ConfigMap", config_map)["data"][name])

    def pods(self) -> Iterator[tuple[str, Manifest]]:
        """Every pod template with a name that says whose it is: under sets, deployments, jobs, in a RayCluster, and bare ones."""
        for manifest in self.manifests:
            name = f"{manifest['kind']}/{manifest['metadata']['name']}"
            spec = manifest.get("spec", {})
            if manifest["kind"] == "Pod":
                yield name, manifest
            elif manifest["kind"] == "RayCluster":
                yield f"{name}/head", spec["headGroupSpec"]["template"]
                for group in spec["workerGroupSpecs"]:
                    yield f"{name}/{group['groupName']}", group["template"]
            elif "template" in spec:
                yield name, spec["template"]

    def workers(self) -> Iterator[tuple[str, Manifest]]:
        for _, pod in self.pods():
            if home := pod["metadata"]["labels"].get("baton.dev/home"):
                yield home, pod


def render(values: Values, name: str = "demo", *flags: str) -> Release:
    """Raises: AssertionError: Helm refused; its message is the error's."""
    return _rendered(json.dumps(values), name, flags)


def refusal(values: Values) -> str:
    """What Helm says to values that it must refuse."""
    done = _template(json.dumps(values), "demo", ())
    assert done.returncode != 0, "nothing was refused"
    return done.stderr


@cache
def _rendered(values: str, name: str, flags: tuple[str, ...]) -> Release:
    done = _template(values, name, flags)
    assert done.returncode == 0, done.stderr
    manifests = tuple(manifest for manifest in yaml.load_all(done.stdout, yaml.CSafeLoader) if manifest)
    return Release(manifests, done.stdout)


def _template(values: str, name: str, flags: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), "template", name, str(CHART), "--namespace", "ns", "--values", "-", *flags]
    return subprocess.run(command, input=values, capture_output=True, text=True, check=False, env=os.environ | GO)


def merged(*parts: Values) -> dict[str, Any]:
    """Later ones win, map by map, as Helm merges values."""
    result: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            both_maps = isinstance(old, dict) and isinstance(value, Mapping)
            result[key] = merged(old, value) if both_maps and isinstance(old, dict) else value
    return result


def nested(path: str, value: object) -> dict[str, Any]:
    """ "a.b", 1 -> {"a": {"b": 1}}."""
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value
