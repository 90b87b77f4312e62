"""A local cluster from the outside: start its processes in order, keep them running, stop them, prove that nothing is left.

    1. guard       ends the run if this process is killed (cli/guard.py)
    2. ray         the head, loopback only, with a token; then the node that the workers are children of
    3. controller  the admin endpoint, the worker actors
    4. routers     the front end
    run: what ends is started again in place (cli/supervisor.py)
    stop: routers drain -> controller ends the actors -> Ray -> whatever is left in the run's sessions -> files -> verify
Each wait is bounded and ends in SIGKILL. The ports are held from start to stop, so nobody takes one while its process is
away. Imports neither ray nor torch. Single-threaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import httpx

from baton.config import LOOPBACK, ClusterConfig
from baton.config_load import to_json
from baton.errors import ConfigError
from cli.guard import Guard
from cli.ports import HeldPorts, free_port, is_listening, listener_pid
from cli.processes import Child, adopt_orphans, end_children, end_sessions, is_stopped, living_pids, spawn
from cli.run_folder import ClusterRecord, RunFolder, write_private
from cli.shared_memory import SharedMemory
from cli.signals import Signals
from cli.supervisor import ClusterFailed, Part, supervise
from cli.terminal import say, step
from router.controller import ray_head
from router.controller.control_store import SLO_FILE

_RAY_START_S = 60.0  # measured: 4-5 s on 2 idle cores
_PROCESS_START_S = 60.0  # measured: 1-3 s
_STOP_S = 15.0  # a controller stops its actors in 4 s at most; Ray's head needs 1-2 s
_STUCK_STOP_S = 3.0  # where one of ours is SIGSTOPped or Ray's head is away, others may wait for it for ever
_HURRY_S = 3.0  # for a router told twice to end its running calls with their error; that takes milliseconds
_SWEEP_S = 10.0
_LOOK_S = 0.05  # between two looks at a starting process; start-up takes seconds


class Cluster:
    """One `baton up`. `start` and `stop` once each; `stop` also after a failed `start`."""

    def __init__(self, config: ClusterConfig, signals: Signals) -> None:
        self.config = _with_ports(config)
        self.folder = RunFolder(self.config.controller.admin_port)
        self._signals = signals
        self._ports = HeldPorts()
        self._ray_port = free_port()
        self._parts: list[Part] = []
        self._sessions: set[int] = set()  # of processes that may have left something
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
        self._hold_ports()
        adopt_orphans()
        # Ray puts Unix sockets below it, and their paths end at 107 bytes: a short folder, not the run folder.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="baton-ray-"))
        self._guard = Guard(self._temp_dir)
        self._write_configs(self._temp_dir)
        for title, parts in self._plan(self._temp_dir):
            with step(title):
                self._start_parts(parts)
        self._await_workers()
        self._await_router()

    def _plan(self, temp_dir: Path) -> list[tuple[str, list[Part]]]:
        """The parts in the order of their start, those of one step together: they wait for each other by themselves."""
        go_on = "workers and running calls go on without it"
        orders = f"{go_on}, but nobody takes orders"
        head = ray_head.head_command(self._ray_port, temp_dir)
        node = ray_head.node_command(f"{LOOPBACK}:{self._ray_port}", temp_dir, os.cpu_count() or 1)
        names = self._router_names()
        rest = "the others take new ones" if len(names) > 1 else "new ones are refused"
        meanwhile = f"its calls are broken off, {rest}"
        others = [
            self._ray("ray-node", node, "its workers end with it, and calls wait for new ones"),
            self._module("controller", "router.controller.main", self.folder.config_file, orders),
            *(self._module(name, "router.main", self.folder.router_file(name), meanwhile) for name in names),
        ]
        what = "the router" if len(names) == 1 else f"{len(names)} routers"
        return [
            ("Starting Ray", [self._ray("ray", head, go_on)]),
            (f"Starting Ray's node, the controller and {what}", others),
        ]

    def _ray(self, name: str, command: list[str], meanwhile: str) -> Part:
        def start() -> Child:
            assert self._temp_dir is not None
            ray_head.before_restart(self._temp_dir)
            return self._spawn(name, command)

        return Part(name, start, lambda child: ray_head.READY_LINE in child.said(), _RAY_START_S, meanwhile)

    def _module(self, name: str, module: str, config_file: Path, meanwhile: str) -> Part:
        command = [sys.executable, "-m", module, "--config", str(config_file)]
        return Part(name, lambda: self._spawn(name, command), _said_ready, _PROCESS_START_S, meanwhile)

    def _router_names(self) -> list[str]:
        count = self.config.router.processes
        return ["router"] if count == 1 else [f"router-{index}" for index in range(count)]

    def _start_parts(self, parts: list[Part]) -> None:
        for part in parts:
            self._parts.append(part)
            part.begin()
        self._write_record()
        for part in parts:
            deadline_s = time.monotonic() + part.patience_s
            assert part.child is not None
            while not part.is_up(part.child):
                if time.monotonic() > deadline_s:
                    raise ClusterFailed(f"{part.name} is not ready after {part.patience_s:g} s", part.child.log_tail())
                self._pause()
            part.state = "up"
        self._write_record()

    def _await_workers(self) -> None:
        """Wait until each worker is ready; one that failed to start ends the wait."""
        patience_s = self._real_s(self.config.controller.worker_start_timeout_s)
        deadline_s = time.monotonic() + patience_s + _PROCESS_START_S
        with step("Starting the workers") as shown, self.admin("viewer") as admin:
            while True:
                workers = admin.get("/admin/v1/workers").json()["workers"]
                failed = [w for w in workers if w["state"] == "failed" and not w["epoch"]]
                if failed:
                    raise ClusterFailed(str(failed[0]["reason"]))
                num_ready = sum(w["state"] in ("ready", "standby") for w in workers)
                shown.note(f"{num_ready} of {len(workers)} ready")
                if workers and num_ready == len(workers):
                    return
                if time.monotonic() > deadline_s:
                    raise ClusterFailed(f"only {num_ready} of {len(workers)} workers are ready; see {self.folder.logs}")
                self._pause()

    def _await_router(self) -> None:
        """Every router, each on its own port where they share one."""
        patience_s = self._real_s(_PROCESS_START_S)
        deadline_s = time.monotonic() + patience_s
        with step("Connecting routers and workers"):
            for port in self._metrics_ports():
                while not _answers_ready(port):
                    if time.monotonic() > deadline_s:
                        raise ClusterFailed(f"the router is not ready after {patience_s:g} s; see {self.folder.logs}")
                    self._pause()

    def _hold_ports(self) -> None:
        router, controller = self.config.router, self.config.controller
        for port, flag in (
            (router.http_port, "--http-port"),
            (router.grpc_port, "--grpc-port"),
            (controller.admin_port, "--admin-port"),
            (controller.control_port, "controller.control_port"),
        ):
            if not self._ports.hold(port):
                raise ConfigError(f"port {port} was taken a moment ago; choose another with {flag}", field=flag)

    def _write_configs(self, temp_dir: Path) -> None:
        """What each process reads, at its start and at every later one."""
        controller = dataclasses.replace(
            self.config.controller,
            ray_address=f"{LOOPBACK}:{self._ray_port}",
            ray_node_dir=str(ray_head.node_dir(temp_dir)),
            run_dir=str(self.folder.path),
        )
        self.config = dataclasses.replace(self.config, controller=controller)
        write_private(self.folder.config_file, to_json(self.config))
        self._process_ports = (
            {name: free_port() for name in self._router_names()} if self.config.router.processes > 1 else {}
        )
        batch = dataclasses.replace(
            self.config.router.batch,
            folder=self.config.router.batch.folder or str(self.folder.path / "batch"),
            database=controller.database or f"sqlite://{(self.folder.path / SLO_FILE).absolute()}",
        )
        for name in self._router_names():
            router = dataclasses.replace(self.config.router, process_port=self._process_ports.get(name, 0), batch=batch)
            write_private(self.folder.router_file(name), to_json(router))
        self.folder.write_targets(self._metrics_ports())

    def _real_s(self, seconds: float) -> float:
        """Of the cluster's clock, on which its configuration is (baton/clock.py)."""
        return seconds * self.config.emulation.time_scale

    def _metrics_ports(self) -> list[int]:
        return list(self._process_ports.values()) or [self.config.router.http_port]

    def _spawn(self, name: str, command: list[str]) -> Child:
        assert self._temp_dir is not None
        environ = ray_head.environ(self.folder.ray_token_file, self._temp_dir)
        child = spawn(name, command, environ, self.folder.logs / f"{name}.log")
        self._sessions.add(child.pid)
        assert self._guard is not None
        self._guard.watch(child.pid)
        return child

    def _pause(self) -> None:
        """A short wait that ends at once, with an exception, when the user or a dead child ends the start."""
        self._signals.pause(_LOOK_S)
        for child in self._children():
            if not child.is_running:
                raise ClusterFailed.ended(child)

    def _write_record(self) -> None:
        router, controller = self.config.router, self.config.controller
        self.folder.write_record(
            ClusterRecord(
                os.getpid(),
                LOOPBACK,
                router.http_port,
                router.grpc_port,
                controller.admin_port,
                {child.name: child.pid for child in self._children()},
                self._process_ports,
                {part.name: part.state for part in self._parts},
                {part.name: part.restarts.num_ends for part in self._parts},
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
        """Keep everything running until the user asks to stop.

        Raises:
            ClusterFailed: a process ended again and again.
        """
        supervise(self._parts, self._signals, self._bury, self._write_record)

    def _bury(self, child: Child) -> None:
        """End what a dead process left; its session's number may be another's from then on."""
        if not end_sessions({child.pid}, _SWEEP_S):
            self._sessions.discard(child.pid)
            assert self._guard is not None
            self._guard.forget(child.pid)

    # -- stop --------------------------------------------------------------------------------------------------------

    def stop(self, *, remove_folder: bool = False) -> list[str]:
        """End everything, in order, within bounds.

        Returns:
            What is left, one line each; empty = nothing.
        """
        children = {child.name: child for child in self._children()}
        if routers := [child for name, child in children.items() if name.startswith("router")]:
            with step("Draining and stopping the router (Ctrl-C again skips the wait)"):
                self._signals.clear()
                end_children(routers, self._real_s(self.config.router.drain_s), self._signals.fd, _HURRY_S)
        with step("Stopping workers and Ray"):
            for name in ("controller", "ray-node", "ray"):
                if child := children.get(name):
                    end_children([child], self._patience_s(children), None)
            left = [f"process {pid}" for pid in end_sessions(self._sessions, _SWEEP_S)]
        left += self._shm.clean()
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
            left += [f"folder {self._temp_dir}"] if self._temp_dir.exists() else []
        self._ports.release()
        left += [f"port {port}" for port in self._held_ports()]
        if self._guard is not None:
            self._guard.dismiss()
        self.folder.release(remove=remove_folder and not left)
        return left

    def _patience_s(self, children: dict[str, Child]) -> float:
        if any(is_stopped(pid) for pid in living_pids(self._sessions)):
            say("  a process is stopped: nothing waits for it long")
            return _STUCK_STOP_S
        return _STOP_S if "ray" in children and children["ray"].is_running else _STUCK_STOP_S

    def _children(self) -> list[Child]:
        return [part.child for part in self._parts if part.child is not None]

    def _held_ports(self) -> list[int]:
        router, controller = self.config.router, self.config.controller
        ports = [router.http_port, router.grpc_port, controller.admin_port, controller.control_port, self._ray_port]
        return [port for port in ports if self._parts and is_listening(port) and not self._is_foreign(port)]

    def _is_foreign(self, port: int) -> bool:
        """Somebody else took the port since it was given up."""
        pid = listener_pid(port)
        return pid is not None and pid not in living_pids(self._sessions)


def _with_ports(config: ClusterConfig) -> ClusterConfig:
    """Replace port 0 by free ones: everything that is said and written names real ports, which stay the same."""
    router, controller = config.router, config.controller
    control_port = controller.control_port or free_port()
    return dataclasses.replace(
        config,
        router=dataclasses.replace(
            router,
            http_port=router.http_port or free_port(),
            grpc_port=router.grpc_port or free_port(),
            control_address=f"{LOOPBACK}:{control_port}",
            shared_ports=True,
        ),
        controller=dataclasses.replace(
            controller,
            admin_port=controller.admin_port or free_port(),
            control_port=control_port,
            shared_ports=True,
        ),
    )


def _answers_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://{LOOPBACK}:{port}/readyz", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False  # not listening yet


def _said_ready(child: Child) -> bool:
    """It wrote the one JSON line with a pid that is not a log line."""
    for line in child.said().splitlines():
        if line.startswith("{"):
            try:
                said = json.loads(line)
            except ValueError:
                continue  # half a line: the rest comes
            if "pid" in said and "event" not in said:
                return True
    return False
