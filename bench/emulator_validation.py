"""`python -m bench.emulator_validation`: goodput of the emulated cluster beside the simulator's, the same calls in both.

The knee is the simulator's: the highest rate at which 90 % of the calls are within their targets. At each load both are given
the very same arrivals and lengths: one as `baton up --emulate`, with Ray, gRPC and a slowed clock, the other under its virtual
clock. Both start empty; every call counts, shed ones as missed; goodput is until the last arrival. Times are of the GPUs' clock.
How late the emulation was is in the table: beyond 10 % of a step its figures mean nothing (docs/emulator.md).

Exit status: 0; 1 where a difference is beyond 10 %, or the emulation was late; 2 where the cluster did not come up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.config import EngineConfig
from baton.slo import SLO, Verdict
from bench.client_grpc import GrpcClient
from bench.cluster import BATON, Cluster, ClusterError, running
from bench.cluster import Layout as Workers
from bench.http_wire import Pool
from bench.loadgen import Load, run_load
from bench.measure import Outcome, Record, percentiles
from bench.plan.judge import Judge
from bench.plan.space import Candidate
from bench.plan.traffic import Drawn
from bench.sim.call import Call
from bench.sim.deployment import MAX_NUM_SEQS, Deployment, Layout
from bench.sim.simulation import BOUNDS, Mix, Simulation
from bench.traces import TraceRow
from bench.workload import SAFE_VOCABULARY, Lengths, PlannedCall
from engine.pace import TOLERANCE

LOADS = (0.8, 1.0, 1.2)  # of the knee
AGREEMENT = 0.10  # of the simulator's goodput
STEP_TOKENS = 2_048  # budget and chunk of every engine, in both
MODEL, GPU, TP = "llama-3.1-70b", "h100", 4
PROMPTS, ANSWERS = Lengths(2_000, 6_000), Lengths(100, 300)  # few calls a second, so that two cores carry them
TARGETS = SLO("interactive", ttft_ms=2_000, tpot_ms=25, percentile=0.9)  # 70B chat
KNEE_CALLS, KNEE_SEED = 600, 1
MAX_IN_FLIGHT = 512  # RouterConfig.max_inflight
CALL_TIMEOUT_S = 600.0  # of the GPUs' clock: none is reached
SETTLE_S = 2.0  # between loads, of this machine's clock: the router's queues are empty then


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one load, in one of the two."""

    num_calls: int
    num_shed: int
    attainment: float
    goodput: float  # calls per second
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_p50_ms: float
    tpot_p95_ms: float


@dataclass(frozen=True, slots=True)
class Compared:
    load: float  # of the knee
    rate: float
    simulated: Served
    emulated: Served
    lateness: float  # p99 of the latest worker's last 1,000 steps, share of a step

    @property
    def difference(self) -> float:
        return self.emulated.goodput / self.simulated.goodput - 1

    @property
    def agrees(self) -> bool:
        return abs(self.difference) <= AGREEMENT and self.lateness <= TOLERANCE


# -- simulated ---------------------------------------------------------------------------------------------------------


def deployment(num_prefill: int, num_decode: int) -> Deployment:
    engine = EngineConfig(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        chunk_tokens=STEP_TOKENS,
        prefix_cache=False,  # no two prompts have anything in common
        max_queued_seqs=sys.maxsize,
    )
    layout = Layout(num_prefill, num_decode)
    return Deployment(layout, gpu=GPU, model=MODEL, tp=TP, engine=engine, prefill_step_tokens=STEP_TOKENS)


def simulated(made: Deployment, rows: Sequence[TraceRow]) -> Served:
    calls: list[Call] = []
    Simulation(made, Mix((TARGETS,)), on_call=calls.append).run(rows)
    done = [call for call in calls if call.end_s is not None]
    return _served(
        rows,
        num_shed=len(calls) - len(done),
        num_met=sum(call.verdict is Verdict.MET for call in done),
        ttft_ms=[1e3 * call.ttft_s for call in done],
        tpot_ms=[1e3 * call.tpot_s for call in done],
    )


def _served(
    rows: Sequence[TraceRow], *, num_shed: int, num_met: int, ttft_ms: Sequence[float], tpot_ms: Sequence[float]
) -> Served:
    ttft, tpot = percentiles(ttft_ms), percentiles(tpot_ms)
    span_s = rows[-1].at_s
    return Served(len(rows), num_shed, num_met / len(rows), num_met / span_s, ttft.p50, ttft.p95, tpot.p50, tpot.p95)


# -- emulated ----------------------------------------------------------------------------------------------------------


def planned(rows: Sequence[TraceRow], time_scale: float, seed: int) -> Iterator[PlannedCall]:
    """The same calls on a slowed clock, each prompt its own."""
    for index, row in enumerate(rows):
        rng = random.Random(f"{seed}/{index}")
        prompt = tuple(rng.choices(SAFE_VOCABULARY, k=row.input_tokens))
        yield PlannedCall(index, prompt, row.output_tokens, seed=index, at_s=time_scale * row.at_s)


async def emulated(cluster: Cluster, rows: Sequence[TraceRow], time_scale: float, seed: int) -> Served:
    client = GrpcClient(f"127.0.0.1:{cluster.grpc_port}")
    pace = Load(MAX_IN_FLIGHT, open_loop=True, call_timeout_s=time_scale * CALL_TIMEOUT_S)
    try:
        done = await run_load(client, planned(rows, time_scale, seed), pace)
    finally:
        await client.close()
    return told(rows, done.records, time_scale)


def told(rows: Sequence[TraceRow], records: Sequence[Record], time_scale: float) -> Served:
    """What clients saw, in the GPUs' time."""
    whole = [record for record in records if record.outcome is Outcome.COMPLETED]
    ttft_ms = [record.ttft_ms / time_scale for record in whole]
    tpot_ms = [(record.tpot_ms or 0.0) / time_scale for record in whole]
    verdicts = [
        TARGETS.verdict(ttft_ms=ttft, tpot_ms=tpot, itl_p99_ms=0.0, e2e_ms=record.e2e_ms / time_scale)
        for record, ttft, tpot in zip(whole, ttft_ms, tpot_ms, strict=True)
    ]
    num_met = sum(verdict is Verdict.MET for verdict in verdicts)
    return _served(rows, num_shed=len(records) - len(whole), num_met=num_met, ttft_ms=ttft_ms, tpot_ms=tpot_ms)


async def lateness(cluster: Cluster) -> float:
    pool = Pool(cluster.http_url)
    _, text = await pool.fetch("GET", "/metrics")
    pool.close()
    found = re.findall(r"^baton_emulation_step_lateness_ratio\{[^}]*\} (\S+)$", text.decode(), re.MULTILINE)
    return max(map(float, found))


async def set_targets(cluster: Cluster) -> None:
    targets = (f"ttft_ms={TARGETS.ttft_ms}", f"tpot_ms={TARGETS.tpot_ms}", "percentile=0.9")
    words = ("slo", "set", TARGETS.name, *targets, "--reason", "validation", "--admin-port", str(cluster.admin_port))
    process = await asyncio.create_subprocess_exec(
        BATON, *words, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise ClusterError(f"the targets could not be set: {said.decode(errors='replace').strip()}")


# -- both --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    num_prefill: int
    num_decode: int
    num_calls: int
    time_scale: float
    seed: int
    model: str

    @property
    def flags(self) -> list[str]:
        """Of `baton up`."""
        return [
            *("--model", self.model, "--emulate", GPU, "--emulate-model", MODEL, "--tp", str(TP)),
            *("--time-scale", f"{self.time_scale:g}", "--max-num-batched-tokens", str(STEP_TOKENS)),
            *("--chunk-tokens", str(STEP_TOKENS), "--max-num-seqs", str(MAX_NUM_SEQS)),
        ]


async def compare(options: Options) -> list[Compared]:
    """Raises: ClusterError: it did not come up."""
    made = deployment(options.num_prefill, options.num_decode)
    traffic = Drawn(1.0, PROMPTS, ANSWERS)
    candidate = Candidate(made, BOUNDS.window_s, made.usd_per_hour)
    knee = Judge(traffic, Mix((TARGETS,))).knee(candidate, 4.0, num_calls=KNEE_CALLS, seed=KNEE_SEED).rate
    workers = Workers("emulated", prefill=options.num_prefill, decode=options.num_decode, sheds=True)
    found = []
    async with running(workers, options.flags) as cluster:
        await set_targets(cluster)
        await emulated(cluster, traffic.calls(0.5 * knee, 10, options.seed), options.time_scale, options.seed)
        for number, load in enumerate(LOADS):
            await asyncio.sleep(SETTLE_S)
            rows = traffic.calls(load * knee, options.num_calls, options.seed + 1 + number)
            seen = await emulated(cluster, rows, options.time_scale, options.seed + 1 + number)
            row = Compared(load, load * knee, simulated(made, rows), seen, await lateness(cluster))
            print(line(row), flush=True)
            found.append(row)
    return found


HEAD = (
    "| of the knee | calls/s | goodput: simulated | emulated | difference | attainment | shed | TTFT p50, p95 ms"
    " | TPOT p50, p95 ms | lateness p99 |\n|---|" + "---:|" * 9
)


def line(row: Compared) -> str:
    both = (row.simulated, row.emulated)
    cells = (
        f"{row.load:.1f}",
        f"{row.rate:.2f}",
        f"{row.simulated.goodput:.2f}",
        f"{row.emulated.goodput:.2f}",
        f"{row.difference:+.1%}",
        " / ".join(f"{one.attainment:.1%}" for one in both),
        " / ".join(str(one.num_shed) for one in both),
        " / ".join(f"{one.ttft_p50_ms:.0f}, {one.ttft_p95_ms:.0f}" for one in both),
        " / ".join(f"{one.tpot_p50_ms:.1f}, {one.tpot_p95_ms:.1f}" for one in both),
        f"{row.lateness:.1%}",
    )
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.emulator_validation", description=__doc__)
    parser.add_argument("--prefill", type=int, default=1, help="workers (%(default)s)")
    parser.add_argument("--decode", type=int, default=1, help="workers (%(default)s)")
    parser.add_argument("--num-calls", type=int, default=200, help="of each load (%(default)s)")
    parser.add_argument("--time-scale", type=float, default=8.0, help="how much slower than real (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer the router loads (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    given = parser.parse_args(arguments)
    options = Options(given.prefill, given.decode, given.num_calls, given.time_scale, given.seed, given.model)
    print(HEAD, flush=True)
    try:
        rows = asyncio.run(compare(options))
    except ClusterError as error:
        print(f"bench.emulator_validation: {error}", file=sys.stderr)
        return 2
    if given.json:
        kept = {"options": asdict(options), "targets": asdict(TARGETS), "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(row.agrees for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
