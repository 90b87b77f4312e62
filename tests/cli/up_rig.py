"""`baton up` as a child process with stand-in workers, and what tests look at from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
        self.sessions = self.record()["pids"]

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.run_folder / "cluster.json").read_text()))

    def kill(self, part: str) -> int:
        """SIGKILL one of its processes, wait until it is back, and return the new pid."""
        before = self.record()
        os.kill(before["pids"][part], signal.SIGKILL)
        until(
            lambda: self.record()["num_ends"][part] > before["num_ends"][part] and self.record()["states"][part] == "up"
        )
        self.sessions = self.record()["pids"]
        return int(self.sessions[part])

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


@contextmanager
def started_clusters(home: Path) -> Iterator[Callable[..., Up]]:
    """Start clusters; those that a failing test leaves are ended."""
    started: list[Up] = []

    def start(*flags: str, **environ: str) -> Up:
        cluster = Up(home, *flags, **environ)
        started.append(cluster)
        return cluster

    try:
        yield start
    finally:
        for cluster in started:
            if cluster.process.poll() is None:
                cluster.end(signal.SIGTERM)
