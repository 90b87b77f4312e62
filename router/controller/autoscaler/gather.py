"""The autoscaler's facts, from what routers and workers say. Pure; the controller and the simulator make them with this.

Classes: rates and lengths are the long window's, unless the short one's differ by more than chance explains (levels.py). So a
change of the mix shows within seconds where it is one, and a few long prompts in a row are none. A forecast counts once some of
its kind have come true. Attainment is the short window's; the long one's, where fewer than MIN_JUDGED calls ended in the short.
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
from router.controller.autoscaler.facts import Blueprint, ClassTraffic, FleetFacts, WorkerFacts, WorkerLoad
from router.controller.autoscaler.levels import ClassLevels, Deviation, Level, Levels, Seen
from router.controller.measures import ClassForecast
from router.controller.observer import FleetView
from router.controller.settings import Budget
from router.controller.step_model import MIN_SAMPLES, StepModel, Terms
from router.ring import BUCKET_S, LONG_S, SHORT_S
from router.windows import BUCKETS_PER_DOUBLING, ClassWindow

MIN_JUDGED = 20.0  # calls; below it a single one moves attainment by more than percentiles leave
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
    levels: Levels,
    start_up_s: float,
    local_prefill_tokens: int = 0,
    queued_tokens: int = 0,
    spare_gpus: int | None = None,
    missing_s: float = 0.0,
) -> FleetFacts:
    """`classes`: those in force; what routers say of others is left out. `levels`: this fleet's, from look to look. `start_up_s`:
    the lead that forecasts need at least."""
    if not math.isfinite(now_s):
        raise InvalidRequest(f"now_s is {now_s}; it must be a number", field="now_s")
    levels.keep([slo.name for slo in classes])
    windows = {(window.class_name, window.window_s): window for window in view.classes}
    later = {forecast.class_name: _later_rate(forecast) for forecast in forecasts}
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
                later.get(slo.name),
                levels.of(slo.name),
                now_s,
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


def _later_rate(forecast: ClassForecast) -> float | None:
    """The upper end of the intervals, at any lead; None: nobody knows how good they are."""
    leads = forecast.forecasts
    return max(of_lead.high for of_lead in leads) if leads and all(lead.error is not None for lead in leads) else None


def _traffic(
    slo: SLO,
    short: ClassWindow | None,
    long: ClassWindow | None,
    coming_rate: float | None,
    later_rate: float | None,
    levels: ClassLevels,
    now_s: float,
    *,
    heard: bool,
) -> ClassTraffic:
    """Windows are None where the class had no call of late, or no router lives."""
    now = short or ClassWindow(slo.name, SHORT_S, SHORT_S)
    lately = long or ClassWindow(slo.name, LONG_S, LONG_S)
    judged = now if now.num_judged >= MIN_JUDGED else lately
    prompt_spread, output_spread = _spread(lately.prompt_lengths), _spread(lately.output_lengths)
    prompts = levels.prompt_tokens.look(
        now_s,
        Seen(now.prompt_tokens, now.num_prompts),
        Seen(lately.prompt_tokens, lately.num_prompts),
        _of_lengths(prompt_spread),
    )
    cached = levels.cached_tokens.look(
        now_s,
        Seen(now.cached_tokens, now.num_prompts),
        Seen(lately.cached_tokens, lately.num_prompts),
        _of_hits(prompt_spread, prompts),
    )
    outputs = levels.output_tokens.look(
        now_s,
        Seen(now.output_tokens, now.num_outputs),
        Seen(lately.output_tokens, lately.num_outputs),
        _of_lengths(output_spread),
    )
    return ClassTraffic(
        slo=slo,
        rate=_rate(now, lately, levels.rate, now_s) if heard else None,
        coming_rate=coming_rate,
        later_rate=later_rate,
        prompt_tokens=prompts,
        cached_tokens=cached,
        prompt_pairs=_pairs(prompts, cached, prompt_spread),
        output_tokens=outputs,
        num_arrived=lately.num_arrived,
        judged_s=judged.window_s,
        num_judged=judged.num_judged,
        num_missed_ttft=judged.num_missed_ttft,
        num_missed_tpot=judged.num_missed_tpot + judged.num_missed_itl,
        num_failed=judged.num_failed + judged.num_missed_e2e,
    )


def _rate(now: ClassWindow, lately: ClassWindow, level: Level, now_s: float) -> float | None:
    """Calls a second."""
    short = Seen(now.num_arrived, max(now.span_s, BUCKET_S))
    long = Seen(lately.num_arrived, max(lately.span_s, BUCKET_S))
    return level.look(now_s, short, long, lambda mean, seconds: math.sqrt(mean / seconds))  # Poisson


def _of_lengths(spread: float) -> Deviation:
    """Of calls' mean length."""
    of_one = math.sqrt(max(spread - 1.0, LEAST_SPREAD))
    return lambda mean, num_calls: mean * of_one / math.sqrt(num_calls)


def _of_hits(spread: float, prompt_tokens: float | None) -> Deviation:
    """Of the mean that is cached of prompts: of some nearly all, of the others hardly anything, so one hit is no change."""
    of_lengths = _of_lengths(spread)

    def deviation(mean: float, num_calls: float) -> float:
        if not prompt_tokens:
            return of_lengths(mean, num_calls)
        least = 1 / (num_calls + 2)  # Laplace's rule: nobody has seen that none, or all, ever are
        share = min(1 - least, max(least, mean / prompt_tokens))
        return max(of_lengths(mean, num_calls), prompt_tokens * math.sqrt(share * (1 - share) / num_calls))

    return deviation


def _spread(lengths: Sequence[float]) -> float:
    """The mean of squares over the square of the mean; 1 = all alike. `lengths`: counts by bucket."""
    count = sum(lengths)
    if not count:
        return 1.0
    middles = [math.exp2((place + 0.5) / BUCKETS_PER_DOUBLING) for place in range(len(lengths))]
    mean = sum(num * middle for num, middle in zip(lengths, middles, strict=True)) / count
    squares = sum(num * middle**2 for num, middle in zip(lengths, middles, strict=True)) / count
    return squares / mean**2


def _pairs(prompt: float | None, cached: float | None, spread: float) -> float | None:
    """Of what is not cached: those of the whole prompt less those of its cached beginning. They go by the square, so there are
    more than a mean prompt's."""
    if prompt is None or cached is None:
        return None
    return spread * (prompt**2 - min(cached, prompt) ** 2) / 2
