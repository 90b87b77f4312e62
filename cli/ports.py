"""TCP ports on loopback: which are free, who listens. Read from /proc, standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from baton.config import LOOPBACK

_LISTEN = "0A"  # TCP_LISTEN, linux/net/tcp_states.h


def free_port() -> int:
    """A port that nobody holds now; the system hands out others for a while before it comes round again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((LOOPBACK, port)) == 0


def listener_pid(port: int) -> int | None:
    """The process that listens there; None where nobody does, or only one that this user may not look into."""
    sockets = _listening_sockets(port)
    if sockets:
        for fd in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(fd) in sockets:
                    return int(fd.parts[2])
    return None


def _listening_sockets(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):  # no IPv6 here
            for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
                fields = line.split()
                local, state, inode = fields[1], fields[3], fields[9]
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{inode}]")
    return found
