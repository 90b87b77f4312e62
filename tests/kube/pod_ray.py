"""Ray's part of a cluster of pods, without Ray: a pod is a node that can hold one worker, which is a real process.

PodNode     what runs of a pod, in place of `ray start --block`: when it ends its worker is killed, and while it lives a worker
            that died is started again, as Ray restarts actors; so is one that died with the node's last container
PodRay      starts and kills workers by the names of their pods; the kubelet's launcher, and the `Pools` of a controller
RayDoor     makes one PodRay the Ray of controllers in processes of their own (kube_controller.py)
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from baton.config import ClusterConfig, WorkerConfig
from tests.integration.fleet_rig import WorkerProcess
from tests.kube.fake_kubelet_pods import Command, PodToRun

START_S = 180.0  # a worker starts in 1-2 s; other work shares these cores
STOP_S = 3.0  # as pools.py has it
RESTART_S = 1.0  # Ray takes 1-9 s


class PodNode:
    """Implements fake_kubelet_pods.Process. Threads of the pod and of Ray use it."""

    def __init__(self, pod: PodToRun, folder: Path, before: PodNode | None) -> None:
        """`before`: the last one of that name."""
        self.pod = pod
        self._folder = folder
        self._lock = threading.RLock()
        self._ended: int | None = None
        is_same = before is not None and before.pod.ip == pod.ip
        self._config: WorkerConfig | None = before._config if before is not None and is_same else None
        self.worker: WorkerProcess | None = None
        self._died_s: float | None = None

    def poll(self) -> int | None:
        with self._lock:
            if self._ended is None and self._config is not None and not (self.worker and self.worker.alive):
                self._restart(self._config)
            return self._ended

    def terminate(self) -> None:
        self._end(0)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def run(self, command: list[str], env: dict[str, str]) -> Command:
        return Command(command, env)

    def start(self, config: WorkerConfig) -> str:
        """The address of the node's one worker, made or found."""
        with self._lock:
            if self._ended is not None:
                raise ConnectionError(f"{self.pod.name} has ended")
            self._config = config
            if self.worker is None:
                self.worker = self._spawn(config)
            worker = self.worker
        return worker.wait_ready().address

    def stop_worker(self) -> None:
        """For good."""
        with self._lock:
            self._config, worker, self.worker = None, self.worker, None
        if worker is not None:
            _stop(worker)

    def _spawn(self, config: WorkerConfig) -> WorkerProcess:
        folder = self._folder / f"{self.pod.pod['metadata']['uid'][:8]}-{time.monotonic_ns()}"
        folder.mkdir()
        return WorkerProcess(config, folder, env=self.pod.env)

    def _restart(self, config: WorkerConfig) -> None:
        self._died_s = self._died_s or time.monotonic()
        if time.monotonic() - self._died_s >= RESTART_S:
            if self.worker is not None:
                self.worker.wait_ended()
            self.worker, self._died_s = self._spawn(config), None

    def _end(self, status: int) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended, worker, self.worker = status, self.worker, None
        if worker is not None:
            worker.process.kill()
            worker.wait_ended()


def _stop(worker: WorkerProcess) -> None:
    """At once, as an actor is stopped: nothing drains."""
    deadline_s = time.monotonic() + STOP_S
    worker.process.terminate()
    while worker.alive and time.monotonic() < deadline_s:
        worker.process.terminate()  # the second signal is the one that hurries
        time.sleep(0.05)
    worker.process.kill()
    worker.wait_ended()


class PodRay:
    """Implements router.controller.ray_actors.Pools, and is a launcher of pods."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._nodes: dict[str, PodNode] = {}
        self.is_away = False  # as if the head did not answer

    def launch(self, pod: PodToRun) -> PodNode:
        with self._lock:
            node = self._nodes[pod.name] = PodNode(pod, self._folder, self._nodes.get(pod.name))
        return node

    def connect(self, cluster: ClusterConfig) -> PodRay:
        self._check()
        return self

    def start(self, config: WorkerConfig) -> str:
        """Waits for the node, as Ray does for a placement."""
        deadline_s = time.monotonic() + START_S
        while (node := self._node(config)) is None:
            self._check()
            if time.monotonic() > deadline_s:
                raise ConnectionError(f"no node for {config.worker_id} within {START_S:g} s")
            time.sleep(0.05)
        return node.start(config)

    def kill(self, worker_id: str, *, is_starting: bool) -> None:
        self._check()
        with self._lock:
            node = self._nodes.get(worker_id)
        if node is not None:
            node.stop_worker()

    def num_places(self) -> int:
        self._check()
        with self._lock:
            return sum(node.poll() is None for node in self._nodes.values())

    def check_fits(self, num_workers: int) -> None:
        """Pods come when they come."""

    def close(self) -> None:
        """Nodes and workers stay."""

    def workers(self) -> Mapping[str, WorkerProcess]:
        """That live, by name."""
        with self._lock:
            nodes = list(self._nodes.values())
        return {node.pod.name: node.worker for node in nodes if node.worker is not None and node.worker.alive}

    def _node(self, config: WorkerConfig) -> PodNode | None:
        with self._lock:
            node = self._nodes.get(config.worker_id)
        is_this = node is not None and node.pod.ip == config.host and node.poll() is None
        return node if is_this else None

    def _check(self) -> None:
        if self.is_away:
            raise ConnectionError("Ray is away: the test says so")


class RayManager(BaseManager):
    """A PodRay over a socket of the loopback."""


class RayDoor:
    """Opens one PodRay to other processes of the test, which know the key."""

    def __init__(self, ray: PodRay, key: bytes) -> None:
        RayManager.register("ray", callable=lambda: ray)
        server: Any = RayManager(address=("127.0.0.1", 0), authkey=key).get_server()
        self._server = server
        self.port = int(self._server.address[1])
        self._thread = threading.Thread(target=self._serve, name="ray-door", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._server.serve_forever()
        except SystemExit:  # how its loop ends
            return

    def close(self) -> None:
        self._server.stop_event.set()
        self._thread.join()
        self._server.listener.close()


def ray_through(port: int, key: bytes) -> PodRay:
    """The PodRay behind a door; its errors are ConnectionErrors there too."""
    RayManager.register("ray")
    manager = RayManager(address=("127.0.0.1", port), authkey=key)
    manager.connect()
    ray: PodRay = manager.ray()  # type: ignore[attr-defined]
    return ray
