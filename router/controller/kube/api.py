"""The calls that we make of the API server, by name. Each write of an object that was read is a compare-and-swap on the version
that was read (Conflict: somebody was faster). Errors: client.py. Blocks: threads only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from router.controller.kube.client import JSON_PATCH, MERGE_PATCH, Client
from router.controller.kube.objects import (
    Happened,
    JsonObject,
    Pod,
    PodSet,
    RayCluster,
    Scale,
    Stored,
    happened_of,
    pod_of,
    ray_cluster_of,
    scale_of,
    set_of,
    stored_of,
)

_CORE = "/api/v1/namespaces/{namespace}"
_SETS = "/apis/apps/v1/namespaces/{namespace}/statefulsets"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
_RAY = "/apis/ray.io/v1/namespaces/{namespace}/rayclusters"
_MAX_EVENTS = 200  # of one look; a set that cannot make its pods repeats one event


class KubeApi:
    """Of one namespace."""

    def __init__(self, client: Client) -> None:
        self.client = client

    # -- sizes -------------------------------------------------------------------------------------------------------

    def pod_set(self, name: str) -> PodSet:
        return set_of(self.client.call("GET", f"{_SETS}/{name}"))

    def scale(self, name: str) -> Scale:
        return scale_of(self.client.call("GET", f"{_SETS}/{name}/scale"))

    def put_scale(self, scale: Scale, desired: int) -> Scale:
        """Raises: Conflict."""
        body = {**scale.body, "spec": {**(scale.body.get("spec") or {}), "replicas": desired}}
        return scale_of(self.client.call("PUT", f"{_SETS}/{scale.name}/scale", body))

    def ray_cluster(self, name: str) -> RayCluster:
        return ray_cluster_of(self.client.call("GET", f"{_RAY}/{name}"))

    def patch_ray_cluster(self, name: str, operations: Sequence[JsonObject]) -> RayCluster:
        """One JSON Patch: all of it, or nothing. Raises: Conflict: a `test` does not hold."""
        body = self.client.call(
            "PATCH", f"{_RAY}/{name}", list(operations), content_type=JSON_PATCH, invalid_is_conflict=True
        )
        return ray_cluster_of(body)

    # -- pods --------------------------------------------------------------------------------------------------------

    def pods(self, selector: str) -> tuple[list[Pod], str]:
        """All of them, as they are now, and the version to watch from."""
        body = self.client.call("GET", f"{_CORE}/pods", query=[("labelSelector", selector)])
        return [pod_of(item) for item in body.get("items") or ()], body["metadata"]["resourceVersion"]

    def pod_events(self, selector: str, version: str, seconds: int) -> Iterator[tuple[str, Pod]]:
        """ADDED, MODIFIED or DELETED, and the pod. Raises: Expired."""
        query = (("labelSelector", selector), ("resourceVersion", version))
        for event in self.client.watch(f"{_CORE}/pods", query, seconds):
            if event["type"] != "BOOKMARK":
                yield event["type"], pod_of(event["object"])

    def label(self, pod: Pod, labels: Mapping[str, str | None]) -> Pod:
        """None takes one off. Raises: Conflict: it changed since, or is another pod of that name."""
        meta = {"labels": dict(labels), "resourceVersion": pod.version, "uid": pod.uid}
        body = {"metadata": meta}
        return pod_of(self.client.call("PATCH", f"{_CORE}/pods/{pod.name}", body, content_type=MERGE_PATCH))

    def evict(self, pod: Pod) -> None:
        """This very pod, gracefully, as budgets allow. Raises: Conflict: it is another one by now; NotFound: it is gone."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod.name, "namespace": self.client.namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        }
        self.client.call("POST", f"{_CORE}/pods/{pod.name}/eviction", body)

    # -- documents ---------------------------------------------------------------------------------------------------

    def config_map(self, name: str) -> Stored:
        return stored_of(self.client.call("GET", f"{_CORE}/configmaps/{name}"), "data")

    def put_config_map(self, name: str, read: Stored, data: Mapping[str, str]) -> Stored:
        """Raises: Conflict."""
        body = {**read.body, "data": dict(data)}
        return stored_of(self.client.call("PUT", f"{_CORE}/configmaps/{name}", body), "data")

    def lease(self, name: str) -> Stored:
        return stored_of(self.client.call("GET", f"{_LEASES}/{name}"), "spec")

    def put_lease(self, name: str, read: Stored, spec: JsonObject) -> Stored:
        """Raises: Conflict."""
        body = {**read.body, "spec": dict(spec)}
        return stored_of(self.client.call("PUT", f"{_LEASES}/{name}", body), "spec")

    # -- events ------------------------------------------------------------------------------------------------------

    def events_about(self, name: str) -> list[Happened]:
        query = [("fieldSelector", f"involvedObject.name={name}"), ("limit", str(_MAX_EVENTS))]
        body = self.client.call("GET", f"{_CORE}/events", query=query)
        return [happened_of(item) for item in body.get("items") or ()]

    def write_event(self, event: JsonObject) -> None:
        self.client.call("POST", f"{_CORE}/events", event)
