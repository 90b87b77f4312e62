"""Whole clusters, real Ray and real processes, with stand-in workers: what starts, restarts, fails to start, and what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.ports import free_port, listener_pid
from cli.processes import living_pids, process_name
from tests.tiny_models import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 60.0  # generous: two cores may be busy with other tests


class Up:
    """One `baton up --colocated` as a child process."""

    def __init__(self, home: Path, *flags: str, **environ: str) -> None:
        self.ports = [free_port() for _ in range(3)]
        model = home / "model"
        if not model.exists():
            make_tiny_model(model)
        names = ("--http-port", "--grpc-port", "--admin-port")
        port_flags = [word for name, port in zip(names, self.ports, strict=True) for word in (name, str(port))]
        self.environ = {
            **os.environ,
            "BATON_HOME": str(home),
            "BATON__CONTROLLER__WORKER_SERVER": "tests.controller.stand_in_server:StandInServer",
            "PYTHONPATH": str(REPOSITORY),
            **environ,
        }
        self.run_folder = home / "run" / str(self.ports[2])
        self.output_file = home / "up.out"
        with self.output_file.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cli.main", "up", "--colocated", "--model", str(model), *port_flags, *flags],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.sessions: dict[str, int] = {}

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def until_ready(self) -> None:
        until(lambda: "Ready." in self.output or self.process.poll() is not None)
        assert self.process.poll() is None, self.output
        self.sessions = json.loads((self.run_folder / "cluster.json").read_text())["pids"]

    def worker(self) -> dict[str, object]:
        """What `baton status` says of the one worker."""
        command = [sys.executable, "-m", "cli.main", "status", "--json", "--admin-port", str(self.ports[2])]
        answer = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, check=True, timeout=PATIENCE_S
        )
        [worker] = json.loads(answer.stdout)["workers"]
        return dict(worker)

    def pids_named(self, words: str, part: str) -> list[int]:
        return [pid for pid in living_pids([self.sessions[part]]) if words in process_name(pid)]

    def living(self) -> list[int]:
        return living_pids(self.sessions.values())

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def held_ports(self) -> list[int]:
        return [port for port in self.ports if listener_pid(port) in self.living()]

    def assert_nothing_left(self) -> None:
        assert self.living() == []
        assert self.held_ports() == []
        assert not (self.run_folder / "tokens.json").exists()
        assert not (self.run_folder / "ray.token").exists()


def until(holds: Callable[[], bool]) -> None:
    """Poll, print the time it took, fail after a generous bound."""
    started_s = time.monotonic()
    while not holds():
        assert time.monotonic() - started_s < PATIENCE_S
        time.sleep(0.1)
    print(f"waited {time.monotonic() - started_s:.2f} s")


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    """Start clusters; those that a failing test leaves are ended."""
    started: list[Up] = []

    def start(*flags: str, **environ: str) -> Up:
        cluster = Up(tmp_path, *flags, **environ)
        started.append(cluster)
        return cluster

    yield start
    for cluster in started:
        if cluster.process.poll() is None:
            cluster.end(signal.SIGTERM)


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
