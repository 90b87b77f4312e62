"""The metrics page, as Prometheus's own parser reads it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from router.series import Counter, Gauge, Histogram, Registry
from tests.router.router_rig import Rig, request

BOUNDS = (0.1, 1.0, 10.0)


def read(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families("".join(registry.lines()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@given(st.lists(st.floats(0, 100) | st.sampled_from(BOUNDS), max_size=50))
def test_observations_counted_together_are_those_counted_one_by_one(values: list[float]) -> None:
    registry = Registry()
    histogram = Histogram("gaps", "Gaps.", ["way"], registry, BOUNDS)
    histogram.labels("together").observe_sorted(sorted(values))
    single = histogram.labels("single")
    for value in values:
        single.observe(value)
    said = read(registry)
    for bound in (*BOUNDS, math.inf):
        expected = sum(value <= bound for value in values)
        le = ("le", "+Inf" if bound == math.inf else str(bound))
        for way in ("together", "single"):
            assert said["gaps_bucket", (le, ("way", way))] == expected
    for way in ("together", "single"):
        assert said["gaps_count", (("way", way),)] == len(values)
        assert math.isclose(said["gaps_sum", (("way", way),)], math.fsum(values), abs_tol=1e-9)


@given(st.text())
def test_any_label_value_is_read_back_as_it_was(value: str) -> None:
    registry = Registry()
    Counter("calls", "Calls.", ["outcome"], registry).labels(value).inc(3)
    assert read(registry) == {("calls_total", (("outcome", value),)): 3}


def test_a_gauge_is_read_when_the_page_is() -> None:
    registry, held = Registry(), [1.0]
    Gauge("held", "Held.", lambda: held[0], registry)
    assert read(registry) == {("held", ()): 1}
    held[0] = 2.5
    assert read(registry) == {("held", ()): 2.5}


async def test_the_routers_whole_page_is_what_prometheus_reads(rig: Rig) -> None:
    await rig.generate(request(max_tokens=5))
    reply = await rig.http.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert {"baton_requests", "baton_worker_up", "baton_kv_blocks", "baton_inter_token_latency_seconds"} <= set(
        families
    )
    assert all(family.documentation for family in families.values())
    gaps = families["baton_inter_token_latency_seconds"].samples
    assert [sample.value for sample in gaps if sample.name.endswith("_count")] == [4]
