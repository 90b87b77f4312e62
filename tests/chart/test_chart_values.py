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
    "pools.prefill.replicas.initial": MATRIX["fixed sizes"],
    "pools.both.replicas": merged(MATRIX["colocated"], MATRIX["hpa"]),
    "router.replicas": LEAST,
    "scaler.hpa": MATRIX["hpa"],
    "scaler.hpa.both": merged(MATRIX["colocated"], MATRIX["hpa"]),
    "batch": MATRIX["batches"],
    "emulation": MATRIX["emulated"],
    "networkPolicy.enabled": LEAST,
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
    "classes": [{"name": "interactive", "ttftMs": 2000, "tpotMs": 100}, {"name": "zz{n}", "ttftMs": 1, "tpotMs": 1}],
    "pullSecrets": ["zz{n}"],
    "hcas": ["zz{n}"],
    "hostnames": ["zz{n}"],
    "ucx": {"ZZ{n}": "1"},
}
# Pools must agree in these, so all pools are asked at once, and for the first one alone.
ALIKE = ("gpu.count", "rdma.hcas", "rdma.addrType", "rdma.require")
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
    return [now + 1, now + 2, now - 1] if isinstance(now, int | float) else [7]


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


REFUSED: list[tuple[str, Values, str]] = [
    ("no model", {}, "model.id is empty"),
    ("a misspelt name says which there are", {"router": {"replica": 1}}, "one of 'replicas', 'processes'"),
    ("a name of other charts", {"replicaCount": 2}, "set router.replicas, or pools.<role>.replicas"),
    ("a secret in values", {"hfToken": {"value": "x"}}, "set hfToken.existingSecret"),
    ("what there is not", {"pools": {"prefill": {"parallelism": {"tp": 8}}}}, "no tensor parallelism yet"),
    ("what the weights say", {"model": {"quantization": "fp8"}}, "reads it from the weights"),
    ("a wrong type", {"pools": {"prefill": {"replicas": 2}}}, "want object"),
    ("a quantity", {"pools": {"prefill": {"memory": "64GB"}}}, "/pools/prefill/memory"),
    ("bounds", {"pools": {"decode": {"replicas": {"min": 9}}}}, "replicas.min = 9 is above pools.decode.replicas.max = 8"),
    ("a start out of bounds", {"pools": {"decode": {"replicas": {"initial": 9}}}}, "initial = 9 is not between"),
    ("a budget below the floor", {"scaler": {"gpuBudget": 1}}, "below the 2 GPUs of the smallest pools"),
    ("workers of two sizes", {"pools": {"decode": {"gpu": {"count": 2}}}}, "pools.decode.gpu.count = 2 differs"),
    ("two KV planes", {"pools": {"decode": {"rdma": {"addrType": "eth"}}}}, "all workers have one KV plane"),
    ("RDMA without a device", {"pools": {"decode": {"rdma": {"require": True}}}}, "a pod without a device has no RDMA"),
    ("two ways at once", {"pools": {"both": {"enabled": True}}}, "pools.both goes alone"),
    ("half a pair", {"pools": {"decode": {"enabled": False}}}, "an answer needs a prefill and a decode pool"),
    ("hugepages of no size", {"pools": {"decode": {"hugepages": {"count": "1Gi"}}}}, "hugepages.size is empty"),
    ("the chart's environment", {"pools": {"decode": {"env": {"RAY_AUTH_MODE": "x"}}}}, "pools.decode.env.RAY_AUTH_MODE"),
    ("a path where an id makes one", {"model": {"path": "x"}}, "model.source is hf, which makes the path"),
    ("a url without a hash", {"model": {"source": "url", "url": "https://x.example/y"}}, "model.sha256"),
    ("a claim that nobody named", {"model": {"source": "pvc", "path": "x"}}, "modelCache.pvc.existingClaim"),
    ("a head that is not named", {"ray": {"mode": "external"}, "scaler": {"type": "none"}}, "set ray.external.address"),
    ("sizes of somebody else's pods", MATRIX["external"] | {"scaler": {"type": "slo"}}, "scaler.type must be none"),
    ("an HPA of worker groups", {"ray": {"mode": "kuberay"}, "scaler": {"type": "none"}}, "scaler.type must be slo"),
    ("redis without an address", {"ray": {"gcs": {"storage": "redis"}}}, "set ray.gcs.redis.address"),
    ("half of mTLS", {"auth": {"internalTls": {"workerSecret": "x"}}}, "or none of them"),
    ("an HPA without its metrics", {"scaler": {"type": "hpa"}}, "metrics.prometheusRule.enabled record"),
    ("a chunk larger than a step", {"engine": {"chunkTokens": 9999}}, "a chunk has to fit in a step"),
    ("batches of many routers", {"batch": {"enabled": True, "existingClaim": "x"}}, "set router.replicas to 1"),
    ("a monitor that is kept out", {"metrics": {"serviceMonitor": {"enabled": True}}}, "or nobody can scrape"),
    ("an ingress without a host", {"router": {"ingress": {"enabled": True}}}, "set router.ingress.host"),
    ("routes of no gateway", {"router": {"gateway": {"grpc": {"enabled": True}}}}, "router.gateway.parentRefs"),
    ("a class twice", {"slo": {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 1}] * 2}}, "a is there twice"),
    ("no interactive class", {"slo": {"classes": [{"name": "a", "ttftMs": 1, "tpotMs": 1}]}}, "interactive must be"),
    ("a label of selectors", {"commonLabels": {"baton.dev/home": "x"}}, "commonLabels.baton.dev/home"),
    ("one port twice", {"router": {"httpPort": 50051}}, "are both 50051"),
    ("a port of a process", {"router": {"httpPort": 9100}}, "router port 9100 is one of the processes' own"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_wrong_value_is_refused_in_words_that_help(wrong: Values, says: str) -> None:
    assert says in refusal(merged(LEAST, wrong) if wrong else {})


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = refusal(
        merged(LEAST, {"scaler": {"gpuBudget": 1, "type": "hpa"}, "pools": {"decode": {"replicas": {"min": 9}}}})
    )
    assert said.count("\n- ") >= 3


def test_claims_of_devices_want_a_kubernetes_that_has_them() -> None:
    render(MATRIX["claims of devices"], "demo", "--kube-version", "1.32.0")
    with pytest.raises(AssertionError, match=r"1\.32 has"):
        render(MATRIX["claims of devices"], "demo", "--kube-version", "1.31.0")


def test_a_model_and_its_gpus_are_enough() -> None:
    assert render(LEAST).of_kind("StatefulSet")


def test_what_only_changes_with_something_beside_it_changes() -> None:
    assert len({render(MATRIX[name]).text for name in ("least", "a url", "a claim with the model", "colocated")}) == 4
