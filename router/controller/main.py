"""The controller process: `python -m router.controller.main --config <file>`, the file being a resolved ClusterConfig in JSON.

    1. open the database, serve Control (gRPC) and the admin endpoint (HTTP)
    2. print one JSON line: {"pid", "control_address", "admin_port"}; log lines go to stderr
    3. connect to Ray as its only driver and create the worker actors, in parallel; GET /admin/v1/workers shows how far that is.
       A controller that was killed left its actors running: its successor finds them by name, and the fleet in a file
    4. SIGTERM or SIGINT: stop the actors, close, exit 0
A worker that cannot be started is a `failed` member with a one-line reason; the process lives on and answers for it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvicorn

from baton import grpc_wakeups
from baton.config import ClusterConfig, ControllerConfig, WorkerConfig
from baton.config_load import from_json
from baton.errors import BatonError, ConfigError
from baton.keepalive import SERVER_OPTIONS
from baton.log import configure, get_log
from baton.peer_trust import Part, PeerTrust
from baton.request import Role
from baton.scaled_clock import slowed
from baton.slo import DEFAULT_CLASSES
from baton.v1 import control_pb2_grpc
from router.controller.admin_api import make_app
from router.controller.admin_tokens import TokenFiles
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore, database_of
from router.controller.controller import Controller
from router.controller.fleet_state import FAILED
from router.controller.fleet_store import FleetStore
from router.controller.pools import Placement, RayPools

log = get_log("controller.main")

TOKENS_FILE = "tokens.json"  # in the run folder, mode 0600: {name: {"role": ..., "secret": ...}}
_REVIVE_S = 15.0  # longer than Ray's own restart of a killed actor (1-9 s), so that the two do not race
LOGS_DIR = "logs"  # in the run folder
FLEET_FILE = "fleet.json"  # in the run folder, for the next controller of the same run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.controller.main")
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        cluster = from_json(ClusterConfig, args.config.read_text(encoding="utf-8"))
        configure("controller", cluster.controller.log_level)
        asyncio.run(_serve(cluster))
    except BatonError as error:
        print(f"controller: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _serve(cluster: ClusterConfig) -> None:
    grpc_wakeups.never_block()
    stop = _stop_on_signal()
    config = cluster.controller
    run_dir = Path(config.run_dir)
    trust = PeerTrust(cluster.tls_dir_of(Part.CONTROLLER), Part.CONTROLLER)
    tokens = TokenFiles(run_dir / TOKENS_FILE, config.admin_tokens_file)
    database = database_of(config.database, run_dir)
    sizes = {"prefill": cluster.prefill, "decode": cluster.decode, "both": cluster.both}
    classes = tuple(slowed(slo, cluster.emulation.time_scale) for slo in DEFAULT_CLASSES)
    store = await asyncio.to_thread(ControlStore, database, time.time, sizes, classes)
    controller = Controller(config, store, FleetStore(run_dir / FLEET_FILE), trust, cluster.emulation)
    # A taken port is an error, not a second listener, unless it is held for this process.
    control = grpc.aio.server(options=[("grpc.so_reuseport", int(config.shared_ports)), *SERVER_OPTIONS])
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller, trust), control)
    control_address = f"{config.host}:{_bind_control(control, trust, config.host, config.control_port)}"
    fleet = _RayFleet(controller, cluster, control_address)
    await control.start()
    listener = _bind_admin(config)
    app = make_app(controller, cluster, tokens.current)
    admin = _AdminServer(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(admin.serve(sockets=[listener]))
    _say_ready(control_address, listener.getsockname()[1])

    starting = asyncio.create_task(_start_and_revive(fleet))
    await stop.wait()
    starting.cancel()
    await fleet.stop()
    await controller.close()
    await control.stop(grace=1.0)  # routers hold Watch open for ever; a second lets answers under way out
    admin.should_exit = True
    await serving
    database.close()


async def _start_and_revive(fleet: _RayFleet) -> None:
    await fleet.start()
    await fleet.revive()


class _RayFleet:
    """The workers that this controller wants, as Ray actors. Ray's calls block, so they run on threads of their own."""

    def __init__(self, controller: Controller, cluster: ClusterConfig, control_address: str) -> None:
        self._controller = controller
        self._config = cluster.controller
        self._workers = worker_configs(cluster, control_address, os.cpu_count() or 1)
        # Two per worker: a stop must not queue behind a start that waits for its deadline.
        self._threads = ThreadPoolExecutor(max_workers=2 * len(self._workers), thread_name_prefix="ray")
        self._pools: RayPools | None = None
        for worker in self._workers:
            controller.expect(worker.worker_id, Role[worker.role.upper()])

    async def start(self) -> None:
        """Bring all workers up; failures end as `failed` members, each with its reason."""
        loop = asyncio.get_running_loop()
        config = self._config
        log_dir = str(Path(config.run_dir, LOGS_DIR))
        placement = Placement(config.worker_num_cpus, config.worker_server, config.worker_start_timeout_s, log_dir)
        try:
            pools = await loop.run_in_executor(
                self._threads, RayPools, config.ray_address, config.ray_node_dir, placement
            )
            self._pools = pools
            await loop.run_in_executor(self._threads, pools.check_fits, len(self._workers))
        except (BatonError, ConnectionError) as error:
            log.error("ray_failed", reason=str(error))
            for worker in self._workers:
                self._controller.start_failed(worker.worker_id, 0, str(error))
            return
        await asyncio.gather(*(self._start_one(pools, worker) for worker in self._workers))

    async def _start_one(self, pools: RayPools, worker: WorkerConfig) -> None:
        epoch = self._controller.fleet.get(worker.worker_id).epoch  # a process that announces meanwhile has not failed
        try:
            await asyncio.get_running_loop().run_in_executor(self._threads, pools.start, worker)
        except BatonError as error:
            self._controller.start_failed(worker.worker_id, epoch, error.message)

    async def revive(self) -> None:
        """For ever: ask again for lost workers, or for Ray where that was away. Ray restarts killed workers itself, but gives
        up where a restart raised."""
        while True:
            await asyncio.sleep(_REVIVE_S)
            if self._pools is None:
                await self.start()
            else:
                pools = self._pools
                lost = {m.worker_id for m in self._controller.fleet.members() if m.state == FAILED}
                await asyncio.gather(*(self._start_one(pools, w) for w in self._workers if w.worker_id in lost))

    async def stop(self) -> None:
        loop = asyncio.get_running_loop()
        if pools := self._pools:
            kills = (loop.run_in_executor(self._threads, pools.kill, worker.worker_id) for worker in self._workers)
            await asyncio.gather(*kills)
            await loop.run_in_executor(self._threads, pools.close)
        self._threads.shutdown(wait=False, cancel_futures=True)


def worker_configs(cluster: ClusterConfig, control_address: str, num_cores: int) -> list[WorkerConfig]:
    """One WorkerConfig per worker of this host; cores are shared out where engine.num_threads leaves it open."""
    sizes = {"prefill": cluster.prefill, "decode": cluster.decode, "both": cluster.both}
    num_workers = sum(sizes.values())
    num_threads = cluster.engine.num_threads or max(1, num_cores // num_workers)
    return [
        WorkerConfig(
            worker_id=f"{role}-{index}",
            role=role,
            host=cluster.controller.host,
            control_address=control_address,
            tls_dir=cluster.tls_dir_of(Part.WORKER),
            heartbeat_s=cluster.router.heartbeat_s,
            missed_heartbeats=cluster.router.missed_heartbeats,
            model=cluster.model,
            engine=dataclasses.replace(cluster.engine_of(role), num_threads=num_threads),
            kv=cluster.kv,
            emulation=cluster.emulation,
            log_level=cluster.controller.log_level,
        )
        for role, size in sizes.items()
        for index in range(size)
    ]


class _AdminServer(uvicorn.Server):
    """uvicorn without its signal handlers: this process has its own order of stopping."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _stop_on_signal() -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _bind_control(server: grpc.aio.Server, trust: PeerTrust, host: str, port: int) -> int:
    try:
        return trust.listen(server, host, port)
    except RuntimeError as error:
        raise ConfigError(
            f"control port {port} cannot be bound (in use?); choose another controller.control_port, or 0 for any",
            field="controller.control_port",
        ) from error


def _bind_admin(config: ControllerConfig) -> socket.socket:
    try:
        return socket.create_server((config.host, config.admin_port), reuse_port=config.shared_ports)
    except OSError as error:
        raise ConfigError(
            f"admin port {config.admin_port}: {error.strerror}; move it with --admin-port", field="admin_port"
        ) from error


def _say_ready(control_address: str, admin_port: int) -> None:
    line = {"pid": os.getpid(), "control_address": control_address, "admin_port": admin_port}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
