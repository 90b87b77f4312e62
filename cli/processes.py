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
    log_start: int = 0  # bytes that its predecessors wrote

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def is_running(self) -> bool:
        return self.popen.poll() is None

    def said(self) -> str:
        """All that it wrote so far."""
        with self.log_file.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def log_tail(self, num_lines: int = 5) -> str:
        """The last lines it said, for an error message."""
        return "\n".join(self.said().splitlines()[-num_lines:])

    def last_word(self) -> str:
        """What it says of its own end ("router: port 80 ..."), without its name; "" = nothing."""
        kind, word = self.name.partition("-")[0], self.log_tail(1)
        return word.removeprefix(f"{kind}: ") if word.startswith(f"{kind}: ") else ""

    def how_it_ended(self) -> str:
        exit_code = self.popen.wait()
        if exit_code < 0:
            return f"was killed ({signal.Signals(-exit_code).name})"
        word = self.last_word()
        return f"ended ({word})" if word else f"ended with exit code {exit_code}"


def spawn(name: str, command: Sequence[str], environ: Mapping[str, str], log_file: Path) -> Child:
    """Start a process; stdout and stderr are appended to its log file."""
    with log_file.open("ab") as log:
        log_start = log.tell()
        popen = subprocess.Popen(
            command,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(name, popen, log_file, log_start)


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


def end_children(
    children: Sequence[Child], patience_s: float, interrupt_fd: int | None = None, hurry_s: float = 0.0
) -> bool:
    """SIGTERM to all, then SIGKILL after `patience_s` or once `interrupt_fd` is readable; to those that are stopped at once.

    With `hurry_s` a second SIGTERM comes before the SIGKILL and has that long to work.

    Returns:
        Whether they ended by themselves.
    """
    left = [child for child in children if child.is_running]
    for child in left:
        child.popen.terminate()
    able = [child for child in left if not is_stopped(child.pid)]
    stopped = [child for child in left if child not in able]
    able = _wait_for(able, patience_s, interrupt_fd)
    if able and hurry_s > 0:
        for child in able:
            child.popen.terminate()
        able = _wait_for(able, hurry_s, None)
    for child in able + stopped:
        child.popen.kill()
        child.popen.wait()
    return not able and not stopped


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


def _wait_for(children: list[Child], timeout_s: float, interrupt_fd: int | None) -> list[Child]:
    """Wait without polling: a pidfd is readable once its process is gone. Returns who is still there."""
    deadline_s = time.monotonic() + timeout_s
    interrupt_fds = [] if interrupt_fd is None else [interrupt_fd]
    with contextlib.ExitStack() as stack:
        pid_fds = {child.pid: os.pidfd_open(child.pid) for child in children}
        for fd in pid_fds.values():
            stack.callback(os.close, fd)
        while left := [child for child in children if child.is_running]:
            fds = [pid_fds[child.pid] for child in left]
            readable, _, _ = select.select(fds + interrupt_fds, [], [], max(0.0, deadline_s - time.monotonic()))
            if not readable or set(readable) <= set(interrupt_fds):
                break
    return [child for child in children if child.is_running]


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> _Stat:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return _Stat("", 0, 0)
    state, parent, _group, session = text.rpartition(")")[2].split()[:4]  # the name before may hold spaces and brackets
    return _Stat(state, int(parent), int(session))
