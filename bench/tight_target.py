"""`python -m bench.tight_target`: what one class's TPOT target, from loose to impossible, does to its own calls and to others'.

The router's own admission and placement under a virtual clock (bench/sim): a 70B on pairs of two H100, where a step of one
sequence takes 15.6 ms and of 64 takes 18.2. Two or three classes share the calls; all but one have targets that the fleet keeps
with ease. What a user expects: others are served whatever the one class asks for, and its own calls as long as they can be.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import mean, stdev

from baton.slo import SLO
from bench.sim.arrivals import Constant, instants, synthetic
from bench.sim.deployment import Deployment, Layout
from bench.sim.simulation import Mix, Simulation
from bench.traces import TraceRow
from bench.workload import Lengths

LAYOUTS = {"1+1": Layout(1, 1), "2+2": Layout(2, 2)}
TIGHT, CHAT, VOICE = "tight", "chat", "voice"
OTHERS = (SLO(CHAT, ttft_ms=1_000.0, tpot_ms=60.0), SLO(VOICE, ttft_ms=600.0, tpot_ms=40.0))
TIGHT_TTFT_MS = 1_000.0
# From what nobody keeps over what a lone sequence takes (15.58 ms) and 1 / 0.85 of that (18.33) to what hinders nobody.
TARGETS_MS = (
    15.0,
    15.6,
    15.8,
    16.0,
    16.3,
    16.6,
    17.0,
    17.5,
    18.0,
    18.3,
    18.4,
    18.7,
    19.0,
    19.5,
    20.0,
    21.0,
    23.0,
    40.0,
)
RATE = 12.0  # calls a second of a pair: some 40 sequences decode, and a step takes 17.3 ms
PROMPTS, OUTPUTS = Lengths(100, 500), Lengths(50, 350)
WARM_UP_S = 10.0  # an answer takes 3.5 s


@dataclass(frozen=True, slots=True)
class World:
    layout: str = "1+1"
    rate: float = RATE
    share: float = 0.25  # of calls, that are of the tight class
    num_classes: int = 2
    seconds: float = 60.0

    def mix(self, tight_ms: float) -> Mix:
        others = OTHERS[: self.num_classes - 1]
        rest = (1 - self.share) / len(others)
        return Mix((SLO(TIGHT, TIGHT_TTFT_MS, tight_ms), *others), (self.share, *(rest for _ in others)))

    def calls(self, seed: int) -> Iterator[TraceRow]:
        rate = Constant(self.rate * LAYOUTS[self.layout].num_prefill)
        return takewhile(lambda row: row.at_s < self.seconds, synthetic(instants(rate, seed), PROMPTS, OUTPUTS, seed))


@dataclass(frozen=True, slots=True)
class Row:
    world: World
    seed: int
    tight_ms: float
    goodput: float  # calls per second of all classes within their targets
    met: dict[str, float]  # by class, share of calls
    shed: dict[str, float]


def measured(world: World, tight_ms: float, seed: int) -> Row:
    deployment = Deployment(LAYOUTS[world.layout], model="llama-3.1-70b", tp=2)
    outcome = Simulation(deployment, world.mix(tight_ms), seed=seed, warm_up_s=WARM_UP_S).run(world.calls(seed))
    met = {of.slo.name: of.attained.mean or 0.0 for of in outcome.classes}
    shed = {of.slo.name: of.num_shed / max(1, of.num) for of in outcome.classes}
    num_met = sum((of.attained.mean or 0.0) * of.num for of in outcome.classes)
    return Row(world, seed, tight_ms, num_met / (world.seconds - WARM_UP_S), met, shed)


def line(rows: Sequence[Row]) -> str:
    """Of one world and target, all seeds."""
    goodputs = [row.goodput for row in rows]
    spread = stdev(goodputs) if len(goodputs) > 1 else 0.0
    classes = "  ".join(
        f"{name} met {mean(row.met[name] for row in rows):5.1%} shed {mean(row.shed[name] for row in rows):5.1%}"
        for name in rows[0].met
    )
    return f"{rows[0].tight_ms:5.1f} ms  goodput {mean(goodputs):6.2f} ± {spread:4.2f}/s  {classes}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.tight_target", description=__doc__)
    parser.add_argument("--layout", choices=[*LAYOUTS], default="1+1")
    parser.add_argument("--rate", type=float, default=RATE, help="calls a second of a pair")
    parser.add_argument("--share", type=float, default=0.25, help="of calls, that are of the class whose target varies")
    parser.add_argument("--classes", type=int, choices=(2, 3), default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--targets-ms", type=float, nargs="+", default=TARGETS_MS)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all rows there")
    args = parser.parse_args()
    world, found = World(args.layout, args.rate, args.share, args.classes), list[Row]()
    for tight_ms in args.targets_ms:
        rows = [measured(world, tight_ms, seed) for seed in args.seeds]
        print(line(rows), flush=True)
        found += rows
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
