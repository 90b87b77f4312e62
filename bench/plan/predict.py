"""What others ask of the planner without its search: what a deployment would attain, and whether disaggregation pays. Pure.

For a process of its own: both take plain values and run for seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.slo import SLO
from bench.plan.judge import Effort, Judge, mean_and_half_width, student_t
from bench.plan.plan import Gain, Question, check_floor, gain_of, space_of
from bench.plan.screen import Targets
from bench.plan.search import Search
from bench.plan.space import OWN_WINDOW_S, SHIPPING_WINDOW_S, Candidate, Offer
from bench.plan.traffic import Traffic, load_of
from bench.sim.deployment import Deployment
from bench.sim.simulation import Mix

LEAST_HALF_WIDTH = (
    0.005  # of a prediction: step times are off by some percent however alike the seeds are (docs/timing.md)
)


@dataclass(frozen=True, slots=True)
class Attainment:
    """Of one class: the share of calls within all its targets."""

    mean: float
    low: float  # what one more run of as many calls comes out within, in 95 % of runs like these
    high: float
    num_calls: int  # simulated, of this class


def predict(
    deployment: Deployment,
    traffic: Traffic,
    classes: Sequence[tuple[SLO, float]],
    *,
    window_s: float | None = None,
    effort: Effort | None = None,
) -> dict[str, Attainment]:
    """Return what each class would attain at the traffic's rate, by name; a class that no call is of is left out.

    `classes`: with their shares of calls. `window_s`: the router's; the default fits the layout.
    """
    effort = effort or Effort()
    mix = Mix(tuple(slo for slo, _ in classes), tuple(share for _, share in classes))
    usual_s = SHIPPING_WINDOW_S if deployment.layout.num_prefill else OWN_WINDOW_S
    candidate = Candidate(deployment, usual_s if window_s is None else window_s, deployment.usd_per_hour)
    judge = Judge(traffic, mix)
    trials = [
        judge.trial(candidate, traffic.rate, num_calls=effort.final_calls, seed=seed)
        for seed in effort.final_seed_numbers
    ]
    found = {}
    for number, slo in enumerate(mix.classes):
        shares = [one.attainment for trial in trials if (one := trial.classes[number]).attainment is not None]
        known = [share for share in shares if share is not None]
        if known:
            found[slo.name] = _attainment(known, sum(trial.classes[number].num_calls for trial in trials))
    return found


def _attainment(shares: Sequence[float], num_calls: int) -> Attainment:
    """The interval of one more draw: the spread of runs, and what is not known of their mean; or that of counting, if wider."""
    num, (mean, _) = len(shares), mean_and_half_width(shares)
    run_calls = num_calls / num
    counting = 1.96 * math.sqrt(mean * (1 - mean) / run_calls)
    spread = 0.0
    if num > 1:
        deviation = math.sqrt(sum((share - mean) ** 2 for share in shares) / (num - 1))
        spread = student_t(num - 1) * deviation * math.sqrt(1 + 1 / num)
    half = max(spread, counting, LEAST_HALF_WIDTH)
    return Attainment(mean, max(0.0, mean - half), min(1.0, mean + half), num_calls)


def pays(
    traffic: Traffic,
    classes: Sequence[tuple[SLO, float]],
    *,
    gpus: int,
    model: str,
    gpu: str = "h100",
    widths: Sequence[int] = (1,),
    effort: Effort | None = None,
) -> Gain | None:
    """Compare the best layout with prefill workers and the best without, on exactly so many GPUs.

    None: one of the two holds nothing. Raises: ConfigError: a name or number that makes no sense, a target below the floor.
    """
    effort = effort or Effort()
    mix = Mix(tuple(slo for slo, _ in classes), tuple(share for _, share in classes))
    question = Question(model, [Offer.parse(gpu)], traffic, mix, gpus, widths, effort=effort)
    load = load_of(traffic)
    check_floor(question, load)
    judge = Judge(traffic, mix)
    search = Search(space_of(question, load), load, Targets.of(mix.classes), judge, effort)
    rates = []
    for is_colocated in (False, True):
        found = search.best(gpus, wanted=lambda one, kind=is_colocated: one.is_colocated is kind)  # type: ignore[misc]
        if found is None:
            return None
        knees = [
            judge.knee(found.candidate, found.knee.rate, num_calls=effort.search_calls, seed=seed)
            for seed in effort.final_seed_numbers
        ]
        rates.append([knee.rate / found.candidate.usd_per_hour for knee in knees])
    return gain_of(*rates)
