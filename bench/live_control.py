"""Live control, proved: an emulated cluster under a load that swings, left to its autoscaler, while processes are killed.

    python -m bench.live_control [--json PATH] [--quick]

2 prefill and 2 decode workers of 405B on 8 A100 each, `baton up --autoscale`, at a quarter of their speed. Calls come at random
(Poisson): long prompts with short answers, then short prompts with long answers and more of them, then the first mix again. In
the middle of the second mix the controller is killed, later a decode worker. Every answer is compared with the one it must be
(engine/emulated_runner.py): a call is lost if it ends in an error, or with a token too few, too many or another. Seconds are the
GPUs', four of this machine's: slow GPUs leave the CPUs as much time as a slower clock would, and windows, ticks and leases are
not waited for as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx

from baton.config import EmulationConfig
from baton.model_files import load_model_files
from baton.request import SamplingParams
from baton.slo import DEFAULT_CLASSES
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.cluster import POLL_S, READY_TIMEOUT_S, Cluster, Layout, running
from engine.emulated_runner import emulated_answer

EMULATION = EmulationConfig(gpu="a100", model="llama-3.1-405b", tp=8, time_scale=4.0)
LAYOUT = Layout("2 + 2", prefill=2, decode=2)  # nobody is turned away: each call has to come to its end
MAX_GPUS = 56  # 7 workers: two cores carry no more truthfully at this scale
MAX_NUM_SEQS = 16  # of a decode worker, so that few streams fill it: a router's tokens are the CPU's, not the GPUs'
TICK_S, DWELL_S, SHRINK_S = 5.0, 20.0, 120.0  # of the autoscaler
CALL_TIMEOUT_S = 150.0
SAMPLE_S = 0.5
MODEL = "smollm2"  # lends its tokenizer


@dataclass(frozen=True, slots=True)
class Phase:
    """One mix."""

    name: str
    seconds: float
    calls_per_s: float
    prompt_tokens: int
    output_tokens: int
    kill: tuple[tuple[float, str], ...] = ()  # seconds into it: "controller", or "worker"


PROMPTS = Phase("long prompts", 60.0, 1.0, 1_500, 16)
ANSWERS = Phase("long answers", 110.0, 6.0, 200, 200, ((50.0, "controller"), (80.0, "worker")))
FULL = (PROMPTS, ANSWERS, PROMPTS)
QUICK = (Phase("long answers", 40.0, 6.0, 200, 200, ((25.0, "controller"),)),)


@dataclass(slots=True)
class Call:
    """What came of one call."""

    phase: str
    at_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    lost: str = ""  # why; "" = every token is there, once, and right

    @property
    def is_met(self) -> bool:
        """By the class's targets."""
        slo = DEFAULT_CLASSES[0]
        if self.lost or self.ttft_s is None or self.tpot_s is None:
            return False
        return 1e3 * self.ttft_s <= slo.ttft_ms and 1e3 * self.tpot_s <= slo.tpot_ms


@dataclass(slots=True)
class Sample:
    """Of the pools."""

    at_s: float
    ready: dict[str, int]
    others: dict[str, int]  # by state


@dataclass(slots=True)
class Run:
    calls: list[Call] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    kills: list[dict[str, object]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    began_s: float = 0.0
    began_unix_s: float = 0.0

    def now_s(self) -> float:
        """Since the run began."""
        return here_s() - self.began_s


def here_s() -> float:
    """On the GPUs' clock."""
    return time.monotonic() / EMULATION.time_scale


async def sleep(seconds: float) -> None:
    """On the GPUs' clock."""
    await asyncio.sleep(seconds * EMULATION.time_scale)


class Client:
    """Calls of one run."""

    def __init__(self, cluster: Cluster, run: Run) -> None:
        self._run = run
        self._rng = random.Random(0)
        spec = load_model_files(MODEL).spec
        self._vocab_size, self._eos = spec.vocab_size, spec.eos_token_ids
        self._channel = grpc.aio.insecure_channel(cluster.grpc_target.removeprefix("grpc://"))
        self._stub = serving_pb2_grpc.ServingStub(self._channel)
        self._open: set[asyncio.Task[None]] = set()

    async def play(self, phase: Phase) -> None:
        """Start the phase's calls; they may end after it."""
        end_s = self._run.now_s() + phase.seconds
        while (now_s := self._run.now_s()) < end_s:
            call = Call(phase.name, now_s)
            self._run.calls.append(call)
            task = asyncio.create_task(self._call(phase, call))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            await sleep(self._rng.expovariate(phase.calls_per_s))

    async def close(self) -> None:
        """After the last call."""
        await asyncio.gather(*self._open)
        await self._channel.close(None)

    async def _call(self, phase: Phase, call: Call) -> None:
        length = max(8, round(self._rng.uniform(0.8, 1.2) * phase.prompt_tokens))
        num_tokens = max(2, round(self._rng.uniform(0.8, 1.2) * phase.output_tokens))
        prompt = [self._rng.randrange(100, self._vocab_size) for _ in range(length)]
        request = serving_pb2.GenerateRequest(
            sampling=serving_pb2.Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        )
        request.token_ids.ids.extend(prompt)
        tokens: list[int] = []
        began_s = first_s = last_s = here_s()
        try:
            async for event in self._stub.Generate(request, timeout=CALL_TIMEOUT_S * EMULATION.time_scale):
                if event.WhichOneof("event") == "error":
                    call.lost = f"{event.error.code}: {event.error.message}"
                if new := event.chunk.token_ids:
                    last_s = here_s()
                    first_s = first_s if tokens else last_s
                    tokens += new
        except grpc.aio.AioRpcError as error:
            call.lost = f"{error.code().name}: {error.details()}"
            return
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        if tokens != emulated_answer(prompt, sampling, num_tokens, self._vocab_size, self._eos):
            call.lost = call.lost or f"{len(tokens)} of {num_tokens} tokens, or others"
        call.ttft_s = first_s - began_s
        call.tpot_s = (last_s - first_s) / max(1, len(tokens) - 1)


class Admin:
    """The admin endpoint, which is away while its controller is."""

    def __init__(self, cluster: Cluster) -> None:
        self._folder = cluster.run_folder
        tokens = json.loads((self._folder / "tokens.json").read_text())
        headers = {"authorization": f"Bearer {tokens['operator']['secret']}"}
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.admin_port}", headers=headers, timeout=20.0)

    async def get(self, path: str) -> dict[str, Any] | None:
        """None while it does not answer."""
        try:
            answer = await self._http.get(f"/admin/v1/{path}")
            return dict(answer.json()) if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    async def until_ready(self, num_workers: int) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                listed = await self.get("workers")
                if listed is not None and sum(w["state"] == "ready" for w in listed["workers"]) == num_workers:
                    return
                await asyncio.sleep(POLL_S)

    async def kill(self, what: str) -> dict[str, object]:
        """SIGKILL the controller, or the decode worker that runs most."""
        pid, name = int(json.loads((self._folder / "cluster.json").read_text())["pids"]["controller"]), what
        if what == "worker":
            listed = await self.get("workers")
            assert listed is not None, "the admin endpoint is away"
            ready = [w for w in listed["workers"] if w["state"] == "ready" and w["role"] == "decode" and w["load"]]
            busiest = max(ready, key=lambda w: int(w["load"]["num_running"]))
            pid, name = int(busiest["pid"]), f"{busiest['worker_id']}, {busiest['load']['num_running']} running"
        os.kill(pid, signal.SIGKILL)
        return {"what": name}

    async def close(self) -> None:
        await self._http.aclose()


async def sample(admin: Admin, run: Run) -> None:
    """Until cancelled."""
    while True:
        if (listed := await admin.get("workers")) is not None:
            taken = Sample(round(run.now_s(), 1), {}, {})
            for worker in listed["workers"]:
                counts = taken.ready if worker["state"] == "ready" else taken.others
                key = worker["role"] if worker["state"] == "ready" else worker["state"]
                counts[key] = counts.get(key, 0) + 1
            run.samples.append(taken)
        await sleep(SAMPLE_S)


async def kill(admin: Admin, run: Run, after_s: float, what: str) -> None:
    await sleep(after_s)
    killed = await admin.kill(what)
    run.kills.append({"at_s": round(run.now_s(), 1), **killed})


def write_paces(folder: Path) -> Path:
    """The autoscaler's, as a configuration file."""
    paces = {"tick_s": TICK_S, "dwell_s": DWELL_S, "shrink_after_s": SHRINK_S}
    lines = [f"  {name}: {seconds}" for name, seconds in paces.items()]
    file = folder / "paces.yaml"
    file.write_text("\n".join(["controller:", *lines]), encoding="utf-8")
    return file


async def play(phases: Sequence[Phase], folder: Path) -> Run:
    """`folder`: for what the cluster is configured with."""
    gpus = ("--emulate", EMULATION.gpu, "--emulate-model", EMULATION.model, "--tp", str(EMULATION.tp))
    engine = (
        "--time-scale",
        f"{EMULATION.time_scale:g}",
        "--chunk-tokens",
        "2048",
        "--max-num-seqs",
        str(MAX_NUM_SEQS),
    )
    autoscaler = ("--autoscale", "--max-gpus", str(MAX_GPUS), "--config", str(write_paces(folder)))
    async with running(LAYOUT, (*gpus, *engine, *autoscaler)) as cluster:
        admin = Admin(cluster)
        await admin.until_ready(LAYOUT.prefill + LAYOUT.decode)
        run = Run(began_s=here_s(), began_unix_s=time.time())
        client = Client(cluster, run)
        sampling = asyncio.create_task(sample(admin, run))
        for phase in phases:
            kills = [asyncio.create_task(kill(admin, run, *one)) for one in phase.kill]
            await client.play(phase)
            await asyncio.gather(*kills)
        await client.close()
        sampling.cancel()
        told = await admin.get("decisions?limit=500")
        run.decisions = list(reversed(told["decisions"])) if told else []
        await admin.close()
    return run


def report(run: Run, phases: Sequence[Phase]) -> dict[str, object]:
    """The figures, also printed."""
    rows = []
    for name in dict.fromkeys(phase.name for phase in phases):
        calls = [call for call in run.calls if call.phase == name]
        met, lost = sum(call.is_met for call in calls), [call.lost for call in calls if call.lost]
        rows.append({"phase": name, "calls": len(calls), "in_slo": met / max(1, len(calls)), "lost": len(lost)})
        print(f"{name}: {len(calls)} calls, {met / max(1, len(calls)):.1%} in SLO, {len(lost)} lost {lost[:3] or ''}")
    for kill_ in run.kills:
        print(f"{kill_['at_s']:>7} s  killed {kill_['what']}")
    for decision in run.decisions:
        at_s = (decision["at_unix_s"] - run.began_unix_s) / EMULATION.time_scale
        not_done = decision["inputs"].get("not_done")
        print(
            f"{at_s:7.1f} s  {decision['action']}{f' NOT DONE ({not_done})' if not_done else ''}: {decision['reason']}"
        )
    last = ""
    for taken in run.samples:
        shown = f"{taken.ready} {taken.others or ''}"
        if shown != last:
            print(f"{taken.at_s:7.1f} s  {shown}")
        last = shown
    return {
        "phases": rows,
        "kills": run.kills,
        "decisions": run.decisions,
        "samples": [asdict(taken) for taken in run.samples],
        "num_flips": sum(d["applied"] and d["lever"] == "flip" for d in run.decisions),
        "num_created": sum(d["applied"] and d["lever"] == "create" for d in run.decisions),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.live_control", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one mix of 40 s")
    args = parser.parse_args(argv)
    phases = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(play(phases, Path(folder)))
    figures = report(run, phases)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return int(any(call.lost for call in run.calls))


if __name__ == "__main__":
    sys.exit(main())
