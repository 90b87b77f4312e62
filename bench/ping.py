"""`baton bench ping`: how long a worker's and the router's event loops keep a caller waiting while the engine decodes.

Health.Check of the router and of each worker over gRPC, first on an idle cluster, then while `--batch` calls decode; p50 and p99
of both. DESIGN section 7 holds p99 to 5 ms at batch 32. The load runs in a process of its own, so the pings do not wait for the
load generator's loop; a control row says how late the pinger's own timers fire, since it shares the cores too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import orjson
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import serving_pb2, serving_pb2_grpc
from bench.client import CallFailed
from bench.cluster import BATON, COLOCATED, DISAGGREGATED, Cluster, ClusterError, running
from bench.measure import Percentiles, percentiles
from bench.report import dump, format_ms, this_machine
from bench.serve_cli import positive_float, positive_int

LIMIT_MS = 5.0  # DESIGN section 7
PING_TIMEOUT_S = 10.0
CONTROL = "none: the pinger's own timer, late by"
LOAD_OUTPUT_TOKENS = 1_000  # longer than the measurement, so that the batch stays whole
BATCH_TIMEOUT_S = 120.0  # all prompts prefilled


@dataclass(frozen=True, slots=True)
class PingRow:
    process: str
    state: str  # idle | decoding
    ping_ms: Percentiles


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("ping", help="gRPC ping p99 while the engine decodes")
    parser.set_defaults(run=main)
    add = parser.add_argument
    add("--batch", type=positive_int, default=32, help="calls that decode at once (%(default)s)")
    add("--duration", type=positive_float, default=10.0, help="seconds of pings in each state (%(default)s)")
    add("--interval-ms", type=positive_float, default=10.0, help="between pings (%(default)s)")
    add("--colocated", action="store_true", help="one worker for both roles")
    add("--json", type=Path, help="write the result to this file")


def main(args: argparse.Namespace) -> int:
    try:
        rows = asyncio.run(measure(args))
    except (ClusterError, CallFailed, OSError, grpc.aio.AioRpcError) as error:
        print(f"baton bench ping: {error}", file=sys.stderr)
        return 2
    print(
        f"{this_machine()}\n\n| gRPC ping of | cluster | n | p50 ms | p99 ms | max ms |\n|---|---|---:|---:|---:|---:|"
    )
    for row in rows:
        ms = row.ping_ms
        print(
            f"| {row.process} | {row.state} | {ms.n} | {format_ms(ms.p50)} | {format_ms(ms.p99)} | {format_ms(ms.max)} |"
        )
    if args.json:
        args.json.write_bytes(dump({"machine": asdict(this_machine()), "rows": [asdict(row) for row in rows]}))
    pings = (row for row in rows if row.state == "decoding" and row.process != CONTROL)
    return int(any(row.ping_ms.p99 > LIMIT_MS for row in pings))


async def measure(args: argparse.Namespace) -> list[PingRow]:
    async with running(COLOCATED if args.colocated else DISAGGREGATED) as cluster:
        names = {f"127.0.0.1:{cluster.grpc_port}": "router", **await worker_names(cluster)}
        rows = await ping_all(names, "idle", args)
        async with decoding(cluster, args.batch):
            rows += await ping_all(names, "decoding", args)
        return rows


async def worker_names(cluster: Cluster) -> dict[str, str]:
    """Address -> name of each worker, as `baton status` tells them."""
    status = await asyncio.create_subprocess_exec(
        BATON, "status", "--json", "--admin-port", str(cluster.admin_port), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await status.communicate()
    if status.returncode != 0:
        raise ClusterError(f"`baton status` ended with status {status.returncode}")
    return {worker["address"]: f"{worker['role']} {worker['worker_id']}" for worker in orjson.loads(out)["workers"]}


async def ping_all(names: dict[str, str], state: str, args: argparse.Namespace) -> list[PingRow]:
    interval_s = args.interval_ms / 1e3
    late, *times = await asyncio.gather(
        lateness(args.duration, interval_s), *(ping(address, args.duration, interval_s) for address in names)
    )
    rows = [PingRow(name, state, percentiles(ms)) for name, ms in zip(names.values(), times, strict=True)]
    return [*rows, PingRow(CONTROL, state, percentiles(late))]


async def lateness(duration_s: float, interval_s: float) -> list[float]:
    """How late this process's own timers fire, ms: what of a ping is the pinger's wait for a core."""
    late_ms = []
    ends_s = time.perf_counter() + duration_s
    while (started_s := time.perf_counter()) < ends_s:
        await asyncio.sleep(interval_s)
        late_ms.append(1e3 * (time.perf_counter() - started_s - interval_s))
    return late_ms


async def ping(address: str, duration_s: float, interval_s: float) -> list[float]:
    """Round trips, ms, one at a time."""
    times_ms = []
    async with grpc.aio.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        await check(health_pb2.HealthCheckRequest(), timeout=PING_TIMEOUT_S)  # connects
        ends_s = time.perf_counter() + duration_s
        while (started_s := time.perf_counter()) < ends_s:
            await check(health_pb2.HealthCheckRequest(), timeout=PING_TIMEOUT_S)
            times_ms.append(1e3 * (time.perf_counter() - started_s))
            await asyncio.sleep(interval_s)
    return times_ms


@asynccontextmanager
async def decoding(cluster: Cluster, batch: int) -> AsyncGenerator[None, None]:
    """Keep `batch` calls decoding, from another process."""
    flags = ("--input-len", "16", "--output-len", str(LOAD_OUTPUT_TOKENS), "--warmup", "0", "--no-progress")
    load = await asyncio.create_subprocess_exec(
        BATON, "bench", "serve", "--target", cluster.grpc_target, "--concurrency", str(batch), "--num-requests",
        str(100 * batch), *flags, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        await until_decoding(cluster, batch, load)
        yield
        if load.returncode is not None:
            raise ClusterError(f"the load ended with status {load.returncode} before the pings did")
    finally:
        if load.returncode is None:
            load.terminate()
        await load.wait()


async def until_decoding(cluster: Cluster, batch: int, load: asyncio.subprocess.Process) -> None:
    """Wait until as many sequences run and none waits."""
    ends_s = time.monotonic() + BATCH_TIMEOUT_S
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = serving_pb2_grpc.ServingStub(channel)
        while time.monotonic() < ends_s and load.returncode is None:
            loads = await stub.GetLoads(serving_pb2.GetLoadsRequest(), timeout=PING_TIMEOUT_S)
            if max((worker.num_running for worker in loads.workers), default=0) >= batch:
                return
            await asyncio.sleep(0.1)
    raise ClusterError(f"{batch} calls did not decode at once within {BATCH_TIMEOUT_S:g} s")
