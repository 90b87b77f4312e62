"""Which process holds a lease, named so that another one on the same host can tell that it is gone.

A name is "host/pid/start/boot/namespace/nonce". A pid alone may have been given again, so the instant of the process's start
(clock ticks since boot) belongs to it; both mean something only within one boot of one kernel, one PID namespace and one time
namespace, so those do, too. Whoever cannot see the process says that it is not gone, never that it is: a name of another host,
or one that says too little, is waited for. A zombie counts as there: threads of it may still run.
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
    return "/".join((socket.gethostname(), str(pid), _started(pid), *_here(), secrets.token_hex(4)))


def is_gone(holder: str) -> bool:
    """Whether that process certainly ended."""
    try:
        _, pid, start, boot, namespaces, _ = holder.split("/")
        return bool(boot and start) and (boot, namespaces) == _here() and _ended(int(pid), start)
    except ValueError:  # a name of somebody else's making
        return False


def describe(holder: str) -> str:
    """As an operator looks for it."""
    host, _, rest = holder.partition("/")
    return f"process {rest.partition('/')[0]} on {host}" if rest else holder


def _ended(pid: int, start: str) -> bool:
    """/proc may hide processes of other users; signals do not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # it is there; or no pid is like that
        pass
    return _started(pid) not in ("", start)


def _here() -> tuple[str, str]:
    """Within which boot and namespaces a pid and a start of ours mean something; "" where nobody can say."""
    try:
        namespaces = os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/time")
        return _BOOT_ID.read_text().strip(), "+".join(namespaces)
    except OSError:
        return "", ""


def _started(pid: int) -> str:
    """When, in ticks since boot; "" where it is not to be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[_START]
