"""The Ray actor shell: a worker process is one actor that holds one server. Ray starts, restarts and ends it; nothing else
passes through Ray. The server runs its own threads, so the actor's single Ray thread only ever answers the three calls below.

The server class is named in the configuration ("module:class"): the shell imports no role and no torch before it runs.
One of the two modules that import ray.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Protocol

import ray

from baton import clock
from baton.config import WorkerConfig
from baton.config_load import from_json
from baton.errors import ConfigError
from baton.log import configure, get_log
from worker.engine_thread import favour_the_loop

log = get_log("worker.actor")


class Server(Protocol):
    """What the shell runs (`worker.server.WorkerServer`; tests bring smaller ones)."""

    epoch: int
    fingerprint: str

    def start(self) -> int:
        """Serve on threads of its own, announce itself, and return the bound port."""
        ...

    def stop(self) -> None: ...


class WorkerActor:
    """One worker process."""

    def __init__(self, config_json: str, server_name: str, log_dir: str) -> None:
        config = from_json(WorkerConfig, config_json)
        if log_dir:
            _write_to(Path(log_dir, f"{config.worker_id}.log"))
        clock.slow_down(config.emulation.time_scale)
        configure(config.worker_id, config.log_level)
        favour_the_loop()
        self._server = _make_server(server_name, config)
        self._address = f"{config.host}:{self._server.start()}"

    def address(self) -> str:
        """host:port of the worker's gRPC server."""
        return self._address

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._server.stop()


RemoteWorker = ray.remote(WorkerActor)


def _write_to(log_file: Path) -> None:
    """Send stdout and stderr of this process there, native code's too; a restarted worker appends."""
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    for standard_fd in (1, 2):
        os.dup2(fd, standard_fd)
    os.close(fd)


def _end_process(error: BaseException) -> None:
    """A worker whose thread died is of no use: leave at once and let Ray start a fresh one."""
    log.error("worker_ends", reason=type(error).__name__)
    os._exit(1)


def _make_server(name: str, config: WorkerConfig) -> Server:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"controller.worker_server = {name!r} cannot be loaded: {error}", field="worker_server"
        ) from error
    server: Server = kind(config, _end_process)
    return server
