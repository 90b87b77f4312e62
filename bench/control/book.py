"""What came of it, for programs: one JSON document, written anew after each load, so that a run that was interrupted can go on.

`rows[]` of `{load, in_slo, gpu_hours, reversals_per_hour, baselines: {name: the same}, oracle}`, and more. A document is gone
on with only where it was made with the same settings, and a row taken over only where its load is the same, call by call; whether
the policies still decide alike it does not say.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from bench.control.baselines import SCALE_ONLY_SETTINGS
from bench.control.contest import Result, Row, Settling
from bench.control.dynamo import DYNAMO_SETTINGS
from bench.control.foresight import INTERVAL_S, MISS_FACTOR
from bench.control.loads import Load, catalogue
from bench.control.rig import BOUNDS, CHAT, SEATS, TIMES, deployment
from bench.control.runs import HEADROOMS, NUM_STATIC, TUNING_S
from bench.control.trial import Figures
from bench.sim.deployment import Layout

_RANGES = ("in_slo", "gpu_hours", "loss")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of a whole bench: what the figures of two runs must have in common to stand in one document."""

    seeds: tuple[int, ...]
    length: float
    tunes: bool
    planner_version: str | None  # ai-dynamo's; None: it takes no part

    def document(self) -> dict[str, Any]:
        return {
            "times": asdict(TIMES),
            "slo": asdict(CHAT),
            "seats": SEATS,
            "seeds": [*self.seeds],
            "length": self.length,
            "tuned": self.tunes,
            "miss_factor": MISS_FACTOR,
            "oracle_interval_s": INTERVAL_S,
            "oracle_headrooms": [*HEADROOMS],
            "num_static": NUM_STATIC,
            "tuning_s": TUNING_S,
            "scale_only_settings": [str(setting) for setting in SCALE_ONLY_SETTINGS],
            "dynamo_settings": [str(setting) for setting in DYNAMO_SETTINGS],
            "bounds": asdict(BOUNDS),
            "deployment": repr(deployment(Layout(1, 1))),
            "ai_dynamo": self.planner_version,
        }


class Book:
    """Of one bench: its rows so far, and the file that holds them."""

    def __init__(self, path: Path | None, settings: Settings) -> None:
        """`path`: None = they are kept nowhere."""
        self._path = path
        self._settings = settings
        self._rows: dict[str, Row] = {}  # by load
        self._documents: dict[str, Mapping[str, Any]] = {}  # likewise, those of an earlier run included

    @property
    def rows(self) -> Sequence[Row]:
        """Of this run, or taken over by it; in the catalogue's order."""
        return [self._rows[load.name] for load in catalogue() if load.name in self._rows]

    def go_on(self) -> None:
        """Take up the document that is there, if there is one. What it has of loads that are not measured again stays in it.

        Raises:
            ConfigError: it was made with other settings, or is none of ours.
        """
        assert self._path is not None, "there is a file to go on with"
        if not self._path.exists():
            return
        try:
            document = json.loads(self._path.read_text())
            self._documents = {row["load"]: row for row in document["rows"]}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--continue: {self._path} is no document of this bench ({error!r})") from error
        for name, wanted in json.loads(json.dumps(self._settings.document())).items():
            if document.get(name) != wanted:
                raise self._mismatch(f"{name} is {document.get(name)} there and {wanted} here")

    def has(self, load: Load) -> bool:
        """Whether there is a row of that name."""
        return load.name in self._documents

    def take_over(self, load: Load, played: str) -> None:
        """Make the row that is there one of ours. `played`: the load's digest.

        Raises:
            ConfigError: it is of another load of this name.
        """
        found = self._documents[load.name]
        if found.get("load_sha256") != played:
            raise self._mismatch(f"the load {load.name!r} has other calls, faults or targets there than here")
        self._rows[load.name] = _row_of(found, load)

    def _mismatch(self, why: str) -> ConfigError:
        return ConfigError(f"--continue: {self._path} cannot be gone on with: {why}; name another --json file")

    def add(self, row: Row) -> None:
        """Write it down. Who reads meanwhile finds the document as before or as after, never a part of it."""
        self._rows[row.load.name] = row
        self._documents[row.load.name] = _document(row)
        if self._path is None:
            return
        rows = [self._documents[load.name] for load in catalogue() if load.name in self._documents]
        written = self._path.with_name(self._path.name + ".new")
        written.write_text(json.dumps({**self._settings.document(), "rows": rows}, indent=1))
        os.replace(written, self._path)


def _document(row: Row) -> dict[str, Any]:
    return {
        "load": row.load.name,
        "load_sha256": row.played,
        "goal": row.load.goal,
        "duration_s": row.load.duration_s,
        "max_gpus": row.load.max_workers,
        **_result(row.ours),
        "recovered": row.recovered,
        "settling": asdict(row.settling) if row.settling is not None else None,
        "back_s": list(row.back_s),
        "static": list(row.static),
        "baselines": {name: _result(result) for name, result in row.baselines.items()},
        "oracle": {**_result(row.oracle), "planned_loss": row.bound},
    }


def _result(result: Result) -> dict[str, Any]:
    ranges = {
        f"{name}_range": [min(values), max(values)]
        for name in _RANGES
        for values in ([getattr(one, name) for one in result.by_seed],)
    }
    by_seed = [asdict(one) for one in result.by_seed]
    return {**asdict(result.figures), **ranges, "setting": result.setting, "by_seed": by_seed}


def _row_of(found: Mapping[str, Any], load: Load) -> Row:
    prefill, decode = found["static"]
    return Row(
        load=load,
        played=found["load_sha256"],
        ours=_result_of(found),
        baselines={name: _result_of(result) for name, result in found["baselines"].items()},
        oracle=_result_of(found["oracle"]),
        bound=found["oracle"]["planned_loss"],
        static=(prefill, decode),
        settling=Settling(**found["settling"]) if found["settling"] is not None else None,
        back_s=found["back_s"],
    )


def _result_of(found: Mapping[str, Any]) -> Result:
    by_seed = tuple(Figures(**one) for one in found["by_seed"])
    return Result(Figures(**{name: found[name] for name in Figures.__slots__}), by_seed, found["setting"])
