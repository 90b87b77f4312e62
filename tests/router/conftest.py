"""One tiny model for all router tests, one rig per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.model_files import ModelFiles
from tests.router.router_rig import Rig, running_rig, tiny_files
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return tiny_files(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="session")
def model_dir(files: ModelFiles) -> Path:
    return files.tokenizer_json.parent


@pytest.fixture
async def rig(files: ModelFiles) -> AsyncIterator[Rig]:
    async with running_rig(files) as rig:
        yield rig


@pytest.fixture
async def rig_without_retries(files: ModelFiles) -> AsyncIterator[Rig]:
    """Where a broken sequence ends its call."""
    async with running_rig(files, max_retries=0) as rig:
        yield rig
