"""Pods that are Ray nodes, made from the rendered chart, under calls that go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chart.chart_rig import needs_helm
from tests.kube.namespace_pods import needs_namespaces
from tests.kube.ray_rig import FULLNAME, ray_rig

# Each starts a head and a Ray node per pod: 40 processes
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_helm, needs_namespaces]

PREFILL, FIRST, SECOND = (f"{FULLNAME}-{name}" for name in ("prefill-0", "decode-0", "decode-1"))


async def test_pods_of_the_chart_become_ray_nodes_with_one_worker_each_and_pools_change_size(tmp_path: Path) -> None:
    async with ray_rig(tmp_path) as rig, rig.calls() as calls:
        await rig.until(lambda: calls.worked(FIRST), "calls are answered")
        pids = rig.worker_pids()
        assert {name: len(found) for name, found in pids.items()} == {PREFILL: 1, FIRST: 1}
        print(pids, await rig.workers(), await rig.conditions())
    calls.check(at_least=4)
