"""An admin endpoint on a port of its own, as `baton` commands find that of a running cluster: by its run folder."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from cli.main import main
from cli.run_folder import ClusterRecord, RunFolder
from router.controller.admin_tokens import Token, read_drawn

START_S = 20.0

Serve = Callable[[Sequence[Token]], AbstractAsyncContextManager[FastAPI]]


@dataclass(frozen=True, slots=True)
class Admin:
    port: int
    folder: Path

    def baton(self, *words: str) -> int:
        return main([*words, "--admin-port", str(self.port)])


@contextmanager
def admin_endpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve) -> Iterator[Admin]:
    """`serve` makes the app, inside an event loop on a thread of its own, for whoever has one of the tokens drawn here."""
    monkeypatch.setenv("BATON_HOME", str(folder))
    monkeypatch.setenv("COLUMNS", "200")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        run = RunFolder(port)
        run.path.mkdir(parents=True)
        run.write_secrets()
        run.write_record(ClusterRecord(os.getpid(), "127.0.0.1", 0, 0, port, {}))
        servers: list[uvicorn.Server] = []
        ready = threading.Event()

        async def answer() -> None:
            async with serve(read_drawn(run.tokens_file)) as app:
                servers.append(uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")))
                ready.set()
                await servers[0].serve(sockets=[listener])

        thread = threading.Thread(target=lambda: asyncio.run(answer()))
        thread.start()
        assert ready.wait(START_S)
        yield Admin(port, folder)
        servers[0].should_exit = True
        thread.join(START_S)
