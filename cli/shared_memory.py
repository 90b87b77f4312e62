"""Shared-memory files that a run leaves behind: found by comparing /dev/shm before and after, removed when nobody uses them.

Ray and UCX unlink theirs when they close in order; a SIGKILLed worker cannot. A file counts as the run's if it appeared since
this object was made, belongs to this user, and no living process has it mapped: another run's files are always mapped.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path("/dev/shm")


class SharedMemory:
    def __init__(self) -> None:
        self._before = {entry.name for entry in _FOLDER.iterdir()}

    def unused(self) -> list[Path]:
        """The run's files that no living process uses."""
        new = [entry for entry in _FOLDER.iterdir() if entry.name not in self._before and _is_mine(entry)]
        in_use = _mapped(new)
        return [entry for entry in new if entry not in in_use]

    def clean(self) -> list[str]:
        """Remove the run's files.

        Returns:
            Those that could not be removed, one line each.
        """
        left = []
        for entry in self.unused():
            try:
                entry.unlink(missing_ok=True)
            except OSError as error:
                left.append(f"shared memory {entry} ({error.strerror})")
        return left


def _is_mine(entry: Path) -> bool:
    try:
        return entry.is_file() and entry.stat().st_uid == os.getuid()
    except OSError:
        return False


def _mapped(entries: Iterable[Path]) -> set[Path]:
    """Those of `entries` that a process of this user maps or holds open."""
    wanted = {str(entry): entry for entry in entries}
    if not wanted:
        return set()
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        used = _used_files(process)
        found.update(entry for name, entry in wanted.items() if name in used)
    return found


def _used_files(process: Path) -> set[str]:
    """Paths that a process maps or has open; empty where it is gone or another user's."""
    used: set[str] = set()
    with contextlib.suppress(OSError):
        maps = (process / "maps").read_text(encoding="utf-8", errors="replace")
        used.update(line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line)
    with contextlib.suppress(OSError):
        for fd in os.listdir(process / "fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                used.add(os.readlink(process / "fd" / fd))
    return used
