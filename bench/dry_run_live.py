"""`python -m bench.dry_run_live`: how often what a dry run says of a change comes true on an emulated cluster.

    a window of calls │ dry run │ change │ SETTLE_S │ a window of calls: what came true │ dry run │ change │ ...

One prefill and one decode worker of a 70B on two A100, whose steps are long enough for few cores to keep up with at full speed.
Calls of several classes come at random. Each change gives every class other targets at random, so each class is a prediction: it
is asked of the admin endpoint as `baton slo set --dry-run` does, then the change is made. What comes true is the share of calls
that met the targets, by the router's own times, of those that arrived in the window after SETTLE_S; who is turned away missed.
Where nothing is predicted of any class the refusals are noted, the change is not made, and other targets are drawn.

How late emulated steps ended is told beside each change: a cluster that is late is another one than what was asked for. Rows are
written as they come, so a run that is stopped leaves what it has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from baton.model_files import load_model_files
from baton.slo import SLO
from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.cluster import Cluster, Layout, running
from engine.pace import TOLERANCE
from router.controller.measured_fleet import WINDOW_S

LAYOUT = Layout("1 + 1", prefill=1, decode=1, sheds=True)
GPUS = ("--emulate", "a100", "--emulate-model", "llama-3.1-70b", "--tp", "2")
MODEL = "smollm2"  # lends its tokenizer
CLASSES = ("interactive", "gold", "silver", "bronze")
RATE = 1.5  # calls a second of each class: 450 in a window, and prefill busy to 60 %
PROMPT_TOKENS, OUTPUT_TOKENS = (100, 320), (20, 60)  # from, to; prompts take 50 to 150 ms of computing
# Likewise, on the log scale: from a TTFT that few calls meet to one that nearly all do, from one step to three
TTFT_MS, TPOT_MS = (120.0, 700.0), (23.5, 70.0)
MOST_DRAWS = 5  # for each change that is made: those that nothing is promised of are drawn again
SETTLE_S = 20.0  # after a change, for calls that came before it to end
PLANNER_S = 60.0  # for each prediction, at the lowest priority beside a busy cluster
CALL_TIMEOUT_S = 60.0  # a call takes some 2 s
LOOK_S = 10.0  # between two looks at lateness: a worker's covers its last 1,000 steps, some 25 s
TRIES = 3  # of the admin endpoint


# -- what was said, and what came true ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    at_s: float
    class_name: str
    ttft_ms: float = float("inf")  # until it is whole; so it stays where it was turned away
    tpot_ms: float = float("inf")
    is_turned_away: bool = False

    def meets(self, slo: SLO) -> bool:
        return self.ttft_ms <= slo.ttft_ms and self.tpot_ms <= slo.tpot_ms


@dataclass(frozen=True, slots=True)
class Said:
    """Of one class before a change: a prediction, or why there is none."""

    attainment: float | None
    low: float | None
    high: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Realised:
    """What calls of one class came to in a window."""

    share: float  # that met the targets
    num_calls: int
    num_turned_away: int


@dataclass(frozen=True, slots=True)
class Row:
    """One class in one change."""

    seed: int
    change: int
    class_name: str
    ttft_ms: float
    tpot_ms: float
    said: Said
    realised: Realised | None = None  # None: nothing was predicted of any class, and nothing changed
    late: float = (
        0.0  # p99 of how late steps ended, as a share of a step: the median over the window, of the later worker
    )

    @property
    def is_inside(self) -> bool | None:
        """None: nothing was predicted."""
        if self.said.low is None or self.said.high is None or self.realised is None:
            return None
        return self.said.low <= self.realised.share <= self.said.high

    def __str__(self) -> str:
        said, came = self.said, self.realised
        verdict = {True: "inside ", False: "OUTSIDE", None: "refused"}[self.is_inside]
        told = said.why if said.low is None else f"{said.attainment:.1%} ({said.low:.1%} to {said.high:.1%})"
        what = (
            "not made"
            if came is None
            else f"{came.share:6.1%} of {came.num_calls:4}, {came.num_turned_away:3} turned away"
        )
        targets = f"{self.ttft_ms:6.0f} ms {self.tpot_ms:5.1f} ms"
        return f"{self.change:2} {self.class_name:12}{targets}  {what:31}  late {self.late:3.0%}  {verdict}  {told}"


def said_of(prediction: dict[str, Any], class_name: str) -> Said:
    """`prediction`: of the answer to a dry run."""
    if (found := prediction.get("classes", {}).get(class_name)) is not None:
        return Said(found["attainment"], found["low"], found["high"])
    return Said(None, None, None, prediction.get("unknown", {}).get(class_name) or prediction.get("reason", ""))


def attained(calls: Sequence[Call], slo: SLO, since_s: float, until_s: float) -> Realised:
    """By the calls that came in that time."""
    came = [call for call in calls if call.class_name == slo.name and since_s <= call.at_s < until_s]
    met = sum(call.meets(slo) for call in came)
    return Realised(met / max(1, len(came)), len(came), sum(call.is_turned_away for call in came))


def drawn(rng: random.Random) -> list[SLO]:
    """Targets of every class."""

    def between(low: float, high: float) -> float:
        return float(round(low * (high / low) ** rng.random(), 1))

    return [SLO(name, between(*TTFT_MS), between(*TPOT_MS)) for name in CLASSES]


def summary(rows: Sequence[Row]) -> str:
    predicted = [row for row in rows if row.is_inside is not None]
    if not predicted:
        return f"nothing was predicted of {len(rows)}"
    inside = sum(row.is_inside is True for row in predicted)
    widest = max((row.said.high or 0.0) - (row.said.low or 0.0) for row in predicted)
    late = max(row.late for row in rows)
    truth = "true" if late <= TOLERANCE else "NOT TRUE, by its own rule"
    return (
        f"{inside} of {len(predicted)} inside ({inside / len(predicted):.0%}), {len(rows) - len(predicted)} not predicted; the"
        f" widest interval is {100 * widest:.1f} points; the emulation was {truth} (p99 of lateness up to {late:.0%} of a step)"
    )


# -- the cluster -------------------------------------------------------------------------------------------------------


class Traffic:
    """Poisson arrivals of every class, while it plays."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.calls: list[Call] = []
        self._rng = random.Random(seed)
        self._vocab_size = load_model_files(MODEL).spec.vocab_size
        self._channel = grpc.aio.insecure_channel(cluster.grpc_target.removeprefix("grpc://"))
        self._stub = serving_pb2_grpc.ServingStub(self._channel)
        self._open: set[asyncio.Task[None]] = set()

    async def play(self) -> None:
        due_s = time.monotonic()
        while True:
            call = Call(time.monotonic(), self._rng.choice(CLASSES))
            self.calls.append(call)
            task = asyncio.create_task(self._run(call))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            due_s += self._rng.expovariate(RATE * len(CLASSES))  # however late this loop is: the rate stays
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def settled(self) -> None:
        """Until the calls that are open now have ended."""
        await asyncio.gather(*self._open)

    async def close(self) -> None:
        await self.settled()
        await self._channel.close(None)

    async def _run(self, call: Call) -> None:
        request = serving_pb2.GenerateRequest(
            sampling=serving_pb2.Sampling(
                max_tokens=self._rng.randint(*OUTPUT_TOKENS), temperature=0.0, ignore_eos=True
            )
        )
        length = self._rng.randint(*PROMPT_TOKENS)
        request.token_ids.ids.extend(self._rng.randrange(100, self._vocab_size) for _ in range(length))
        stream = self._stub.Generate(request, timeout=CALL_TIMEOUT_S, metadata=(("x-slo-class", call.class_name),))
        try:
            async for event in stream:
                if event.WhichOneof("event") == "done":
                    call.ttft_ms, call.tpot_ms = event.done.timings.ttft_ms, event.done.timings.tpot_ms
        except grpc.aio.AioRpcError as error:  # who failed otherwise has missed, too
            call.is_turned_away = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Admin:
    """The admin endpoint, as an operator."""

    def __init__(self, cluster: Cluster) -> None:
        secret = json.loads((cluster.run_folder / "tokens.json").read_text())["operator"]["secret"]
        url, headers = f"http://127.0.0.1:{cluster.admin_port}/admin/v1", {"authorization": f"Bearer {secret}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=3 * PLANNER_S)

    async def dry_run(self, classes: Sequence[SLO]) -> dict[str, Any]:
        """What is predicted."""
        return dict((await self._send("POST", "/slo:dryRun", classes))["prediction"])

    async def change(self, classes: Sequence[SLO]) -> None:
        await self._send("PATCH", "/slo", classes)

    async def lateness(self) -> float:
        """Of the later worker, now."""
        workers = (await self._send("GET", "/workers"))["workers"]
        return max(float((worker["load"] or {}).get("p99_lateness", 0.0)) for worker in workers)

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, method: str, path: str, classes: Sequence[SLO] = ()) -> dict[str, Any]:
        """Again where the connection broke: while it was idle the controller may have closed it."""
        targets = {slo.name: {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms} for slo in classes}
        body, headers = {"classes": targets} if classes else None, {"if-match": "*"}
        for tries_left in reversed(range(TRIES)):
            try:
                answer = await self._http.request(method, path, json=body, headers=headers)
                return dict(answer.raise_for_status().json())
            except httpx.TransportError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")


async def watched(admin: Admin, seconds: float) -> float:
    """Let time go by; returns the median of how late the cluster was meanwhile."""
    shares, until_s = [], time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        shares.append(await admin.lateness())
        await asyncio.sleep(min(LOOK_S, left_s))
    return statistics.median(shares)


async def changed(number: int, seed: int, classes: Sequence[SLO], admin: Admin, traffic: Traffic) -> list[Row]:
    """One change of all classes: what is said of it, and a window later what came true."""
    prediction = await admin.dry_run(classes)
    told = [Row(seed, number, slo.name, slo.ttft_ms, slo.tpot_ms, said_of(prediction, slo.name)) for slo in classes]
    if all(row.said.low is None for row in told):
        return told
    await admin.change(classes)
    since_s = time.monotonic() + SETTLE_S
    await asyncio.sleep(SETTLE_S)
    late = await watched(admin, WINDOW_S)
    until_s = time.monotonic()
    await traffic.settled()
    return [
        replace(row, realised=attained(traffic.calls, slo, since_s, until_s), late=late)
        for row, slo in zip(told, classes, strict=True)
    ]


async def play(num_changes: int, seed: int, settings: Path, tell: Callable[[Sequence[Row]], None]) -> None:
    """`tell`: of each change, when its window is over."""
    rng = random.Random(f"{seed}/targets")
    async with running(LAYOUT, (*GPUS, "--config", str(settings))) as cluster:
        admin, traffic = Admin(cluster), Traffic(cluster, seed)
        await admin.change(drawn(rng))
        playing = asyncio.create_task(traffic.play())
        try:
            await asyncio.sleep(SETTLE_S + WINDOW_S)
            number = 0
            for _ in range(MOST_DRAWS * num_changes):
                if number == num_changes:
                    break
                if playing.done():
                    playing.result()  # raises what ended it
                rows = await changed(number, seed, drawn(rng), admin, traffic)
                number += any(row.realised is not None for row in rows)
                tell(rows)
        finally:
            playing.cancel()
            await traffic.close()
            await admin.close()


class Journal:
    """All rows so far, on the screen and in a file that is whole after every change."""

    def __init__(self, file: Path | None) -> None:
        self.rows: list[Row] = []
        self._file = file

    def tell(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        print("\n".join(map(str, rows)), flush=True)
        if self._file is not None:
            told = [asdict(row) | {"is_inside": row.is_inside} for row in self.rows]
            self._file.write_text(json.dumps(told, indent=2), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where nothing was predicted."""
    parser = argparse.ArgumentParser(prog="python -m bench.dry_run_live")
    parser.add_argument(
        "--changes", type=int, default=7, help="of all four classes at once, one each 6 min (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, as they come")
    args = parser.parse_args(argv)
    journal = Journal(args.json)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.yaml"
        settings.write_text(f"controller:\n  planner_seconds: {PLANNER_S:g}\n", encoding="utf-8")
        try:
            asyncio.run(play(args.changes, args.seed, settings, journal.tell))
        finally:
            print(summary(journal.rows))
    return 0 if any(row.is_inside is not None for row in journal.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
