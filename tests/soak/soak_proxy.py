"""A TCP address that outlives its server: connections are forwarded to whoever is behind it now, and can be cut at will.

Sessions of routers and links of prefill workers go through one of these per worker, so that a restart can keep the address
or change it, and a cut hits gRPC streams alone: the data path between two workers stays. Event loop only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import cast


class Proxy:
    """`port` is bound from `start` to `close`; `backend` is a port on loopback, 0 = nobody answers."""

    def __init__(self) -> None:
        self.port = 0
        self.backend = 0
        self._ends: set[_End] = set()  # those that clients hold
        self._connecting: set[asyncio.Task[None]] = set()

    async def start(self) -> Proxy:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self._on_client, self._ends.discard), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def cut(self, rng: random.Random) -> bool:
        """Break one connection, any; returns whether there was one."""
        if not self._ends:
            return False
        rng.choice(sorted(self._ends, key=id)).transport.abort()
        return True

    async def close(self) -> None:
        self._server.close()
        for end in list(self._ends):
            end.transport.abort()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _on_client(self, client: _End) -> None:
        client.transport.pause_reading()
        self._ends.add(client)
        task = asyncio.create_task(self._join(client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _join(self, client: _End) -> None:
        """Connect to whoever is behind us; nobody there is a closed connection, as with a dead server."""
        try:
            if not self.backend:
                raise ConnectionRefusedError
            loop = asyncio.get_running_loop()
            _, server = await loop.create_connection(_End, "127.0.0.1", self.backend)
        except OSError:
            client.transport.abort()
            return
        client.other, server.other = server, client
        if client.transport.is_closing():
            server.transport.abort()
        else:
            client.transport.resume_reading()


class _End(asyncio.Protocol):
    """One end of a forwarded connection: what it hears, `other` says."""

    def __init__(
        self, on_made: Callable[[_End], None] = lambda _: None, on_lost: Callable[[_End], None] = lambda _: None
    ) -> None:
        self.transport: asyncio.Transport
        self.other: _End | None = None
        self._on_made, self._on_lost = on_made, on_lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._on_made(self)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None, "reading starts when both ends are there"
        self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost(self)
        if self.other is not None:
            self.other.transport.close()
