"""Real worker processes behind a router and a controller of the test's own loop, without Ray: fleets that `baton up` cannot make,
such as workers that do not fit each other.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio
import httpx

from baton.config import LOOPBACK, ClusterConfig, ControllerConfig, RouterConfig, TracingConfig, WorkerConfig
from baton.config_load import to_json
from baton.model_files import load_model_files
from baton.request import Role
from baton.v1 import control_pb2_grpc, serving_pb2, serving_pb2_grpc, worker_pb2
from cli.main import main
from cli.run_folder import ClusterRecord
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.fleet_state import Announcement
from router.front_end import FrontEnd
from tests.integration.cluster_rig import Answer, collect, until

ROOT = Path(__file__).parents[2]
STOP_S = 20.0
UNTRACED = TracingConfig()


class WorkerProcess:
    """One `python -m MODULE --config FILE`, ended by `stopping`. It announces itself to nobody: see Fleet.add."""

    def __init__(
        self, config: WorkerConfig, folder: Path, module: str = "worker.main", env: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        self.worker_id = config.worker_id
        file = folder / f"{config.worker_id}.json"
        file.write_text(to_json(config))
        self._log = (folder / f"{config.worker_id}.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(file)],
            cwd=ROOT, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=self._log,
        )  # fmt: skip

    def wait_ready(self) -> WorkerProcess:
        """Return once it answers, and know its port and epoch."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line) if line.startswith(b"{") else {}
            if "port" in said:
                self.address, self.epoch = f"{self.config.host}:{said['port']}", said["epoch"]
                return self
        raise AssertionError(f"{self.worker_id} ended before it answered: {Path(self._log.name).read_text()}")

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_ended(self) -> str:
        """Wait for the end of one that was told to; returns what was wrong with it, "" = nothing."""
        try:
            self.process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self._log.close()
        status = self.process.returncode
        return f"{self.worker_id} ended with {status}: {Path(self._log.name).read_text()}" if status else ""


@contextlib.contextmanager
def stopping(*workers: WorkerProcess) -> Iterator[tuple[WorkerProcess, ...]]:
    """All workers ready inside; all told to stop afterwards, and each has to end in order."""
    try:
        for worker in workers:
            worker.wait_ready()
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        wrong = [found for worker in workers if (found := worker.wait_ended())]
        assert not wrong, wrong


@dataclass
class Fleet:
    """Controller, router and a client of each."""

    controller: Controller
    front_end: FrontEnd
    admin: httpx.AsyncClient
    stub: serving_pb2_grpc.ServingAsyncStub

    def add(self, worker: WorkerProcess, fingerprint: str = "") -> None:
        """Tell the controller of a worker, as the worker would."""
        role = Role[worker.config.role.upper()]
        self.controller.announce(
            Announcement(worker.worker_id, worker.epoch, worker.address, role, worker.process.pid, "", fingerprint)
        )

    async def until_ready(self) -> None:
        await until(lambda: not self.front_end.fleet.unready_reason(), "the router is ready")

    async def until_link(self, source: str, target: str, state: str) -> None:
        """Wait until the router knows the link of one worker to another to be so."""

        def known() -> bool:
            snapshots = {s.worker_id: s for s in self.front_end.fleet.snapshots()}
            link = snapshots[source].links.get(target) if source in snapshots else None
            return link is not None and link.state == state

        await until(known, f"{source} to {target} is {state}")

    async def until_kv(self, holds: Callable[[worker_pb2.KvStatus], bool], worker_id: str) -> None:
        """Wait until the controller has heard such a KV status of a worker."""

        def heard() -> bool:
            view = self.controller.view(worker_id)
            return view is not None and view.kv is not None and holds(view.kv)

        await until(heard, f"{worker_id} said so of its KV plane")

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """One greedy call to its end."""
        sampling = serving_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        request = serving_pb2.GenerateRequest(sampling=sampling, token_ids=serving_pb2.TokenIds(ids=prompt))
        return await collect(self.stub.Generate(request, timeout=60.0))

    async def status(self, *flags: str) -> str:
        """What `baton status` prints."""
        paths = ("/admin/v1/workers", "/admin/v1/slo", "/admin/v1/goodput")
        answers = {path: (await self.admin.get(path)).json() for path in paths}
        printed = io.StringIO()
        with (
            patch("cli.status.RunningCluster.find", lambda port: _Answers(answers)),
            contextlib.redirect_stdout(printed),
        ):
            assert main(["status", *flags]) == 0
        return printed.getvalue()


@dataclass
class _Answers:
    """A running cluster as `baton status` reads it."""

    answers: dict[str, Any]
    record: ClusterRecord = field(default_factory=lambda: ClusterRecord(0, LOOPBACK, 0, 0, 0, {}))

    def get(self, path: str) -> Any:
        return self.answers[path]


@asynccontextmanager
async def fleet(
    model_dir: Path, folder: Path, *workers: WorkerProcess, tracing: TracingConfig = UNTRACED
) -> AsyncIterator[Fleet]:
    """A controller and a router that know `workers`, which are ready; more may be added."""
    store = ControlStore(SQLite(folder / "slo.sqlite"), now_unix_s=lambda: 7.0)
    controller = Controller(ControllerConfig(), store)
    control = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(ControlService(controller), control)
    port = control.add_insecure_port("127.0.0.1:0")
    await control.start()
    config = RouterConfig(
        http_port=0, grpc_port=0, control_address=f"127.0.0.1:{port}", unavailable_wait_s=20.0, tracing=tracing
    )
    front_end = FrontEnd(config, load_model_files(str(model_dir)))
    await front_end.start()
    app = make_app(controller, ClusterConfig(), lambda: [Token.of("test", "viewer", "secret")])
    headers = {"authorization": "Bearer secret"}
    transport = httpx.ASGITransport(app)
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as admin,
            grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}") as channel,
        ):
            made = Fleet(controller, front_end, admin, serving_pb2_grpc.ServingStub(channel))
            for worker in workers:
                made.add(worker)
            yield made
    finally:
        await front_end.stop()
        await controller.close()
        await control.stop(None)
