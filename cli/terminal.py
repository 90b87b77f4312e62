"""What the user sees of long work: one line per step, alive on a terminal, plain in a pipe. Progress goes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

console = Console(stderr=True, highlight=False)
output = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # a pipe has no width to wrap at


class Step:
    """A step that is under way; `note` shows how far it is."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.detail = ""
        self._status = console.status(title) if console.is_terminal else None

    def note(self, detail: str) -> None:
        if detail == self.detail:
            return
        self.detail = detail
        if self._status:
            self._status.update(f"{self.title}: {detail}")
        else:
            say(f"  {detail}")

    def begin(self) -> None:
        if self._status:
            self._status.start()
        else:
            say(f"{self.title} ...")

    def end(self) -> None:
        if self._status:
            self._status.stop()


@contextmanager
def step(title: str) -> Iterator[Step]:
    """Show a step while the block runs, then a line with the time it took."""
    shown = Step(title)
    started_s = time.monotonic()
    shown.begin()
    outcome = "failed"
    try:
        yield shown
        outcome = shown.detail or "done"
    finally:
        shown.end()
        say(f"{title}: {outcome} ({time.monotonic() - started_s:.1f} s)")


def say(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


def fail(line: str) -> None:
    """The one clear line that goes with a non-zero exit."""
    console.print(f"baton: {line}", markup=False, soft_wrap=True, style="red")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout."""
    drawn = Table(title=title, title_justify="left")
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    output.print(drawn, markup=False)
