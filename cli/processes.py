"""Processes of one run: started with a mark in their environment, so that all their descendants can be found and ended.

The mark (BATON_RUN=<run id>) is inherited by everything a child starts, whoever becomes its parent later: Ray's head, raylet,
agents and actors included. A run is over when no process carries its mark. Standard library only; Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

MARK = "BATON_RUN"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.02  # between two looks at /proc while waiting for processes to go; one look takes about 1 ms


@dataclass(frozen=True, slots=True)
class Child:
    """A process started here, in a session of its own: Ctrl-C in the terminal reaches the CLI alone."""

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


def spawn(name: str, command: Sequence[str], run_id: str, environ: Mapping[str, str], log_file: Path) -> Child:
    """Start a marked process; stdout and stderr go to its log file."""
    with log_file.open("wb") as log:
        popen = subprocess.Popen(
            command,
            env={**os.environ, **environ, MARK: run_id},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Child(name, popen, log_file)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies, so that none of them ends as a zombie of nobody."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(children: Sequence[Child]) -> None:
    """Collect adopted processes that ended; the children proper are left to their Popen."""
    own = {child.pid for child in children}
    for pid in _pids():
        state, parent = _stat(pid)
        if state == "Z" and parent == os.getpid() and pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def marked_pids(run_id: str) -> list[int]:
    """Living processes of the run; zombies have no environment and do not count."""
    mark = f"{MARK}={run_id}".encode()
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def is_stopped(pid: int) -> bool:
    """SIGSTOPped: it will not answer any signal but SIGKILL."""
    return _stat(pid)[0] == "T"


def process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words[:4]).decode(errors="replace").strip()
    return "?"


def end_child(child: Child, patience_s: float, interrupt_fd: int | None = None) -> bool:
    """SIGTERM, then SIGKILL after `patience_s`, at once if it is stopped or `interrupt_fd` becomes readable.

    Returns:
        Whether it ended by itself.
    """
    if child.popen.poll() is not None:
        return True
    child.popen.terminate()
    if not is_stopped(child.pid) and _wait_for(child, patience_s, interrupt_fd):
        return True
    child.popen.kill()
    child.popen.wait()
    return False


def end_marked(run_id: str, patience_s: float) -> list[int]:
    """SIGKILL all that is left of a run, until nothing is or `patience_s` is over.

    Returns:
        Who is still there (a process in an uninterruptible wait).
    """
    deadline_s = time.monotonic() + patience_s
    while left := marked_pids(run_id):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return left
        time.sleep(_LOOK_S)
    return []


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


def _stat(pid: int) -> tuple[str, int]:
    """State letter and parent pid; ("", 0) where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    state, parent = text.rpartition(")")[2].split()[:2]  # the name before may hold spaces and brackets
    return state, int(parent)
