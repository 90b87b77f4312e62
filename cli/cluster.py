"""A local cluster from the outside: start its processes in order, watch them, stop them, prove that nothing is left.

    1. guard       ends the run if this process is killed (cli/guard.py)
    2. ray         the head, loopback only, with a token
    3. controller  the admin endpoint, the worker actors
    4. router      the front end
    stop: router drains -> controller ends the actors -> Ray -> whatever is left in the run's sessions -> files -> verify
Each wait is bounded and ends in SIGKILL. Imports neither ray nor torch. Single-threaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from baton.config import LOOPBACK, ClusterConfig
from baton.config_load import to_json
from cli.guard import Guard
from cli.ports import free_port, is_listening, listener_pid
from cli.processes import Child, adopt_orphans, end_child, end_sessions, is_stopped, living_pids, spawn
from cli.run_folder import ClusterRecord, RunFolder, write_private
from cli.shared_memory import SharedMemory
from cli.signals import Signals
from cli.terminal import say, step
from router.controller import ray_head

_RAY_START_S = 60.0  # measured: 4-5 s on 2 idle cores
_PROCESS_START_S = 60.0  # measured: 1-3 s
_STOP_S = 15.0  # a controller stops its actors in 4 s at most; Ray's head needs 1-2 s
_STUCK_STOP_S = 3.0  # where one of ours is SIGSTOPped, others may wait for it for ever
_HURRY_S = 3.0  # for a router told twice to end its running calls with their error; that takes milliseconds
_SWEEP_S = 10.0
_LOOK_S = 0.05  # between two looks at a starting process; start-up takes seconds


class ClusterFailed(Exception):
    """One line, with what to do; `log` may hold the last lines of the process concerned."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log

    @classmethod
    def ended(cls, child: Child) -> ClusterFailed:
        """A process ended by itself: its own last word ("router: port ..."), who killed it, or what it logged."""
        exit_code = child.popen.wait()
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            return cls(f"{child.name} was killed ({name}); the cluster cannot go on without it: run the command again")
        last_word = child.log_tail(1)
        if last_word.startswith(f"{child.name}: "):
            return cls(last_word)
        return cls(
            f"{child.name} ended with exit code {exit_code}; its last words follow, run the command again",
            child.log_tail(),
        )


class Cluster:
    """One `baton up`. `start` and `stop` once each; `stop` also after a failed `start`."""

    def __init__(self, config: ClusterConfig, signals: Signals) -> None:
        self.config = _with_ports(config)
        self.folder = RunFolder(self.config.controller.admin_port)
        self._signals = signals
        self._children: list[Child] = []
        self._guard: Guard | None = None
        self._temp_dir: Path | None = None
        self._shm = SharedMemory()

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up; checks were made before.

        Raises:
            ClusterFailed, ConfigError: why it cannot.
            Interrupted: the user asked to stop.
        """
        self.folder.take()
        self.folder.write_secrets()
        adopt_orphans()
        # Ray puts Unix sockets below it, and their paths end at 107 bytes: a short folder, not the run folder.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="baton-ray-"))
        self._guard = Guard(self._temp_dir)
        self._start_ray()
        self._start_controller()
        self._start_router()
        self._await_workers()
        self._await_router()

    def _start_ray(self) -> None:
        port = free_port()
        self._configure(ray_address=f"{LOOPBACK}:{port}", run_dir=str(self.folder.path))
        assert self._temp_dir is not None
        command = ray_head.command(port, self._temp_dir, os.cpu_count() or 1)
        with step("Starting Ray"):
            head = self._spawn("ray", command)
            self._await(head, _RAY_START_S, lambda: ray_head.READY_LINE in head.log_file.read_text(errors="replace"))

    def _start_controller(self) -> None:
        with step("Starting the controller"):
            write_private(self.folder.config_file, to_json(self.config))
            module = ("-m", "router.controller.main", "--config", str(self.folder.config_file))
            child = self._spawn("controller", [sys.executable, *module])
            ready = self._await_ready_line(child)
        router = dataclasses.replace(self.config.router, control_address=str(ready["control_address"]))
        self.config = dataclasses.replace(self.config, router=router)

    def _start_router(self) -> None:
        with step("Starting the router"):
            write_private(self.folder.router_file, to_json(self.config.router))
            module = ("-m", "router.main", "--config", str(self.folder.router_file))
            child = self._spawn("router", [sys.executable, *module])
            self._write_record()
            self._await_ready_line(child)

    def _await_workers(self) -> None:
        """Wait until each worker is ready; one that failed to start ends the wait."""
        deadline_s = time.monotonic() + self.config.controller.worker_start_timeout_s + _PROCESS_START_S
        with step("Starting the workers") as shown, self.admin("viewer") as admin:
            while True:
                workers = admin.get("/admin/v1/workers").json()["workers"]
                failed = [w for w in workers if w["state"] == "failed" and not w["epoch"]]
                if failed:
                    raise ClusterFailed(str(failed[0]["reason"]))
                num_ready = sum(w["state"] == "ready" for w in workers)
                shown.note(f"{num_ready} of {len(workers)} ready")
                if workers and num_ready == len(workers):
                    return
                if time.monotonic() > deadline_s:
                    raise ClusterFailed(f"only {num_ready} of {len(workers)} workers are ready; see {self.folder.logs}")
                self._pause()

    def _await_router(self) -> None:
        deadline_s = time.monotonic() + _PROCESS_START_S
        url = f"http://{LOOPBACK}:{self.config.router.http_port}/readyz"
        with step("Connecting router and workers"):
            while True:
                try:
                    if httpx.get(url, timeout=2.0).status_code == 200:
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if time.monotonic() > deadline_s:
                    raise ClusterFailed(f"the router is not ready after {_PROCESS_START_S:g} s; see {self.folder.logs}")
                self._pause()

    def _configure(self, *, ray_address: str, run_dir: str) -> None:
        controller = dataclasses.replace(self.config.controller, ray_address=ray_address, run_dir=run_dir)
        self.config = dataclasses.replace(self.config, controller=controller)

    def _spawn(self, name: str, command: list[str]) -> Child:
        environ = ray_head.environ(self.folder.ray_token_file)
        child = spawn(name, command, environ, self.folder.logs / f"{name}.log")
        self._children.append(child)
        assert self._guard is not None
        self._guard.watch(child.pid)
        return child

    def _await_ready_line(self, child: Child) -> dict[str, object]:
        """What the process said of itself once it served."""
        self._await(child, _PROCESS_START_S, lambda: _ready_line(child) is not None)
        ready = _ready_line(child)
        assert ready is not None
        return ready

    def _await(self, child: Child, timeout_s: float, is_ready: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not is_ready():
            if time.monotonic() > deadline_s:
                raise ClusterFailed(f"{child.name} is not ready after {timeout_s:g} s", child.log_tail())
            self._pause()

    def _pause(self) -> None:
        """A short wait that ends at once, with an exception, when the user or a dead child ends the start."""
        self._signals.pause(_LOOK_S)
        for child in self._children:
            if child.popen.poll() is not None:
                raise ClusterFailed.ended(child)

    def _write_record(self) -> None:
        router, controller = self.config.router, self.config.controller
        pids = {child.name: child.pid for child in self._children}
        self.folder.write_record(
            ClusterRecord(
                os.getpid(),
                LOOPBACK,
                router.http_port,
                router.grpc_port,
                controller.admin_port,
                pids,
            )
        )

    # -- run ---------------------------------------------------------------------------------------------------------

    def admin(self, role: str) -> httpx.Client:
        """A client of the admin endpoint."""
        return httpx.Client(
            base_url=f"http://{LOOPBACK}:{self.config.controller.admin_port}",
            headers={"authorization": f"Bearer {self.folder.admin_secret(role)}"},
            timeout=10.0,
        )

    def wait(self) -> None:
        """Sleep until the user asks to stop.

        Raises:
            ClusterFailed: a process ended by itself.
        """
        pid_fds = {os.pidfd_open(child.pid): child for child in self._children}
        try:
            readable, _, _ = select.select([self._signals.fd, *pid_fds], [], [])
        finally:
            for fd in pid_fds:
                os.close(fd)
        for fd in readable:
            if dead := pid_fds.get(fd):
                raise ClusterFailed.ended(dead)

    # -- stop --------------------------------------------------------------------------------------------------------

    def stop(self, *, remove_folder: bool = False) -> list[str]:
        """End everything, in order, within bounds.

        Returns:
            What is left, one line each; empty = nothing.
        """
        children = {child.name: child for child in self._children}
        if router := children.get("router"):
            with step("Draining and stopping the router (Ctrl-C again skips the wait)"):
                self._signals.clear()
                end_child(router, self.config.router.drain_s, self._signals.fd, _HURRY_S)
        with step("Stopping workers and Ray"):
            for name in ("controller", "ray"):
                if child := children.get(name):
                    end_child(child, self._patience_s(), None)
            left = [f"process {pid}" for pid in end_sessions(self._sessions(), _SWEEP_S)]
        left += self._shm.clean()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            left += [f"folder {self._temp_dir}"] if self._temp_dir.exists() else []
        left += [f"port {port}" for port in self._held_ports()]
        if self._guard is not None:
            self._guard.dismiss()
        self.folder.release(remove=remove_folder and not left)
        return left

    def _patience_s(self) -> float:
        stuck = any(is_stopped(pid) for pid in living_pids(self._sessions()))
        if stuck:
            say("  a process is stopped: nothing waits for it long")
        return _STUCK_STOP_S if stuck else _STOP_S

    def _sessions(self) -> set[int]:
        return {child.pid for child in self._children}

    def _held_ports(self) -> list[int]:
        router, controller = self.config.router, self.config.controller
        addresses = (controller.ray_address, router.control_address)
        ports = [router.http_port, router.grpc_port, controller.admin_port]
        ports += [int(address.rpartition(":")[2]) for address in addresses if address]
        return [port for port in ports if self._children and is_listening(port) and not self._is_foreign(port)]

    def _is_foreign(self, port: int) -> bool:
        """Somebody else took the port since it was given up."""
        pid = listener_pid(port)
        return pid is not None and pid not in living_pids(self._sessions())


def _with_ports(config: ClusterConfig) -> ClusterConfig:
    """Replace port 0 by free ones: everything that is said and written names real ports."""
    router, controller = config.router, config.controller
    return dataclasses.replace(
        config,
        router=dataclasses.replace(
            router, http_port=router.http_port or free_port(), grpc_port=router.grpc_port or free_port()
        ),
        controller=dataclasses.replace(controller, admin_port=controller.admin_port or free_port()),
    )


def _ready_line(child: Child) -> dict[str, object] | None:
    """The one JSON line with a pid that is not a log line."""
    for line in child.log_file.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                continue  # half a line: the rest comes
            if "pid" in said and "event" not in said:
                return dict(said)
    return None
