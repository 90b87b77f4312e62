"""`python -m cli.guard <folder to remove>`: ends a run whose `baton up` was killed and could not do it itself.

Standard input, whose other end `baton up` holds, carries one line per process session of the run, the same with a minus
once that session is empty (its number may then be another's), and "done" once all is clean. End of file without "done" =
`baton up` is gone: end every process of these sessions, remove the temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from cli.processes import end_sessions, living_pids

_GENTLE_S = 3.0  # what workers need to close their shared memory
_KILL_S = 10.0
_DONE = "done"


class Guard:
    """The guard process, as `baton up` sees it."""

    def __init__(self, temp_dir: Path) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", __name__, str(temp_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, session: int) -> None:
        self._say(str(session))

    def forget(self, session: int) -> None:
        self._say(f"-{session}")

    def dismiss(self) -> None:
        """Say that all is clean, and collect the guard."""
        self._say(_DONE)
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._popen.communicate(timeout=_GENTLE_S)
        self._popen.kill()
        self._popen.wait()

    def _say(self, line: str) -> None:
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the run goes on without one
            self._popen.stdin.write(f"{line}\n")
            self._popen.stdin.flush()


def main() -> int:
    temp_dir = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lines = sys.stdin.read().split()
    if _DONE in lines:
        return 0
    sessions = sessions_of(lines)
    for pid in living_pids(sessions):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline_s = time.monotonic() + _GENTLE_S
    while living_pids(sessions) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    left = end_sessions(sessions, _KILL_S)
    shutil.rmtree(temp_dir, ignore_errors=True)
    return 1 if left else 0


def sessions_of(lines: Iterable[str]) -> set[int]:
    """Those that were said and not taken back."""
    sessions: set[int] = set()
    for number in map(int, lines):
        sessions.discard(-number)
        if number > 0:
            sessions.add(number)
    return sessions


if __name__ == "__main__":
    sys.exit(main())
