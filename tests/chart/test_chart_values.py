"""What values may be: the set is closed, wrong ones are refused in words that help, none is without effect."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from tests.chart.chart_rig import CHART, Values, merged, needs_helm, nested, refusal, render
from tests.chart.chart_values import EVERYTHING, LEAST, MATRIX
from tests.chart.schema_leaves import Leaf, get, leaves, objects

pytestmark = needs_helm

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# Where a value counts: the beginning of its path, and what else must be set. The longest beginning holds.
WHERE: dict[str, Values] = {
    "": EVERYTHING,
    "image.control.digest": LEAST,
    "image.worker.digest": LEAST,
    "model.path": MATRIX["a claim with the model"],
    "model.url": MATRIX["a url"],
    "model.sha256": MATRIX["a url"],
    "modelCache.emptyDir": LEAST,
    "modelCache.hostPath": MATRIX["host path"],
    "modelCache.pvc.existingClaim": MATRIX["a claim that others fill"],
    "engine.chunkTokens": merged(EVERYTHING, {"engine": {"maxNumBatchedTokens": 99_999}}),
    "ray.external": MATRIX["external"],
    "ray.gcs.redis": MATRIX["redis"],
    "pools.both": merged(EVERYTHING, MATRIX["colocated"], {"pools": {"both": EVERYTHING["pools"]["decode"]}}),
    "pools.prefill.parallelism.tensor": MATRIX["ranks"],
    "pools.prefill.replicas.initial": MATRIX["fixed sizes"],
    "router.replicas": LEAST,
    "scaler.hpa": MATRIX["hpa"],
    "scaler.hpa.both": merged(MATRIX["colocated"], MATRIX["hpa"]),
    "batch": MATRIX["batches"],
    "emulation": MATRIX["emulated"],
    "networkPolicy.enabled": LEAST,
    "networkPolicy.rayFrom": MATRIX["external"],
} | {f"pools.{role}.gpu.claimTemplate": LEAST for role in ("prefill", "decode")} | {
    "pools.both.gpu.claimTemplate": MATRIX["colocated"],
    "modelCache.prefetch.enabled": MATRIX["a claim that others fill"],
}  # fmt: skip
# Lists and maps with a number in them that stands nowhere else.
SHAPES: dict[str, Any] = {
    "tolerations": [{"key": "zz{n}"}],
    "topologySpread": [{"maxSkew": 1, "topologyKey": "zz{n}", "whenUnsatisfiable": "DoNotSchedule"}],
    "parentRefs": [{"name": "zz{n}"}],
    "networkPolicyFrom": [{"podSelector": {"matchLabels": {"zz{n}": "x"}}}],
    "clientsFrom": [{"podSelector": {"matchLabels": {"zz{n}": "x"}}}],
    "metricsFrom": [{"podSelector": {"matchLabels": {"zz{n}": "x"}}}],
    "rayFrom": [{"podSelector": {"matchLabels": {"zz{n}": "x"}}}],
    "classes": [{"name": "interactive", "ttftMs": 2000, "tpotMs": 100}, {"name": "zz{n}", "ttftMs": 1, "tpotMs": 1}],
    "pullSecrets": ["zz{n}"],
    "hcas": ["zz{n}"],
    "hostnames": ["zz{n}"],
    "ucx": {"ZZ{n}": "1"},
    "endpoint": "https://zz{n}:4317",
}
# Pools must agree in these, so all pools are asked at once, and for the first one alone.
ALIKE = ("gpu.count", "parallelism.tensor", "rdma.hcas", "rdma.addrType", "rdma.require")
# They change with what stands beside them only: of the matrix "a url", "a claim with the model" and "colocated" differ by them.
TOGETHER = {"model.source", *(f"pools.{role}.enabled" for role in ("prefill", "decode", "both"))}


def numbered(shape: Any, number: int) -> Any:
    if isinstance(shape, str):
        return shape.format(n=number)
    if isinstance(shape, list):
        return [numbered(item, number) for item in shape]
    if isinstance(shape, dict):
        return {numbered(key, number): numbered(value, number) for key, value in shape.items()}
    return shape


def where(path: str) -> str:
    return max((start for start in WHERE if path == start or path.startswith(f"{start}.") or not start), key=len)


def setting(path: str, value: object) -> Values:
    if path.startswith("pools.prefill.") and (name := path.removeprefix("pools.prefill.")) in ALIKE:
        return merged(*(nested(f"pools.{role}.{name}", value) for role in ("prefill", "decode", "both")))
    return nested(path, value)


def asked() -> list[Leaf]:
    twice = {f"pools.{role}.{name}" for role in ("decode", "both") for name in ALIKE}
    return [leaf for leaf in leaves() if leaf.path not in twice | TOGETHER]


def is_one_of_many(leaf: Leaf) -> bool:
    """A value of the second or third pool that the same lines of the templates read as the first one's."""
    _, role, *names = [*leaf.path.split("."), "", ""]
    return role in ("decode", "both") and names[0] != "replicas"


def telling(leaf: Leaf, number: int) -> object | None:
    name = leaf.path.rpartition(".")[2]
    if name in SHAPES:
        shape: object = numbered(SHAPES[name], number)
        return shape
    return {f"zz{number}": "x"} if leaf.schema.get("type") == "object" else leaf.telling(number)


def others(leaf: Leaf) -> list[object]:
    """Values that the leaf does not have by default, of which one must show."""
    now = get(merged(DEFAULTS, WHERE[where(leaf.path)]), leaf.path)
    if leaf.choices:
        return [choice for choice in leaf.choices if choice != now]
    if isinstance(now, float):
        return [now / 2]  # of a ratio there is no more than 1
    return [now + 1, now + 2, now - 1] if isinstance(now, int) else [7]


def shows(leaf: Leaf) -> bool:
    base = WHERE[where(leaf.path)]
    before = render(base).text
    for value in others(leaf):
        try:
            if render(merged(base, setting(leaf.path, value))).text != before:
                return True
        except AssertionError:
            continue  # it needs others beside it
    return False


def test_no_value_is_without_effect() -> None:
    told: dict[str, dict[str, tuple[int, object]]] = defaultdict(dict)
    quiet: list[Leaf] = []
    for number, leaf in enumerate(asked(), 2_001):
        value = telling(leaf, number)
        if value is None and not is_one_of_many(leaf):
            quiet.append(leaf)
        elif value is not None:
            told[where(leaf.path)][leaf.path] = (number, value)
    dead = []
    for start, values in told.items():
        text = render(merged(WHERE[start], *(setting(path, value) for path, (_, value) in values.items()))).text
        numbers = set(re.findall(r"(?<!\d)2\d{3}(?!\d)", text))
        dead += [path for path, (number, _) in values.items() if str(number) not in numbers]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        dead += [leaf.path for leaf, shown in zip(quiet, threads.map(shows, quiet), strict=True) if not shown]
    assert not dead


def test_the_schema_is_closed_everywhere_and_names_what_it_knows() -> None:
    closed = list(objects())
    assert len(closed) > 50
    for path, schema in closed:
        assert schema["additionalProperties"] is False, path
        assert schema["propertyNames"]["enum"] == list(schema["properties"]), path


def test_every_value_has_a_default_that_the_file_shows() -> None:
    for leaf in leaves():
        if leaf.path.startswith(("ray.head.affinity.", "router.affinity.", "controller.affinity.")):
            continue
        if ".affinity." not in leaf.path:
            get(DEFAULTS, leaf.path)


# What goes together is said together: each refusal is one run of Helm, each line of it one value and what is said of it.
REFUSED: dict[str, list[tuple[str, Values, str]]] = {
    "by the schema": [
        ("a misspelt name says which there are", {"router": {"replica": 1}}, "one of 'replicas', 'processes'"),
        ("a name of other charts", {"replicaCount": 2}, "set router.replicas, or pools.<role>.replicas"),
        ("a secret in values", {"hfToken": {"value": "x"}}, "set hfToken.existingSecret"),
        ("what there is not", {"pools": {"prefill": {"parallelism": {"pipeline": 2}}}}, "there is only `tensor`"),
        ("another name for it", {"pools": {"decode": {"parallelism": {"tp": 2}}}}, "one of 'tensor', 'pipeline'"),
        ("a quantised checkpoint", {"model": {"quantization": "awq"}}, "auto or int8: quantised checkpoints"),
        ("a wrong type", {"pools": {"prefill": {"replicas": 2}}}, "want object"),
        ("a quantity", {"pools": {"prefill": {"memory": "64GB"}}}, "/pools/prefill/memory"),
        ("a key in values", {"tracing": {"headers": "x"}}, "set tracing.headersSecret"),
        ("a share of more than all", {"tracing": {"sampleRatio": 1.5}}, "/tracing/sampleRatio"),
        ("a collector's path", {"tracing": {"endpoint": "http://otel:4318/v1/traces"}}, "/tracing/endpoint"),
        ("a list of choices", {"model": {"dtype": "int8"}}, "one of 'bfloat16', 'float16', 'float32'"),
    ],
    "nothing given": [("no model", {"model": {"id": ""}}, "model.id is empty")],
    "pools": [
        ("bounds", {"pools": {"decode": {"replicas": {"min": 9}}}}, "min = 9 is above pools.decode.replicas.max = 8"),
        ("a start out of bounds", {"pools": {"prefill": {"replicas": {"initial": 9}}}}, "initial = 9 is not between"),
        ("a budget below the floor", {"scaler": {"gpuBudget": 1}}, "below the 19 GPUs of the smallest pools"),
        ("workers of two sizes", {"pools": {"decode": {"gpu": {"count": 2}}}}, "pools.decode.gpu.count = 2 differs"),
        ("pools cut unlike", {"pools": {"decode": {"parallelism": {"tensor": 4}}}}, "decode.parallelism.tensor = 4 differs"),
        ("ranks without GPUs", {}, "tensor = 4, but gpu.count = 2: each rank has one GPU"),
        ("ranks whose KV peers map", {"kv": {"mode": "direct"}}, "so kv.mode cannot be direct"),
        ("two KV planes", {"pools": {"decode": {"rdma": {"addrType": "eth"}}}}, "all workers have one KV plane"),
        ("RDMA without a device", {"pools": {"decode": {"rdma": {"require": True}}}}, "decode.rdma.require is set, but no"),
        ("HCAs without a device", {"pools": {"decode": {"rdma": {"hcas": ["a"]}}}}, "decode.rdma.hcas is set, but no"),
        ("hugepages of no size", {"pools": {"decode": {"hugepages": {"count": "1Gi"}}}}, "hugepages.size is empty"),
        ("hugepages of no amount", {"pools": {"prefill": {"hugepages": {"size": "2Mi"}}}}, "hugepages.count is empty"),
        ("the chart's environment", {"pools": {"decode": {"env": {"RAY_X": "x"}}}}, "pools.decode.env.RAY_X"),
        ("who a pod is", {"pools": {"prefill": {"env": {"OTEL_RESOURCE_ATTRIBUTES": "a=b"}}}, "tracing": {"enabled": True}},
         "the chart sets it where tracing.enabled is true; set tracing.resourceAttributes"),
        ("a claim of no device", {"pools": {"both": {"enabled": True, "gpu": {"count": 0, "claimTemplate": "x"}}}},
         "say how many GPUs the claim holds"),
        ("two ways at once", {}, "pools.both goes alone"),
    ],
    "half a pair": [
        ("one pool", {"pools": {"decode": {"enabled": False}}}, "an answer needs a prefill and a decode pool"),
        ("ranks of no GPU", {"emulation": {"gpu": "h100"}, "pools": {"prefill": {"parallelism": {"tensor": 2}}}},
         "tensor = 2: the emulated GPUs of a worker are emulation.tp"),
    ],
    "parts": [
        ("a path where an id makes one", {"model": {"path": "x"}}, "model.source is hf, which makes the path"),
        ("a hash of no url", {"model": {"sha256": "0" * 64}}, "model.source is hf: set model.source to url"),
        ("a claim nobody fills", {"modelCache": {"type": "pvc", "prefetch": {"enabled": False}}}, "nobody fills the claim"),
        ("an HPA of worker groups", {"ray": {"mode": "kuberay"}, "scaler": {"type": "hpa"}}, "scaler.type must be slo"),
        ("an HPA without its metrics", {}, "metrics.prometheusRule.enabled record"),
        ("somebody's head", {"ray": {"external": {"address": "a:1"}}}, "ray.external is set, but ray.mode is kuberay"),
        ("a head that is the chart's", {"networkPolicy": {"rayFrom": [{}]}}, "networkPolicy.rayFrom is set, but ray.mode is"),
        ("redis without an address", {"ray": {"gcs": {"storage": "redis"}}}, "set ray.gcs.redis.address"),
        ("half of mTLS", {"auth": {"internalTls": {"workerSecret": "x"}}}, "or none of them"),
        ("a chunk larger than a step", {"engine": {"chunkTokens": 9999}}, "a chunk has to fit in a step"),
        ("batches of many routers", {"batch": {"enabled": True}}, "set database.existingSecret, or router.replicas to 1"),
        ("one fabric of no name", {"fabric": {"policy": "required"}}, "fabric.policy is required: set fabric.topologyKey"),
        ("batches of no claim", {}, "set batch.existingClaim"),
        ("a monitor that is kept out", {"metrics": {"serviceMonitor": {"enabled": True}}}, "or nobody can scrape"),
        ("a collector of no name", {"tracing": {"enabled": True}}, "tracing.enabled: set tracing.endpoint"),
        ("certificates without TLS", {"tracing": {"tls": {"caSecret": "ca"}}}, "tracing.tls is set, but tracing.endpoint is"),
        ("an ingress without a host", {"router": {"ingress": {"enabled": True}}}, "set router.ingress.host"),
        ("routes of no gateway", {"router": {"gateway": {"grpc": {"enabled": True}}}}, "router.gateway.parentRefs"),
        ("clients of no certificate", {"router": {"tls": {"clientCa": True}}}, "but no router.tls.secret"),
        ("bounds of routers", {"router": {"hpa": {"minReplicas": 9}}}, "minReplicas = 9 is above router.hpa.maxReplicas = 8"),
        ("a port of a process", {"router": {"httpPort": 9100}}, "router port 9100 is one of the processes' own"),
        ("one port twice", {"router": {"grpcPort": 9100}}, "router.httpPort and router.grpcPort are both 9100"),
        ("one service port twice", {"router": {"service": {"grpcPort": 80}}}, "service.grpcPort are both 80"),
        ("a label of selectors", {"commonLabels": {"baton.dev/home": "x"}}, "commonLabels.baton.dev/home"),
        ("a class twice, none interactive", {"slo": {"classes": [{"name": "a", "ttftMs": 9, "tpotMs": 1, "e2eMs": 1}] * 2}},
         "a is there twice"),
        ("no interactive class", {}, "interactive must be among them"),
        ("an end before its beginning", {}, "e2eMs = 1 is below ttftMs = 9"),
    ],
    "a url without a hash": [
        ("no hash", {"model": {"source": "url", "url": "https://x.example", "revision": "v1"}}, "set model.url and model"),
        ("two ways to say which", {}, "model.sha256 says which file is meant"),
    ],
    "a claim that nobody named": [
        ("no claim", {"model": {"source": "pvc"}}, "modelCache.pvc.existingClaim to the claim that holds the model"),
        ("no path", {}, "model.path is empty"),
        ("weights that nobody loads", {"model": {"quantization": "int8"}, "emulation": {"gpu": "h100"}},
         "emulated weights are never loaded"),
    ],
    "a head that is not named": [
        ("no address", {"ray": {"mode": "external"}}, "set ray.external.address and ray.external.tokenSecret"),
        ("a head that is kept out", {}, "name the pods of its head in networkPolicy.rayFrom"),
        ("sizes of somebody else's pods", {}, "scaler.type must be none"),
        ("an island for somebody else's pods", {"fabric": {"topologyKey": "x"}}, "place those pods where they are made"),
        ("redis of another storage", {"ray": {"gcs": {"redis": {"address": "r:1"}}}}, "but ray.gcs.storage is rocksdb"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("together", REFUSED)
def test_wrong_values_are_refused_in_words_that_help_all_at_once(together: str) -> None:
    said = refusal(merged(LEAST, *(values for _, values, _ in REFUSED[together])))
    for name, _, says in REFUSED[together]:
        assert says in said, name


def test_every_check_of_the_chart_is_tried() -> None:
    """Each `append $wrong` of the checks has its line above: as many messages are asked for as there are."""
    checks = (CHART / "templates" / "_checks.tpl").read_text(encoding="utf-8")
    tried = {says for rows in list(REFUSED.values())[1:] for _, _, says in rows}
    assert (
        len(re.findall(r"append \$wrong ", checks)) == len(tried) + 1
    )  # the one that asks for a version of Kubernetes


def test_claims_of_devices_want_a_kubernetes_that_has_them() -> None:
    render(MATRIX["claims of devices"], "demo", "--kube-version", "1.32.0")
    with pytest.raises(AssertionError, match=r"1\.32 has"):
        render(MATRIX["claims of devices"], "demo", "--kube-version", "1.31.0")


def test_a_model_and_its_gpus_are_enough() -> None:
    assert render(LEAST).of_kind("StatefulSet")


def test_what_only_changes_with_something_beside_it_changes() -> None:
    assert len({render(MATRIX[name]).text for name in ("least", "a url", "a claim with the model", "colocated")}) == 4
