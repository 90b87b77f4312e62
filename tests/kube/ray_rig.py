"""A release whose pods are Ray nodes: the chart's manifests as Helm renders them, run by the fake kubelet in namespaces.

    async with ray_rig(folder, decode=2) as rig:
        async with rig.calls(4) as calls:        # real streams through a real router, each token compared
            ...
        calls.check()

The head, the pools' pods and the controller with its Ray node run the commands that the chart renders, at its paths and ports, as
its user. Changed are only: the API server's address and token in the controller's configuration (the fake has no TLS), the ports
and addresses of the router, which is on the test's event loop. GPUs are emulated at their own speed, so all clocks are true ones.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import hashlib
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import yaml

from baton.config import RouterConfig
from baton.config_load import from_json
from baton.model_files import load_model_files
from baton.v1 import serving_pb2_grpc
from router.front_end import FrontEnd
from tests.chart.chart_rig import Manifest, Values, merged, render
from tests.kube.checked_calls import Caller, Calls, num_moved
from tests.kube.fake_api import FakeApi
from tests.kube.fake_api_resources import LEASES, PODS, STATEFUL_SETS, Json, Resource
from tests.kube.fake_api_rules import is_ready
from tests.kube.fake_kubelet import FakeKubelet, Node
from tests.kube.fake_services import FakeServices
from tests.kube.namespace_pods import NamespacePod, NamespacePods, Network
from tests.kube.pod_volumes import ACCOUNT, Volumes
from tests.tiny_models import make_tiny_model

NAMESPACE, FULLNAME = "baton", "demo"
HEAD = f"{FULLNAME}-head-0"
CONTROLLER = f"{FULLNAME}-controller"
ROUTER = f"{FULLNAME}-router"
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
GPU = "nvidia.com/gpu"
START_S = 120.0  # Ray's head, a node per pod and the workers: 15 to 25 s at loads of 5 to 12
PATIENCE_S = 100.0
CALL_S = 60.0
SECRET = "ba-of-this-test"
API = "api"  # a name for the API server within the cluster
# A decode step of the 70B on two A100 takes 23 ms, which two cores can follow for a few callers
VALUES: Values = {
    "fullnameOverride": FULLNAME,
    "model": {"id": "acme/tiny", "source": "pvc", "path": "tiny", "servedName": "emulated"},
    "modelCache": {"type": "pvc", "pvc": {"existingClaim": "models"}},
    "emulation": {"gpu": "a100", "model": "llama-3.1-70b", "tp": 2},
    "engine": {"numBlocks": 2000, "chunkTokens": 2048},
    "kv": {"frameBytes": 65600, "numSlots": 4},
    "router": {"settings": {"shedByForecast": False, "unavailableWaitS": 30}},
    "scaler": {"mode": "frozen"},
    "controller": {"replicas": 1, "planner": False},
    "pools": {
        "prefill": {"gpu": {"count": 2}, "drainSeconds": 60},
        "decode": {"gpu": {"count": 2}, "drainSeconds": 60},
    },
}


@dataclass
class RayRig:
    folder: Path
    api: FakeApi
    nodes: FakeKubelet
    pods_here: NamespacePods
    services: FakeServices
    front_end: FrontEnd
    caller: Caller

    # -- what there is -----------------------------------------------------------------------------------------------

    def pods(self, home: str = "") -> Mapping[str, Json]:
        """Worker pods by name."""
        found = self.api.verbs.objects(PODS, NAMESPACE)
        homes = {p["metadata"]["name"]: (p["metadata"]["labels"].get("baton.dev/home"), p) for p in found}
        return {name: pod for name, (its, pod) in homes.items() if its is not None and home in ("", its)}

    def ready(self) -> set[str]:
        """Workers that the router places calls on."""
        return {snapshot.worker_id for snapshot in self.front_end.fleet.snapshots() if snapshot.state == "ready"}

    def uid(self, name: str) -> str:
        """Empty where there is no such pod."""
        found = {p["metadata"]["name"]: p for p in self.api.verbs.objects(PODS, NAMESPACE)}
        return str(found[name]["metadata"]["uid"]) if name in found else ""

    def phase(self, name: str) -> str:
        return str(self.api.verbs.get(PODS, NAMESPACE, name)["status"].get("phase", ""))

    def ip(self, name: str) -> str:
        return str(self.api.verbs.get(PODS, NAMESPACE, name)["status"]["podIP"])

    def is_ready(self, name: str) -> bool:
        return bool(self.uid(name)) and is_ready(self.api.verbs.get(PODS, NAMESPACE, name))

    def leader(self) -> str:
        """Its pod."""
        held = self.api.verbs.get(LEASES, NAMESPACE, CONTROLLER).get("spec", {}).get("holderIdentity", "")
        return str(held).rpartition("-")[0]

    def size(self, home: str) -> int:
        return int(self.api.verbs.get(STATEFUL_SETS, NAMESPACE, f"{FULLNAME}-{home}")["spec"]["replicas"])

    def process(self, pod: str) -> NamespacePod:
        running = self.nodes.pod(pod).process
        assert isinstance(running, NamespacePod)
        return running

    async def worker_pids(self) -> dict[str, list[int]]:
        """Processes of worker actors by pod, as this machine counts them. On a thread: the router is on the loop."""

        def pids(name: str) -> list[int]:
            return [process.pid for process in self.process(name).processes("ray::WorkerActor")]

        return await asyncio.to_thread(lambda: {name: pids(name) for name in self.pods()})

    # -- what a test asks for ----------------------------------------------------------------------------------------

    async def kill(self, pod: str) -> None:
        """All of it. On a thread: the router is on the loop, and would hear of nobody meanwhile."""
        await asyncio.to_thread(self.process(pod).kill)

    async def admin(self, method: str, path: str, body: object = None) -> Any:
        """Through the Service, as an operator; empty while nobody answers."""
        url = f"http://{self.services.ip(CONTROLLER)}:8001/admin/v1/{path}"
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.request(method, url, json=body, headers={"authorization": f"Bearer {SECRET}"})
                return answer.json()
        return {}

    async def workers(self) -> dict[str, tuple[str, int]]:
        """State and epoch of each, as the controller has them."""
        listed = (await self.admin("GET", "workers")).get("workers", ())
        return {one["worker_id"]: (one["state"], one["epoch"]) for one in listed}

    async def conditions(self) -> dict[str, str]:
        """Kinds that hold, and their messages."""
        held = (await self.admin("GET", "kubernetes")).get("conditions", ())
        return {one["condition"]["kind"]: one["condition"]["message"] for one in held}

    async def num_moved(self) -> int:
        """Sequences that went on elsewhere because a worker was lost."""
        return await num_moved(self.front_end)

    async def scale(self, home: str, num_workers: int) -> str:
        done = await self.admin("POST", f"pools/{home}:scale", {"workers": num_workers, "reason": "a launch"})
        assert "done" in done, done
        return str(done["done"])

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
            await asyncio.sleep(0.25)

    async def until_condition(self, kinds: set[str], patience_s: float = PATIENCE_S) -> float:
        """Until these hold and no others; seconds that it took."""
        began_s = time.monotonic()
        while (await self.conditions()).keys() != kinds or not await self.admin("GET", "kubernetes"):
            held = f"{await self.conditions()}"
            assert time.monotonic() - began_s < patience_s, f"not within {patience_s:g} s: {kinds}, but {held}"
            await asyncio.sleep(0.25)
        return time.monotonic() - began_s

    def calls(self, num_clients: int = 4, num_tokens: int = 60) -> AbstractAsyncContextManager[Calls]:
        return self.caller.calls(num_clients, num_tokens)

    def tell(self) -> str:
        """Where everything is, for whoever reads a failure."""
        found = self.api.verbs.objects(PODS, NAMESPACE)
        pods = {p["metadata"]["name"]: (p["status"].get("phase"), is_ready(p)) for p in found}
        logs = {log.name: log.read_text(errors="replace")[-2_000:] for log in sorted(self.folder.glob("*.log"))}
        said = "\n".join(f"--- {name}\n{text}" for name, text in logs.items())
        return f"pods {pods}; router {self.front_end.fleet.unready_reason()!r}, ready {self.ready()}\n{said}"


def rendered(values: Values) -> list[Manifest]:
    release = render(merged(VALUES, values), "demo", "--namespace", NAMESPACE)
    return [copy.deepcopy(one) for one in release.manifests]


def helm_tests() -> list[Manifest]:
    """Pods that `helm test` runs."""
    return [one for one in rendered({}) if one["metadata"].get("annotations", {}).get("helm.sh/hook") == "test"]


def manifests(values: Values, token: Path, api_url: str) -> list[Manifest]:
    """Of the release, without Helm's hooks; the controller's configuration leads to this API server."""
    found = rendered(values)
    config = next(m for m in found if m["metadata"]["name"] == f"{FULLNAME}-config")
    cluster = json.loads(config["data"]["cluster.json"])
    cluster["kubernetes"] |= {"api_server": api_url, "token_file": str(token)}
    config["data"]["cluster.json"] = json.dumps(cluster)
    return [m for m in found if "helm.sh/hook" not in m["metadata"].get("annotations", {})]


def admin_secret() -> Manifest:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    tokens = yaml.safe_dump({"tokens": [{"name": "test", "role": "operator", "sha256": digest}]})
    data = {"tokens.yaml": base64.b64encode(tokens.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{FULLNAME}-admin"}, "data": data}


def deployment_pod(api: FakeApi, deployment: str, number: int) -> Json:
    """As its ReplicaSet would make it."""
    template = api.verbs.get(DEPLOYMENTS, NAMESPACE, deployment)["spec"]["template"]
    pod = {"metadata": template["metadata"] | {"name": f"{deployment}-{number}"}, "spec": template["spec"]}
    return api.verbs.create(PODS, NAMESPACE, pod)


@asynccontextmanager
async def ray_rig(
    folder: Path,
    *,
    prefill: int = 1,
    decode: int = 1,
    controllers: int = 1,
    nodes: Sequence[Node] = (Node("gpu-1", {GPU: 16}),),
    values: Values | None = None,
) -> AsyncIterator[RayRig]:
    """A release that serves."""
    sizes = {"prefill": {"replicas": {"initial": prefill}}, "decode": {"replicas": {"initial": decode}}}
    with FakeApi(namespaces=("default", NAMESPACE)) as api, contextlib.ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        services = FakeServices(api, NAMESPACE, network.service_ip)
        stack.callback(services.close)
        volumes = Volumes(folder, api.verbs, api.token_for)
        shutil.copytree(make_tiny_model(folder / "model" / "tiny"), volumes.claim("models") / "tiny")
        pods_here = NamespacePods(network, volumes, services.hosts, folder)
        stack.callback(pods_here.close)
        services.forward(API, 80, ("127.0.0.1", api.port))
        found = manifests(merged({"pools": sizes}, values or {}), Path(ACCOUNT, "token"), f"http://{API}")
        api.load([*found, admin_secret()], NAMESPACE)
        services.serve_all()
        kubelet = stack.enter_context(FakeKubelet(api, pods_here.launch, nodes=nodes, network=network.pods))
        for number in range(controllers):
            deployment_pod(api, CONTROLLER, number)
        front_end = FrontEnd(_router(found, services, volumes), load_model_files(str(volumes.claim("models") / "tiny")))
        await front_end.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}") as channel:
                caller = Caller(serving_pb2_grpc.ServingStub(channel), CALL_S)
                rig = RayRig(folder, api, kubelet, pods_here, services, front_end, caller)
                await rig.until(lambda: len(rig.ready()) == prefill + decode, "all workers are ready", START_S)
                yield rig
        finally:
            await front_end.stop()


def _router(found: Sequence[Manifest], services: FakeServices, volumes: Volumes) -> RouterConfig:
    """As the chart configures it, outside the cluster's network."""
    config = next(m for m in found if m["metadata"]["name"] == f"{FULLNAME}-config")
    router = from_json(RouterConfig, config["data"]["router-0.json"])
    name, _, port = router.control_address.rpartition(":")
    return replace(
        router,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        process_port=0,
        control_address=f"{services.ip(name)}:{port}",
        model=replace(router.model, path=str(volumes.claim("models") / "tiny")),
    )
