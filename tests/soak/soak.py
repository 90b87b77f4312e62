"""A soak: storms and rests in turns; at a rest nothing may be left of the storm.

    storm   clients call; workers are killed, stopped, cut off                                              storm_s
    rest    faults end, calls end, then: every gauge idle, every link proved, plain calls right, footprints taken

The seed decides every draw; the moments are the machine's. Findings are lines, so one soak shows all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.soak_cluster import CALL_TIMEOUT_S, Member, SoakCluster, Start
from tests.soak.soak_faults import ROOMY_BLOCKS, SHARES, Fault, Faults
from tests.soak.soak_growth import Rest, footprint, growth, rss_slopes
from tests.soak.soak_load import Asked, Kind, Load

MEMBERS = (
    Member("prefill-0", "prefill"),
    Member("prefill-1", "prefill", mortal=True),
    Member("decode-0", "decode"),
    Member("decode-1", "decode", mortal=True),
)
NUM_CLIENTS = 8  # enough that every stage of a call is under way somewhere when a fault strikes
# DESIGN section 5: a silent peer's blocks are free within lease + 1 s = 6 s; the rest is what two busy cores may take.
IDLE_S = 20.0
NUM_PLAIN = 4  # as many as there are pairs


@dataclass(frozen=True, slots=True)
class Plan:
    """One soak with one model. `asked(index)` gives the calls and what must come of them."""

    worker_module: str
    model_dir: Path
    asked: Callable[[int], Asked]
    seed: int
    num_storms: int
    storm_s: float
    mean_gap_s: float  # between two faults
    max_bytes_per_call: float  # of growth of resident memory, in any long-lived process
    prefix_cache: bool = True
    shares: Mapping[Fault, float] = field(default_factory=lambda: SHARES)


@dataclass(slots=True)
class Report:
    num_calls: int = 0
    num_finished: int = 0
    num_handoffs: int = 0
    num_cancelled: int = 0  # cancelled, aborted, hung up
    num_wrong: int = 0  # answers, and steps that would have read wrong KV
    num_leaks: int = 0  # rests that did not come
    num_kills: int = 0
    num_stops: int = 0
    num_cuts: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by code
    worst_idle_s: float = 0.0
    pauses_s: list[float] = field(default_factory=list)  # the longest of each stream, longest first
    transports: set[str] = field(default_factory=set)
    rests: list[Rest] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def pauses(self) -> str:
        at = {f"p{share}": len(self.pauses_s) * (100 - share) // 100 for share in (50, 90, 99)} | {"max": 0}
        return ", ".join(f"{name} {self.pauses_s[rank]:.3f} s" for name, rank in at.items() if self.pauses_s)

    def __str__(self) -> str:
        slopes = ", ".join(f"{name} {value:+.0f}" for name, value in rss_slopes(self.rests).items())
        return (
            f"{self.num_calls} calls, {self.num_finished} finished, {self.num_handoffs} handoffs, {self.num_kills} kills, "
            f"{self.num_stops} stops, {self.num_cuts} cuts, {self.num_cancelled} cancels, errors {self.errors}, "
            f"wrong={self.num_wrong}, leaked={self.num_leaks}, idle after {self.worst_idle_s:.1f} s at most, "
            f"streams' longest pauses: {self.pauses()}, "
            f"RSS bytes per call: {slopes}; over {', '.join(sorted(self.transports))}"
        )


async def soak(plan: Plan, folder: Path) -> Report:
    """Run one; configs and logs go to `folder`."""
    report = Report()
    cluster = SoakCluster(MEMBERS, plan.worker_module, plan.model_dir, folder, prefix_cache=plan.prefix_cache)
    faults = Faults(cluster, plan.seed, plan.mean_gap_s, plan.shares)
    load: Load | None = None
    try:
        await cluster.start(Start(ROOMY_BLOCKS))
        load = Load((cluster.grpc_port, cluster.http_port), plan.asked, plan.seed, NUM_CLIENTS, CALL_TIMEOUT_S)
        rested = await _rest(cluster, load, report)
        for storm in range(plan.num_storms):
            if not rested:
                break
            load.resume()
            faults.resume()
            await asyncio.sleep(plan.storm_s)
            await faults.calm()
            await load.pause()
            rested = await _rest(cluster, load, report)
            _count(report, faults, load)
            print(f"storm {storm + 1} of {plan.num_storms}: {report}", flush=True)
    finally:
        if load is not None:
            await load.close()
        await cluster.stop()
        report.findings += cluster.findings
        report.num_wrong += cluster.num_wrong_kv
    report.findings += load.tally.findings
    report.findings += growth(report.rests, plan.max_bytes_per_call)
    return report


async def _rest(cluster: SoakCluster, load: Load, report: Report) -> bool:
    """See that nothing is left of the storm and all is well; returns whether there was a rest at all."""
    if not await cluster.wait_announced():
        return False
    started_s = time.monotonic()
    num_reports = cluster.num_reports
    while cluster.num_reports < num_reports + 2 or cluster.unrest():  # the first report may have been on its way
        if time.monotonic() - started_s > IDLE_S:
            report.num_leaks += 1
            report.findings.append(f"no rest within {IDLE_S:g} s: {cluster.unrest() or 'the router is silent'}")
            return False
        await asyncio.sleep(0.05)
    report.worst_idle_s = max(report.worst_idle_s, time.monotonic() - started_s)
    report.transports |= cluster.transports()
    for _ in range(NUM_PLAIN):
        if not (await load.plain()).finished:
            report.findings.append("a plain call failed at rest")
    held = {name: footprint(pid) for name, pid in cluster.long_lived().items()}
    report.rests.append(Rest(load.tally.num_calls.total(), held))
    return True


def _count(report: Report, faults: Faults, load: Load) -> None:
    tally = load.tally
    report.num_calls = tally.num_calls.total()
    report.num_finished, report.num_handoffs, report.num_wrong = tally.num_finished, tally.num_handoffs, tally.num_wrong
    report.num_cancelled = sum(tally.num_calls[kind] for kind in (Kind.CANCEL, Kind.ABORT, Kind.HANG_UP))
    report.errors = dict(tally.errors)
    report.pauses_s = sorted(tally.pauses_s, reverse=True)
    report.num_kills, report.num_stops = faults.counts[Fault.KILL], faults.counts[Fault.STOP]
    report.num_cuts = faults.counts[Fault.CUT]
