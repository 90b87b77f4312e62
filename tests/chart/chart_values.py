"""The sets of values that the chart is tried with: what operators ask for, one concern each, and all that goes together."""

from __future__ import annotations

from typing import Any

from tests.chart.chart_rig import merged

# What an install needs at least; a secret of Ray's is named so that nothing is drawn by chance.
LEAST: dict[str, Any] = {
    "model": {"id": "acme/tiny"},
    "pools": {"prefill": {"gpu": {"count": 1}}, "decode": {"gpu": {"count": 1}}},
}
STILL = merged(LEAST, {"ray": {"tokenSecret": "ray-token"}})

_RDMA = {"resource": "rdma/ib", "count": 2, "hcas": ["mlx5_0:1", "mlx5_1:1"], "addrType": "ib_global", "require": True}
_PROMETHEUS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
_POOL: dict[str, Any] = {
    "rdma": _RDMA,
    "hugepages": {"size": "2Mi", "count": "4Gi"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "topologySpread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    "priorityClass": "high",
    "runtimeClass": "nvidia",
    "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "ib0"},
    "env": {"NCCL_DEBUG": "INFO"},
}
EVERYTHING = merged(
    STILL,
    {
        "commonLabels": {"team": "search"},
        "commonAnnotations": {"owner": "search@acme.example"},
        "image": {"registry": "registry.acme.example/ml", "pullSecrets": ["pull"]},
        "model": {"revision": "v1", "servedName": "tiny", "maxModelLen": 8192},
        "hfToken": {"existingSecret": "hf"},
        "modelCache": {"type": "pvc", "pvc": {"storageClass": "nfs"}},
        "pools": {"prefill": _POOL, "decode": _POOL},
        "fabric": {"topologyKey": "acme.example/island", "policy": "required"},
        "router": {
            "processes": 2,
            "ingress": {"enabled": True, "className": "nginx", "host": "llm.acme.example", "tlsSecret": "edge"},
            "gateway": {
                "parentRefs": [{"name": "edge", "namespace": "gateways"}],
                "hostnames": ["llm.acme.example"],
                "http": {"enabled": True},
                "grpc": {"enabled": True},
            },
            "tls": {"secret": "grpc-tls"},
            "hpa": {"enabled": True},
            "topologySpread": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            "priorityClass": "high",
        },
        "auth": {
            "apiKeysSecret": "keys",
            "internalTls": {"routerSecret": "tr", "workerSecret": "tw", "controllerSecret": "tc"},
        },
        "admin": {"tokensSecret": "tokens", "networkPolicyFrom": [{"podSelector": {"matchLabels": {"app": "ops"}}}]},
        "scaler": {"mode": "auto", "gpuBudget": 16},
        "engine": {"chunkTokens": 1024},
        "cost": {"usdPerGpuHour": 4},
        "metrics": {
            "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "grafanaDashboard": {"enabled": True},
            "vllmAlias": True,
        },
        "tracing": {
            "enabled": True,
            "endpoint": "https://otel.acme.example:4317",
            "sampleRatio": 0.05,
            "resourceAttributes": {"deployment.environment.name": "production"},
            "headersSecret": {"name": "otel", "key": "otlp"},
            "tls": {"caSecret": "otel-ca", "clientSecret": "otel-client"},
        },
        "networkPolicy": {"clientsFrom": [{"podSelector": {}}], "metricsFrom": _PROMETHEUS},
        "tests": {"apiKeySecret": "key"},
    },
)
_COLOCATED = {"pools": {"prefill": {"enabled": False}, "decode": {"enabled": False}, "both": {"enabled": True}}}
_CLAIM = {"type": "pvc", "pvc": {"existingClaim": "models"}}

MATRIX: dict[str, dict[str, Any]] = {
    "least": STILL,
    "everything": EVERYTHING,
    "everything under kuberay": merged(EVERYTHING, {"ray": {"mode": "kuberay"}}),
    "kuberay": merged(STILL, {"ray": {"mode": "kuberay"}}),
    "kuberay with redis": merged(
        STILL,
        {
            "ray": {
                "mode": "kuberay",
                "gcs": {"storage": "redis", "redis": {"address": "r:6379", "passwordSecret": "r"}},
            }
        },
    ),
    "external": merged(
        STILL,
        {
            "ray": {
                "mode": "external",
                "tokenSecret": "",
                "external": {"address": "ray.acme:6379", "tokenSecret": "t"},
            },
            "scaler": {"type": "none"},
            "networkPolicy": {"rayFrom": [{"podSelector": {"matchLabels": {"ray.io/node-type": "head"}}}]},
        },
    ),
    "redis": merged(
        STILL, {"ray": {"gcs": {"storage": "redis", "redis": {"address": "r:6379", "passwordSecret": "r"}}}}
    ),
    "memory": merged(STILL, {"ray": {"gcs": {"storage": "memory"}}}),
    "colocated": merged(STILL, _COLOCATED),
    "fixed sizes": merged(STILL, {"scaler": {"type": "none"}}),
    "hpa": merged(STILL, {"scaler": {"type": "hpa"}, "metrics": {"prometheusRule": {"enabled": True}}}),
    "claims of devices": merged(
        STILL, {"pools": {role: {"gpu": {"claimTemplate": "h100"}} for role in ("prefill", "decode")}}
    ),
    "a url": merged(STILL, {"model": {"source": "url", "url": "https://acme.example/m.gguf", "sha256": "0" * 64}}),
    "a claim with the model": merged(
        STILL, {"model": {"id": "", "source": "pvc", "path": "tiny.gguf"}, "modelCache": _CLAIM}
    ),
    "a claim that others fill": merged(STILL, {"modelCache": merged(_CLAIM, {"prefetch": {"enabled": False}})}),
    "host path": merged(STILL, {"modelCache": {"type": "hostPath"}}),
    "near in the fabric": merged(STILL, {"fabric": {"topologyKey": "rack"}}),
    "batches": merged(STILL, {"batch": {"enabled": True, "existingClaim": "batches"}, "router": {"replicas": 1}}),
    "batches of several routers": merged(
        STILL,
        {
            "batch": {"enabled": True, "existingClaim": "batches"},
            "router": {"replicas": 3},
            "database": {"existingSecret": "postgres", "key": "uri"},
        },
    ),
    "an island that is named otherwise": merged(STILL, {"fabric": {"policy": "required", "podLabel": "acme/island"}}),
    "emulated": merged(
        STILL, {"emulation": {"gpu": "h100"}, "pools": {r: {"gpu": {"count": 0}} for r in ("prefill", "decode")}}
    ),
    "ranks": merged(
        STILL,
        {"pools": {r: {"gpu": {"count": 2}, "parallelism": {"tensor": 2}} for r in ("prefill", "decode")}},
    ),
    "targets from values": merged(STILL, {"slo": {"source": "values"}}),
    "nothing extra": merged(
        STILL,
        {
            "tests": {"enabled": False},
            "networkPolicy": {"enabled": False},
            "rbac": {"create": False},
            "serviceAccount": {"create": False, "name": "mine"},
            "llmdLabels": False,
            "controller": {"planner": False},
            "router": {"headlessService": {"enabled": False}, "pdb": {"enabled": False}},
            "pools": {role: {"pdb": {"enabled": False}} for role in ("prefill", "decode")},
        },
    ),
    "another name": merged(STILL, {"fullnameOverride": "chat", "nameOverride": "llm"}),
}
