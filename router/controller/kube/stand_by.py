"""A controller that does not lead yet: it holds nothing, serves nothing but its probes, and tries for the Lease.

    /healthz   200: it lives and is ready to lead, which is all that its pod's Ready says
    anything else, /leaderz among it: 503

The Service sends nobody here: it asks for the leader's label (leader_label.py). Routers and workers are the leader's alone: two
views of one fleet would be one too many. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.errors import BatonError
from baton.log import get_log
from router.controller.kube.calls import KubeCalls
from router.controller.kube.lease import KubeLease
from router.controller.lease import LEASE_S

log = get_log("controller.kube.stand_by")

_TRY_S = LEASE_S / 4  # a free one is taken within
_READ_S = 5.0  # a probe says what it wants at once
_MAX_HEAD_BYTES = 8_192


async def lead(lease: KubeLease, calls: KubeCalls, host: str, port: int, stop: asyncio.Event) -> bool:
    """Return once the Lease is held; False: `stop` was set before."""
    async with _probes(host, port):
        holder = ""
        while not stop.is_set():
            try:
                if await calls.run(lease.take):
                    log.info("leads")
                    return True
                if lease.holder_seen != holder:
                    holder = lease.holder_seen
                    log.info("stands_by", leader=holder)
            except BatonError as error:
                log.warning("lease_unknown", reason=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TRY_S):
                    await stop.wait()
    return False


@asynccontextmanager
async def _probes(host: str, port: int) -> AsyncIterator[None]:
    server = await asyncio.start_server(_answer, host, port, limit=_MAX_HEAD_BYTES)
    try:
        yield
    finally:
        server.close()
        await server.wait_closed()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        async with asyncio.timeout(_READ_S):
            head = await reader.readuntil(b"\r\n\r\n")
            status = b"200 OK" if head.split(b" ", 2)[1:2] == [b"/healthz"] else b"503 Service Unavailable"
            writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            await writer.drain()
    writer.close()
