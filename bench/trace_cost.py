"""What traces cost a router: `python -m bench.trace_cost [--rounds N] [--calls N]`.

Routers that differ in nothing but tracing stand side by side, each over a stub fleet of its own (bench/router_bench_rig.py), and
take turns: a round is `--calls` short chats of one token, one after the other on one connection. CPU is that of the router's
process with all its threads, by /proc; so is what its SDK's thread spends while the others have their turn. Latency is the
client's. Neighbours in a round see the same machine, so compare within one run.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from dataclasses import dataclass, field, replace

from bench.foreign_load import ForeignLoad
from bench.router_bench_cases import keep_alive, timed
from bench.router_bench_rig import Features, Rig, running_rig

SMALL = Features(num_endpoints=8, num_keys=16)
ARMS: tuple[tuple[str, float | None], ...] = (("off", None), ("ratio 0", 0.0), ("ratio 0.1", 0.1), ("ratio 1", 1.0))
FLUSHED_S = 2.5  # a batch is sent within 1 s (baton/otlp.py), and a hundredth of a second is as fine as /proc counts


@dataclass
class Arm:
    name: str
    rig: Rig
    cpu_us: list[float] = field(default_factory=list)  # per call, of each round
    p50_ms: list[float] = field(default_factory=list)

    def round(self, num_calls: int) -> None:
        idle_s, began_s = self._idle_s(), self.rig.cpu_s()
        with keep_alive(self.rig.port) as connection:
            chat, start_s = self.rig.chat(), time.monotonic()
            took_ms = [timed(connection, chat) for _ in range(num_calls)]
        time.sleep(FLUSHED_S)
        lasted_s = time.monotonic() - start_s
        self.cpu_us.append((self.rig.cpu_s() - began_s - idle_s * lasted_s) / num_calls * 1e6)
        self.p50_ms.append(statistics.median(took_ms))

    def _idle_s(self) -> float:
        """CPU that the router takes each second by itself."""
        before_s, began_s = self.rig.cpu_s(), time.monotonic()
        time.sleep(FLUSHED_S)
        return (self.rig.cpu_s() - before_s) / (time.monotonic() - began_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="What traces cost a router.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=1_000)
    args = parser.parse_args()
    load = ForeignLoad()
    with contextlib.ExitStack() as stack:
        arms = [Arm(name, stack.enter_context(running_rig(replace(SMALL, trace_ratio=ratio)))) for name, ratio in ARMS]
        for arm in arms:
            stack.enter_context(arm.rig.unpaced())
            arm.round(args.calls // 4)  # warms up, and is not counted
            arm.cpu_us.clear()
            arm.p50_ms.clear()
        for number in range(args.rounds):
            for arm in arms if number % 2 else reversed(arms):
                arm.round(args.calls)
    print(f"n = {args.rounds} rounds of {args.calls} calls; others used {load.cores():.2f} cores meanwhile")
    off = arms[0]
    for arm in arms:
        cpu_us = [a - b for a, b in zip(arm.cpu_us, off.cpu_us, strict=True)]
        p50_ms = [a - b for a, b in zip(arm.p50_ms, off.p50_ms, strict=True)]
        print(f"{arm.name:<10} CPU us per call {_spread(arm.cpu_us, 0)}   p50 ms {_spread(arm.p50_ms, 2)}")
        print(f"{'':<10} more than off  {_spread(cpu_us, 0)}   p50 ms {_spread(p50_ms, 2)}")
    return 0


def _spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    sys.exit(main())
