"""What the controller has found out about its fleet, in a file: one that starts again decides as the last one would have.

Start-ups as they were measured, step models, and the autoscaler's regrets, lessons and sizes that were enough. All of it can be
found out again, so a file that cannot be read, is of another version or of other workers is logged and left. Written whole and
atomically each SAVE_S and at the end; disks are written beside the event loop, where everything else runs. A save whose task was
cancelled goes on in its thread: the next one waits for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from pydantic import TypeAdapter, ValidationError

from baton import clock
from baton.config import ClusterConfig
from baton.log import get_log
from router.controller.arrivals import TICK_S
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.kept import Kept
from router.controller.live_times import LiveTimes
from router.controller.measures import Measures
from router.controller.step_model import KeptSteps

log = get_log("controller.memory")

VERSION = 1  # of the file; another one's is left alone
SAVE_S = TICK_S  # what a killed controller forgets at most


@dataclass(frozen=True, slots=True)
class Saved:
    """Of one instant."""

    workers: str  # what they are: of others nothing here is true
    at_unix_s: float = 0.0  # clock.unix_s
    version: int = VERSION
    start_ups_s: tuple[float, ...] = ()
    start_ups_from: tuple[str, ...] = ()  # where each one's weights came from; an earlier release did not say
    steps: dict[str, KeptSteps] = field(default_factory=dict)  # by role
    sizes: Kept = field(default_factory=Kept)


SAVED = TypeAdapter(Saved)


class Memory:
    """Of one controller."""

    def __init__(self, file: Path, workers: str, times: LiveTimes, measures: Measures, sizes: Autoscaler) -> None:
        """Takes over what is in `file`, if that is of use. `workers`: as `kind_of_workers`. It blocks for a millisecond."""
        self._file = file
        self._workers = workers
        self._times = times
        self._measures = measures
        self._sizes = sizes
        self._writing = threading.Lock()
        self._failed = False  # one line per outage
        try:
            if (saved := self._load()) is not None:
                self._take_over(saved)
        except (OSError, ValueError, RecursionError) as error:  # the last: of brackets in brackets without end
            log.warning("memory_unreadable", file=str(file), reason=_first_line(error))

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        start_ups = self._times.kept()
        saved = Saved(
            self._workers,
            clock.unix_s(),
            start_ups_s=tuple(seconds for seconds, _ in start_ups),
            start_ups_from=tuple(weights_from for _, weights_from in start_ups),
            steps=self._measures.kept_steps(),
            sizes=self._sizes.kept(),
        )
        try:
            await asyncio.to_thread(self._write, saved)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.error("memory_not_saved", reason=str(error))
            self._failed = True

    def _write(self, saved: Saved) -> None:
        new = self._file.with_suffix(".new")
        with self._writing:
            new.write_bytes(SAVED.dump_json(saved))
            new.replace(self._file)

    def _load(self) -> Saved | None:
        """None: there is nothing. Raises: ValueError: it is of no use; OSError."""
        try:
            said = json.loads(self._file.read_text(encoding="utf-8"), parse_constant=_refuse)
        except FileNotFoundError:
            return None
        if not isinstance(said, dict) or said.get("version") != VERSION:
            raise ValueError(f"it is not of version {VERSION}")
        saved = SAVED.validate_python(said)
        if saved.workers != self._workers:
            raise ValueError("it is of other workers")
        return saved

    def _take_over(self, saved: Saved) -> None:
        """Raises: ValueError."""
        self._measures.restore_steps(saved.steps)
        weights_from = (*saved.start_ups_from, *[""] * len(saved.start_ups_s))
        self._times.restore(zip(saved.start_ups_s, weights_from, strict=False))
        self._sizes.restore(saved.sizes, clock.unix_s() - saved.at_unix_s)


def kind_of_workers(cluster: ClusterConfig) -> str:
    """What start-ups and steps depend on: of other workers they are others."""
    emulation = replace(cluster.emulation, origin=0.0)
    return json.dumps(
        {"model": asdict(cluster.model), "engine": asdict(cluster.engine), "emulation": asdict(emulation)}
    )


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _first_line(error: Exception) -> str:
    """Of a validation error: where, and what is wrong."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error)
