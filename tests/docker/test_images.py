"""What can be said of the images where no engine builds any: their linters are content, and what is pinned fits together."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
TOOLS = Path(sys.executable).parent
LAYERS = ("postgres", "kubernetes", "tracing", "worker-cuda13")


def _locked() -> dict[str, Requirement]:
    lines = (DOCKER / "constraints.txt").read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(one.name): one for one in locked}


def _wanted() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in (*project["dependencies"], *(one for name in LAYERS for one in extras[name]))]


def test_the_linter_of_dockerfiles_has_nothing_to_say() -> None:
    command = f"{TOOLS}/hadolint --config {DOCKER}/.hadolint.yaml {DOCKER}/Dockerfile"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_linter_of_scripts_has_nothing_to_say() -> None:
    scripts = sorted((ROOT / "deploy").rglob("*.sh"))
    assert len(scripts) >= 5
    done = subprocess.run([TOOLS / "shellcheck", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_base_image_is_pinned_by_digest() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)) - stages
    assert bases
    for base in bases:
        name = re.fullmatch(r"\$\{(\w+)\}", base)
        assert name is not None, base
        assert re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", arguments[name[1]])


def test_both_images_run_as_nobody_in_particular() -> None:
    for stage in re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE):
        if re.match(r"python AS (control|worker)$", stage, re.MULTILINE):
            users = re.findall(r"^USER (\S+)$", stage, re.MULTILINE)
            assert users == ["10001:10001"]


@pytest.mark.parametrize("wanted", _wanted(), ids=str)
def test_what_is_locked_is_what_the_project_asks_for(wanted: Requirement) -> None:
    locked = _locked()[canonicalize_name(wanted.name)]
    if wanted.name == "torch":  # each torch names its own CUDA packages, so the lock leaves its last digit open
        assert locked.specifier == wanted.specifier
        return
    [exact] = locked.specifier
    assert exact.operator == "=="
    assert wanted.specifier.contains(Version(exact.version))


def test_the_image_has_the_ucx_that_ucxx_was_built_against() -> None:
    [exact] = _locked()["libucx-cu13"].specifier
    assert f"/v{exact.version}/ucx-{exact.version}.tar.gz" in DOCKERFILE
    script = (DOCKER / "check_ucx.sh").read_text(encoding="utf-8")
    assert f"MAJOR_MINOR={exact.version.rpartition('.')[0]}\n" in script


def test_an_unknown_layer_is_refused() -> None:
    done = subprocess.run([DOCKER / "check_pip_layer.sh", "nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown layer" in done.stderr


def test_a_ucx_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = subprocess.run([DOCKER / "check_ucx.sh", tmp_path, "ib"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"no {tmp_path}/bin/ucx_info" in done.stderr
