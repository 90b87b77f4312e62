"""Clusters of one test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.up_rig import Up, started_clusters


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    with started_clusters(tmp_path) as start:
        yield start
