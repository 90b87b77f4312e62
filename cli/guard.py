"""`python -m cli.guard <run id> <folder to remove>`: ends a run whose `baton up` was killed and could not do it itself.

Reads standard input, whose other end `baton up` holds. "done" = all is clean, exit. End of file without it = `baton up` is
gone: end every marked process and remove the run's temporary folder. Carries no mark itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.processes import end_marked, marked_pids

_GENTLE_S = 3.0  # what workers need to close their shared memory
_KILL_S = 10.0
DONE = b"done"


def start(run_id: str, temp_dir: Path) -> subprocess.Popen[bytes]:
    """Start the guard of a run; close it with `dismiss`."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, run_id, str(temp_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def dismiss(guard: subprocess.Popen[bytes]) -> None:
    """Say that all is clean."""
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guard.communicate(DONE, timeout=_GENTLE_S)
    guard.kill()
    guard.wait()


def main() -> int:
    run_id, temp_dir = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return 0
    for pid in marked_pids(run_id):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _GENTLE_S
    while marked_pids(run_id) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    left = end_marked(run_id, _KILL_S)
    shutil.rmtree(temp_dir, ignore_errors=True)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
