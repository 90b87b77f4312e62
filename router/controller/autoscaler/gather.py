"""The autoscaler's facts, from what routers and workers say. Pure; the controller and the simulator make them with this.

Classes: rates and lengths are the long window's, unless the short one's differ by more than chance explains: then they are
those. So a change of the mix shows within seconds where it is one, and a few long prompts in a row are none. A forecast counts
once some of its kind have come true. Attainment is the short window's.
Steps: only models that have learned count, since the roofline they begin with may be of other GPUs; who knows the workers'
step times (simulator, emulator) gives Terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.errors import InvalidRequest
from baton.request import Role
from baton.slo import SLO
from baton.v1 import worker_pb2
from router.controller.autoscaler.chance import unless_changed
from router.controller.autoscaler.facts import Blueprint, ClassTraffic, FleetFacts, WorkerFacts, WorkerLoad
from router.controller.measures import ClassForecast
from router.controller.observer import FleetView
from router.controller.settings import Budget
from router.controller.step_model import MIN_SAMPLES, StepModel, Terms
from router.ring import BUCKET_S, LONG_S, SHORT_S
from router.windows import BUCKETS_PER_DOUBLING, ClassWindow

LEAST_SPREAD = 0.01  # of lengths that are all in one bucket: they differ by up to 40 %


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What does not change from look to look."""

    kv_bytes_per_token: float
    link_bytes_per_s: float
    usd_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)  # by shape
    blueprints: Mapping[Role, Blueprint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises: InvalidRequest: a number that cannot be."""
        prices = {f"usd_per_gpu_hour[{shape}]": usd for shape, usd in self.usd_per_gpu_hour.items()}
        for name, value in {
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "link_bytes_per_s": self.link_bytes_per_s,
            **prices,
        }.items():
            if not 0 <= value < math.inf:  # NaN fails, too
                raise InvalidRequest(f"{name} is {value}; it must be a number of at least 0", field=name)


def gather(
    now_s: float,
    *,
    view: FleetView,
    forecasts: Sequence[ClassForecast],
    classes: Sequence[SLO],
    steps: Mapping[Role, Terms],
    workers: Iterable[WorkerFacts],
    budget: Budget,
    surroundings: Surroundings,
    start_up_s: float,
    local_prefill_tokens: int = 0,
    queued_tokens: int = 0,
    spare_gpus: int | None = None,
    missing_s: float = 0.0,
) -> FleetFacts:
    """`classes`: those in force; what routers say of others is left out. `start_up_s`: the lead that forecasts need at least."""
    windows = {(window.class_name, window.window_s): window for window in view.classes}
    coming = {forecast.class_name: _coming_rate(forecast, start_up_s) for forecast in forecasts}
    return FleetFacts(
        now_s=now_s,
        workers=tuple(workers),
        classes=tuple(
            _traffic(
                slo,
                windows.get((slo.name, SHORT_S)),
                windows.get((slo.name, LONG_S)),
                coming.get(slo.name),
                heard=view.num_routers > 0,
            )
            for slo in classes
        ),
        steps=steps,
        budget=budget,
        kv_bytes_per_token=surroundings.kv_bytes_per_token,
        link_bytes_per_s=surroundings.link_bytes_per_s,
        local_prefill_tokens=local_prefill_tokens,
        queued_tokens=queued_tokens,
        oldest_queued_s=view.oldest_queued_s,
        spare_gpus=spare_gpus,
        missing_s=missing_s,
        usd_per_gpu_hour=surroundings.usd_per_gpu_hour,
        blueprints=surroundings.blueprints,
    )


def learned(models: Mapping[str, StepModel]) -> dict[Role, Terms]:
    """Of the roles whose workers have been seen at work; `models`: by a role's name, as Measures has them."""
    return {Role[name.upper()]: model.terms for name, model in models.items() if model.num_samples >= MIN_SAMPLES}


def load_of(load: worker_pb2.Load, at_s: float, block_tokens: int) -> WorkerLoad:
    """What a worker's report says, heard at `at_s`; `block_tokens`: its block size. It is dated back to when the engine said so:
    a worker whose GPU hangs goes on reporting, always the same."""
    return WorkerLoad(
        at_s=at_s - load.age_s,
        num_seqs=load.num_running + load.num_waiting + load.num_tickets,
        waiting_tokens=load.waiting_tokens,
        used_tokens=block_tokens * (load.active_blocks + load.reserved_blocks),
        step_s=load.step_ms / 1e3,
        num_preemptions=load.num_preemptions,
        num_waiting=load.num_waiting,
    )


def _coming_rate(forecast: ClassForecast, start_up_s: float) -> float | None:
    """At the shortest lead that a start-up fits into, else at the longest there is; None: nobody knows how good it is."""
    leads = sorted(forecast.forecasts, key=lambda of_lead: of_lead.lead_s)
    if not leads:
        return None
    told = next((of_lead for of_lead in leads if of_lead.lead_s >= start_up_s), leads[-1])
    return told.rate if told.error is not None else None


def _traffic(
    slo: SLO, short: ClassWindow | None, long: ClassWindow | None, coming_rate: float | None, *, heard: bool
) -> ClassTraffic:
    """Windows are None where the class had no call of late, or no router lives."""
    none = ClassWindow(slo.name, SHORT_S, SHORT_S)
    now, lately = short or none, long or none
    prompts = _Mean(now.prompt_tokens, now.num_prompts, lately.prompt_tokens, lately.num_prompts, lately.prompt_lengths)
    outputs = _Mean(now.output_tokens, now.num_outputs, lately.output_tokens, lately.num_outputs, lately.output_lengths)
    cached = _Mean(now.cached_tokens, now.num_prompts, lately.cached_tokens, lately.num_prompts, lately.prompt_lengths)
    return ClassTraffic(
        slo=slo,
        rate=_rate(now, lately) if heard else None,
        coming_rate=coming_rate,
        prompt_tokens=prompts.value,
        cached_tokens=cached.value,
        prompt_pairs=_pairs(prompts.value, cached.value, prompts.spread),
        output_tokens=outputs.value,
        num_arrived=lately.num_arrived,
        num_judged=now.num_judged,
        num_missed_ttft=now.num_missed_ttft,
        num_missed_tpot=now.num_missed_tpot + now.num_missed_itl,
        num_failed=now.num_failed + now.num_missed_e2e,
    )


def _rate(now: ClassWindow, lately: ClassWindow) -> float:
    """Calls a second."""
    short, long = now.per_s(now.num_arrived), lately.per_s(lately.num_arrived)
    return unless_changed(long, short, math.sqrt(long / max(now.span_s, BUCKET_S)))  # Poisson


@dataclass(frozen=True, slots=True)
class _Mean:
    """Of something over calls."""

    total: float  # over the short window
    count: float
    lately_total: float  # over the long one, which holds the short one, too
    lately_count: float
    lengths: tuple[float, ...]  # counts by bucket over the long window: how much calls differ

    @property
    def value(self) -> float | None:
        """None: there were no calls."""
        if not self.lately_count:
            return self.total / self.count if self.count else None
        long = self.lately_total / self.lately_count
        if not self.count:
            return long
        short = self.total / self.count
        return unless_changed(long, short, long * math.sqrt(max(self.spread - 1.0, LEAST_SPREAD) / self.count))

    @property
    def spread(self) -> float:
        """The mean of squares over the square of the mean; 1 = all alike."""
        middles = [math.exp2((place + 0.5) / BUCKETS_PER_DOUBLING) for place in range(len(self.lengths))]
        count = sum(self.lengths)
        if not count:
            return 1.0
        mean = sum(num * middle for num, middle in zip(self.lengths, middles, strict=True)) / count
        squares = sum(num * middle**2 for num, middle in zip(self.lengths, middles, strict=True)) / count
        return squares / mean**2


def _pairs(prompt: float | None, cached: float | None, spread: float) -> float | None:
    """Of what is not cached: those of the whole prompt less those of its cached beginning. They go by the square, so there are
    more than a mean prompt's."""
    if prompt is None or cached is None:
        return None
    return spread * (prompt**2 - min(cached, prompt) ** 2) / 2
