"""What a container of a namespace pod (namespace_pods.py) begins with, in namespaces that others have made:

    python -m tests.kube.pod_init pause   hold them until stdin is closed, and reap orphans, as a cluster's pause process does
    python -m tests.kube.pod_init run     read a Container from stdin, make its file system, run its command, end as it ends

The file system is this machine's own with a layer of the container's on top, where volumes are mounted; then it is read-only
where the pod says so, and the command runs as the pod's user. `run` does what `tini -g` does in the images: SIGTERM goes to the
whole group, and orphans are reaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Mount:
    path: str  # in the container
    source: str  # folder of this machine
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, as its runtime is told of it."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    layer: str  # an empty folder of this machine, under which its file system is put together
    mounts: tuple[Mount, ...]
    hosts: str  # /etc/hosts
    user: int
    group: int
    read_only_root: bool
    must_be_seen: tuple[str, ...] = ()  # folders that any user may pass: where the interpreter and the project are

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Container:
        fields: dict[str, Any] = json.loads(text)
        fields["mounts"] = tuple(Mount(**mount) for mount in fields["mounts"])
        return cls(**fields)


def pause() -> None:
    """Also ends with whoever made it: then nobody holds the other end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    print("ready", flush=True)
    sys.stdin.read()


def run(container: Container) -> int:
    """The command's exit status, as a shell counts signals."""
    _enter(container)
    child = os.fork()
    if child == 0:
        _become(container)
    with contextlib.suppress(PermissionError):  # it has done so itself, and runs its command already
        os.setpgid(child, child)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(child, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _enter(container: Container) -> None:
    layer = Path(container.layer)
    _mount("-t", "tmpfs", "tmpfs", str(layer))
    upper, work, root = (layer / name for name in ("upper", "work", "root"))
    for folder in (upper, work, root):
        folder.mkdir()
    _mount("-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "overlay", str(root))
    _mount("--rbind", "/dev", f"{root}/dev")
    _mount("-t", "proc", "proc", f"{root}/proc")
    _mount("-t", "sysfs", "-o", "ro", "sysfs", f"{root}/sys")  # of the pod's network: UCX finds its devices there
    Path(root, "etc/hosts").write_text(container.hosts)
    Path(root, "etc/resolv.conf").write_text("")
    for seen in container.must_be_seen:
        for folder in (Path(seen), *Path(seen).parents):
            inside = Path(f"{root}{folder}")
            inside.chmod(inside.stat().st_mode | 0o055)
    for mount in sorted(container.mounts, key=lambda mount: mount.path):
        where = Path(f"{root}{Path(mount.path).resolve()}")  # /var/run is a link
        where.mkdir(parents=True, exist_ok=True)
        _mount("--bind", mount.source, str(where))
        if mount.read_only:
            _mount("-o", "remount,bind,ro", str(where))
    if container.read_only_root:
        _mount("-o", "remount,ro", str(root))
    os.chroot(root)
    os.chdir("/tmp")


def _become(container: Container) -> None:
    os.setpgid(0, 0)
    os.setgroups([container.group])
    os.setgid(container.group)
    os.setuid(container.user)
    os.execvpe(container.command[0], list(container.command), dict(container.env))


def _mount(*args: str) -> None:
    subprocess.run(["mount", *args], check=True)


if __name__ == "__main__":
    if sys.argv[1] == "pause":
        pause()
    else:
        sys.exit(run(Container.from_json(sys.stdin.read())))
