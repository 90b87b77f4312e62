"""Processes of one run: each child starts in a session of its own, so that all their descendants can be found and ended.

A session is inherited by everything a child starts, whoever becomes its parent later, and nothing in a run leaves it: Ray's
raylet, agents and actors all stay in the head's (checked with ray 2.60; a mark in the environment does not survive there,
because Ray's agents overwrite theirs with a process title). A run is over when its sessions are empty. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.02  # between two looks at /proc while waiting for processes to go; one look takes about 1 ms


_DEAD = ("Z", "X", "")  # zombie, being removed, gone


class _Stat(NamedTuple):
    """From /proc/<pid>/stat; state "" where the process is gone."""

    state: str
    parent: int
    session: int


@dataclass(frozen=True, slots=True)
class Child:
    """A process started here; its pid is also its session's. Ctrl-C in the terminal reaches the CLI alone."""

    name: str
    popen: subprocess.Popen[bytes]
    log_file: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def log_tail(self, num_lines: int = 5) -> str:
        """The last lines it said, for an error message."""
        lines = self.log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def spawn(name: str, command: Sequence[str], environ: Mapping[str, str], log_file: Path) -> Child:
    """Start a process; stdout and stderr go to its log file."""
    with log_file.open("wb") as log:
        popen = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(name, popen, log_file)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them ends as a zombie of nobody."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def living_pids(sessions: Collection[int]) -> list[int]:
    """Processes of these sessions; zombies do not count."""
    stats = ((pid, _stat(pid)) for pid in _pids())
    return [pid for pid, stat in stats if stat.session in sessions and stat.state not in _DEAD]


def is_stopped(pid: int) -> bool:
    """SIGSTOPped: it will not answer any signal but SIGKILL."""
    return _stat(pid).state == "T"


def process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words[:4]).decode(errors="replace").strip()
    return "?"


def end_child(child: Child, patience_s: float, interrupt_fd: int | None = None, hurry_s: float = 0.0) -> bool:
    """SIGTERM, then SIGKILL after `patience_s` or once `interrupt_fd` is readable; at once if it is stopped.

    With `hurry_s` a second SIGTERM comes before the SIGKILL and has that long to work.

    Returns:
        Whether it ended by itself.
    """
    if child.popen.poll() is not None:
        return True
    child.popen.terminate()
    if not is_stopped(child.pid):
        if _wait_for(child, patience_s, interrupt_fd):
            return True
        if hurry_s > 0:
            child.popen.terminate()
            if _wait_for(child, hurry_s, None):
                return True
    child.popen.kill()
    child.popen.wait()
    return False


def end_sessions(sessions: Collection[int], patience_s: float) -> list[int]:
    """SIGKILL all that is left of a run and collect it, until nothing is left or `patience_s` is over.

    Returns:
        Who is still there (a process in an uninterruptible wait).
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        left = living_pids(sessions)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not _reap_orphans(sessions) and not left:
            return []
        if time.monotonic() > deadline_s:
            return left
        time.sleep(_LOOK_S)


def _reap_orphans(sessions: Collection[int]) -> int:
    """Collect adopted processes that ended, but not the children proper: their Popen does that. Returns how many."""
    zombies = [pid for pid in _pids() if pid not in sessions and _is_own_zombie(_stat(pid), sessions)]
    for pid in zombies:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return len(zombies)


def _is_own_zombie(stat: _Stat, sessions: Collection[int]) -> bool:
    return stat.state == "Z" and stat.parent == os.getpid() and stat.session in sessions


def _wait_for(child: Child, timeout_s: float, interrupt_fd: int | None) -> bool:
    """Wait without polling: a pidfd is readable once its process is gone."""
    pid_fd = os.pidfd_open(child.pid)
    try:
        fds = [pid_fd] if interrupt_fd is None else [pid_fd, interrupt_fd]
        readable, _, _ = select.select(fds, [], [], timeout_s)
    finally:
        os.close(pid_fd)
    if pid_fd not in readable:
        return False
    child.popen.wait()
    return True


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> _Stat:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _Stat("", 0, 0)
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]  # the name before may hold spaces and brackets
    return _Stat(state, int(parent), int(session))
