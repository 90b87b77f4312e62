"""The chart as it is handed over: linted, packed, the same from the package, with notes that say how to go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.chart_rig import CHART, GO, HELM, ROOT, Values, merged, needs_helm, render
from tests.chart.chart_values import EVERYTHING, LEAST, MATRIX, STILL
from tests.chart.golden import GOLDEN, golden
from tests.chart.schema_leaves import SCHEMA

pytestmark = needs_helm


def helm(*args: str, values: Values | None = None) -> str:
    done = subprocess.run(
        [str(HELM), *args],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | GO,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def notes(values: Values) -> str:
    return _notes(json.dumps(values))


@cache
def _notes(values: str) -> str:
    args = ("install", "demo", str(CHART), "--namespace", "ns", "--dry-run=client", "--values", "-")
    return helm(*args, values=json.loads(values)).partition("NOTES:")[2]


@pytest.mark.parametrize("name", ["least", "everything", "kuberay", "external"])
def test_the_linter_has_nothing_to_say(name: str) -> None:
    assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), "--values", "-", values=MATRIX[name])


def test_a_package_renders_what_the_folder_does_and_holds_nothing_else(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    (package,) = tmp_path.glob("*.tgz")
    with tarfile.open(package) as tar:
        packed = {name.removeprefix("baton/") for name in tar.getnames()}
    there = {
        str(file.relative_to(CHART)) for file in CHART.rglob("*") if file.is_file() and "__pycache__" not in file.parts
    }
    assert packed == there
    command = ("template", "demo", str(package), "--namespace", "ns", "--values", "-")
    assert helm(*command, values=EVERYTHING) == render(EVERYTHING).text


def test_nothing_is_drawn_by_chance_but_rays_token() -> None:
    assert render(STILL).text == render(STILL, "demo", "--debug").text
    secret = render(LEAST).get("Secret", "demo-baton-ray")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert not render(STILL).of_kind("Secret")


@pytest.mark.parametrize("file", golden, ids=lambda file: file)
def test_reviewed_manifests_are_what_is_rendered(file: str) -> None:
    """`python -m tests.chart.golden` writes them anew; review the difference."""
    written = (GOLDEN / file).read_text(encoding="utf-8")
    assert golden[file]() == written


def test_the_charts_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{chart["appVersion"]}"' in project


def test_notes_say_how_to_call_to_change_a_target_and_to_watch() -> None:
    said = notes(STILL)
    for words in ("http://demo-baton-router.ns/v1", "dns:///demo-baton-router-headless.ns:50051", "/admin/v1/slo/interactive",
                  "get pods -l app.kubernetes.io/instance=demo", "/admin/v1/pools", "test demo"):  # fmt: skip
        assert words in said


WARNINGS = {
    "no RDMA": (STILL, "prefill pods have no RDMA"),
    "RDMA that may fail": (merged(EVERYTHING, {"pools": {r: {"rdma": {"require": False}} for r in ("prefill", "decode")}}),
                           "rdma.require is false"),
    "a GCS in memory": (MATRIX["memory"], "ray.gcs.storage is memory"),
    "what kuberay needs": (MATRIX["kuberay"], "needs the KubeRay operator"),
    "a moving revision": (STILL, "Pin a commit"),
    "open routers": (STILL, "auth.apiKeysSecret is empty"),
    "no network policy": (MATRIX["nothing extra"], "networkPolicy.enabled is false"),
    "a mode that only advises": (STILL, "scaler.mode is advisory"),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNINGS)
def test_notes_warn(name: str) -> None:
    values, says = WARNINGS[name]
    assert says in notes(values)


def test_notes_do_not_warn_of_what_is_well() -> None:
    assert "WARNING" not in notes(merged(EVERYTHING, {"scaler": {"mode": "auto"}}))


def test_the_guides_example_installs_and_every_value_that_it_names_is_there() -> None:
    guide = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    render(yaml.safe_load(example))
    named = {name.rstrip(":.") for name in re.findall(r"`([a-z][A-Za-z]*(?:\.[A-Za-z*<>]+)+):?[^`]*`", guide)}
    roots = SCHEMA["properties"].keys()
    asked = {name for name in named if name.split(".")[0] in roots}
    assert len(asked) > 25
    for name in asked:
        path = re.sub(r"\.(\*|<role>)", ".prefill", name) if name.startswith("pools.") else name.removesuffix(".*")
        assert resolves(path), name


def resolves(path: str) -> bool:
    node: dict[str, Any] = SCHEMA
    for name in path.split("."):
        if "$ref" in node:
            node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
        if name not in node.get("properties", {}):
            return False
        node = node["properties"][name]
    return True
