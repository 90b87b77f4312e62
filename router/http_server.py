"""uvicorn on a socket of our own, inside the router's event loop.

The socket is made with IPPROTO_TCP: asyncio sets TCP_NODELAY only on such sockets, and without it keep-alive connections
stall 44 ms (DESIGN section 8). Signals are the process's business (router/main.py), so uvicorn's handlers stay out.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Callable, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from baton.config import RouterConfig
from baton.errors import ConfigError
from baton.log import get_log
from router.http_protocol import Connections, FrontDoorProtocol, Intake

log = get_log("router.http")

BACKLOG = 4_096  # connections that may wait while the loop is busy; the kernel's own limit (somaxconn) by default
ACCEPTS_PER_TURN = 16  # 1 to 2 ms
ACCEPT_PAUSE_S = 0.1  # after an error, which is not over the next moment
OTHER_FILES = 4_096  # a Session takes one or two: a thousand workers, gRPC's clients, and as many again
SHUTDOWN_S = 1  # for calls that were told to end
# A client that takes none of what waits for it is cut by the kernel: twice common proxies' 30 s of patience
STALL_MS = 60_000


class Acceptor:
    """Takes a listening socket's connections, a few per turn of the loop: a thousand that come at once are 50 ms of work.

    Looks to uvicorn like one of asyncio's servers.
    """

    def __init__(self, listener: socket.socket, new_protocol: Callable[[], asyncio.Protocol]) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._new_protocol = new_protocol
        self._opening: set[asyncio.Task[object]] = set()
        self._closed = False
        self._watch()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: connections are uvicorn's."""

    def _watch(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._take)

    def _take(self) -> None:
        """Called each turn while connections wait."""
        try:
            for _ in range(ACCEPTS_PER_TURN):
                self._open(self._listener.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:  # no more files, or a connection that ended before it was taken
            log.warning("accept_failed", reason=error.strerror)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(ACCEPT_PAUSE_S, self._watch)

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = self._loop.create_task(self._loop.connect_accepted_socket(self._new_protocol, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opened)

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled():
            opening.exception()  # a connection that is gone already; there is nobody to tell


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's for sockets that are bound, with our Acceptor."""
        await self.lifespan.startup()
        new_protocol = partial(  # type: ignore[call-arg]  # as uvicorn calls it
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers = [Acceptor(listener, new_protocol) for listener in sockets or []]  # type: ignore[misc]  # looks like one
        self.started = True


class HttpServer:
    """Binds, serves and stops; `port` is what was bound."""

    def __init__(self, config: RouterConfig, app: ASGIApp) -> None:
        """Raises: ConfigError, when the port is taken."""
        self._socket = _listen(config)
        self.port: int = self._socket.getsockname()[1]
        self._is_shared = config.shared_ports
        self._app = app
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._connections = Connections(loop, _max_connections())
        self._server = _Uvicorn(
            uvicorn.Config(
                self._app,
                http=partial(FrontDoorProtocol, Intake(loop), self._connections),  # type: ignore[arg-type]  # is only called
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

    def leave(self) -> None:
        """Let clients go elsewhere: connections end with their next answer, idle ones now; a shared port is the others'."""
        self._connections.leave()
        if self._is_shared:
            for acceptor in self._server.servers:
                acceptor.close()
            self._socket.close()

    async def stop(self) -> None:
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            self._connections.stop()
        self.close()

    def close(self) -> None:
        """Give the port up; all there is to do for a server that was not started."""
        self._socket.close()


def _max_connections() -> int:
    """As many as the process may have, less what else it opens."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft // 2, soft - OTHER_FILES)


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
