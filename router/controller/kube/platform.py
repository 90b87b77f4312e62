"""The cluster around one controller, put together: its client, Lease, documents, pods and pools.

    1. the client; nothing is asked yet
    2. lead                                until this process holds the Lease (stand_by.py)
    3. documents, fleets, machines         what main.py builds a controller from
    4. look_after, be_found, until_lost    beside it, until another controller leads: then this one ends

Event loop only; what blocks runs on the threads of calls.py.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import FastAPI

from baton import clock
from baton.config import ClusterConfig
from baton.errors import Unavailable
from baton.log import get_log
from router.controller.admin_access import Doors
from router.controller.admin_tokens import Token
from router.controller.autoscaler.acts import Act
from router.controller.controller import Controller
from router.controller.kube.admin import kube_routes
from router.controller.kube.api import KubeApi
from router.controller.kube.calls import KubeCalls
from router.controller.kube.care import Care
from router.controller.kube.client import Client
from router.controller.kube.documents import ConfigMapVersions
from router.controller.kube.fleet import KubeFleet, shape_of
from router.controller.kube.homes import Homes, configured
from router.controller.kube.leader_label import LeaderLabel
from router.controller.kube.lease import KubeLease
from router.controller.kube.pods import PodTable, PodWatch
from router.controller.kube.ray_cluster import RayClusterPool
from router.controller.kube.saved_fleet import ConfigMapFleet
from router.controller.kube.seeds import seeded_classes
from router.controller.kube.sizes import ForeignPool, PodPool, StatefulSetPool
from router.controller.kube.stand_by import lead
from router.controller.kube.status import Conditions, Status
from router.controller.kube.upgrade import Upgrade
from router.controller.kube.view import View
from router.controller.live_facts import drains_of, gpus_per_worker
from router.controller.pool_orders import Order, PoolOrders
from router.controller.ray_actors import Connect, RayActors, connect
from router.controller.settings import Budget
from router.controller.versioned import Format, Versions
from router.ring import SPANS_S
from router.series import Registry

log = get_log("controller.kube")

T = TypeVar("T")
_LOOK_S = 0.5  # for the loss of the Lease; a successor needs longer than that to begin
_CARE_S = 1.0  # a control tick


class Platform:
    """Of one release. Create it inside the event loop."""

    def __init__(self, cluster: ClusterConfig, pod_name: str = "") -> None:
        """`pod_name`: this process's; "" = the host's name, which in a pod is the same.

        Raises: ConfigError: this is no pod, or what is configured cannot be used.
        """
        self._cluster = cluster
        self._fullname = cluster.kubernetes.fullname
        self.client = Client(cluster.kubernetes)
        self.api = KubeApi(self.client)
        self.calls = KubeCalls()
        pod_name = pod_name or socket.gethostname()
        self.lease = KubeLease(self.api, f"{self._fullname}-controller", f"{pod_name}-{os.getpid()}")
        self._label = LeaderLabel(self.api, self.calls, self._fullname, pod_name, self.lease)
        self.fleets = ConfigMapFleet(self.api, f"{self._fullname}-fleet")
        self.pods = PodTable(self._on_pods)
        self._watch = PodWatch(self.api, self._fullname, self.pods)
        self._fleet: KubeFleet | None = None

    async def lead(self, stop: asyncio.Event) -> bool:
        """Wait for the Lease; False: `stop` came first."""
        config = self._cluster.controller
        return await lead(self.lease, self.calls, config.host, config.admin_port, stop)

    def documents(self, written: Format[T]) -> Versions[T]:
        """Blocks. Raises: ConfigError."""
        return ConfigMapVersions(self.api, f"{self._fullname}-slo", written, time.time)

    def machines(self, controller: Controller, connect: Connect = connect) -> KubeFleet:
        """Watching pods begins."""

        def budget() -> Budget:
            return controller.in_force.settings.revision.value.budget

        def leads() -> bool:
            return self.lease.is_held

        cluster, kubernetes = self._cluster, self._cluster.kubernetes
        pools = configured(cluster, lambda role: shape_of(cluster, role), self._pods_of)
        homes = Homes(pools, self.calls, gpus_per_worker(cluster), budget, self._check_leads)
        actors = RayActors(controller, cluster, connect)
        told = Conditions(self.api, self.calls, f"{self._fullname}-controller")
        near = (controller, homes, self.pods, actors, self.api, self.calls)
        self._fleet = KubeFleet(cluster, *near, leads)
        self._care = Care(*near, told, leads, kubernetes.sick_s)
        drain_s = drains_of(cluster)
        self._upgrade = Upgrade(
            controller, homes, self.pods, self.api, self.calls, lambda: goodput(controller), drain_s, kubernetes.scaler
        )
        seeded = seeded_classes(kubernetes, ()) or None
        self._view = View(controller, self.lease, self.client.counts, homes, told, seeded, self._upgrade)
        self._watch.start()
        return self._fleet

    async def look_after(self, orders: PoolOrders) -> None:
        """For ever: what is beside the fleet itself."""

        async def pull(act: Act, reason: str) -> str:
            return await orders.carry_out(act, Order("upgrade", reason))

        while True:
            await asyncio.sleep(_CARE_S)
            await self._care.look(self._upgrade.paused)
            if (
                self.lease.is_held and self._cluster.kubernetes.mode == "statefulset"
            ):  # others' pods are others' to replace
                await self._upgrade.look(pull)

    async def be_found(self) -> None:
        """For ever: the Service leads here while this one leads."""
        await self._label.keep()

    async def until_lost(self, stop: asyncio.Event) -> None:
        """Set `stop` once another controller leads."""
        while not self.lease.is_lost:  # noqa: ASYNC110 - it is found out on another thread
            await asyncio.sleep(_LOOK_S)
        log.error("leads_no_more", leader=self.lease.holder_seen)
        await self._label.withdraw()
        stop.set()

    def show(self, app: FastAPI, tokens: Callable[[], Sequence[Token]], registry: Registry) -> None:
        """Add what the admin endpoint says of the cluster, and its metrics."""
        app.include_router(kube_routes(self.status, lambda: self.lease.is_held, Doors(tokens)))
        self.show_metrics(registry)

    def status(self) -> Status:
        return self._view.status()

    def show_metrics(self, registry: Registry) -> None:
        for source in (self.client.counts, self.pods, self._view):
            registry.add(source)

    def close(self) -> None:
        self._watch.stop()
        self.calls.close()
        self.client.close()

    def _on_pods(self) -> None:
        if self._fleet is not None:
            self._fleet.wake()

    def _check_leads(self) -> None:
        """Raises: Unavailable. Any thread."""
        if not self.lease.is_held:
            raise Unavailable("the Lease ran out meanwhile: another controller may act")

    def _pods_of(self, home: str) -> PodPool:
        match self._cluster.kubernetes.mode:
            case "kuberay":
                return RayClusterPool(self.api, self._fullname, home, lambda: self._names_of(home))
            case "external":
                return ForeignPool(home, lambda: self._names_of(home))
            case _:
                return StatefulSetPool(self.api, f"{self._fullname}-{home}")

    def _names_of(self, home: str) -> set[str]:
        pods = self.pods.by_name().values()
        return {pod.name for pod in pods if pod.home == home and not pod.is_terminating}


def goodput(controller: Controller) -> float | None:
    """The part of calls that met their targets, all classes, in the shortest window; None: there were none."""
    windows = [w for w in controller.measures.view(clock.now_s()).classes if w.window_s == min(SPANS_S)]
    num_judged = sum(window.num_judged for window in windows)
    return sum(window.num_met for window in windows) / num_judged if num_judged else None
