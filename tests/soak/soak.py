"""A soak: load and faults in turns with rests, at which nothing may be left of either.

    storm   clients call, workers are killed, stopped, cut off                       REST_EVERY_S
    rest    faults end, calls end, then: every gauge idle, every link proved, plain calls right, footprints taken

The seed decides every draw; the moments are the machine's. Findings are lines, so one soak shows all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.soak_cluster import CALL_TIMEOUT_S, Member, SoakCluster, Start
from tests.soak.soak_faults import ROOMY_BLOCKS, Fault, Faults
from tests.soak.soak_growth import Footprint, footprint
from tests.soak.soak_load import Asked, Kind, Load

MEMBERS = (
    Member("prefill-0", "prefill"),
    Member("prefill-1", "prefill", mortal=True),
    Member("decode-0", "decode"),
    Member("decode-1", "decode", mortal=True),
)
NUM_CLIENTS = 8  # enough that every stage of a call is under way somewhere when a fault strikes
REST_EVERY_S = 25.0
# DESIGN section 5: a silent peer's blocks are free within lease + 1 s = 6 s; the rest is what two busy cores may take.
IDLE_S = 20.0
NUM_PLAIN = 4  # as many as there are pairs


@dataclass(slots=True)
class Report:
    seed: int
    num_calls: int = 0
    num_finished: int = 0
    num_handoffs: int = 0
    num_cancelled: int = 0  # cancelled, aborted, hung up
    num_wrong: int = 0
    num_leaks: int = 0  # rests that did not come
    num_kills: int = 0
    num_stops: int = 0
    num_cuts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    worst_idle_s: float = 0.0
    transports: set[str] = field(default_factory=set)
    findings: list[str] = field(default_factory=list)
    footprints: list[tuple[float, dict[str, Footprint]]] = field(default_factory=list)  # (seconds, by process)

    def line(self) -> str:
        return (
            f"seed {self.seed}: {self.num_calls} calls, {self.num_finished} finished, {self.num_handoffs} handoffs, "
            f"{self.num_kills} kills, {self.num_stops} stops, {self.num_cuts} cuts, {self.num_cancelled} cancels, "
            f"errors {self.errors}, wrong={self.num_wrong}, leaked={self.num_leaks}, "
            f"idle within {self.worst_idle_s:.1f} s, {len(self.findings)} findings"
        )


async def soak(
    asked: Callable[[int], Asked],
    worker_module: str,
    model_dir: Path,
    folder: Path,
    *,
    seed: int,
    duration_s: float,
    mean_gap_s: float,
) -> Report:
    """Run one; `asked(index)` gives the calls and what must come of them."""
    report = Report(seed)
    cluster = SoakCluster(MEMBERS, worker_module, model_dir, folder)
    faults = Faults(cluster, seed, mean_gap_s)
    load: Load | None = None
    try:
        await cluster.start(Start(ROOMY_BLOCKS))
        load = Load((cluster.grpc_port, cluster.http_port), asked, seed, NUM_CLIENTS, CALL_TIMEOUT_S)
        started_s = time.monotonic()
        await _rest(cluster, load, report, 0.0)
        while (left_s := started_s + duration_s - time.monotonic()) > 0 and not report.num_leaks:
            load.resume()
            faults.resume()
            await asyncio.sleep(min(left_s, REST_EVERY_S))
            await faults.calm()
            await load.pause()
            await _rest(cluster, load, report, time.monotonic() - started_s)
            _count(report, faults, load)
            print(f"{time.monotonic() - started_s:6.1f} s  {report.line()}", flush=True)
    finally:
        if load is not None:
            await load.close()
        await cluster.stop()
        report.findings += cluster.findings
    assert load is not None
    _count(report, faults, load)
    report.findings += load.tally.findings
    return report


async def _rest(cluster: SoakCluster, load: Load, report: Report, now_s: float) -> None:
    """Wait until nothing is left of the storm, then see that all is well."""
    await cluster.wait_announced()
    started_s = time.monotonic()
    seen = cluster.num_reports
    while cluster.num_reports < seen + 2 or cluster.unrest():  # the first report may have been on its way
        if time.monotonic() - started_s > IDLE_S:
            report.num_leaks += 1
            report.findings.append(f"after {IDLE_S:g} s at {now_s:.0f} s: {cluster.unrest() or 'the router is silent'}")
            return
        await asyncio.sleep(0.05)
    report.worst_idle_s = max(report.worst_idle_s, time.monotonic() - started_s)
    report.transports |= cluster.transports()
    for _ in range(NUM_PLAIN):
        if not (await load.plain()).finished:
            report.findings.append(f"a plain call at rest failed at {now_s:.0f} s")
    held = {name: footprint(pid) for name, pid in cluster.long_lived().items()}
    report.footprints.append((now_s, held))


def _count(report: Report, faults: Faults, load: Load) -> None:
    tally = load.tally
    report.num_calls = tally.num_calls.total()
    report.num_finished, report.num_handoffs, report.num_wrong = tally.num_finished, tally.num_handoffs, tally.num_wrong
    report.num_cancelled = sum(tally.num_calls[kind] for kind in (Kind.CANCEL, Kind.ABORT, Kind.HANG_UP))
    report.errors = dict(tally.errors)
    report.num_kills, report.num_stops = faults.counts[Fault.KILL], faults.counts[Fault.STOP]
    report.num_cuts = faults.counts[Fault.CUT]
