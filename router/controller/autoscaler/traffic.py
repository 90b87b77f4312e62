"""What a fleet's calls ask of it, in numbers that can be computed with. Pure.

`loads_of` takes the classes as they were seen and leaves out what is not known or cannot be: a class without a rate asks for
nothing, one whose lengths nobody has seen yet is taken at its last ones. The rate is the larger of now's and the forecast at
the start-up lead (DESIGN section 9, step 5). A class below priority 0 fills slack only, so it asks for no worker of its own
(step 4), except where nobody else calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from baton.slo import SLO
from router.controller.autoscaler.facts import ClassTraffic
from router.ring import SHORT_S

LEAST_RATE = 1e-3  # calls a second: one in a quarter of an hour; a forecast that fades never reaches 0
MAX_RATE = 1e6  # as router/controller/arrivals.py
DOUBTS = 2.0  # standard deviations: once in 44 windows by chance
MAX_TOKENS = 1e7  # of a call: as router/controller/step_model.py


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """Of one SLO class. Every field is a finite number, none is negative."""

    slo: SLO
    rate: float  # calls a second
    prompt_tokens: float  # of a call
    lacking_tokens: float  # of them, that must be computed: at least 1
    pairs: float  # (query, context) pairs of their attention
    output_tokens: float  # at least 1

    @property
    def is_background(self) -> bool:
        return self.slo.priority < 0


@dataclass(frozen=True, slots=True)
class Load:
    """Of several classes together; means are over calls."""

    classes: tuple[ClassLoad, ...]
    measured_context: float | None = None  # tokens of a sequence that decodes, seen where they run

    @property
    def rate(self) -> float:
        return sum(load.rate for load in self.classes)

    @property
    def lacking_per_s(self) -> float:
        return sum(load.rate * load.lacking_tokens for load in self.classes)

    @property
    def pairs_per_s(self) -> float:
        return sum(load.rate * load.pairs for load in self.classes)

    @property
    def outputs_per_s(self) -> float:
        return sum(load.rate * load.output_tokens for load in self.classes)

    @property
    def context_tokens(self) -> float:
        """Of a sequence while it decodes, on average over tokens. If nobody has looked: its prompt and half its answer, as if
        long prompts had answers like short ones."""
        if self.measured_context is not None:
            return self.measured_context
        outputs = self.outputs_per_s
        tokens = sum(
            load.rate * load.output_tokens * (load.prompt_tokens + load.output_tokens / 2) for load in self.classes
        )
        return tokens / outputs if outputs else 0.0

    def times(self, factor: float) -> Load:
        """The same calls, more or fewer of them."""
        return replace(self, classes=tuple(replace(load, rate=load.rate * factor) for load in self.classes))


def later(load: Load, classes: Iterable[ClassTraffic]) -> Load | None:
    """The same calls, as many as may come at the longest lead; None: nobody knows."""
    rates = {traffic.slo.name: known(traffic.later_rate, MAX_RATE) for traffic in classes}
    told = [(of_class, rates.get(of_class.slo.name)) for of_class in load.classes]
    if not told or any(rate is None for _, rate in told):
        return None
    return replace(load, classes=tuple(replace(of_class, rate=rate or 0.0) for of_class, rate in told))


def known(value: float | None, most: float) -> float | None:
    """None where it is no number that can be."""
    return value if value is not None and 0 <= value <= most and math.isfinite(value) else None


def loads_of(classes: Iterable[ClassTraffic], last: Mapping[str, ClassLoad]) -> list[ClassLoad]:
    """Of the classes with calls, now or to come; `last`: what was known of each before, by name."""
    loads = (_load_of(traffic, last.get(traffic.slo.name)) for traffic in classes)
    return [load for load in loads if load is not None]


def _load_of(traffic: ClassTraffic, last: ClassLoad | None) -> ClassLoad | None:
    rate = _rate(known(traffic.rate, MAX_RATE), known(traffic.coming_rate, MAX_RATE))
    prompt = known(traffic.prompt_tokens, MAX_TOKENS) or (last.prompt_tokens if last else None)
    output = known(traffic.output_tokens, MAX_TOKENS) or (last.output_tokens if last else None)
    if rate < LEAST_RATE or prompt is None or output is None:
        return None
    lacking = max(1.0, prompt - (known(traffic.cached_tokens, MAX_TOKENS) or 0.0))
    pairs = known(traffic.prompt_pairs, MAX_TOKENS**2)
    if pairs is None:
        pairs = lacking * (prompt - lacking / 2)  # each lacking token looks at all before it
    return ClassLoad(traffic.slo, rate, max(1.0, prompt), lacking, pairs, max(1.0, output))


def _rate(now: float | None, coming: float | None) -> float:
    """Where there is a forecast, which has been smoothed, now's counts as far as chance does not explain it (Poisson)."""
    if now is None or coming is None:
        return now or coming or 0.0
    return max(coming, now - DOUBTS * math.sqrt(now / SHORT_S))


def sizing(loads: Sequence[ClassLoad], counted: Set[str] = frozenset(), measured_context: float | None = None) -> Load:
    """Of the classes that workers are kept for; `counted`: background ones that do not get by on slack."""
    foreground = tuple(load for load in loads if not load.is_background or load.slo.name in counted)
    return Load(foreground or tuple(loads), measured_context)
