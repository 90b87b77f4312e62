"""TCP ports on loopback: which are free, who listens. Read from /proc, standard library only."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from baton.config import LOOPBACK

_LISTEN = "0A"  # TCP_LISTEN, linux/net/tcp_states.h


class HeldPorts:
    """Ports that this process holds without listening, for others that listen there with SO_REUSEPORT: while none of them
    does, a caller is refused at once, and nobody else can take the port."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def hold(self, port: int) -> bool:
        """Returns False where somebody else has it."""
        holder = socket.socket()
        self._sockets.append(holder)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((LOOPBACK, port))
        except OSError:
            return False
        return not _listening_sockets(port)  # of this user, and it shares the port, too

    def release(self) -> None:
        for holder in self._sockets:
            holder.close()
        self._sockets.clear()


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
