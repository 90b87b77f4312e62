"""Pods that are Linux namespaces, as a container runtime makes them: a fake kubelet's launcher that runs what the chart says.

    Network        a bridge of this machine; pods and Services have addresses on it
    NamespacePods  the launcher: a sandbox per pod, and in it all its containers with the chart's commands, paths and ports

A pod has a network, a host name and IPC of its own; its containers have file systems of their own, read-only where the chart
says so, users and volumes as the chart says, and see each other's processes only where the chart says that, too. Images are this
machine and this tree. CPU, memory, capabilities, seccomp and NetworkPolicies are not enforced. Init containers are not run.

It needs root: `needs_namespaces`.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil
import pytest

from tests.kube.fake_api_resources import Json, at
from tests.kube.fake_kubelet_env import environment, expanded
from tests.kube.fake_kubelet_pods import ROOT, Command, PodToRun, Process
from tests.kube.pod_init import Container
from tests.kube.pod_volumes import Volumes

INIT = (sys.executable, "-m", "tests.kube.pod_init")
TOOLS = ("ip", "mount", "nsenter", "unshare")
# What the images hold: an interpreter with all of it. HOME is the pod's
IMAGE = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
SEEN = (sys.prefix, sys.base_prefix, str(ROOT))


@cache
def _can_make_namespaces() -> bool:
    if os.geteuid() or not all(map(shutil.which, TOOLS)) or "overlay" not in Path("/proc/filesystems").read_text():
        return False
    tried = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "tried", "type", "veth"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _can_make_namespaces(),
    reason="pods are Linux namespaces: root, ip, mount, nsenter, unshare, overlayfs",
)


class Network:
    """10.N.0.0/16 of this machine, which is 10.N.0.1 in it. Nobody outside can reach it."""

    def __init__(self) -> None:
        self.number = random.choice([n for n in range(64, 250) if not _is_taken(n)])
        self.bridge = f"pods{self.number}"
        self.gateway = f"10.{self.number}.0.1"
        self.pods = f"10.{self.number}.1"  # the kubelet hands out addresses in it
        self._num_services = 0
        # A hardware address of its own: else it has the lowest of its ports', and is lost to all when a new pod's is lower
        own = f"02:00:00:00:00:{self.number:02x}"
        _ip("link", "add", self.bridge, "address", own, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/16", "dev", self.bridge)
        _ip("link", "set", self.bridge, "up")

    def service_ip(self) -> str:
        """Another address of this machine."""
        self._num_services += 1
        ip = f"10.{self.number}.0.{self._num_services + 1}"
        _ip("addr", "add", f"{ip}/16", "dev", self.bridge)
        return ip

    def close(self) -> None:
        _ip("link", "delete", self.bridge)


class Sandbox:
    """What a pod's containers share: network, host name, IPC, and a process that holds them."""

    def __init__(self, network: Network, name: str, ip: str) -> None:
        self.name = name
        self._pause = subprocess.Popen(
            ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", *INIT, "pause"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._pause.stdout is not None
        assert self._pause.stdout.readline() == b"ready\n"
        pid = str(self._pause.pid)
        self._device = f"p{network.number}-{ip.rpartition('.')[2]}"
        _ip("link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _ip("link", "set", self._device, "master", network.bridge, "up")
        within = ["nsenter", "--target", pid, "--net", "--uts"]
        for command in (
            ["hostname", name],
            ["ip", "addr", "add", f"{ip}/16", "dev", "eth0"],
            ["ip", "link", "set", "eth0", "up"],
            ["ip", "link", "set", "lo", "up"],
            ["ip", "route", "add", "default", "via", network.gateway],
        ):
            subprocess.run([*within, *command], check=True)

    def enter(self, *, sees_others: bool) -> list[str]:
        """A prefix for the command of a container's runtime."""
        pid = self._pause.pid
        shared = ["nsenter", "--target", str(pid), "--net", "--uts", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return [*shared, "unshare", "--mount", *(() if sees_others else ("--pid", "--fork", "--kill-child"))]

    def unplug(self) -> None:
        """Nothing of it is heard any more, not even that its connections end."""
        _ip("link", "set", self._device, "down")

    def close(self) -> None:
        """Whatever runs in it is killed with the first process there."""
        _ip("link", "delete", self._device)
        with self._pause:  # stdin is closed, and its end awaited
            pass


class RunningContainer:
    """One container of a pod. Its runtime is this process's child; in the container pod_init is the first process."""

    def __init__(self, sandbox: Sandbox, container: Container, log: Path, *, sees_others: bool) -> None:
        self._user = container.user
        self._env = container.env
        with log.open("ab") as out:
            self._runtime = subprocess.Popen(
                [*sandbox.enter(sees_others=sees_others), *INIT, "run"],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
        assert self._runtime.stdin is not None
        with self._runtime.stdin as stdin:
            stdin.write(container.to_json())

    def poll(self) -> int | None:
        return self._runtime.poll()

    def processes(self) -> list[psutil.Process]:
        """All of it, as this machine sees them."""
        return psutil.Process(self._runtime.pid).children(recursive=True) if self.poll() is None else []

    def terminate(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess, StopIteration):  # it has ended meanwhile
            self._first().terminate()

    def kill(self) -> None:
        """Returns once nothing of it runs; its runtime ends by itself then."""
        killed = self.processes()
        for process in killed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._runtime.wait()
        psutil.wait_procs(killed)

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Command:
        """Beside what runs there."""
        first = self._first().pid
        spaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--root", "--wdns=/tmp")
        within = ["nsenter", "--target", str(first), *spaces, f"--setuid={self._user}", f"--setgid={self._user}"]
        return Command([*within, *command], dict(env))

    def _first(self) -> psutil.Process:
        return next(one for one in self.processes() if one.cmdline() == [*INIT, "run"])


class NamespacePod:
    """Implements fake_kubelet_pods.Process: all containers of one run of a pod. They live and die together."""

    def __init__(self, sandbox: Sandbox, containers: Mapping[str, RunningContainer]) -> None:
        self.sandbox = sandbox
        self.containers = containers
        self._ended: int | None = None

    def poll(self) -> int | None:
        if self._ended is None:
            ended = [status for one in self.containers.values() if (status := one.poll()) is not None]
            if ended:
                self._ended = ended[0]
                for container in self.containers.values():
                    container.kill()
        return self._ended

    def terminate(self) -> None:
        for container in self.containers.values():
            container.terminate()

    def kill(self) -> None:
        for container in self.containers.values():
            container.kill()
        self._ended = -signal.SIGKILL if self._ended is None else self._ended

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> Process:
        return next(iter(self.containers.values())).run(command, env)

    def processes(self, name: str) -> list[psutil.Process]:
        """Whose name begins like that."""
        found = [process for one in self.containers.values() for process in one.processes()]
        return [process for process in found if _title(process).startswith(name)]


class NamespacePods:
    """`hosts`: what /etc/hosts says of Services, asked for whenever a container starts."""

    def __init__(self, network: Network, volumes: Volumes, hosts: Callable[[], str], folder: Path) -> None:
        self._network = network
        self._volumes = volumes
        self._hosts = hosts
        self._folder = folder
        self._lock = threading.Lock()
        self._sandboxes: dict[str, Sandbox] = {}  # by uid of the pod
        self._runs: list[NamespacePod] = []
        self._names: dict[str, str] = {}  # uid of the last pod of a name
        self._num_containers = 0

    def launch(self, pod: PodToRun) -> NamespacePod:
        sandbox = self._sandbox(pod)
        containers = pod.pod["spec"]["containers"]
        run = NamespacePod(sandbox, {one["name"]: self._run(sandbox, pod, one) for one in containers})
        with self._lock:
            self._runs.append(run)
        return run

    def log(self, pod: str, container: str) -> Path:
        """What it printed, over all its lives."""
        return self._folder / f"{pod}-{container}.log"

    def close(self) -> None:
        """Kill whatever runs."""
        for run in self._runs:
            run.kill()
        while self._sandboxes:
            self._sandboxes.popitem()[1].close()

    def _sandbox(self, pod: PodToRun) -> Sandbox:
        """A pod's own, which outlives its containers; that of an earlier pod of the name goes."""
        uid = pod.pod["metadata"]["uid"]
        with self._lock:
            before = self._names.get(pod.name, uid)
            if before != uid:
                self._sandboxes.pop(before).close()
            if uid not in self._sandboxes:
                self._sandboxes[uid] = Sandbox(self._network, pod.name, pod.ip)
            self._names[pod.name] = uid
            return self._sandboxes[uid]

    def _run(self, sandbox: Sandbox, pod: PodToRun, container: Json) -> RunningContainer:
        with self._lock:
            self._num_containers += 1
            layer = self._folder / f"layer-{self._num_containers}"
        layer.mkdir()
        known = pod.pod | {"status": pod.pod.get("status", {}) | {"podIP": pod.ip}}
        env = IMAGE | environment(self._volumes.verbs, known, container)
        whole = (*container.get("command", ()), *container.get("args", ()))
        security: Json = at(pod.pod, ("spec", "securityContext"), {})
        told = Container(
            command=tuple(expanded(part, env) for part in whole),
            env=env,
            layer=str(layer),
            mounts=tuple(self._volumes.mounts(pod.pod, container)),
            hosts=f"127.0.0.1 localhost\n{pod.ip} {pod.name}\n{self._hosts()}",
            user=security.get("runAsUser", 0),
            group=security.get("runAsGroup", 0),
            read_only_root=at(container, ("securityContext", "readOnlyRootFilesystem"), False),
            must_be_seen=SEEN,
        )
        sees_others = bool(pod.pod["spec"].get("shareProcessNamespace", False))
        return RunningContainer(sandbox, told, self.log(pod.name, container["name"]), sees_others=sees_others)


def _title(process: psutil.Process) -> str:
    """As it calls itself."""
    try:
        return (process.cmdline() or [""])[0].rpartition("/")[2]
    except psutil.NoSuchProcess:
        return ""


def _is_taken(number: int) -> bool:
    addresses = [one.address for them in psutil.net_if_addrs().values() for one in them]
    return any(address.startswith(f"10.{number}.") for address in addresses)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)
