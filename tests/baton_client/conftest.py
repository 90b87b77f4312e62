"""One tiny model for all client tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("client_model") / "tiny")
