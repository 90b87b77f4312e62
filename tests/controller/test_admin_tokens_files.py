"""Where admin tokens come from: a run folder, a mounted secret, or both."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.errors import ConfigError
from router.controller.admin_tokens import TokenFiles


def test_a_mounted_folder_does_without_drawn_tokens_and_may_be_empty(tmp_path: Path) -> None:
    assert TokenFiles(tmp_path / "tokens.json", str(tmp_path)).current() == ()


def test_without_a_mounted_folder_the_drawn_ones_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the admin tokens"):
        TokenFiles(tmp_path / "tokens.json", "")
