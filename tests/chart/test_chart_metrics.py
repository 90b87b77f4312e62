"""Alerts, dashboard and aliases speak of metrics that the processes have, and every alert and condition has its page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from router.controller.kube.conditions import KINDS
from tests.chart.chart_rig import CHART, ROOT, Manifest, needs_helm, render
from tests.chart.chart_values import EVERYTHING, LEAST

pytestmark = needs_helm

_CODE = ("router", "worker")
_NAME = re.compile(r"\bbaton_[a-z0-9_]+\b")
_RECORDED = re.compile(r"\b(?:baton|vllm):[a-z0-9_:]+\b")
OPERATIONS = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def exported() -> set[str]:
    """Names of samples, from where the code makes metrics: their constructors, tables and headers."""
    text = "\n".join(file.read_text(encoding="utf-8") for part in _CODE for file in (ROOT / part).rglob("*.py"))
    names = {"gauge": set[str](), "counter": set[str](), "histogram": set[str]()}
    for kind, name in re.findall(r'\b(Gauge|Counter|Histogram)\(\s*"(baton_[a-z0-9_]+)"', text):
        names[kind.lower()].add(name)
    for kind, name in re.findall(r'self\._(histogram|counter)\(\s*"([a-z0-9_]+)"', text):
        names[kind].add(f"baton_{name}")
    for row in text.split("_Row(")[1:]:
        name = re.match(r'\s*"([a-z0-9_]+)"', row)
        if name is not None:
            names["counter" if "is_total=True" in row else "gauge"].add(f"baton_{name[1]}")
    names["gauge"] |= set(re.findall(r'\bname(?:, held)? = "(baton_[a-z0-9_]+)"', text))
    names["gauge"] |= set(re.findall(r'\bheader\("(baton_[a-z0-9_]+)"', text))
    return (
        names["gauge"]
        | {f"{name}_total" for name in names["counter"]}
        | {f"{name}_{part}" for name in names["histogram"] for part in ("bucket", "sum", "count")}
    )


def rules(manifest: Manifest) -> Iterator[dict[str, Any]]:
    for group in manifest["spec"]["groups"]:
        yield from group["rules"]


def expressions() -> Iterator[str]:
    release = render(EVERYTHING)
    for manifest in release.of_kind("PrometheusRule"):
        yield from (rule["expr"] for rule in rules(manifest))
    dashboard = json.loads(release.file("demo-baton-dashboard", "demo-baton.json"))
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def test_every_metric_that_is_asked_for_exists() -> None:
    known = exported()
    assert {"baton_pool_size", "baton_requests_total", "baton_goodput_total", "baton_kube_condition"} <= known
    recorded = {
        rule["record"]
        for one in render(EVERYTHING).of_kind("PrometheusRule")
        for rule in rules(one)
        if "record" in rule
    }
    asked = list(expressions())
    assert len(asked) > 50
    for expression in asked:
        assert set(_NAME.findall(expression)) <= known, expression
        assert set(_RECORDED.findall(expression)) <= recorded, expression
        assert _NAME.search(expression) or _RECORDED.search(expression), expression


def test_labels_that_are_asked_for_exist() -> None:
    """Of those that tell series apart: a rule on a label that is never written finds nothing, and is silent for ever."""
    ours = {
        "slo_class",
        "type",
        "role",
        "state",
        "worker",
        "reason",
        "transport",
        "outcome",
        "applied",
        "lever",
        "kind",
    }
    ours |= {"part", "window"}
    prometheus = {"__name__", "le", "namespace", "service", "release"}
    for expression in expressions():
        matched = {
            name for names in re.findall(r"\{([^}]*)\}", expression) for name in re.findall(r"(\w+)[=!]~?\"", names)
        }
        grouped = {
            name.strip()
            for names in re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", expression)
            for name in names.split(",")
        }
        assert matched | grouped <= ours | prometheus, expression


def test_a_share_is_told_also_where_all_is_bad() -> None:
    """What is divided by is there even if nothing ever went well: a sum with a counter that does not exist yet finds nothing."""
    shares = [
        rule["expr"] for rule in rules(render(EVERYTHING).get("PrometheusRule", "demo-baton")) if "/ " in rule["expr"]
    ]
    assert len(shares) == 7
    for expression in shares:
        below = expression.partition("/ ")[2]
        assert "or vector(0)" in below or "__name__=~" in below, expression


def test_braces_and_brackets_of_expressions_are_whole() -> None:
    for expression in expressions():
        for left, right in ("()", "{}", "[]"):
            assert expression.count(left) == expression.count(right), expression


def test_burn_rates_look_through_two_windows_at_every_class_and_can_be_reached() -> None:
    burns = [
        rule
        for rule in rules(render(EVERYTHING).get("PrometheusRule", "demo-baton"))
        if "SLOBurn" in rule.get("alert", "")
    ]
    by_class: dict[str, list[dict[str, Any]]] = {}
    for rule in burns:
        by_class.setdefault(rule["labels"]["slo_class"], []).append(rule)
        windows = re.findall(r"ratio_rate(\w+)\{", rule["expr"])
        assert len(set(windows)) == 2
        limits = [float(limit) for limit in re.findall(r"> ([0-9.]+)", rule["expr"])]
        assert len(set(limits)) == 1
        assert 0 < limits[0] < 1  # a share of calls
    assert by_class.keys() == {"interactive", "batch"}
    assert all(len(found) == 3 for found in by_class.values())


def test_every_alert_and_every_condition_has_its_remedy_in_the_operators_guide() -> None:
    rule = render(EVERYTHING).get("PrometheusRule", "demo-baton")
    alerts = {one["alert"] for one in rules(rule) if "alert" in one}
    assert len(alerts) >= 15
    for alert in alerts:
        name = "BatonSLOBurn" if alert.startswith("BatonSLOBurn") else alert
        assert f"`{name}`" in OPERATIONS, alert
    for kind in KINDS:
        assert f"`{kind}`" in OPERATIONS, kind


def test_alerts_name_their_page() -> None:
    for one in rules(render(EVERYTHING).get("PrometheusRule", "demo-baton")):
        if "alert" in one:
            assert one["annotations"]["runbook"].startswith("docs/operations.md, ")
            assert one["labels"]["severity"] in ("page", "ticket")


def test_aliases_are_off_by_default_and_named_after_vllm() -> None:
    assert not render(LEAST).of_kind("PrometheusRule")
    records = {rule["record"] for rule in rules(render(EVERYTHING).get("PrometheusRule", "demo-baton-vllm"))}
    assert {"vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"} <= records
    assert records == {
        f"vllm:{name}" for name in yaml.safe_load((CHART / "files" / "vllm.yaml").read_text(encoding="utf-8"))
    }


def test_every_process_of_a_router_is_scraped_and_the_controller_too() -> None:
    release = render(EVERYTHING)
    scraped = {
        endpoint["port"] for monitor in release.of_kind("ServiceMonitor") for endpoint in monitor["spec"]["endpoints"]
    }
    assert scraped == {"process-0", "process-1", "admin"}
    for monitor in release.of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        found = [service for service in release.of_kind("Service") if wanted <= service["metadata"]["labels"].items()]
        assert len(found) == 1
        assert {e["port"] for e in monitor["spec"]["endpoints"]} <= {p["name"] for p in found[0]["spec"]["ports"]}


@pytest.mark.parametrize("name", ["demo-baton-router", "demo-baton-controller"])
def test_labels_for_prometheus_are_added(name: str) -> None:
    assert render(EVERYTHING).get("ServiceMonitor", name)["metadata"]["labels"]["release"] == "prometheus"
