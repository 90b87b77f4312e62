"""Keeps the KeyRing of this router in line with its file, also where that is a mounted secret.

A file, or a folder of which every visible file counts (Kubernetes mounts a secret as links into a hidden folder). It is looked
at each second, by name, size and time, which sees swapped links, too. A file that became bad or vanished changes nothing: the
last good keys stay in force and one log line per change says so. Reading and parsing run in a thread, for a thousand keys take
tens of milliseconds; everything else is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from baton.errors import ConfigError
from baton.log import get_log
from router.tenants import KeyRing, parse_keys

log = get_log("router.keys")

CHECK_S = 1.0  # a revoked key is refused a second after the file says so; one `stat` costs microseconds
MAX_FILE_BYTES = 16 << 20  # 50,000 keys

State = tuple[tuple[str, int, int], ...]  # name, size, mtime_ns of each file


class KeyFile:
    """`ring` is the one in force."""

    def __init__(self, path: str) -> None:
        """`path`: "" = no keys.

        Raises:
            ConfigError: it cannot be read or is wrong.
        """
        self._path = Path(path) if path else None
        self._state: State = ()
        self.ring = KeyRing()
        if self._path is not None:
            self._state, self.ring = _load(self._path)

    async def watch(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Follow the file until cancelled; returns at once where there is none."""
        while self._path is not None:
            await asyncio.sleep(CHECK_S)
            if await self.check():
                on_change()

    async def check(self) -> bool:
        """Look at the file now; True when other keys are in force."""
        assert self._path is not None
        state, ring = await asyncio.to_thread(_changed, self._path, self._state)
        if state == self._state:
            return False
        self._state = state
        if ring is None:
            return False
        self.ring = ring
        log.info("api_keys_loaded", num_tenants=len(ring.tenants))
        return True


def _changed(path: Path, before: State) -> tuple[State, KeyRing | None]:
    """None: nothing of use has changed. A state that could not be read is remembered, so that it is said once."""
    state = _state(path)
    if state == before:
        return before, None
    try:
        return _load(path)
    except ConfigError as error:
        log.error("api_keys_refused", reason=error.message)
        return state, None


def _load(path: Path) -> tuple[State, KeyRing]:
    state = _state(path)
    if not state:
        raise ConfigError(f"api_keys_file: {path} is no file and no folder with files", field="api_keys_file")
    if sum(size for _, size, _ in state) > MAX_FILE_BYTES:
        raise ConfigError(f"api_keys_file: {path} is larger than {MAX_FILE_BYTES} bytes", field="api_keys_file")
    try:
        texts = [Path(name).read_text(encoding="utf-8") for name, _, _ in state]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"api_keys_file: {path} cannot be read: {reason}", field="api_keys_file") from None
    return state, parse_keys(texts)


def _state(path: Path) -> State:
    """Empty where nothing is there."""
    try:
        files = sorted(f for f in path.iterdir() if not f.name.startswith(".")) if path.is_dir() else [path]
        stats = [(file, file.stat()) for file in files]
    except OSError:
        return ()
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)
