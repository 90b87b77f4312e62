"""Whether targets can be met at all, and what a change would do: two seams, and floors from timing or measurement.

A Floor is what no scheduling can beat: a decode step of one sequence, a prompt of one token. A Forecast needs a planner; where
there is none, nobody pretends. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.config import EmulationConfig
from baton.request import Role
from baton.slo import SLO
from baton.v1 import worker_pb2
from engine.timing.step_time import Batch, StepTime, step_time

NO_FORECAST = "no prediction is available: this controller has no planner"


@dataclass(frozen=True, slots=True)
class Floor:
    """None where nothing is known."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    source: str = ""  # where the numbers come from, for the operator


class FloorSource(Protocol):
    def floor(self) -> Floor: ...


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one class's attainment after a change, a share of calls."""

    attainment: float
    low: float  # the interval that holds it in 80 % of changes
    high: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a change would do."""

    classes: Mapping[str, Prediction]  # by name
    unknown: Mapping[str, str]  # classes that nothing can be said of, and why
    assumptions: tuple[str, ...] = ()


class NoForecast(Exception):
    """Nothing can be said; the message says why, for the operator."""


class Forecast(Protocol):
    async def predict(self, before: Sequence[SLO], after: Sequence[SLO]) -> Outlook:
        """With the classes `after` in place of `before`, which are in force. Raises: NoForecast."""
        ...


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A target that cannot be met."""

    field: str  # classes.<name>.<target>
    target_ms: float
    floor_ms: float


def infeasible(classes: Sequence[SLO], floor: Floor) -> list[Infeasible]:
    """Targets below the floor. An ITL is at least a step; a call has a first token and at least one step."""
    floors: dict[str, float | None] = {
        "ttft_ms": floor.ttft_ms,
        "tpot_ms": floor.tpot_ms,
        "itl_p99_ms": floor.tpot_ms,
        "e2e_ms": floor.ttft_ms,
    }
    found = []
    for slo in classes:
        targets = {
            "ttft_ms": slo.ttft_ms,
            "tpot_ms": slo.tpot_ms,
            "itl_p99_ms": slo.itl_p99_ms,
            "e2e_ms": slo.e2e_ms,
        }
        for name, target_ms in targets.items():
            least_ms = floors[name]
            if target_ms is not None and least_ms is not None and target_ms < least_ms:
                found.append(Infeasible(f"classes.{slo.name}.{name}", target_ms, least_ms))
    return found


class StepTimeFloor:
    """What the timing model of the workers' GPUs says of a fleet without any other load."""

    def __init__(self, step_time: StepTime, source: str) -> None:
        prefill = Batch(prefills=((1, 0),), num_decodes=0, decode_context_tokens=0)
        self._floor = Floor(
            ttft_ms=1e3 * step_time.step_s(prefill),
            tpot_ms=1e3 * step_time.decode_steps_s(1, 1, 1),
            source=source,
        )

    def floor(self) -> Floor:
        return self._floor


def emulated_floor(emulation: EmulationConfig) -> StepTimeFloor | None:
    """None where the workers are real."""
    if not emulation.gpu:
        return None
    times = step_time(
        emulation.gpu,
        emulation.model,
        emulation.tp,
        weight_dtype=emulation.weight_dtype,
        kv_dtype=emulation.kv_dtype,
    )
    source = f"one sequence alone, {emulation.model} on {emulation.tp} x {emulation.gpu}"
    return StepTimeFloor(times, source)


class MeasuredFloor:
    """TPOT's floor: the quickest mean step that a decode worker reported while it ran one sequence alone.

    Steps of more sequences are longer and would refuse what an idle fleet can do. Says nothing until that was seen, and nothing
    of TTFT, for no load report holds a lone prompt's time.
    """

    def __init__(self) -> None:
        self._step_ms: float | None = None

    def observe(self, load: worker_pb2.Load) -> None:
        alone = load.role == worker_pb2.Role.ValueType(Role.DECODE) and load.num_running == 1 and load.num_waiting == 0
        if alone and load.step_ms > 0.0 and (self._step_ms is None or load.step_ms < self._step_ms):
            self._step_ms = load.step_ms

    def floor(self) -> Floor:
        if self._step_ms is None:
            return Floor()
        return Floor(tpot_ms=self._step_ms, source="the quickest decode step of one sequence alone, measured")
