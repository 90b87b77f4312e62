"""Checks manifests as an API server would, offline: unknown fields, missing ones and wrong types, per version of Kubernetes.

The schemas are those of kubernetes-validate, strict; compiled once and kept, since that package's own check reads 2 MB per
object. RayCluster is not Kubernetes' own: what of it the chart may use is written down here after KubeRay's API reference
(ray.io/v1), and its pods are checked as Kubernetes' are. KUBE_CRDS=FOLDER, a folder of CRDs as other projects publish them, has
their kinds checked against these, too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import yaml

from tests.chart.chart_rig import Manifest

VERSIONS = ("1.29.0", "1.33.0", "1.37.0")  # what Chart.yaml allows first, and up to the newest that has schemas
_SCHEMAS = Path(str(kubernetes_validate.__file__)).parent / "kubernetes-json-schema"
# Of other projects; nobody here has their schemas but RayCluster's.
FOREIGN = ("RayCluster", "ServiceMonitor", "PrometheusRule", "HTTPRoute", "GRPCRoute")


def faults(manifest: Manifest, version: str) -> Iterator[str]:
    """Of one object, in words."""
    validator = _ray_cluster(version) if manifest["kind"] == "RayCluster" else _kubernetes(version, _file_of(manifest))
    for error in validator.iter_errors(manifest):
        where = "/".join(map(str, error.instance_path))
        yield f"{manifest['kind']} {manifest['metadata']['name']} at {where}: {error.message[:300]}"


def _file_of(manifest: Manifest) -> str:
    group, _, version = manifest["apiVersion"].rpartition("/")
    return "-".join(filter(None, (manifest["kind"].lower(), group.split(".")[0], version))) + ".json"


@cache
def _kubernetes(version: str, file: str) -> jsonschema_rs.Validator:
    schema = json.loads((_SCHEMAS / f"v{version}-local-strict" / file).read_text(encoding="utf-8"))
    return jsonschema_rs.validator_for(schema, registry=_registry(version)[1])


@cache
def _registry(version: str) -> tuple[str, jsonschema_rs.Registry]:
    """Where the definitions are, and they."""
    definitions = json.loads((_SCHEMAS / f"v{version}-local-strict" / "_definitions.json").read_text(encoding="utf-8"))
    return definitions["$id"], jsonschema_rs.Registry([(definitions["$id"], definitions)])


@cache
def _ray_cluster(version: str) -> jsonschema_rs.Validator:
    uri, registry = _registry(version)
    definition = f"{uri}#/$defs/io.k8s.api.core.v1"
    schema = _ray_cluster_schema({"$ref": f"{definition}.PodTemplateSpec"}, {"$ref": f"{definition}.EnvVarSource"})
    return jsonschema_rs.validator_for(schema, registry=registry)


def _ray_cluster_schema(pod: dict[str, str], env_source: dict[str, str]) -> dict[str, Any]:
    params = {"type": "object", "additionalProperties": {"type": "string"}}  # flags of `ray start`
    group = _closed(
        {
            "groupName": {"type": "string"},
            "replicas": {"type": "integer"},
            "minReplicas": {"type": "integer"},
            "maxReplicas": {"type": "integer"},
            "rayStartParams": params,
            "template": pod,
        },
        ("groupName", "minReplicas", "maxReplicas", "template"),
    )
    redis = {"redisAddress": {"type": "string"}, "redisPassword": _closed({"valueFrom": env_source})}
    spec = {
        "gcsFaultToleranceOptions": _closed(redis),
        "headGroupSpec": _closed({"rayStartParams": params, "template": pod}, ("template",)),
        "workerGroupSpecs": {"type": "array", "items": group},
    }
    return _closed(
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": "RayCluster"},
            "metadata": {"type": "object"},
            "spec": _closed(spec, ("headGroupSpec",)),
        }
    )


def _closed(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


@cache
def upstream() -> dict[str, jsonschema_rs.Validator]:
    """By kind: schemas of other projects' CRDs, closed as an API server closes them; none where nobody named a folder of them."""
    folder = os.environ.get("KUBE_CRDS")
    files = sorted(Path(folder).glob("*.yaml")) if folder else []
    return dict(_upstream(yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)) for file in files)


def _upstream(crd: dict[str, Any]) -> tuple[str, jsonschema_rs.Validator]:
    (schema,) = [v["schema"]["openAPIV3Schema"] for v in crd["spec"]["versions"] if v["name"] == "v1"]
    schema["properties"]["metadata"] = {"type": "object"}
    return crd["spec"]["names"]["kind"], jsonschema_rs.validator_for(_as_json_schema(schema))


def _as_json_schema(node: Any) -> Any:  # a schema as Kubernetes writes it
    if isinstance(node, list):
        return [_as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {key: _as_json_schema(value) for key, value in node.items() if key not in ("format", "default")}
    if "properties" in node and "additionalProperties" not in node and isinstance(node["properties"], dict):
        result["additionalProperties"] = False
    return result
