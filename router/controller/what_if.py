"""What a fleet would do, asked of a simulator in another process: plain data, and how it travels. Pure.

    Question   traffic as routers measured it, and scenarios: pools of workers with step times, classes, limits
    Answer     what calls came to in each scenario, once per seed; scenarios of one seed met the very same calls

A router may not import the simulator, so the two sides share these words and nothing else (bench/what_if.py answers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pydantic import TypeAdapter

from baton.request import Role
from baton.slo import SLO
from router.controller.autoscaler.facts import Tuning
from router.controller.step_model import Terms


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What arrives of one SLO class. Lengths as routers count them (router/windows.py): by log bucket, and their mean."""

    class_name: str
    rate: float  # calls a second
    prompt_lengths: tuple[float, ...]
    output_lengths: tuple[float, ...]
    prompt_tokens: float
    output_tokens: float
    cached_share: float = 0.0  # of the prompts' tokens


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """Workers that are alike."""

    role: Role
    num_workers: int
    steps: Terms
    kv_tokens: int  # of each
    tuning: Tuning


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    classes: tuple[SLO, ...]  # calls of a class that is not here do not come
    pools: tuple[WorkerPool, ...]
    local_prefill_tokens: int
    slowness: float = 1.0  # of every step: what the step model may be off by


@dataclass(frozen=True, slots=True)
class Question:
    load: tuple[ClassLoad, ...]
    scenarios: tuple[Scenario, ...]
    kv_bytes_per_token: float
    link_bytes_per_s: float
    network_s: float  # of a first token's way, that no worker accounts for
    warm_up_s: float  # calls that come before do not count
    length_s: float  # calls come for so long
    seeds: tuple[int, ...]  # as many as there is time for, at least one
    budget_s: float  # of the clock on the wall, for all of it


@dataclass(frozen=True, slots=True)
class ClassRun:
    class_name: str
    num_calls: int
    num_met: int

    @property
    def attainment(self) -> float:
        return self.num_met / self.num_calls if self.num_calls else 0.0


@dataclass(frozen=True, slots=True)
class Run:
    scenario: str
    seed: int
    measured_s: float
    classes: tuple[ClassRun, ...]

    @property
    def num_calls(self) -> int:
        return sum(one.num_calls for one in self.classes)

    @property
    def num_met(self) -> int:
        return sum(one.num_met for one in self.classes)

    @property
    def goodput(self) -> float:
        """Calls a second that met every target."""
        return self.num_met / self.measured_s if self.measured_s else 0.0

    def of(self, class_name: str) -> ClassRun:
        return next((one for one in self.classes if one.class_name == class_name), ClassRun(class_name, 0, 0))


@dataclass(frozen=True, slots=True)
class Answer:
    """Every scenario once per seed; none where time was up before the first seed was through."""

    runs: tuple[Run, ...]

    def of(self, scenario: str) -> list[Run]:
        """In the order of the seeds."""
        return [run for run in self.runs if run.scenario == scenario]


QUESTION = TypeAdapter(Question)  # to and from JSON
ANSWER = TypeAdapter(Answer)


class Simulator(Protocol):
    async def ask(self, question: Question) -> Answer:
        """Raises: Unavailable: it did not answer in time, or not at all."""
        ...
