"""Which process holds a lease, named so that another one on the same host can tell that it is gone.

A name is "host/pid/start/boot/namespace/nonce". A pid alone may have been given again, so the instant of the process's start
(clock ticks since boot) belongs to it; a pid means something only within one boot of one kernel and one PID namespace, so those
do, too. Whoever cannot see the process says that it is not gone, never that it is: a name of another host, or one that cannot
be read, is waited for. A zombie counts as there: threads of it may still run.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_START = 19  # starttime, field 22 of /proc/PID/stat; the name before field 3 may hold spaces. proc_pid_stat(5)


def this_process() -> str:
    """A name of its own for each call."""
    pid = os.getpid()
    return "/".join((socket.gethostname(), str(pid), _started(pid), *_pids_of(), secrets.token_hex(4)))


def is_gone(holder: str) -> bool:
    """Whether that process certainly ended."""
    try:
        _, pid, start, boot, namespace, _ = holder.split("/")
        return (boot, namespace) == _pids_of() and bool(boot) and _started(int(pid)) != start
    except ValueError:  # a name of somebody else's making
        return False


def describe(holder: str) -> str:
    """As an operator looks for it."""
    host, _, rest = holder.partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if rest else holder


def _pids_of() -> tuple[str, str]:
    """Within which boot and PID namespace a pid of ours means something; "" where nobody can say."""
    try:
        return _BOOT_ID.read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> str:
    """When, in ticks since boot; "" where there is no such process. Raises: ValueError: it is not to be seen from here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError as error:
        raise ValueError(f"process {pid} is hidden") from error
    return stat.rpartition(")")[2].split()[_START]
