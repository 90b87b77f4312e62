"""Clusters shared by a whole test session: the demo model P/D and colocated, and a small random model for faults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.errors import BatonError
from baton.model_files import load_model_files
from tests.integration.cluster_rig import ClusterUnderTest
from tests.tiny_models import make_tiny_model

# Blocks for 16 prompts of 2,000 tokens, so that soaks wait for time, not for memory.
TINY_BLOCKS = "2048"


@pytest.fixture(scope="session")
def demo_model() -> str:
    """The demo model's name; skips where its files are absent."""
    try:
        load_model_files("smollm2")
    except BatonError:
        pytest.skip("the demo model is not here: run `baton model fetch smollm2`")
    return "smollm2"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_model_len=4096)


def serve(*flags: str, home: Path | None = None) -> Iterator[ClusterUnderTest]:
    """One cluster while it is wanted, which has to end in order."""
    cluster = ClusterUnderTest(*flags, home=home).start()
    try:
        yield cluster
    finally:
        status = cluster.stop()
        assert status == 0, "\n".join(cluster.output)
        assert "no process, port or shared-memory file is left" in "\n".join(cluster.output)


@pytest.fixture(scope="session")
def pd_cluster(demo_model: str) -> Iterator[ClusterUnderTest]:
    yield from serve("--model", demo_model, "--prefill", "1", "--decode", "1")


@pytest.fixture(scope="session")
def colocated_cluster(demo_model: str) -> Iterator[ClusterUnderTest]:
    yield from serve("--model", demo_model, "--colocated")


@pytest.fixture(scope="session")
def fault_cluster(tiny_model: Path) -> Iterator[ClusterUnderTest]:
    """1 prefill + 1 decode of the small model: what tests kill, cancel and overload."""
    yield from serve("--model", str(tiny_model), "--prefill", "1", "--decode", "1", "--num-blocks", TINY_BLOCKS)
