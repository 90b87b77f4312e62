"""A controller of release "demo" on the fake API server: real client, Lease, sizes and watch; Ray and workers are stand-ins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from baton.config import ClusterConfig, ControllerConfig, WorkerConfig
from baton.errors import ConfigError
from baton.request import Role
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.fleet_state import Announcement
from router.controller.kube.fleet import KubeFleet
from router.controller.kube.platform import Platform
from router.controller.settings import Budget
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import PODS, STATEFUL_SETS, Json, Resource
from tests.kube.kube_rig import FULLNAME, NAMESPACE, config_of, pod

PATIENCE_S = 10.0


class StandInRay:
    """Starts succeed at once; whoever is started announces itself, if it is to."""

    def __init__(self) -> None:
        self.started: list[WorkerConfig] = []
        self.ended: list[str] = []
        self.fails = ""
        self.is_closed = False
        self.answers = threading.Event()  # as long as it is not set, whoever connects hangs, as Ray's drivers do
        self.answers.set()

    def connect(self, cluster: ClusterConfig) -> StandInRay:
        self.answers.wait()
        return self

    def start(self, config: WorkerConfig) -> str:
        self.started.append(config)
        if self.fails:
            raise ConfigError(self.fails)
        return f"{config.host}:{config.port}"

    def kill(self, worker_id: str, *, is_starting: bool) -> None:
        self.ended.append(worker_id)

    def num_places(self) -> int:
        if self.fails:
            raise ConnectionError(self.fails)
        return 100

    def check_fits(self, num_workers: int) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    def names(self) -> list[str]:
        return [config.worker_id for config in self.started]


class Rig:
    def __init__(self, fake: FakeApi, folder: Path, cluster: ClusterConfig) -> None:
        self.fake = fake
        self.cluster = cluster
        self.ray = StandInRay()
        self.platform = Platform(cluster)
        self.store = ControlStore(SQLite(folder / "decisions"), lambda: 7.0, {}, documents=self.platform.documents)
        self.platform.fleets.load()
        self.controller = Controller(cluster.controller, self.store, self.platform.fleets)
        self.fleet: KubeFleet

    async def begin(self) -> None:
        await asyncio.to_thread(self.platform.lease.take)
        self.fleet = self.platform.machines(self.controller, self.ray.connect)

    def announce(self, worker_id: str, epoch: int = 1, ip: str = "10.0.0.1") -> None:
        """As the process that was started there would. Nobody answers at that address: its Session stays unopened."""
        role = Role.PREFILL if "prefill" in worker_id else Role.DECODE
        self.controller.announce(Announcement(worker_id, epoch, f"{ip}:7100", role, pid=1, fingerprint="f"))

    async def allow(self, **bounds: object) -> None:
        """A budget."""
        live = self.controller.in_force.settings
        changed = replace(live.revision.value, budget=replace(Budget(), **bounds))  # type: ignore[arg-type]
        await live.put(live.revision.version, changed, "a test", "a test")

    # -- the cluster -------------------------------------------------------------------------------------------------

    def make_pod(self, name: str, *, ip: str = "10.0.0.1", phase: str = "Running", **status: object) -> Json:
        home = "prefill" if "prefill" in name else "decode"
        made = self.fake.verbs.create(PODS, NAMESPACE, pod(name, home))
        self.tell_pod(name, ip=ip, phase=phase, **status)
        return made

    def tell_pod(self, name: str, *, ip: str = "10.0.0.1", phase: str = "Running", **status: object) -> None:
        body = self.get(PODS, name)
        body["status"] = {"phase": phase, "conditions": [{"type": "Ready", "status": "True"}], **status}
        if ip:
            body["status"]["podIP"] = ip
        self.fake.verbs.update(PODS, NAMESPACE, name, body, "status")

    def delete_pod(self, name: str) -> None:
        self.fake.verbs.delete(PODS, NAMESPACE, name, {"gracePeriodSeconds": 0})

    def get(self, resource: Resource, name: str) -> Json:
        return self.fake.verbs.get(resource, NAMESPACE, name)

    def desired(self, home: str) -> int:
        return int(self.get(STATEFUL_SETS, f"{FULLNAME}-{home}")["spec"]["replicas"])

    def config_map(self, name: str) -> dict[str, str]:
        return dict(self.platform.api.config_map(f"{FULLNAME}-{name}").data)

    def labels(self, pod: str) -> dict[str, str]:
        return dict(self.get(PODS, pod)["metadata"]["labels"])

    def ids(self) -> list[str]:
        return [member.worker_id for member in self.controller.fleet.members()]

    def state(self, worker_id: str) -> str:
        return self.controller.fleet.get(worker_id).state


def cluster_of(fake: FakeApi, folder: Path, *, prefill: int = 1, decode: int = 1, **more: object) -> ClusterConfig:
    return ClusterConfig(
        prefill=prefill,
        decode=decode,
        controller=ControllerConfig(run_dir=str(folder), worker_num_cpus=1.0),
        kubernetes=config_of(fake, folder, control_address="demo-controller:7001", **more),
    )


@asynccontextmanager
async def rig_of(fake: FakeApi, folder: Path, cluster: ClusterConfig) -> AsyncIterator[Rig]:
    rig = Rig(fake, folder, cluster)
    await rig.begin()
    try:
        yield rig
    finally:
        await rig.fleet.stop()
        await rig.controller.close()
        rig.platform.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)
