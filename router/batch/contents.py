"""Big contents beside the store: input and output files, and the journals from which outputs are made.

    FILE_ID.jsonl               a file, whole: written as .part, flushed to the disk, renamed
    BATCH_ID.GENERATION.done    one owner's journal: a record per finished line, appended, flushed to the disk in groups

A journal's last record may be torn by a crash; it has no line end then and does not count, and the line is run again. Each
owner writes a journal of its own, so one that was taken for dead cannot tear another's. Of two records of one line the first
counts: whatever happens, a line has one outcome. Blocks on the disk: run it off the event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PART, _WHOLE, _DONE = ".part", ".jsonl", ".done"
ORPHAN_S = 3_600.0  # after which a file that nobody knows of is rubbish; an upload takes 10 minutes at most


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one line."""

    line: int  # from 1
    succeeded: bool
    text: bytes  # the line of the output file, or of the error file, without its end


class Contents:
    """One folder's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, file_id: str) -> Path:
        """Of a whole file."""
        return self._folder / f"{file_id}{_WHOLE}"

    @contextmanager
    def new(self, file_id: str) -> Iterator[IO[bytes]]:
        """Write a file: whole once the block ends, gone where it ends with an exception."""
        part = self._folder / f"{file_id}{_PART}"
        try:
            with part.open("xb") as file:
                os.chmod(part, 0o600)
                yield file
                _flush(file)
            part.rename(self.path(file_id))
            self._flush_folder()
        finally:
            part.unlink(missing_ok=True)

    def drop(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def lines(self, file_id: str) -> Iterator[tuple[int, bytes]]:
        """(number from 1, text) of each line that is not blank."""
        with self.path(file_id).open("rb") as file:
            for number, line in enumerate(file, 1):
                if text := line.strip():
                    yield number, text

    # -- journals ----------------------------------------------------------------------------------------------------

    def journal(self, batch_id: str, generation: int) -> IO[bytes]:
        """A new one, for `append`; the caller closes it."""
        return (self._folder / f"{batch_id}.{generation}{_DONE}").open("ab")

    def append(self, journal: IO[bytes], outcomes: Iterable[Outcome]) -> None:
        """Returns once they outlive a crash."""
        journal.writelines(b"%d %d %b\n" % (o.line, o.succeeded, o.text) for o in outcomes)
        _flush(journal)

    def outcomes(self, batch_id: str) -> Iterator[Outcome]:
        """Of every finished line, once."""
        seen: set[int] = set()
        for path in self._journals(batch_id):
            with path.open("rb") as file:
                for record in file:
                    if not record.endswith(b"\n"):
                        break
                    line, succeeded, text = record[:-1].split(b" ", 2)
                    if int(line) not in seen:
                        seen.add(int(line))
                        yield Outcome(int(line), succeeded == b"1", text)

    def drop_journals(self, batch_id: str) -> None:
        for path in self._journals(batch_id):
            path.unlink(missing_ok=True)

    def _journals(self, batch_id: str) -> list[Path]:
        """Oldest owner first."""
        return sorted(self._folder.glob(f"{batch_id}.*{_DONE}"), key=lambda path: int(path.name.split(".")[1]))

    # -- housekeeping ------------------------------------------------------------------------------------------------

    def sweep(self, file_ids: set[str], batch_ids: set[str]) -> None:
        """Delete what belongs to none of these and is older than ORPHAN_S: crashes leave such."""
        for path in self._folder.iterdir():
            known = batch_ids if path.suffix == _DONE else file_ids
            if path.suffix not in (_PART, _WHOLE, _DONE) or path.name.split(".")[0] in known:
                continue
            if _age_s(path) > ORPHAN_S:
                path.unlink(missing_ok=True)

    def _flush_folder(self) -> None:
        """So that the new name outlives a crash, too."""
        number = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:  # another process swept it
        return 0.0


def _flush(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
