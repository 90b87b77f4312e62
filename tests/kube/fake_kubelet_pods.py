"""One pod's life on its node, told in a straight line by a thread of its own.

    1 waiting     until its image can be had and what its environment names is there
    2 running     its process is up; Ready by its probes
    3 backing off after a crash, longer each time, then 2 again
    4 ending      told to: preStop, SIGTERM, and SIGKILL when the grace is over; preStop counts against the grace
    5 over        ended for good; its object goes once it is told to end

A pod is one process here: that of its first container. Its init containers are not run. Where the API server or the node is
away the process lives on, on what was last known, and the status is written when they are back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.kube.fake_api_resources import PODS, Json, at
from tests.kube.fake_api_verbs import Verbs, Write, now
from tests.kube.fake_kubelet_env import MissingReference, environment, expanded
from tests.kube.fake_kubelet_probes import Probe, Target, http_get
from tests.kube.fake_kubelet_sets import tell

ROOT = Path(__file__).parents[2]
TICK_S = 0.03
BACKOFF_S, MAX_BACKOFF_S = 10.0, 300.0  # source: Pod Lifecycle, "Container restarts"
BACKOFF_RESETS_AFTER_S = 600.0  # source: as above
WRITE = Write("kubelet")


class Process(Protocol):
    """What runs of a pod; `subprocess.Popen` is one."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def run(self, command: list[str], env: dict[str, str]) -> Process:
        """Another command in the same container."""
        ...


@dataclass(frozen=True, slots=True)
class PodToRun:
    """What a launcher is told of a pod whose process it is to start."""

    pod: Json
    container: Json
    ip: str  # of the loopback network, no other pod's: two pods may listen on the same port
    env: dict[str, str]
    num_restarts: int

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def command(self) -> list[str]:
        whole = [*self.container.get("command", ()), *self.container.get("args", ())]
        return [expanded(part, self.env) for part in whole]


Launch = Callable[[PodToRun], Process]


class Command(subprocess.Popen[bytes]):
    """A command with the pod's environment; a kill takes its children along."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: int = subprocess.DEVNULL) -> None:
        super().__init__(command, env=host_environment() | env, cwd=ROOT, stdout=stdout, start_new_session=True)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()

    def run(self, command: list[str], env: dict[str, str]) -> Command:
        return Command(command, env)


def host_environment() -> dict[str, str]:
    """This interpreter's `python` is the image's."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return dict(os.environ) | {"PATH": path, "PYTHONPATH": str(ROOT)}


def run_command(pod: PodToRun) -> Process:
    """The launcher that does what the container says."""
    return Command(pod.command, pod.env)


class Pretend:
    """A launcher's answer where nothing needs to run: it lives until it is told to end."""

    def __init__(self, exit_status: int = 0) -> None:
        self._exit_status = exit_status
        self._ended: int | None = None

    def poll(self) -> int | None:
        return self._ended

    def terminate(self) -> None:
        self._ended = self._exit_status

    def kill(self) -> None:
        self._ended = -signal.SIGKILL

    def crash(self, status: int = 1) -> None:
        self._ended = status

    def run(self, command: list[str], env: dict[str, str]) -> Command:
        return Command(command, env)


class Surroundings(Protocol):
    """What a pod needs of its kubelet."""

    verbs: Verbs
    pace: float
    launch: Launch

    def is_cut_off(self, node: str) -> bool:
        """The API server cannot be reached from there."""
        ...

    def is_off(self, node: str) -> bool:
        """Nothing runs there, and nothing is started."""
        ...

    def can_pull(self, image: str) -> bool: ...


@dataclass(slots=True)
class Container:
    """Of the pod's status."""

    state: Json = field(default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}})
    last_state: Json = field(default_factory=dict)
    ready: bool = False
    num_restarts: int = 0


class Ending(Exception):
    """The pod was told to end, or its kubelet was."""


class PodLife:
    def __init__(self, around: Surroundings, pod: Json, ip: str) -> None:
        self._around = around
        self._pod = pod  # as last seen
        self._ip = ip
        self._key: tuple[str, str] = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        self._uid: str = pod["metadata"]["uid"]
        self._created = pod["metadata"]["creationTimestamp"]
        self._container = Container()
        self._phase = "Pending"
        self._ready_since = now()
        self._num_crashes = 0  # in a row
        self._started_s = 0.0
        self._forced = False  # its object is gone
        self._quit = threading.Event()
        self._oom = False
        self.process: Process | None = None
        self._thread = threading.Thread(target=self._live, name=f"pod-{self._key[1]}")
        self._thread.start()

    @property
    def uid(self) -> str:
        return self._uid

    @property
    def name(self) -> str:
        return self._key[1]

    @property
    def node(self) -> str:
        return str(self._pod["spec"]["nodeName"])

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def quit(self) -> None:
        """End without more ado, as when the test is over; `join` waits for it."""
        self._quit.set()

    def join(self) -> None:
        self._thread.join()

    def kill(self, *, out_of_memory: bool = False) -> None:
        """As the kernel does."""
        self._oom = out_of_memory
        if self.process is not None:
            self.process.kill()

    def _live(self) -> None:
        try:
            self._pause()
            self._wait_for_image()
            while self._run_once():
                self._back_off()
            while True:  # over, and not yet told to go
                self._pause()
        except Ending:
            self._end()

    # 1 waiting

    def _wait_for_image(self) -> None:
        tries = 0
        while not self._around.can_pull(image := self._spec["image"]):
            reason = "ErrImagePull" if tries % 2 == 0 else "ImagePullBackOff"
            if tries == 0:
                self._tell("Warning", "Failed", f'Failed to pull image "{image}": not found')
            self._wait_as(reason, f'Back-off pulling image "{image}"')
            tries += 1
            self._sleep(BACKOFF_S * self._around.pace)

    def _launch(self) -> Process:
        while self._around.is_off(self.node):
            self._pause()
        while True:
            try:
                env = environment(self._around.verbs, self._pod | {"status": self._status()}, self._spec)
            except MissingReference as missing:
                self._wait_as("CreateContainerConfigError", str(missing))
                self._sleep(BACKOFF_S * self._around.pace)
                continue
            return self._around.launch(PodToRun(self._pod, self._spec, self._ip, env, self._container.num_restarts))

    # 2 running

    def _run_once(self) -> bool:
        """Run the process to its end. Returns whether it is to run again."""
        self.process = self._launch()
        self._container.state = {"running": {"startedAt": now()}}
        self._phase = "Running"
        self._tell("Normal", "Started", f"Started container {self._spec['name']}")
        self._started_s = time.monotonic()
        self._attend(self.process)
        policy = self._pod["spec"]["restartPolicy"]
        failed = self._ended_as(self.process)
        if policy == "Always" or (policy == "OnFailure" and failed):
            return True
        self._phase = "Failed" if failed else "Succeeded"
        self._report()
        return False

    def _attend(self, process: Process) -> None:
        """Until it has ended, of itself or killed by a probe."""
        target = Target(self._ip, self._ports(), self._run)
        startup, readiness, liveness = (
            Probe.of(self._spec, kind, self._around.pace)
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        )
        while process.poll() is None:
            started = startup is None or startup.passed
            asked = (readiness, liveness) if started else (startup,)
            for probe in asked:
                if probe is not None:
                    probe.look(target)
            self._set_ready(started and (readiness is None or readiness.passed))
            if any(probe is not None and probe.failed for probe in (startup, liveness)):
                self._tell("Warning", "Unhealthy", "Liveness or startup probe failed: the container is killed")
                self._end_process(process, time.monotonic() + self._grace_s())
            self._pause()

    def _ended_as(self, process: Process) -> bool:
        """Note how the process ended. Returns whether it failed."""
        status = process.poll()
        assert status is not None
        code = status if status >= 0 else 128 - status  # as a shell counts signals
        reason = "OOMKilled" if self._oom else "Error" if code else "Completed"
        self._oom = False
        ended = {"exitCode": code, "reason": reason, "finishedAt": now()}
        self._container.last_state = self._container.state = {"terminated": ended}
        self._set_ready(False)
        return bool(code)

    # 3 backing off

    def _back_off(self) -> None:
        """The first restart is at once."""
        container = self._container
        if time.monotonic() - self._started_s > BACKOFF_RESETS_AFTER_S * self._around.pace:
            self._num_crashes = 0
        wait_s = min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (self._num_crashes - 1)) if self._num_crashes else 0.0
        self._num_crashes += 1
        container.num_restarts += 1
        if wait_s:
            self._wait_as("CrashLoopBackOff", f"back-off {wait_s:g}s restarting failed container={self._spec['name']}")
            self._tell("Warning", "BackOff", f"Back-off restarting failed container {self._spec['name']}")
        self._sleep(wait_s * self._around.pace)

    # 4 ending

    def _end(self) -> None:
        ends_s = time.monotonic() + (0.0 if self._quit.is_set() else self._grace_s())
        if self.process is not None and self.process.poll() is None:
            self._tell("Normal", "Killing", f"Stopping container {self._spec['name']}")
            self._end_process(self.process, ends_s)
            self._ended_as(self.process)
        while self._around.is_cut_off(self.node) and not (self._quit.is_set() or self._forced):
            time.sleep(TICK_S)
        if not self._quit.is_set():
            self._report()
            self._remove()

    def _remove(self) -> None:
        with self._around.verbs.store.changed:
            self._look()
            if not self._forced:
                self._around.verbs.delete(PODS, *self._key, {"gracePeriodSeconds": 0})

    def _end_process(self, process: Process, ends_s: float) -> None:
        if time.monotonic() < ends_s:
            self._pre_stop(ends_s)
            process.terminate()
        while process.poll() is None and time.monotonic() < self._shortened(ends_s) and not self._quit.is_set():
            time.sleep(TICK_S)
        if process.poll() is None:
            process.kill()

    def _pre_stop(self, ends_s: float) -> None:
        left_s = ends_s - time.monotonic()
        match at(self._spec, ("lifecycle", "preStop"), {}):
            case {"exec": {"command": command}}:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if status := self._run(command, left_s):
                        self._tell("Warning", "FailedPreStopHook", f"PreStopHook failed: exit status {status}")
            case {"httpGet": get}:
                port = get["port"] if isinstance(get["port"], int) else self._ports()[get["port"]]
                with contextlib.suppress(OSError):
                    http_get(self._ip, port, get.get("path", "/"), left_s)
            case {"sleep": {"seconds": seconds}}:
                time.sleep(min(seconds, left_s))

    def _shortened(self, ends_s: float) -> float:
        """A second delete may leave less time; one that forces leaves none."""
        self._look()
        return 0.0 if self._forced else ends_s

    def _grace_s(self) -> float:
        spec, meta = self._pod["spec"], self._pod["metadata"]
        return float(meta.get("deletionGracePeriodSeconds", spec.get("terminationGracePeriodSeconds", 30)))

    def _run(self, command: list[str], timeout_s: float) -> int:
        """A command in the container: with its environment, no longer than so long, nor than the pod is let be."""
        env = environment(self._around.verbs, self._pod | {"status": self._status()}, self._spec)
        assert self.process is not None
        process = self.process.run([expanded(part, env) for part in command], env)
        ends_s = time.monotonic() + timeout_s
        try:
            while (status := process.poll()) is None:
                if time.monotonic() > ends_s or self._quit.is_set() or self._forced:
                    raise subprocess.TimeoutExpired(command, timeout_s)
                self._look()
                time.sleep(TICK_S)
            return status
        finally:
            process.kill()

    # What all states do

    @property
    def _spec(self) -> Json:
        container: Json = self._pod["spec"]["containers"][0]
        return container

    def _ports(self) -> dict[str, int]:
        return {p["name"]: p["containerPort"] for p in self._spec.get("ports", ()) if "name" in p}

    def _pause(self) -> None:
        """Look and write. Raises: Ending."""
        self._look()
        if self._quit.is_set() or self._forced or "deletionTimestamp" in self._pod["metadata"]:
            raise Ending
        self._report()
        self._quit.wait(TICK_S)

    def _sleep(self, seconds: float) -> None:
        """Raises: Ending."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self._pause()

    def _look(self) -> None:
        if self._around.is_cut_off(self.node):
            return
        live = self._around.verbs.find(PODS, *self._key)
        if live is None or live["metadata"]["uid"] != self._uid:
            self._forced = True
        else:
            self._pod = live

    def _wait_as(self, reason: str, message: str) -> None:
        self._container.state = {"waiting": {"reason": reason, "message": message}}
        self._report()

    def _set_ready(self, ready: bool) -> None:
        if ready != self._container.ready:
            self._container.ready, self._ready_since = ready, now()
            self._report()

    def _status(self) -> Json:
        container = self._container
        ready = {"status": str(container.ready), "lastTransitionTime": self._ready_since}
        ours = ("PodScheduled", "ContainersReady", "Ready")
        others = [c for c in at(self._pod, ("status", "conditions"), []) if c["type"] not in ours]
        status = {
            "name": self._spec["name"],
            "image": self._spec["image"],
            "imageID": "",
            "ready": container.ready,
            "started": "running" in container.state,
            "restartCount": container.num_restarts,
            "state": container.state,
            "lastState": container.last_state,
        }
        return {
            "phase": self._phase,
            "podIP": self._ip,
            "podIPs": [{"ip": self._ip}],
            "hostIP": "127.0.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True", "lastTransitionTime": self._created},
                {"type": "ContainersReady", **ready},
                {"type": "Ready", **ready},
                *others,
            ],
            "containerStatuses": [status],
        }

    def _report(self) -> None:
        """Write the status where it is another than the one that is there, once that is possible."""
        if self._forced or self._around.is_cut_off(self.node):
            return
        with self._around.verbs.store.changed:
            self._look()
            if not self._forced and (status := self._status()) != self._pod["status"]:
                self._around.verbs.update(PODS, *self._key, self._pod | {"status": status}, "status", WRITE)

    def _tell(self, kind: str, reason: str, message: str) -> None:
        if self._around.is_cut_off(self.node):
            return
        with self._around.verbs.store.changed:
            self._look()
            if not self._forced:
                tell(self._around.verbs, self._pod, kind, reason, message)
