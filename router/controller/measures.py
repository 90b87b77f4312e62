"""What the controller knows of its fleet's work: attainment and goodput, what will arrive, how long steps take. Pure.

    heard    a router's windows and totals            -> Observer
    sampled  a worker's totals of steps               -> StepModel of its role
    advance  once a second or so                      -> each TICK_S one rate per class to its Forecaster; a tick in which no
                                                         router lived is one without data, which is not the same as none

Instants come in, on one clock that never goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from baton.config import EmulationConfig
from engine.timing.step_time import step_time
from router.controller.arrivals import TICK_S, Forecast, Forecaster
from router.controller.observer import FleetView, Observer
from router.controller.rate_store import SavedRates
from router.controller.step_model import KeptSteps, StepModel, Terms, terms_of
from router.controller.step_samples import Kinds, StepSamples
from router.windows import RouterWindows

SILENT_TICKS = 360  # an hour; a class that had no call for so long is forgotten, and begins anew
SAVED_TICKS = 360  # an hour: filters are compared over ten minutes, levels follow within one
MAX_CATCH_UP = 360  # ticks after a pause of this process: an hour without data leaves nothing of a forecast anyway


@dataclass(frozen=True, slots=True)
class ClassForecast:
    class_name: str
    rate: float | None  # of the last tick, calls a second; None: no router lived
    forecasts: tuple[Forecast, ...]  # by lead


def roofline_of(emulation: EmulationConfig) -> Terms:
    """Where step models begin: the emulated GPUs', or, since nobody says what real ones are, an 8B model's on one H100."""
    gpu = emulation.gpu or "h100"
    return terms_of(
        step_time(gpu, emulation.model, emulation.tp, weight_dtype=emulation.weight_dtype, kv_dtype=emulation.kv_dtype)
    )


class Measures:
    """Of one fleet."""

    def __init__(self, roofline: Terms, now_s: float, saved: SavedRates | None = None, now_unix_s: float = 0.0) -> None:
        """`roofline`: where the models of all roles begin. Only its proportions count: how fast the workers really are is
        learned first (step_model.py). `saved`: what an earlier controller heard; since then there is no data."""
        self.steps: dict[str, StepModel] = {}  # by role
        self._roofline = roofline
        self._observer = Observer()
        self._samples = StepSamples()
        self._forecasters: dict[str, Forecaster] = {}
        self._ticks: dict[str, deque[float | None]] = {}  # what the forecasters were told
        self._tick_s = now_s  # when the current one began
        if saved is not None:
            self._remember(saved, now_unix_s)

    def heard(self, router_id: str, windows: RouterWindows, now_s: float) -> None:
        self.advance(now_s)
        self._observer.heard(router_id, windows, now_s)

    def sampled(self, worker_id: str, epoch: int, role: str, kinds: Kinds, now_s: float) -> None:
        """`kinds`: a worker's totals, of steps of one kind each."""
        for work, step_s in self._samples.take(worker_id, epoch, kinds, now_s):
            if role not in self.steps:
                self.steps[role] = StepModel(self._roofline)
            self.steps[role].observe(work, step_s)

    def kept_steps(self) -> dict[str, KeptSteps]:
        """By role, of those that have learned something."""
        return {role: kept for role, model in self.steps.items() if (kept := model.kept()) is not None}

    def restore_steps(self, kept: Mapping[str, KeptSteps]) -> None:
        """Of an earlier process. Raises: ValueError: nobody can have learned that; nothing has changed then."""
        restored = {role: StepModel(self._roofline) for role in kept}
        for role, model in restored.items():
            model.restore(kept[role])
        self.steps.update(restored)

    def advance(self, now_s: float) -> None:
        """Close the ticks that are over."""
        num_ticks = int((now_s - self._tick_s) / TICK_S)
        if num_ticks < 1:
            return
        self._tick_s += num_ticks * TICK_S
        self._close_tick(self._observer.hears(now_s))
        for _ in range(min(num_ticks - 1, MAX_CATCH_UP)):  # nobody asked meanwhile, so nobody reported either
            self._close_tick(False)
        self._samples.forget(now_s)

    def _close_tick(self, has_data: bool) -> None:
        arrived = self._observer.take_arrivals()
        for name in arrived.keys() | self._forecasters.keys():
            self._tell(name, arrived[name] / TICK_S if has_data else None)
            if self._forecasters[name].silent_ticks >= SILENT_TICKS:
                del self._forecasters[name], self._ticks[name]

    def _tell(self, name: str, rate: float | None) -> None:
        self._forecasters.setdefault(name, Forecaster()).observe(rate)
        self._ticks.setdefault(name, deque(maxlen=SAVED_TICKS)).append(rate)

    def saved(self, now_unix_s: float) -> SavedRates:
        """What a successor needs to forecast alike."""
        return SavedRates(now_unix_s, {name: tuple(ticks) for name, ticks in self._ticks.items()})

    def _remember(self, saved: SavedRates, now_unix_s: float) -> None:
        missed_s = min(max(0.0, now_unix_s - saved.at_unix_s), MAX_CATCH_UP * TICK_S)  # wall clocks jump
        for name, ticks in saved.ticks.items():
            for rate in (*ticks[-SAVED_TICKS:], *[None] * round(missed_s / TICK_S)):
                self._tell(name, rate)

    def view(self, now_s: float) -> FleetView:
        return self._observer.view(now_s)

    def forecasts(self, now_s: float) -> list[ClassForecast]:
        self.advance(now_s)
        return [
            ClassForecast(name, forecaster.rate, tuple(forecaster.forecasts()))
            for name, forecaster in sorted(self._forecasters.items())
        ]
