"""The hash of a model's weight files, noted beside them: so that a worker knows which weights it wants without reading any.

Whoever has read the files whole writes the note, with each file's size and time of change. It holds while no file that is there
differs from it; files that are not there at all are taken on its word. So a model directory may do with small files and this
note, where a running worker lends the weights. Files are never loaded by it: what is read is hashed again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from baton.model_store import write_atomically

_HASH = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 1 << 20  # a thousand files are listed in 100 KB

Stamp = dict[str, tuple[int, int]]  # by file name: bytes, time of change in ns


def stamp(files: Sequence[Path]) -> Stamp:
    """To be taken before the files are read. Raises: OSError."""
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def note_digest(note: Path, weights_hash: str, before: Stamp) -> None:
    """Write the note where that is allowed, and not there yet."""
    text = json.dumps({"sha256": weights_hash, "files": before})
    with contextlib.suppress(OSError):  # it only ever saves time
        if os.access(note.parent, os.W_OK) and not (note.is_file() and note.read_text(encoding="utf-8") == text):
            write_atomically(note, text)


def noted_digest(note: Path) -> str:
    """The hash, "" where there is no note or it is of other files than those that lie there."""
    try:
        if note.stat().st_size > _MAX_BYTES:
            return ""
        said = json.loads(note.read_text(encoding="utf-8"))
        digest, files = said["sha256"], said["files"]
        if not _HASH.fullmatch(digest) or not all(_agrees(note.parent, name, told) for name, told in files.items()):
            return ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # anybody may have written it
        return ""
    return str(digest)


def _agrees(folder: Path, name: str, told: Sequence[int]) -> bool:
    """Raises: ValueError, TypeError: it is no file's name, or not two numbers."""
    size, changed_ns = told
    file = folder / name
    if Path(name).name != name:
        return False
    return not file.exists() or (file.stat().st_size, file.stat().st_mtime_ns) == (size, changed_ns)
