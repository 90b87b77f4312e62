"""Arrival rates of the last hour in a file, so that a controller that starts again forecasts as the last one would have.

Written whole and atomically. A file that cannot be read costs an hour's memory and nothing else, so it is logged and left.
Calls block for a millisecond: run `save` off the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.log import get_log

log = get_log("controller.rates")


@dataclass(frozen=True, slots=True)
class SavedRates:
    """Of one instant."""

    at_unix_s: float = 0.0
    ticks: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)  # by class, oldest first; None: no data


class RateStore:
    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> SavedRates:
        """Nothing where nothing was saved, or what was cannot be understood."""
        try:
            return _rates(json.loads(self._file.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return SavedRates()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("rates_unreadable", file=str(self._file), reason=str(error))
            return SavedRates()

    def save(self, rates: SavedRates) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"at_unix_s": rates.at_unix_s, "ticks": dict(rates.ticks)}), encoding="utf-8")
        new.replace(self._file)


def _rates(saved: dict[str, Any]) -> SavedRates:
    """Raises: TypeError, ValueError, KeyError or AttributeError: it is none."""
    ticks = {
        str(name): tuple(None if rate is None else float(rate) for rate in rates)
        for name, rates in saved["ticks"].items()
    }
    return SavedRates(float(saved["at_unix_s"]), ticks)
