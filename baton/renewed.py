"""What is read from files that may be renewed in place, as certificates are: read again once they have changed.

Files that cannot be used change nothing but one log line, so what was read last stays in force; that also covers the moment in
which one of two files is new already. `current` costs a `stat` per file. Any thread may call; two at once at worst read the same
files twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from baton.errors import ConfigError
from baton.log import get_log

log = get_log("baton.renewed")

T = TypeVar("T")
State = tuple[tuple[int, int, int], ...]  # inode, size, mtime_ns of each file; empty while one is missing


class Renewed(Generic[T]):
    """One thing that is made of some files."""

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        """Raises: ConfigError, as `load` does: a file is missing, or cannot be used."""
        self._files = files
        self._load = load
        self._state = _state(files)
        self._value = load()

    def current(self) -> T:
        """Of the files as they are now, or as they last were of use."""
        if (state := _state(self._files)) != self._state:
            self._state = state
            try:
                self._value = self._load()
                log.info("certificates_loaded", files=[str(file) for file in self._files])
            except ConfigError as error:
                log.error("certificates_refused", reason=error.message)
        return self._value


def _state(files: Sequence[Path]) -> State:
    try:
        stats = [file.stat() for file in files]
    except OSError:
        return ()
    return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
