"""Router, controller and client run where torch and ucxx are not installed: their image has neither."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.errors import ConfigError
from cli.checks import WORKER_PACKAGES, check_installed

PROCESSES = ("router.main", "router.controller.main", "cli.main", "baton_client")

# Run in a process of its own: this one has torch imported already.
_IMPORT_ALL = f"""
import importlib, sys
for package in {WORKER_PACKAGES}:
    sys.modules[package] = None  # importing it raises ImportError
for module in {PROCESSES}:
    importlib.import_module(module)
"""


def test_processes_of_the_control_plane_import_neither_torch_nor_ucxx() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]


def test_a_cluster_is_not_begun_where_workers_cannot_run() -> None:
    check_installed()
    with pytest.raises(ConfigError, match=r"no_such_package not installed: .* pip install 'baton\[worker\]'"):
        check_installed(("sys", "no_such_package"))
