"""Whether a peer's process on this machine is still the one that we met.

UCX's own check misses a peer that is killed while a message to it waits in shared memory unread (measured with UCX 1.21: not
noticed in 10 s, else in 0.5-1 s), and takes a zombie for alive. So an address carries the process's id and start time, and where
that process can be seen here, its death is read from /proc. A peer on another machine, or in another pid namespace, is unknown,
never dead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    start_ticks: int  # since boot; field 22 of /proc/<pid>/stat (proc_pid_stat(5)): tells a reused pid apart

    def is_running(self) -> bool:
        """False where no such process can be seen, or only its zombie."""
        return _start_ticks(self.pid) == self.start_ticks


def own_identity() -> ProcessIdentity:
    pid = os.getpid()
    return ProcessIdentity(pid, _start_ticks(pid))


def _start_ticks(pid: int) -> int:
    """0 for a process that is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    state, *fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return 0 if state in "ZX" else int(fields[18])
