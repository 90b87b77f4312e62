"""The controller process: `python -m router.controller.main --config <file>`, the file being a resolved ClusterConfig in JSON.

    1. open the database, serve Control (gRPC) and the admin endpoint (HTTP)
    2. print one JSON line: {"pid", "control_address", "admin_port"}; log lines go to stderr
    In a cluster (docs/kubernetes.md) it first waits until it leads, and ends once another one does
    3. connect to Ray as its only driver and create the worker actors, in parallel; GET /admin/v1/workers shows how far that is.
       A controller that was killed left its actors running: its successor finds them by name, and the fleet in a file
    4. SIGTERM or SIGINT: stop the actors, close, exit 0
A worker that cannot be started is a `failed` member with a one-line reason; the process lives on and answers for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import uvicorn

from baton import clock, grpc_wakeups
from baton.config import ClusterConfig, ControllerConfig
from baton.config_load import from_json
from baton.errors import BatonError, ConfigError, InvalidRequest
from baton.keepalive import SERVER_OPTIONS
from baton.log import configure, get_log
from baton.peer_trust import Part, PeerTrust
from baton.slo import DEFAULT_CLASSES
from baton.v1 import control_pb2_grpc
from router.controller.admin_api import make_app
from router.controller.admin_tokens import TokenFiles
from router.controller.background import Background
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore, database_of
from router.controller.controller import Controller
from router.controller.fleet_store import Fleets, FleetStore
from router.controller.holder import this_process
from router.controller.kube.seeds import put_values_in_force, seeded_budget, seeded_classes
from router.controller.lease import Lease
from router.controller.live_control import LiveControl
from router.controller.live_facts import gpus_per_worker
from router.controller.planner import hand_back
from router.controller.rate_store import RateStore
from router.controller.ray_fleet import RayFleet, sizes_of
from router.controller.settings import began
from router.controller.slo_store import SLOSet

if TYPE_CHECKING:
    from router.controller.kube.platform import Platform

log = get_log("controller.main")

TOKENS_FILE = "tokens.json"  # in the run folder, mode 0600: {name: {"role": ..., "secret": ...}}
FLEET_FILE = "fleet.json"  # in the run folder, for the next controller of the same run
RATES_FILE = "rates.json"  # likewise
MEMORY_FILE = "memory.json"  # likewise


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.controller.main")
    parser.add_argument("--config", type=Path, required=True)
    args = parser.parse_args(argv)
    try:
        cluster = from_json(ClusterConfig, args.config.read_text(encoding="utf-8"))
        configure("controller", cluster.controller.log_level)
        clock.slow_down(cluster.emulation.time_scale)
        clock.run(_serve(cluster))
    except BatonError as error:
        print(f"controller: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _serve(cluster: ClusterConfig) -> None:
    grpc_wakeups.never_block()
    stop = _stop_on_signal()
    config = cluster.controller
    kube = _platform(cluster)
    if kube is not None and not await kube.lead(stop):
        kube.close()
        return
    run_dir = Path(config.run_dir)
    trust = PeerTrust(cluster.tls_dir_of(Part.CONTROLLER), Part.CONTROLLER)
    tokens = TokenFiles(run_dir / TOKENS_FILE, config.admin_tokens_file)
    database = database_of(config.database, run_dir)
    sizes = {role.name.lower(): size for role, size in sizes_of(cluster).items()}
    classes = seeded_classes(cluster.kubernetes, DEFAULT_CLASSES)
    documents = kube.documents if kube else None
    store = await asyncio.to_thread(ControlStore, database, time.time, sizes, classes, documents)
    fleets: Fleets = kube.fleets if kube else FleetStore(run_dir / FLEET_FILE)
    is_new = (await asyncio.to_thread(fleets.load)).is_new
    await asyncio.to_thread(_begin, store, cluster, classes, is_new=is_new)
    rates = RateStore(run_dir / RATES_FILE)
    lease = kube.lease if kube else await asyncio.to_thread(Lease, database, "autoscaler", this_process())
    controller = Controller(config, store, fleets, trust, cluster.emulation, rates, lease)
    # A taken port is an error, not a second listener, unless it is held for this process.
    control = grpc.aio.server(options=[("grpc.so_reuseport", int(config.shared_ports)), *SERVER_OPTIONS])
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller, trust), control)
    control_address = f"{config.host}:{_bind_control(control, trust, config.host, config.control_port)}"
    fleet = kube.machines(controller) if kube else RayFleet(controller, cluster, control_address)
    live = LiveControl(controller, cluster, fleet, lease, run_dir / MEMORY_FILE)
    await control.start()
    listener = _bind_admin(config)
    planner = live.planner
    app = make_app(
        controller,
        cluster,
        tokens.current,
        forecast=planner.forecast if planner else None,
        pays=planner.pays if planner else None,
        control=live,
    )
    if kube is not None:
        kube.show(app, tokens.current, live.registry)
    admin = _AdminServer(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
    serving = asyncio.create_task(admin.serve(sockets=[listener]))
    _say_ready(control_address, listener.getsockname()[1])

    background = Background(controller.task_failures)
    background.keep("workers", fleet.start_and_revive)
    background.keep("autoscaler", live.loop.run)
    background.keep("planner", live.plan)
    background.keep("save memory", live.memory.run)
    background.keep("local prefill", partial(hand_back, controller, planner))
    if kube is not None:
        background.keep("cluster", partial(kube.look_after, live.orders))
        background.keep("leader label", kube.be_found)
        background.keep("lease", partial(kube.until_lost, stop))
    await stop.wait()
    await background.end()
    await live.close()
    await fleet.stop()
    await controller.close()
    await control.stop(grace=1.0)  # routers hold Watch open for ever; a second lets answers under way out
    admin.should_exit = True
    await serving
    if kube is not None:
        kube.close()
    database.close()


def _platform(cluster: ClusterConfig) -> Platform | None:
    """Raises: ConfigError."""
    if not cluster.kubernetes.fullname:
        return None
    try:
        from router.controller.kube.platform import Platform  # its client is an extra
    except ImportError as error:
        raise ConfigError(
            f"kubernetes.fullname is set, but its client is missing ({error}); pip install 'baton[kubernetes]'",
            field="kubernetes.fullname",
        ) from None
    return Platform(cluster)


def _begin(store: ControlStore, cluster: ClusterConfig, classes: SLOSet, *, is_new: bool) -> None:
    """Put in force what the configuration asks for: some of it each time, the rest of a new fleet. Raises: ConfigError."""
    if cluster.kubernetes.slo_source == "values":
        put_values_in_force(store.slo, classes)
    if is_new:
        _begin_fleet(store, cluster)


def _begin_fleet(store: ControlStore, cluster: ClusterConfig) -> None:
    """Raises: ConfigError: it cannot be."""
    config, current = cluster.controller, store.settings.current()
    asked = began(current.value, config.mode, config.max_gpus)
    if cluster.kubernetes.fullname and current.version == 1:  # bounds of an older store are its operators'
        asked = replace(asked, budget=seeded_budget(cluster.kubernetes, asked.budget))
    if asked != current.value:
        try:
            asked.budget.check(gpus_per_worker(cluster))
        except InvalidRequest as error:
            raise ConfigError(f"controller.max_gpus: {error.message}", field="controller.max_gpus") from error
        store.settings.replace(current.version, asked, "baton", "as configured")


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
