"""`python -m bench.batch_slack`: what a batch that never ends costs interactive calls, and how much it gets done.

The router's own admission and pacer under a virtual clock (bench/overload_fleet.py): the same figures on every machine. Workers
compute prompts in the order they come and step all sequences alike, so nothing but the pacer protects interactive calls here;
real engines put batch sequences behind others, too.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from baton.slo import DEFAULT_CLASSES
from bench.overload import (
    BOUNDS,
    DECODE_OUTPUT_TOKENS,
    DECODE_PROMPT_TOKENS,
    DECODE_SHAPE,
    DECODE_SLO,
    INTERACTIVE,
    WARM_S,
    Traffic,
    prefill_capacity,
)
from bench.overload_fleet import Fleet, Job, Outcome, Shape, _Live, _Prefill
from router.admission import Bounds
from router.batch.pacer import LOOK_S, Pacer
from router.service_tiers import BATCH

BATCH_SLO = DEFAULT_CLASSES[1]
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
SEEDS = (1, 2, 3, 4, 5)
MAX_LINES = 256  # baton/config.py
CHUNK_TOKENS = 512  # likewise: where a prompt may be given up
RUN_S = 120.0
BURST_S = 10.0  # of each 30 the load is twice as high; the other 20 s make up for it


class SharedFleet(Fleet):
    """A fleet that runs the lines of a batch in what is left, as router/batch/slots.py does."""

    def __init__(self, shape: Shape, bounds: Bounds, lines: Iterator[Job], tpot_s: float, until_s: float) -> None:
        super().__init__(shape, bounds)
        self.num_preempted = 0
        self._pacer = Pacer(MAX_LINES)
        self._lines = lines
        self._tpot_s = tpot_s  # the tightest target in force
        self._until_s = until_s
        self._held: list[_Live] = []  # oldest first
        self._again: list[Job] = []
        self._at(0.0, self._pace)

    def _pace(self) -> None:
        self._look()
        self._held = [live for live in self._held if live.outcome.end_s is None and live.outcome.shed is None]
        num_shed = sum(o.shed is not None for o in self.outcomes if o.job.slo.name != BATCH)
        slack = self.admission.slack(BATCH, (self._tpot_s,), num_shed, self.now_s)
        starting = [live for live in self._held if live.outcome.first_s is None]
        allowed = self._pacer.look(slack, len(self._held), len(starting), self.now_s)
        for live in starting[allowed.num_starting :]:
            self._preempt(live)
        for live in self._held[allowed.num_running :]:
            self._preempt(live)
        for _ in range(min(allowed.num_running - len(self._held), allowed.num_starting - len(starting))):
            self._begin(self._again.pop() if self._again else next(self._lines))
        if self.now_s < self._until_s:
            self._at(self.now_s + LOOK_S, self._pace)

    def _preempt(self, live: _Live) -> None:
        self._held.remove(live)
        self.num_preempted += 1
        self._again.append(live.outcome.job)
        self._abandon(live)
        if live.prefill is not None and live in live.prefill.queue:  # the chunk under way is not cut
            self._at(
                self.now_s + CHUNK_TOKENS / self.shape.tokens_per_s, partial(self._computed_if, live.prefill, live)
            )

    def _compute(self, prefill: _Prefill, after_s: float = 0.0) -> None:
        live = prefill.queue[0]
        took_s = after_s + self.shape.prompt_s + live.outcome.job.prompt_tokens / self.shape.tokens_per_s
        self._at(self.now_s + took_s, partial(self._computed_if, prefill, live))

    def _computed_if(self, prefill: _Prefill, live: _Live) -> None:
        """Unless it was cut short."""
        if prefill.queue and prefill.queue[0] is live:
            self._computed(prefill)

    def _begin(self, job: Job) -> None:
        """A line that the policy turns away comes again."""
        self._arrive(replace(job, at_s=self.now_s))
        live = next(reversed(self._lives.values()), None)
        if live is not None and live.outcome is self.outcomes[-1]:
            self._held.append(live)
        else:
            self._again.insert(0, job)
            self._held.append(_Live(None, self.outcomes[-1]))  # type: ignore[arg-type]  # is gone by the next look


@dataclass(frozen=True, slots=True)
class Row:
    """Interactive calls without and beside a batch; means over seeds."""

    case: str
    load: float
    attainment_alone: float  # of all calls: shed ones are missed
    attainment_beside: float
    batch_tokens_per_s: float  # of lines that were answered
    interactive_tokens_per_s: float
    preempted_share: float  # of lines begun

    @property
    def loss_points(self) -> float:
        return 100 * (self.attainment_alone - self.attainment_beside)


def lines(traffic: Traffic, seed: int) -> Iterator[Job]:
    """Without end, as long as interactive calls are."""
    rng = random.Random(seed)
    while True:
        yield from replace(traffic, slo=BATCH_SLO, calls_per_s=100.0, until_s=10.0).jobs(rng.randrange(1 << 30))


def bursts(traffic: Traffic, until_s: float) -> list[Traffic]:
    """The same load on average, twice of it for 10 s of each 30."""
    calm, high = (
        replace(traffic, calls_per_s=0.5 * traffic.calls_per_s),
        replace(traffic, calls_per_s=2 * traffic.calls_per_s),
    )
    cuts = range(0, int(until_s), int(3 * BURST_S))
    result = []
    for at_s in cuts:
        result.append(replace(high, from_s=at_s, until_s=at_s + BURST_S))
        result.append(replace(calm, from_s=at_s + BURST_S, until_s=min(until_s, at_s + 3 * BURST_S)))
    return result


def row(case: str, load: float, shape: Shape, traffic: Sequence[Traffic], seeds: Sequence[int], until_s: float) -> Row:
    pairs = [_pair(shape, traffic, seed, until_s) for seed in seeds]
    mean = [sum(values) / len(seeds) for values in zip(*pairs, strict=True)]
    return Row(case, load, *mean)


def _pair(
    shape: Shape, traffic: Sequence[Traffic], seed: int, until_s: float
) -> tuple[float, float, float, float, float]:
    jobs = sorted(
        (job for n, each in enumerate(traffic) for job in each.jobs(seed + 100 * n)), key=lambda job: job.at_s
    )
    alone = Fleet(shape, BOUNDS).run(iter(jobs))
    fleet = SharedFleet(shape, BOUNDS, lines(traffic[0], seed), traffic[0].slo.tpot_ms / 1e3, until_s)
    fleet.run(iter(jobs), until_s + 60)
    ours = [o for o in fleet.outcomes if o.job.slo.name == BATCH]
    theirs = [o for o in fleet.outcomes if o.job.slo.name != BATCH]
    return (
        _attainment(alone, until_s),
        _attainment(theirs, until_s),
        sum(o.num_tokens for o in ours if o.end_s is not None and not o.abandoned) / until_s,
        sum(o.num_tokens for o in theirs if o.end_s is not None) / until_s,
        fleet.num_preempted / max(1, len(ours)),
    )


def _attainment(outcomes: Sequence[Outcome], until_s: float) -> float:
    mine = [outcome for outcome in outcomes if WARM_S <= outcome.job.at_s < until_s]
    return sum(outcome.met for outcome in mine) / max(1, len(mine))


def rows(loads: Sequence[float], seeds: Sequence[int], until_s: float) -> Iterator[Row]:
    prefill = Traffic(prefill_capacity(Shape()), slo=INTERACTIVE, until_s=until_s)
    # 31 sequences a worker keep the target (bench/overload.py); each takes its output's steps
    step_s = DECODE_SHAPE.step_s + 31 * DECODE_SHAPE.step_s_per_seq
    decode = Traffic(
        DECODE_SHAPE.num_decode * 31 / (DECODE_OUTPUT_TOKENS * 1.38 * step_s),  # 1.38: mean by median of the lengths
        slo=DECODE_SLO, prompt_tokens=DECODE_PROMPT_TOKENS, output_tokens=DECODE_OUTPUT_TOKENS, until_s=until_s,
    )  # fmt: skip
    for load in loads:
        for case, shape, traffic in (("prefill", Shape(), prefill), ("decode", DECODE_SHAPE, decode)):
            scaled = replace(traffic, calls_per_s=load * traffic.calls_per_s)
            yield row(case, load, shape, [scaled], seeds, until_s)
            yield row(f"{case}, bursts", load, shape, bursts(scaled, until_s), seeds, until_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--loads", type=float, nargs="*", default=LOADS)
    options = parser.parse_args()
    found = []
    print("case             load  alone  beside  loss  batch tok/s  interactive tok/s  preempted")
    for one in rows(options.loads, SEEDS[: options.seeds], RUN_S):
        found.append(one)
        print(
            f"{one.case:16} {one.load:4.1f} {one.attainment_alone:6.2%} {one.attainment_beside:6.2%} {one.loss_points:6.2f}"
            f" {one.batch_tokens_per_s:8.0f} {one.interactive_tokens_per_s:12.0f} {one.preempted_share:14.1%}",
            flush=True,
        )
    if options.json:
        text = json.dumps([asdict(one) | {"loss_points": one.loss_points} for one in found], indent=2)
        options.json.write_text(text)


if __name__ == "__main__":
    main()
