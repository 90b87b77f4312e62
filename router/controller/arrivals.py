"""How much will arrive once a new worker is up: forecasts of a rate, and how far off they were. Pure: one value per tick.

A bank of simple filters sees every tick; each is scored on what it would have forecast at each lead, and the one that was off
least of late speaks. The candidates:

    last       the last tick's rate: what a forecast must beat
    level-q    Kalman filter of a random walk; q = how much the rate moves per tick, relative. The noise of a tick is known: the
               arrivals counted in it are at best Poisson, so a slow service is smoothed for minutes and a busy one hardly at all
    trend-q    the same with a damped slope: (damped) Holt, with gains that follow from the rate

A daily season was tried and left out: at these leads it made forecasts worse on fourteen days of real traffic.
Intervals are quantiles of realised / forecast rates at that lead, so they are as wide as the errors were. A tick without data
changes nothing for HOLD_TICKS, since a controller that lost its routers must not shrink the pools that serve; from then on the
forecast halves each HALF_LIFE_S: what nobody confirms any more decays to zero.
Source: Durbin and Koopman, Time Series Analysis by State Space Methods, 2012, chapter 2; Gardner and McKenzie 1985 (damping).
measured: docs/goodput.md, `python -m bench.forecast_error`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

TICK_S = 10.0  # a burst of seconds shows, and at 1 call/s a tick still has ten
LEADS_S = (60.0, 300.0)  # a warm worker's start, a cold one's: weights from disk, weights from the network
TARGET_TICKS = 3  # whose mean rate, up to its lead, a forecast is of: single ones are noise that no GPU can follow
HOLD_TICKS = 3
HALF_LIFE_S = 60.0
SCORE_MEMORY = 1 - 1 / 60  # per tick: filters are compared over about the last ten minutes
NUM_ERRORS = 720  # realised errors kept by lead: two hours
MIN_ERRORS = 20  # fewer have no such quantiles
INTERVAL = (0.07, 0.93)  # of past errors: 80 % of the next ones are inside, as errors drift. measured: docs/goodput.md
FIRST_INTERVAL = (0.5, 2.0)  # of the forecast, before there are errors to go by: the azure trace doubles within minutes
MAX_RATE = 1e6  # calls a second, beyond any deployment: a counter that ran wild
DAMPING = 0.9  # of the slope per tick, which so carries 9 ticks' worth. measured: docs/goodput.md
NEVER = 1e-3  # chance below which silence is no chance any more: traffic has stopped


class Filter(Protocol):
    """Follows one rate."""

    def update(self, rate: float) -> None: ...

    def predict(self, num_ticks: int) -> float:
        """The rate so many ticks from now; never below 0."""
        ...


@dataclass(slots=True)
class Last:
    rate: float = 0.0

    def update(self, rate: float) -> None:
        self.rate = rate

    def predict(self, num_ticks: int) -> float:
        return self.rate


@dataclass(slots=True)
class Level:
    """A Kalman filter of a random walk with steps of `drift` x level; a tick's variance is level / TICK_S."""

    drift: float
    level: float = 0.0
    variance: float = math.inf  # of the level

    def update(self, rate: float) -> None:
        if math.isinf(self.variance):
            self.level, self.variance = rate, _noise(rate)
            return
        expected = self.variance + (self.drift * self.level) ** 2
        gain = expected / (expected + _noise(self.level))
        self.level += gain * (rate - self.level)
        self.variance = (1 - gain) * expected

    def predict(self, num_ticks: int) -> float:
        return max(0.0, self.level)


@dataclass(slots=True)
class Trend:
    """The same with a slope that fades: level' = level + slope, slope' = DAMPING x slope + noise."""

    drift: float
    level: float = 0.0
    slope: float = 0.0
    _var_level: float = math.inf
    _var_slope: float = 0.0
    _covariance: float = 0.0

    def update(self, rate: float) -> None:
        if math.isinf(self._var_level):
            self.level, self._var_level = rate, _noise(rate)
            return
        moved = (self.drift * self.level) ** 2
        ahead = self.level + self.slope
        var_level = self._var_level + 2 * self._covariance + self._var_slope + moved
        covariance = DAMPING * (self._covariance + self._var_slope)
        var_slope = DAMPING**2 * self._var_slope + moved / 4
        innovation = rate - ahead
        of_level, of_slope = (v / (var_level + _noise(ahead)) for v in (var_level, covariance))
        self.level = ahead + of_level * innovation
        self.slope = DAMPING * self.slope + of_slope * innovation
        self._var_level = (1 - of_level) * var_level
        self._covariance = (1 - of_level) * covariance
        self._var_slope = var_slope - of_slope * covariance

    def predict(self, num_ticks: int) -> float:
        faded = (1 - DAMPING**num_ticks) / (1 - DAMPING)
        return max(0.0, self.level + self.slope * faded)


def _noise(rate: float) -> float:
    """Variance of one tick's rate, Poisson; at least that of one call."""
    return max(rate, 1 / TICK_S) / TICK_S


def new_bank() -> dict[str, Filter]:
    """The candidates, by name. The drifts are those that won on some trace at some lead: docs/goodput.md."""
    return {
        "last": Last(),
        "level-0.03": Level(0.03),
        "level-0.1": Level(0.1),
        "trend-0.001": Trend(0.001),
        "trend-0.003": Trend(0.003),
    }


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of the mean rate of the TARGET_TICKS before `lead_s` from now."""

    lead_s: float
    rate: float  # calls a second
    low: float
    high: float
    by: str  # the filter that spoke
    error: float | None  # median relative error of the last forecasts at this lead; None: too few have come true
    coverage: float | None  # share of realised rates that were inside their interval; likewise


@dataclass(slots=True)
class _Told:
    """What was said of a moment, until it comes."""

    by_filter: dict[str, float]
    chosen: Forecast


class _Lead:
    """One lead's: who speaks, what was said, how far off it was."""

    def __init__(self, lead_s: float) -> None:
        self.lead_s = lead_s
        self.num_ticks = round(lead_s / TICK_S)
        self.scores: dict[str, float] = {}  # faded sums of absolute errors
        self.told: deque[_Told | None] = deque(
            maxlen=self.num_ticks
        )  # the first is of this tick; None: a tick without data
        self.ratios: deque[float] = deque(maxlen=NUM_ERRORS)  # realised by forecast
        self.errors: deque[float] = deque(maxlen=NUM_ERRORS)  # relative
        self.inside: deque[bool] = deque(maxlen=NUM_ERRORS)

    def realise(self, rate: float | None) -> None:
        """The moment has come of which the oldest forecast spoke."""
        told = self.told[0] if len(self.told) == self.num_ticks else None
        if told is None or rate is None:
            return
        for name, said in told.by_filter.items():
            self.scores[name] = SCORE_MEMORY * self.scores.get(name, 0.0) + abs(said - rate)
        least = 1 / (TARGET_TICKS * TICK_S)  # one call: nothing smaller can be seen
        said = told.chosen.rate
        self.ratios.append(max(rate, least) / max(said, least))
        self.errors.append(abs(said - rate) / max(rate, least))
        self.inside.append(told.chosen.low <= rate <= told.chosen.high)

    def forecast(self, by_filter: dict[str, float]) -> Forecast:
        by = min(by_filter, key=lambda name: self.scores.get(name, 0.0))
        rate = by_filter[by]
        low, high = self._interval()
        known = len(self.errors) >= MIN_ERRORS
        return Forecast(
            lead_s=self.lead_s,
            rate=rate,
            low=rate * low,
            high=max(rate, 1 / (TARGET_TICKS * TICK_S)) * high,
            by=by,
            error=sorted(self.errors)[len(self.errors) // 2] if known else None,
            coverage=sum(self.inside) / len(self.inside) if known else None,
        )

    def _interval(self) -> tuple[float, float]:
        if len(self.ratios) < MIN_ERRORS:
            return FIRST_INTERVAL
        ordered = sorted(self.ratios)
        return ordered[int(INTERVAL[0] * len(ordered))], ordered[min(len(ordered) - 1, int(INTERVAL[1] * len(ordered)))]


class Forecaster:
    """Of one rate. Call `observe` once per tick of TICK_S."""

    def __init__(self, leads_s: Sequence[float] = LEADS_S) -> None:
        """Raises: ValueError: a lead shorter than the forecast's target, or one that is no whole number of ticks."""
        for lead_s in leads_s:
            if lead_s < TARGET_TICKS * TICK_S or lead_s % TICK_S:
                raise ValueError(
                    f"lead_s {lead_s:g} must be a multiple of {TICK_S:g}, at least {TARGET_TICKS * TICK_S:g}"
                )
        self._bank = new_bank()
        self._leads = [_Lead(lead_s) for lead_s in leads_s]
        self._recent: deque[float | None] = deque(maxlen=TARGET_TICKS)
        self._num_missing = 0
        self._has_stopped = False
        self.silent_ticks = 0  # since the last call; ticks without data count neither way
        self.rate: float | None = None  # of the last tick

    def observe(self, rate: float | None) -> None:
        """Take one tick's rate, calls a second; None, and what cannot be one, is a tick without data."""
        if rate is not None and not 0 <= rate <= MAX_RATE:  # NaN fails, too
            rate = None
        self.rate = rate
        self._recent.append(rate)
        target = _mean(self._recent)
        for lead in self._leads:
            lead.realise(target)
        if rate is None:
            self._num_missing += 1
        else:
            self._take(rate)
        for lead in self._leads:
            lead.told.append(self._tell(lead) if rate is not None else None)

    def forecasts(self) -> list[Forecast]:
        """One per lead."""
        return [_faded(self._tell(lead).chosen, self._fade()) for lead in self._leads]

    def _take(self, rate: float) -> None:
        self.silent_ticks = 0 if rate else self.silent_ticks + 1
        begins = self._has_stopped and rate > 0
        self._has_stopped = not rate and (self._has_stopped or self._is_no_chance())
        if self._has_stopped or begins or self._num_missing > HOLD_TICKS:
            self._bank = new_bank()  # what they knew is over
        self._num_missing = 0
        for candidate in self._bank.values():
            candidate.update(rate)

    def _is_no_chance(self) -> bool:
        """Whether so long a silence would be a wonder at the rate there was."""
        return math.exp(-self._bank["level-0.03"].predict(1) * TICK_S * self.silent_ticks) < NEVER

    def _tell(self, lead: _Lead) -> _Told:
        by_filter = {name: candidate.predict(lead.num_ticks) for name, candidate in self._bank.items()}
        return _Told(by_filter, lead.forecast(by_filter))

    def _fade(self) -> float:
        num_ticks = max(0, self._num_missing - HOLD_TICKS)
        return float(0.5 ** (num_ticks * TICK_S / HALF_LIFE_S))


def _faded(forecast: Forecast, fade: float) -> Forecast:
    return replace(forecast, rate=forecast.rate * fade, low=forecast.low * fade, high=forecast.high * fade)


def _mean(rates: Sequence[float | None]) -> float | None:
    """None where one is missing."""
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if len(known) == TARGET_TICKS else None
