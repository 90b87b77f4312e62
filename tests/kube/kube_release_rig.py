"""A whole release "demo" in one process: API server and kubelet are fakes, pods pretend, workers are stand-ins that announce
themselves and drain; controller, levers, upgrades and conditions are the real ones, hurried.

    async with release_of(tmp_path, prefill=1, decode=2) as rig:
        await rig.orders.scale(Role.DECODE, 3, Order("ann"))
        await rig.until(lambda: rig.serving() == {...})
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from baton.config import ClusterConfig, ControllerConfig, ModelConfig, WorkerConfig
from baton.errors import BatonError, ConfigError
from baton.v1 import control_pb2_grpc
from router.controller.control_service import ControlService
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from router.controller.decisions import Decision
from router.controller.fleet_state import READY
from router.controller.kube.platform import Platform
from router.controller.levers import Levers, Waits
from router.controller.pool_orders import PoolOrders
from router.controller.settings import Budget
from router.series import Registry
from tests.controller.stand_in_server import StandInServer
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import EVENTS, PODS, STATEFUL_SETS, Json
from tests.kube.fake_kubelet import FakeKubelet, Node
from tests.kube.fake_kubelet_pods import PodToRun, Pretend, Process
from tests.kube.kube_rig import FULLNAME, NAMESPACE, config_of, release

PATIENCE_S = 60.0  # other work shares these cores
GPU = "nvidia.com/gpu"


class PodWorkers:
    """Ray and kubelet in one: a pod's worker runs as long as its pod does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.servers: dict[str, StandInServer] = {}
        self.pods: dict[str, Pretend] = {}
        self.sick: set[str] = set()  # pods, by uid, on which no worker comes up
        self.uids: dict[str, str] = {}
        self.behaviour = ""  # of stand-ins that are started from now on
        self.is_away = False

    # -- the kubelet's launcher --------------------------------------------------------------------------------------

    def launch(self, pod: PodToRun) -> Process:
        workers, name = self, pod.name

        class Ended(Pretend):
            def terminate(self) -> None:
                workers.stop(name)
                super().terminate()

            def kill(self) -> None:
                workers.stop(name)
                super().kill()

        with self._lock:
            self.uids[name] = str(pod.pod["metadata"]["uid"])
            self.pods[name] = Ended()
            return self.pods[name]

    # -- Ray ---------------------------------------------------------------------------------------------------------

    def start(self, config: WorkerConfig) -> str:
        if self.uids.get(config.worker_id) in self.sick:
            raise ConfigError("CUDA error: an illegal memory access was encountered")
        config = replace(config, model=ModelConfig(path=self.behaviour))
        self.stop(config.worker_id)
        server = StandInServer(config, lambda error: None)
        with self._lock:
            self.servers[config.worker_id] = server
        server.start()
        return f"{config.host}:{config.port}"

    def kill(self, worker_id: str, *, is_starting: bool) -> None:
        self.stop(worker_id)

    def num_places(self) -> int:
        if self.is_away:
            raise ConnectionError("Ray is away: the head does not answer")
        return 100

    def check_fits(self, num_workers: int) -> None: ...

    def close(self) -> None: ...

    def stop(self, worker_id: str) -> None:
        with self._lock:
            server = self.servers.pop(worker_id, None)
        if server is not None:
            server.stop()

    def stop_all(self) -> None:
        for name in list(self.servers):
            self.stop(name)


class Release:
    def __init__(
        self, fake: FakeApi, nodes: FakeKubelet, workers: PodWorkers, cluster: ClusterConfig, folder: Path
    ) -> None:
        self.fake = fake
        self.nodes = nodes
        self.workers = workers
        self.platform = Platform(cluster)
        self.registry = Registry()
        store = ControlStore(SQLite(folder / "decisions"), lambda: 7.0, {}, documents=self.platform.documents)
        self.platform.fleets.load()
        self.controller = Controller(cluster.controller, store, self.platform.fleets, leadership=self.platform.lease)
        self.decisions: list[Decision] = []
        self.lowest = 10**9  # workers that served, of those that were there, at the worst moment
        self.orders: PoolOrders
        self._levers: Levers

    async def begin(self) -> None:
        await asyncio.to_thread(self.platform.lease.take)
        fleet = self.platform.machines(self.controller, lambda _: self.workers)
        self._levers = Levers(self.controller, fleet, 1, Waits(resumed_s=0.0))
        self.orders = PoolOrders(self.controller, self._levers, fleet.shape_of, self._record, self.platform.lease)
        loops = (fleet.start_and_revive(), self._settle(), self.platform.look_after(self.orders), self._lead())
        self._fleet = fleet
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def _record(self, decision: Decision) -> None:
        self.decisions.append(decision)

    async def _lead(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(BatonError):
                await asyncio.to_thread(self.platform.lease.take)

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(0.03)
            with contextlib.suppress(BatonError):
                async for decision in self._levers.settle():
                    self.decisions.append(decision)

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._fleet.stop()
        await self.controller.close()
        self.platform.close()

    # -- what there is -----------------------------------------------------------------------------------------------

    def serving(self) -> set[str]:
        members = self.controller.fleet.members()
        return {m.worker_id for m in members if m.state == READY and self.controller.view(m.worker_id) is not None}

    def pods(self) -> dict[str, Json]:
        return {pod["metadata"]["name"]: pod for pod in self.fake.verbs.objects(PODS, NAMESPACE)}

    def images(self) -> dict[str, str]:
        return {name: pod["spec"]["containers"][0]["image"] for name, pod in self.pods().items()}

    def size(self, home: str) -> int:
        return int(self.fake.verbs.get(STATEFUL_SETS, NAMESPACE, f"{FULLNAME}-{home}")["spec"]["replicas"])

    def conditions(self) -> dict[str, str]:
        """Kinds and messages."""
        return {held.condition.kind: held.condition.message for held in self.platform.status().conditions}

    def events(self) -> list[str]:
        """Reasons of ours."""
        told = self.fake.verbs.objects(EVENTS, NAMESPACE)
        return [e["reason"] for e in told if (e.get("source") or {}).get("component") == "baton-controller"]

    def metrics(self) -> str:
        return "".join(self.registry.lines())

    # -- what is done to it ------------------------------------------------------------------------------------------

    async def allow(self, **bounds: object) -> None:
        live = self.controller.in_force.settings
        changed = replace(live.revision.value, budget=replace(Budget(), **bounds))  # type: ignore[arg-type]
        await live.put(live.revision.version, changed, "a test", "a test")

    def scale(self, home: str, replicas: int) -> None:
        """As `kubectl scale` does."""
        name = f"{FULLNAME}-{home}"
        body = self.fake.verbs.get(STATEFUL_SETS, NAMESPACE, name, "scale")
        body["spec"]["replicas"] = replicas
        self.fake.verbs.update(STATEFUL_SETS, NAMESPACE, name, body, "scale")

    def upgrade(self, image: str) -> None:
        """As `helm upgrade` does."""
        for home in ("prefill", "decode"):
            body = self.fake.verbs.get(STATEFUL_SETS, NAMESPACE, f"{FULLNAME}-{home}")
            body["spec"]["template"]["spec"]["containers"][0]["image"] = image
            self.fake.verbs.update(STATEFUL_SETS, NAMESPACE, f"{FULLNAME}-{home}", body)

    async def until(self, holds: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        ends_s = asyncio.get_running_loop().time() + patience_s
        while not holds():
            assert asyncio.get_running_loop().time() < ends_s, self._tell()
            for task in self._tasks:
                if task.done():
                    task.result()
            self.lowest = min(self.lowest, len(self.serving()))
            await asyncio.sleep(0.01)

    def _tell(self) -> str:
        members = [(m.worker_id, m.state, str(m.after_drain), m.reason) for m in self.controller.fleet.members()]
        return f"{members} {self.images()} {self.conditions()} upgrade: {self.platform.status().upgrade!r}"


@asynccontextmanager
async def release_of(
    folder: Path, *, prefill: int = 1, decode: int = 2, gpus: int = 8, **kubernetes: object
) -> AsyncIterator[Release]:
    """Up and serving. `gpus`: of its one node."""
    workers = PodWorkers()
    with FakeApi() as fake, FakeKubelet(fake, workers.launch, nodes=[Node("node-1", {GPU: gpus})], pace=0.02) as nodes:
        objects = release(prefill, decode)
        for the_set in objects[:2]:
            container = the_set["spec"]["template"]["spec"]["containers"][0]
            container["resources"] = {"limits": {GPU: "1"}}
            the_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 5
        fake.load(objects, NAMESPACE)
        control = grpc.aio.server()
        port = control.add_insecure_port("127.0.0.1:0")
        cluster = ClusterConfig(
            prefill=prefill,
            decode=decode,
            controller=ControllerConfig(run_dir=str(folder), worker_num_cpus=1.0, heartbeat_s=0.2),
            kubernetes=config_of(
                fake, folder, control_address=f"127.0.0.1:{port}", prefill_drain_s=5.0, decode_drain_s=5.0, **kubernetes
            ),
        )
        rig = Release(fake, nodes, workers, cluster, folder)
        control_pb2_grpc.add_ControlServicer_to_server(ControlService(rig.controller), control)
        await control.start()
        await rig.begin()
        try:
            await rig.until(lambda: len(rig.serving()) == prefill + decode)
            rig.lowest = 10**9
            yield rig
        finally:
            await rig.end()
            await control.stop(None)
            await asyncio.to_thread(workers.stop_all)
