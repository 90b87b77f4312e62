"""A process that a bench started, and the pipe to it: one question, one answer.

The child is `python -m MODULE FD...`, one file descriptor for each pipe that it is given, the parent's first. It ends when that
pipe closes, so nothing outlives a bench, however the bench ends; a terminal's Ctrl-C reaches the bench alone.
Messages are pickled dataclasses: both ends are processes of one bench and hold the only ends of the pipe.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as Pipe  # the two ends that the children of a pair hold
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent  # where the packages are, for interpreters that do not have them installed
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_TIMEOUT_S = 10.0  # a plane waits 5 s for a silent peer's slots

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Failed:
    """A child's answer to what it could not do."""

    reason: str


class ChildError(Exception):
    """A child failed, died or did not answer; says which and why."""


class Child:
    """Owns the process; `close` ends it."""

    def __init__(
        self,
        name: str,
        module: str,
        pipes: Sequence[Connection] = (),
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it, with `environment` added to ours, through the command `prefix`, which must become it. `pipes` are its
        ends of other pipes, closed here.

        Raises:
            ChildError: no such interpreter.
        """
        self.name = name
        self._pipe, theirs = Pipe()
        given = [theirs, *pipes]
        fds = [pipe.fileno() for pipe in given]
        try:
            self._process = subprocess.Popen(
                [*prefix, python, "-m", module, *map(str, fds)], pass_fds=fds, start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path(), "UCX_WARN_UNUSED_ENV_VARS": "n", **(environment or {})},
                stdin=subprocess.DEVNULL, stdout=sys.stderr,
            )  # fmt: skip
        except OSError as error:
            raise ChildError(f"{name}: {python} cannot be started: {error.strerror}") from error
        finally:
            for pipe in given:
                pipe.close()

    def tell(self, message: object) -> None:
        """Raises: ChildError: it is gone."""
        try:
            self._pipe.send(message)
        except OSError as error:
            raise ChildError(f"{self.name} is gone: {error}") from error

    def ask(self, question: object, kind: type[Answer], timeout_s: float) -> Answer:
        """Raises: ChildError: as tell and hear."""
        self.tell(question)
        return self.hear(kind, timeout_s)

    def hear(self, kind: type[Answer], timeout_s: float) -> Answer:
        """The next answer. Raises: ChildError: it failed, is gone, said nothing in time or something else."""
        try:
            if not self._pipe.poll(timeout_s):
                raise ChildError(f"{self.name} did not answer within {timeout_s:g} s")
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise ChildError(f"{self.name} ended before it answered, status {self._process.poll()}") from error
        if isinstance(answer, Failed):
            raise ChildError(f"{self.name}: {answer.reason}")
        if not isinstance(answer, kind):
            raise ChildError(f"{self.name} said {answer} where {kind.__name__} was expected")
        return answer

    def fileno(self) -> int:
        """Readable when it has answered, or is gone; for who waits for several."""
        return self._pipe.fileno()

    def close(self) -> None:
        """Idempotent."""
        self._pipe.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def die_with_parent() -> None:
    """For `preexec_fn` of what has no pipe to watch: whoever kills the bench kills it too; prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def python_path() -> str:
    """Ours before whatever the caller set."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
