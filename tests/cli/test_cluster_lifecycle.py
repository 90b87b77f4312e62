"""Whole clusters, real Ray and real processes, with stand-in workers: what starts, restarts, fails to start, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.up_rig import PATIENCE_S, Up, until


def test_a_killed_worker_comes_back_and_a_stuck_ray_still_stops_with_nothing_left(up: Callable[..., Up]) -> None:
    cluster = up()
    cluster.until_ready()
    assert '{"model": "model", ' in cluster.output, "the call it suggests names the model as the router does"
    before = cluster.worker()
    niceness = os.getpriority(os.PRIO_PROCESS, int(str(before["pid"])))
    assert niceness == os.getpriority(os.PRIO_PROCESS, 0), "an engine that yields to every other process"
    os.kill(int(str(before["pid"])), signal.SIGKILL)
    until(lambda: cluster.worker()["num_restarts"] == 1)
    after = cluster.worker()
    assert after["state"] == "ready"
    assert after["epoch"] != before["epoch"]

    second = subprocess.run(
        [sys.executable, "-m", "cli.main", "up", "--admin-port", str(cluster.ports[2]), "--http-port", "0"],
        env=cluster.environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert second.returncode == 1
    assert f"admin port {cluster.ports[2]}" in second.stderr
    assert "--admin-port" in second.stderr

    [raylet] = cluster.pids_named("raylet/raylet", "ray-node")
    os.kill(raylet, signal.SIGSTOP)
    assert cluster.end(signal.SIGINT) == 0, cluster.output
    assert "no process, port or shared-memory file is left" in cluster.output
    cluster.assert_nothing_left()
    assert (cluster.run_folder / "slo.sqlite").exists()


def test_a_worker_that_ray_gave_up_is_revived_and_a_killed_baton_up_takes_all_along(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    obstacle = tmp_path / "obstacle"
    cluster = up(STAND_IN_FAILS_WHILE_EXISTS=str(obstacle))
    cluster.until_ready()
    obstacle.touch()
    os.kill(int(str(cluster.worker()["pid"])), signal.SIGKILL)
    until(lambda: "no such model" in (cluster.run_folder / "logs" / "controller.log").read_text())
    assert cluster.worker()["state"] == "failed"
    obstacle.unlink()
    until(lambda: cluster.worker()["state"] == "ready")

    assert cluster.living()
    assert cluster.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: cluster.living() == [])
    assert cluster.held_ports() == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"STAND_IN_FAILS_WHILE_EXISTS": "/"}, ["both-0", "model.path = 'x': no such model"]),
        ({"BATON__CONTROLLER__WORKER_NUM_CPUS": "900"}, ["Ray cannot place", "900 CPU", "lower --prefill/--decode"]),
    ],
)
def test_a_worker_that_cannot_start_is_one_clear_line_and_a_clean_end(
    up: Callable[..., Up], environ: dict[str, str], words: list[str]
) -> None:
    cluster = up(**environ)
    assert cluster.process.wait(PATIENCE_S) == 1
    [line] = [line for line in cluster.output.splitlines() if line.startswith("baton:")]
    assert all(word in line for word in words), line
    assert "ConfigError" not in line, "the words of the error, not its class"
    assert "no process, port or shared-memory file is left" in cluster.output


def test_ctrl_c_during_the_start_ends_it_with_nothing_left(up: Callable[..., Up]) -> None:
    cluster = up()
    until(lambda: "Starting Ray" in cluster.output)
    assert cluster.end(signal.SIGINT) == 130, cluster.output
    assert "interrupted while starting" in cluster.output
    assert "no process, port or shared-memory file is left" in cluster.output
