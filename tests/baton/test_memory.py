from pathlib import Path

import pytest

from baton import memory


def test_a_container_may_take_what_its_limit_leaves_and_the_file_pages_it_can_drop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory_bytes() == 400_000


def test_without_a_limit_it_is_the_machine_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available_memory_bytes() > 1 << 20
