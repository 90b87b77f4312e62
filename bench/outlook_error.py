"""Which share of calls formulas say a pool serves in time, and which share it does: `python -m bench.outlook_error [--seeds N]`.

The load of the control bench (bench/control/loads.py: documents and essays), constant, for half an hour; one pool of n workers,
the other ample, sizes fixed. The formulas are told what the autoscaler would be told: `wanted` is what it would have, `said` what
it thinks of the n there are, the mean over its looks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from baton.request import Role
from bench.control import trial
from bench.control.loads import DOCUMENT, ESSAY, Load, Stream, mixed, until
from bench.control.oracle import Sizes
from bench.control.rig import TIMES
from bench.sim import arrivals
from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.facts import FleetFacts
from router.controller.autoscaler.layouts import Layout
from router.controller.autoscaler.outlook import Analytic, Outlook, Scene

DURATION_S, WARM_UP_S = 1_800.0, 300.0
AMPLE = 9
DOCUMENTS = 0.42  # of calls, as many as in `rate swings`
RATES = (1.0, 1.25, 1.6, 2.0, 2.6)  # calls a second
# (prefill, decode) that make the other pool's worth of a call: 2.9 and 0.3 s, 0.4 and 2.2 s, docs/control.md
SECONDS = {Role.PREFILL: DOCUMENTS * 2.9 + (1 - DOCUMENTS) * 0.3, Role.DECODE: DOCUMENTS * 0.4 + (1 - DOCUMENTS) * 2.2}
BUSY = (0.70, 1.0)  # of pools that are looked at


@dataclass
class Watching:
    """Decides nothing. Implements Scaler, and the Evaluator of the autoscaler that it asks."""

    layout: Layout
    said: list[float] = field(default_factory=list)
    wanted: list[Layout] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._formulas = Analytic()
        self._autoscaler = Autoscaler(TIMES, evaluator=self)
        self._scene: Scene | None = None  # of the load as it is: a look's first

    def outlook(self, layout: Layout, scene: Scene) -> Outlook:
        self._scene = self._scene or scene
        return self._formulas.outlook(layout, scene)

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        self._scene = None
        self._autoscaler.look(facts)
        if self._scene is not None and facts.now_s >= WARM_UP_S:
            self.said += self._formulas.outlook(self.layout, self._scene).attainment.values()
            self.wanted.append(self._autoscaler.wanted)
        return ()


def measure(role: Role, rate: float, num: int, num_seeds: int) -> str:
    """A row of the table."""
    sizes: Sizes = (num, AMPLE) if role is Role.PREFILL else (AMPLE, num)
    streams = mixed(
        Stream(DOCUMENT, arrivals.Constant(DOCUMENTS * rate)), Stream(ESSAY, arrivals.Constant((1 - DOCUMENTS) * rate))
    )
    load = Load("constant", "", until(streams, DURATION_S), DURATION_S, 2 * AMPLE, judge_from_s=WARM_UP_S)
    watching, met = [Watching(Layout(*sizes)) for _ in range(num_seeds)], list[float]()
    for seed, watcher in enumerate(watching):
        met.append(trial.run(load, watcher, sizes, seed, 0.0).figures.in_slo)
    said = fmean(share for watcher in watching for share in watcher.said)
    wanted = fmean(layout.of(role) for watcher in watching for layout in watcher.wanted)
    seconds = " ".join(f"{share:.1%}" for share in met)
    pool = f"{role.name.lower()} | {rate:g} | {num} | {rate * SECONDS[role] / num:.0%}"
    return f"| {pool} | {seconds} | {said:.1%} | {wanted:.1f} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each pool (default: %(default)s)")
    options = parser.parse_args()
    print(
        "| pool | calls/s | workers | busy | in time, by seed | formulas say | wanted |\n|---|---|---|---|---|---|---|"
    )
    for role in (Role.PREFILL, Role.DECODE):
        for rate in RATES:
            for num in range(1, AMPLE):
                if BUSY[0] <= rate * SECONDS[role] / num <= BUSY[1]:
                    print(measure(role, rate, num, options.seeds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
