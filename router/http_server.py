"""uvicorn on a socket of our own, inside the router's event loop.

The socket is made with IPPROTO_TCP: asyncio sets TCP_NODELAY only on such sockets, and without it keep-alive connections
stall 44 ms (DESIGN section 8). Signals are the process's business (router/main.py), so uvicorn's handlers stay out.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from baton.config import RouterConfig
from baton.errors import ConfigError
from router.http_protocol import MAX_IDLE, FrontDoorProtocol, Idle, Intake

BACKLOG = 4_096  # connections that may wait while the loop is busy; the kernel's own limit (somaxconn) by default
SHUTDOWN_S = 1  # for calls that were told to end
STALL_MS = (
    60_000  # a client that takes none of what waits for it is cut by the kernel: twice common proxies' 30 s of patience
)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Binds, serves and stops; `port` is what was bound."""

    def __init__(self, config: RouterConfig, app: ASGIApp) -> None:
        """Raises: ConfigError, when the port is taken."""
        self._socket = _listen(config)
        self.port: int = self._socket.getsockname()[1]
        self._app = app
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle = Idle(loop, MAX_IDLE)
        self._server = _Uvicorn(
            uvicorn.Config(
                self._app,
                http=partial(FrontDoorProtocol, Intake(loop), self._idle),  # type: ignore[arg-type]  # is only called
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="http")

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._idle.stop()
        self.close()

    def close(self) -> None:
        """Give the port up; all there is to do for a server that was not started."""
        self._socket.close()


def _listen(config: RouterConfig) -> socket.socket:
    host, port = config.host, config.http_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # Lets a restarted router take the port of connections in TIME_WAIT; a living listener still refuses it.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, config.shared_ports)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALL_MS)  # inherited by its connections
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"HTTP port {port} on {host} cannot be bound ({error.strerror}); choose another with --http-port",
            field="http_port",
        ) from None
    listener.setblocking(False)
    return listener
