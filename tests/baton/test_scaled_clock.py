"""A slow clock slows every wait of a cluster, and nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from baton.config import ClusterConfig, EmulationConfig, WorkerConfig
from baton.scaled_clock import is_duration, is_rate, slowed
from baton.slo import DEFAULT_CLASSES

SCALE = 10.0
# Settings with a fraction that are no times: a new one has to be put here, or be named as the time or rate that it is.
DIMENSIONLESS = {
    "emulation.time_scale",
    "emulation.memory_ratio",
    "emulation.origin",  # an instant of the machine's own clock
    "controller.worker_num_cpus",
    "controller.planner_seconds",  # of the machine's own time: an operator waits for it
    "router.cost.usd_per_gpu_hour",
    "router.cost.time_scale",
}


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


@dataclasses.dataclass(frozen=True)
class Wire:
    nic_bytes_per_s: float = 50.0
    delay_ms: int = 3
    heads: int = 7


@pytest.mark.parametrize("config", [ClusterConfig(), WorkerConfig("w")])
def test_every_duration_is_multiplied_and_everything_else_stays(config: Any) -> None:
    before, after = dict(leaves(config)), dict(leaves(slowed(config, SCALE)))
    assert before.keys() == after.keys()
    for path, value in before.items():
        if is_duration(path):
            assert isinstance(value, int | float), path
            assert after[path] == value * SCALE, path
        elif not is_rate(path):
            assert after[path] == value, path


@pytest.mark.parametrize("config", [ClusterConfig(), WorkerConfig("w")])
def test_no_setting_is_a_time_under_another_name(config: Any) -> None:
    fractions = {path for path, value in leaves(config) if isinstance(value, float)}
    unnamed = {path for path in fractions if not is_duration(path) and not is_rate(path)}
    assert unnamed <= DIMENSIONLESS


def test_the_waits_that_a_slow_engine_would_run_into_are_among_them() -> None:
    slow, plain = slowed(ClusterConfig(), SCALE), ClusterConfig()
    assert slow.kv.lease_s == SCALE * plain.kv.lease_s
    assert slow.kv.quiet_s == SCALE * plain.kv.quiet_s
    assert slow.router.heartbeat_s == SCALE * plain.router.heartbeat_s
    assert slow.router.request_timeout_s == SCALE * plain.router.request_timeout_s
    assert slow.controller.worker_start_timeout_s == SCALE * plain.controller.worker_start_timeout_s


def test_rates_are_divided_and_milliseconds_multiplied() -> None:
    assert slowed(Wire(), SCALE) == Wire(nic_bytes_per_s=5.0, delay_ms=30, heads=7)


def test_a_scale_of_one_changes_nothing() -> None:
    assert slowed(ClusterConfig(), 1.0) == ClusterConfig()


def test_zero_still_means_never_and_at_once() -> None:
    assert slowed(EmulationConfig(), SCALE) == EmulationConfig()


def test_targets_of_slo_classes_are_slowed_alike() -> None:
    for slo in DEFAULT_CLASSES:
        slow = slowed(slo, SCALE)
        assert (slow.ttft_ms, slow.tpot_ms) == (SCALE * slo.ttft_ms, SCALE * slo.tpot_ms)
        assert (slow.percentile, slow.weight, slow.itl_p99_ms) == (slo.percentile, slo.weight, slo.itl_p99_ms)
