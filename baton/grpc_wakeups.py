"""Keeps grpc.aio's wake-up socket from holding its events back.

grpc.aio collects events in a thread of its own, which writes one byte to a socket pair for each. The event loop, woken, takes
one byte and all the events there are, so the bytes of events that came together stay behind. Some 280 of them fill the socket.
From then on the thread waits in `write`, and hands over one event per turn of the loop, however many have come: a router to
which 1,500 calls came at once heard nothing of its workers for 700 ms (grpcio 1.85.3; measured: docs/router_cost.md).

A write end that does not block loses nothing: where the socket is full, the loop has yet to be woken by what is in it.
"""

from __future__ import annotations

import functools
import os
import stat

import grpc.aio


@functools.cache  # once: what opens between two looks later on is somebody else's
def never_block() -> None:
    """Call it before this process first uses grpc.aio; later calls do nothing."""
    before = _sockets()
    # Never taken back, so that the socket pair lives as long as the process.
    grpc.aio.init_grpc_aio()  # type: ignore[attr-defined]  # the stubs lack it
    for fd in _sockets() - before:
        os.set_blocking(fd, False)


def _sockets() -> set[int]:
    return {fd for fd in map(int, os.listdir("/dev/fd")) if _is_socket(fd)}


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:  # the listing's own, which is closed by now
        return False
