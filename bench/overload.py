"""`baton bench overload`: what the router's admission does with more load than a fleet can take, and with unequal tenants.

    overload   0.5x to 3x of capacity; then 3x for a minute, falling to 0.5x: attainment of accepted calls, goodput, recovery
    decode     the same where decode seats, not prefill, are what is short
    fairness   a victim alone, and beside others that ask for the rest up to more than twice the capacity
    window     how much work a worker should have before it is given more: bubbles against the victim's wait
The policy objects are the router's own under a virtual clock (bench/overload_fleet.py): hours of load in seconds, the same
figures on every machine. `--live` runs a shorter overload through a real front end over stub workers with scripted service
times (bench/overload_live.py): wall time, this machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.slo import DEFAULT_CLASSES, SLO
from bench.overload_fleet import Fleet, Job, Outcome, Shape
from router.admission import Bounds
from router.tenants import OPEN, Tenant

INTERACTIVE = DEFAULT_CLASSES[0]
# Lengths: log-normal. Medians and spread of outputs as in the azure2023 trace (129 tokens), prompts of a chat with documents.
PROMPT_TOKENS, PROMPT_SIGMA, MAX_PROMPT_TOKENS = 1_500, 1.0, 32_000
OUTPUT_TOKENS, OUTPUT_SIGMA, MAX_OUTPUT_TOKENS = 129, 0.8, 2_000
WARM_S = 15.0  # at the start of a run, of which nothing is said: longer than nearly every answer
LOADS = (0.5, 0.7, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0)
BOUNDS = Bounds(max_inflight=100_000, max_queued=1_024, max_queued_tokens=8_000_000, window_s=0.01)  # RouterConfig's
# Where decode is short: quick prefill, slow steps, a tight target; 31 sequences a worker keep 0.85 x 30 ms.
DECODE_SHAPE = Shape(num_decode=2, step_s=0.010, step_s_per_seq=0.0005)
DECODE_SLO = replace(INTERACTIVE, tpot_ms=30.0)
DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS = 500, 300


@dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson calls of one tenant."""

    calls_per_s: float
    tenant: Tenant = OPEN
    slo: SLO = INTERACTIVE
    prompt_tokens: int = PROMPT_TOKENS  # median
    prompt_sigma: float = PROMPT_SIGMA
    output_tokens: int = OUTPUT_TOKENS
    from_s: float = 0.0
    until_s: float = 75.0

    def jobs(self, seed: int) -> Iterator[Job]:
        rng = random.Random(seed)
        at_s = self.from_s + rng.expovariate(self.calls_per_s)
        while at_s < self.until_s:
            prompt = _tokens(rng, self.prompt_tokens, self.prompt_sigma, MAX_PROMPT_TOKENS)
            output = _tokens(rng, self.output_tokens, OUTPUT_SIGMA, MAX_OUTPUT_TOKENS)
            yield Job(at_s, self.tenant, self.slo, prompt, output)
            at_s += rng.expovariate(self.calls_per_s)


def _tokens(rng: random.Random, median: int, sigma: float, most: int) -> int:
    return max(2, min(most, round(median * rng.lognormvariate(0.0, sigma))))


def mean_tokens(median: int, sigma: float, most: int) -> float:
    """Of what `_tokens` draws."""
    rng = random.Random(0)
    return sum(_tokens(rng, median, sigma, most) for _ in range(20_000)) / 20_000


def prefill_capacity(shape: Shape, prompt_tokens: int = PROMPT_TOKENS, sigma: float = PROMPT_SIGMA) -> float:
    """Calls per second that keep every prefill worker busy."""
    own_s = mean_tokens(prompt_tokens, sigma, MAX_PROMPT_TOKENS) / shape.tokens_per_s + shape.prompt_s
    return shape.num_prefill / own_s


def run(traffic: Iterable[Traffic], shape: Shape, bounds: Bounds = BOUNDS, seed: int = 1) -> list[Outcome]:
    jobs = [job for number, each in enumerate(traffic) for job in each.jobs(seed + number)]
    return Fleet(shape, bounds).run(iter(sorted(jobs, key=lambda job: job.at_s)))


# -- what is said of outcomes ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the calls that arrived within some seconds; goodput of those that ended then."""

    num_calls: int
    num_accepted: int
    attainment: float  # of accepted calls: both targets met
    goodput_per_s: float
    ttft_s: Mapping[str, float]  # of accepted calls
    shed: Mapping[str, int]
    shed_late: int  # of these, how many had waited
    shed_s: Mapping[str, float]  # how long those had


def summary(outcomes: Sequence[Outcome], from_s: float, until_s: float) -> Summary:
    num_good = sum(o.met for o in outcomes if o.end_s is not None and from_s <= o.end_s < until_s)
    mine = [outcome for outcome in outcomes if from_s <= outcome.job.at_s < until_s]
    accepted = [outcome for outcome in mine if outcome.shed is None]
    num_met = sum(outcome.met for outcome in accepted)
    late_s = [o.shed_s - o.job.at_s for o in mine if o.shed_s is not None and o.shed_s > o.job.at_s]
    return Summary(
        num_calls=len(mine),
        num_accepted=len(accepted),
        attainment=num_met / max(1, len(accepted)),
        goodput_per_s=num_good / (until_s - from_s),
        ttft_s=percentiles([outcome.ttft_s for outcome in accepted if outcome.first_s is not None]),
        shed=dict(Counter(str(outcome.shed) for outcome in mine if outcome.shed is not None)),
        shed_late=len(late_s),
        shed_s=percentiles(late_s),
    )


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{q}": ordered[min(len(ordered) - 1, int(q / 100 * len(ordered)))] for q in (50, 95, 99)}


def recovery_s(outcomes: Iterable[Outcome], drop_s: float) -> float:
    """From the drop of the load until the last call arrived that was shed or missed a target."""
    return max((o.job.at_s for o in outcomes if o.job.at_s >= drop_s and not o.met), default=drop_s) - drop_s


# -- scenarios ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overload:
    by_load: Mapping[str, Summary]
    attainment_loss: float  # of accepted calls: 0.9x less 3x
    goodput_share: float  # at 3x, of the best of all loads
    recovery_s: float  # after 3x for a minute


def overload(shape: Shape, traffic: Traffic, loads: Sequence[float] = LOADS, seed: int = 1) -> Overload:
    """`traffic` is that of load 1."""
    by_load = {}
    for load in loads:
        outcomes = run([replace(traffic, calls_per_s=load * traffic.calls_per_s)], shape, seed=seed)
        by_load[f"{load:g}"] = summary(outcomes, WARM_S, traffic.until_s)
    drop_s = traffic.until_s
    calm = replace(traffic, calls_per_s=0.5 * traffic.calls_per_s, from_s=drop_s, until_s=drop_s + 30)
    fallen = run([replace(traffic, calls_per_s=3 * traffic.calls_per_s), calm], shape, seed=seed)
    most, usual = by_load["3"], by_load["0.9"]
    return Overload(
        by_load,
        attainment_loss=usual.attainment - most.attainment,
        goodput_share=most.goodput_per_s / max(each.goodput_per_s for each in by_load.values()),
        recovery_s=recovery_s(fallen, drop_s),
    )


def prefill_bound() -> tuple[Shape, Traffic]:
    shape = Shape()
    return shape, Traffic(prefill_capacity(shape))


def decode_bound() -> tuple[Shape, Traffic]:
    shape, limit_s = DECODE_SHAPE, 0.85 * DECODE_SLO.tpot_ms / 1e3
    num_seats = shape.num_decode * int((limit_s - shape.step_s) / shape.step_s_per_seq)
    output = mean_tokens(DECODE_OUTPUT_TOKENS, OUTPUT_SIGMA, MAX_OUTPUT_TOKENS)
    traffic = Traffic(
        num_seats / (output * limit_s),
        slo=DECODE_SLO,
        prompt_tokens=DECODE_PROMPT_TOKENS,
        output_tokens=DECODE_OUTPUT_TOKENS,
    )
    return shape, traffic


@dataclass(frozen=True, slots=True)
class Fairness:
    """A victim's TTFT alone and beside the others; shares are of the fleet's prefill capacity."""

    victim_load: float
    others_load: float
    num_others: int
    weights: tuple[float, float]
    alone: Mapping[str, float]
    beside: Mapping[str, float]
    p95_rise: float
    num_shed: int  # of the victim's, beside the others


def fairness(
    victim_load: float,
    others_load: float,
    *,
    weights: tuple[float, float] = (1.0, 1.0),
    num_others: int = 1,
    shape: Shape | None = None,
    bounds: Bounds = BOUNDS,
    prompt_sigma: float = PROMPT_SIGMA,
    until_s: float = 120.0,
    seed: int = 3,
) -> Fairness:
    shape = shape or Shape(num_prefill=8, num_decode=4)
    capacity = prefill_capacity(shape, sigma=prompt_sigma)
    tenant = Tenant("victim", weight=weights[0])
    victim = Traffic(victim_load * capacity, tenant, prompt_sigma=prompt_sigma, until_s=until_s)
    each = others_load * capacity / num_others
    others = [
        Traffic(each, Tenant(f"other-{number}", weight=weights[1]), prompt_sigma=prompt_sigma, until_s=until_s)
        for number in range(num_others)
    ]
    ttfts: list[dict[str, float]] = []
    num_shed = 0
    for traffic in ([victim], [victim, *others]):
        mine = [o for o in run(traffic, shape, bounds, seed) if o.job.tenant is tenant and o.job.at_s > WARM_S]
        ttfts.append(percentiles([outcome.ttft_s for outcome in mine if outcome.first_s is not None]))
        num_shed = sum(outcome.shed is not None for outcome in mine)
    alone, beside = ttfts
    rise = beside["p95"] / alone["p95"] - 1
    return Fairness(victim_load, others_load, num_others, weights, alone, beside, rise, num_shed)


@dataclass(frozen=True, slots=True)
class Window:
    window_s: float
    goodput_per_s: float  # at 1.5x
    p95_rise: float  # of the victim


def window(window_s: float) -> Window:
    bounds = replace(BOUNDS, window_s=window_s)
    shape, traffic = prefill_bound()
    busy = run([replace(traffic, calls_per_s=1.5 * traffic.calls_per_s)], shape, bounds)
    victim = fairness(0.35, 1.8, bounds=bounds)
    return Window(window_s, summary(busy, WARM_S, traffic.until_s).goodput_per_s, victim.p95_rise)


# -- the command -------------------------------------------------------------------------------------------------------


def measure() -> dict[str, object]:
    """Every scenario under the virtual clock, as JSON."""
    return {
        "overload": asdict(overload(*prefill_bound())),
        "decode": asdict(overload(*decode_bound())),
        "fairness": [
            asdict(fairness(0.35, 1.8)),
            asdict(fairness(0.35, 1.8, shape=Shape())),
            asdict(fairness(0.7, 1.5, weights=(7.0, 3.0))),
            asdict(fairness(0.14, 2.0, num_others=4)),
        ],
        "window": [asdict(window(each)) for each in (0.0, 0.005, 0.01, 0.02, 0.05, 0.1)],
    }


def show(result: Mapping[str, object], title: str = "") -> None:
    """Figures, one per line, under their path."""
    for name, value in result.items():
        path = f"{title}.{name}" if title else name
        if isinstance(value, Mapping):
            show(value, path)
        elif isinstance(value, list):
            show({str(number): each for number, each in enumerate(value)}, path)
        else:
            print(f"{path:60} {value:.4g}" if isinstance(value, float) else f"{path:60} {value}")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("overload", help="admission and fairness, simulated; --live through a real router")
    parser.add_argument("--live", action="store_true", help="a real front end over stub workers, about two minutes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    if args.live:
        from bench import overload_live  # the router and its servers: only where they are wanted

        result = overload_live.measure()
    else:
        result = measure()
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["overload", *__import__("sys").argv[1:]])
    raise SystemExit(options.run(options))
