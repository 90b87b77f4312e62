"""A pool as a worker group of a RayCluster, whose pods KubeRay makes, under names that it draws.

One JSON Patch per change, whole or not at all: it tests that the group still stands where it stood and has the size that was
decided on, then sets replicas and which pods are to go. KubeRay alone clears `workersToDelete`, so what it holds and is still
there is kept in. Calls block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from baton.errors import NotFound, Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict
from router.controller.kube.objects import JsonObject, WorkerGroup
from router.controller.kube.sizes import TRIES, Allows, SetSize


class RayClusterPool:
    """One group. `pods`: names of those that are there now, of this group, and not about to end."""

    def __init__(self, api: KubeApi, cluster: str, group: str, pods: Callable[[], Collection[str]]) -> None:
        self._api = api
        self._cluster = cluster
        self._group = group
        self._pods = pods

    @property
    def name(self) -> str:
        return f"{self._cluster}/{self._group}"

    def desired(self) -> int:
        return self._read().replicas

    def get(self, ready: Collection[str]) -> SetSize:
        group = self._read()
        staying, awaited = self._staying(group), self._awaited(group)
        there = [name for name in staying if name in ready]
        waiting = tuple(name for name in staying if name not in ready)
        return SetSize(group.replicas, len(there), (*waiting, *awaited), (*reversed(awaited), *staying))

    def scale_up(self, num_pods: int, allows: Allows) -> tuple[str, ...]:
        before = self._resize(lambda group: (group.replicas + num_pods, group.to_delete), allows)
        first = len(self._awaited(before))
        return tuple(self._placeholder(first + n) for n in range(num_pods))

    def scale_down(self, victims: Collection[str], allows: Allows) -> None:
        def without(group: WorkerGroup) -> tuple[int, tuple[str, ...]]:
            pods, awaited = self._pods(), self._awaited(group)
            leaving = [name for name in group.to_delete if name in pods]
            more = [name for name in self._staying(group) if name in victims]
            num_awaited = sum(name in victims for name in awaited)
            return group.replicas - len(more) - num_awaited, (*leaving, *more)

        self._resize(without, allows)

    def _staying(self, group: WorkerGroup) -> list[str]:
        return sorted(name for name in self._pods() if name not in group.to_delete)

    def _awaited(self, group: WorkerGroup) -> list[str]:
        """Names that stand for pods until KubeRay has made them."""
        return [self._placeholder(n) for n in range(group.replicas - len(self._staying(group)))]

    def _placeholder(self, number: int) -> str:
        return f"{self._cluster}-{self._group}-awaited-{number}"

    def _read(self) -> WorkerGroup:
        """Raises: NotFound."""
        for group in self._api.ray_cluster(self._cluster).groups:
            if group.name == self._group:
                return group
        raise NotFound(f"the RayCluster {self._cluster} has no worker group {self._group!r}", field="kubernetes.mode")

    def _resize(self, decide: Callable[[WorkerGroup], tuple[int, tuple[str, ...]]], allows: Allows) -> WorkerGroup:
        """The group before."""
        for _ in range(TRIES):
            group = self._read()
            size, to_delete = decide(group)
            if size == group.replicas and set(to_delete) == set(group.to_delete) & set(self._pods()):
                return group
            if size != group.replicas:
                allows(size)
            try:
                self._api.patch_ray_cluster(self._cluster, _operations(group, size, to_delete))
            except Conflict:
                continue
            return group
        raise Unavailable(f"the RayCluster {self._cluster} changes faster than it can be scaled", retry_after_s=1.0)


def _operations(group: WorkerGroup, size: int, to_delete: tuple[str, ...]) -> list[JsonObject]:
    """`add` of a member that is there replaces it, so it does for both."""
    at = f"/spec/workerGroupSpecs/{group.index}"
    return [
        {"op": "test", "path": f"{at}/groupName", "value": group.name},
        {"op": "test", "path": f"{at}/replicas", "value": group.replicas},
        {"op": "add", "path": f"{at}/replicas", "value": size},
        {"op": "add", "path": f"{at}/scaleStrategy", "value": {"workersToDelete": list(to_delete)}},
    ]
