"""One release "demo" on the fake API server, all of it running: pods with real workers, controllers, a router, calls.

    async with kube_rig(folder, prefill=1, decode=2) as rig:
        async with rig.calls(num_clients=8) as calls:          # go on, each answer checked token by token, until the block ends
            await rig.admin("POST", "pools/decode:scale", {"workers": 3})
            await rig.until(lambda: rig.ready() == {...}, "the third")
        calls.check()

Workers are emulated GPUs (1-2 s to start, 90 MB each): times are the GPUs', five times slower, tokens exact. Controllers are
processes of their own, the router is on the test's event loop, which must go by the same clock
(`@Slowed(EMULATION.time_scale)`), pods are the fake kubelet's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from baton.config import (
    ClusterConfig,
    ControllerConfig,
    EmulationConfig,
    EngineConfig,
    KubernetesConfig,
    KVTransferConfig,
    ModelConfig,
    RouterConfig,
)
from baton.config_load import to_json
from baton.model_files import load_model_files
from baton.v1 import serving_pb2_grpc
from bench.cluster import free_ports
from router.front_end import FrontEnd
from tests.kube.checked_calls import Caller, Calls, num_moved
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import PODS, STATEFUL_SETS, Json
from tests.kube.fake_api_rules import is_ready
from tests.kube.fake_kubelet import FakeKubelet, Node
from tests.kube.kube_rig import FULLNAME, NAMESPACE, config_map, lease, stateful_set
from tests.kube.pod_ray import PodRay, RayDoor
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # other work shares these cores
START_S = 240.0  # of all processes at once: 15 s of CPU each
# A decode step of the 70B on 4 H100 takes 50 ms here, and all that the cluster waits for is as slow; Kubernetes has its own pace
EMULATION = EmulationConfig(gpu="h100", model="llama-3.1-70b", tp=4, time_scale=5.0)
GPU = "nvidia.com/gpu"
PACE = 0.1  # of what Kubernetes waits for
TICK_S = 0.4  # two seconds here: of the autoscaler, which is frozen
WORKER_PORT = 7_100
REVISION = "baton.dev/config"  # the annotation by which the chart makes new pods of a new configuration
NUM_TOKENS = 30  # of an answer: 1.5 s
ENGINE = EngineConfig(num_blocks=2_000, chunk_tokens=2_048)


def worker_set(
    home: str, replicas: int, control_address: str, *, image: str = "baton-worker:1", drain_s: int = 60
) -> Json:
    """As the chart's, as far as a pod's life is concerned."""
    hook = "exec python -m router.controller.kube.prestop"
    hook += f' --control {control_address} --worker "$POD_NAME" --limit-s {drain_s}'
    the_set = stateful_set(home, replicas)
    the_set["spec"]["template"]["spec"] = {
        "terminationGracePeriodSeconds": drain_s + 30,
        "containers": [
            {
                "name": "worker",
                "image": image,
                "env": [
                    {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                ],
                "ports": [{"name": "worker", "containerPort": WORKER_PORT}],
                "startupProbe": {"tcpSocket": {"port": "worker"}, "periodSeconds": 5, "failureThreshold": 360},
                "readinessProbe": {"tcpSocket": {"port": "worker"}, "periodSeconds": 5, "timeoutSeconds": 3},
                "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", hook]}}},
                "resources": {"limits": {GPU: "1"}},
            }
        ],
    }
    return the_set


class ControllerProcess:
    """One controller, with its log in a file."""

    def __init__(self, cluster: ClusterConfig, folder: Path, door: RayDoor, key: str) -> None:
        folder.mkdir(parents=True)
        self.secret = secrets.token_urlsafe()
        (folder / "tokens.json").write_text(json.dumps({"test": {"role": "operator", "secret": self.secret}}))
        (folder / "tokens.json").chmod(0o600)
        self.admin_port = cluster.controller.admin_port
        file = folder / "config.json"
        file.write_text(to_json(cluster))
        self.log = folder / "controller.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kube.kube_controller", "--config", str(file)],
                cwd=ROOT,
                env=os.environ | {"POD_RAY_PORT": str(door.port), "POD_RAY_KEY": key},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """In order, where it still runs; its exit status."""
        self.process.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise


@dataclass
class KubeRig:
    folder: Path
    api: FakeApi
    nodes: FakeKubelet
    ray: PodRay
    cluster: ClusterConfig
    front_end: FrontEnd
    caller: Caller
    door: RayDoor
    key: str
    controllers: list[ControllerProcess] = field(default_factory=list)

    # -- what runs ---------------------------------------------------------------------------------------------------

    def start_controller(self) -> ControllerProcess:
        """One more; it leads, or waits for the Lease."""
        folder = self.folder / f"controller-{len(self.controllers)}"
        (admin_port,) = free_ports(1)
        config = _changed(self.cluster, admin_port, folder)
        controller = ControllerProcess(config, folder, self.door, self.key)
        self.controllers.append(controller)
        return controller

    def pods(self, home: str = "") -> Mapping[str, Json]:
        """Objects by name."""
        found = self.api.verbs.objects(PODS, NAMESPACE)
        return {p["metadata"]["name"]: p for p in found if home in ("", p["metadata"]["labels"]["baton.dev/home"])}

    def ready_pods(self) -> set[str]:
        return {n for n, p in self.pods().items() if is_ready(p) and "deletionTimestamp" not in p["metadata"]}

    def ready(self) -> set[str]:
        """Workers that the router places calls on."""
        return {snapshot.worker_id for snapshot in self.front_end.fleet.snapshots() if snapshot.state == "ready"}

    def size(self, home: str) -> int:
        return int(self.api.verbs.get(STATEFUL_SETS, NAMESPACE, f"{FULLNAME}-{home}")["spec"]["replicas"])

    def revisions(self) -> set[str]:
        """That the annotations of worker pods name."""
        return {p["metadata"].get("annotations", {}).get(REVISION, "") for p in self.pods().values()}

    # -- what a test asks for ----------------------------------------------------------------------------------------

    async def admin(self, method: str, path: str, body: object = None) -> Any:
        """Of the controller that answers; empty while none does."""
        for controller in self.controllers:
            url = f"http://127.0.0.1:{controller.admin_port}/admin/v1/{path}"
            headers = {"authorization": f"Bearer {controller.secret}"}
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                with contextlib.suppress(httpx.TransportError):
                    answer = await client.request(method, url, json=body, headers=headers)
                    if answer.status_code != 503 or answer.content:
                        return answer.json()
        return {}

    def upgrade(self, revision: str) -> None:
        """As `helm upgrade` does: both sets have another template."""
        annotations = {"spec": {"template": {"metadata": {"annotations": {REVISION: revision}}}}}
        for home in ("prefill", "decode"):
            name = f"{FULLNAME}-{home}"
            self.api.verbs.patch(STATEFUL_SETS, NAMESPACE, name, "application/merge-patch+json", annotations)

    async def until(self, holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> float:
        """Seconds that it took."""
        began_s = time.monotonic()
        while not await asyncio.to_thread(holds):
            assert time.monotonic() - began_s < patience_s, f"not within {patience_s:g} s: {what}; {self.tell()}"
            await asyncio.sleep(0.05)
        return time.monotonic() - began_s

    async def until_led(self) -> None:
        """A controller takes orders."""
        ends_s = time.monotonic() + PATIENCE_S
        while not (await self.admin("GET", "pools")).get("autoscaler", {}).get("leads"):
            assert time.monotonic() < ends_s, f"nobody leads: {self.tell()}"
            await asyncio.sleep(0.1)

    def tell(self) -> str:
        """Where everything is, for whoever reads a failure."""
        pods = {
            n: (p["status"]["phase"], is_ready(p), "deletionTimestamp" in p["metadata"]) for n, p in self.pods().items()
        }
        logs = [c.log.read_text()[-3_000:] for c in self.controllers]
        return f"pods {pods}; router {self.front_end.fleet.unready_reason()!r}, ready {self.ready()}; {logs}"

    async def num_moved(self) -> int:
        """Sequences that went on elsewhere because a worker was lost."""
        return await num_moved(self.front_end)

    def calls(self, num_clients: int = 4, num_tokens: int = NUM_TOKENS) -> AbstractAsyncContextManager[Calls]:
        return self.caller.calls(num_clients, num_tokens)


def _changed(cluster: ClusterConfig, admin_port: int, folder: Path) -> ClusterConfig:
    return replace(cluster, controller=replace(cluster.controller, admin_port=admin_port, run_dir=str(folder)))


def config_of(
    api: FakeApi, folder: Path, prefill: int, decode: int, control_port: int, engine: EngineConfig, **more: Any
) -> ClusterConfig:
    """What the chart would render; `more`: of KubernetesConfig."""
    token = folder / "token"
    token.write_text(api.admin_token)
    model = make_tiny_model(folder / "model" / "tiny")
    return ClusterConfig(
        prefill=prefill,
        decode=decode,
        model=ModelConfig(path=str(model), served_name="emulated"),
        engine=engine,
        kv=KVTransferConfig(mode="staged", frame_bytes=64 << 10, num_slots=4),
        emulation=EMULATION,
        controller=ControllerConfig(control_port=control_port, planner="", mode="frozen", tick_s=TICK_S),
        router=RouterConfig(http_port=0, grpc_port=0, shed_by_forecast=False, unavailable_wait_s=20.0),
        kubernetes=KubernetesConfig(
            fullname=FULLNAME,
            namespace=NAMESPACE,
            api_server=api.url,
            token_file=str(token),
            control_address=f"127.0.0.1:{control_port}",
            worker_port=WORKER_PORT,
            **more,
        ),
    )


@asynccontextmanager
async def kube_rig(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    nodes: Sequence[Node] = (Node("gpu-1", {GPU: 8}),),
    manifests: Sequence[Json] = (),
    engine: EngineConfig = ENGINE,
    **kubernetes: Any,
) -> AsyncIterator[KubeRig]:
    """A release that serves. `manifests`: more objects; `kubernetes`: fields of KubernetesConfig."""
    (control_port,) = free_ports(1)
    key = secrets.token_hex()
    ray = PodRay(folder)
    door = RayDoor(ray, key.encode())
    with contextlib.closing(door), FakeApi() as api, FakeKubelet(api, ray.launch, nodes=nodes, pace=PACE) as kubelet:
        cluster = config_of(api, folder, prefill, decode, control_port, engine, **kubernetes)
        address = cluster.kubernetes.control_address
        sets = [worker_set("prefill", prefill, address), worker_set("decode", decode, address)]
        maps = [config_map(f"{FULLNAME}-slo"), config_map(f"{FULLNAME}-fleet"), lease(f"{FULLNAME}-controller")]
        api.load([*sets, *maps, *manifests], NAMESPACE)
        router = _router(cluster, address)
        front_end = FrontEnd(router, load_model_files(cluster.model.path))
        await front_end.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}") as channel:
                stub = serving_pb2_grpc.ServingStub(channel)
                rig = KubeRig(folder, api, kubelet, ray, cluster, front_end, Caller(stub, PATIENCE_S), door, key)
                rig.start_controller()
                try:
                    await rig.until(lambda: len(rig.ready()) == prefill + decode, "all workers are ready", START_S)
                    yield rig
                finally:
                    await asyncio.to_thread(_end_all, rig.controllers)
        finally:
            await front_end.stop()


def _router(cluster: ClusterConfig, control_address: str) -> RouterConfig:
    return replace(cluster.router, control_address=control_address, model=cluster.model)


def _end_all(controllers: Sequence[ControllerProcess]) -> None:
    for controller in controllers:
        if controller.process.poll() is None:
            controller.process.send_signal(signal.SIGTERM)
    for controller in controllers:
        if controller.process.poll() is None:
            controller.end()
