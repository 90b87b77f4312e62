"""A worker dies, stands still or comes back, at each step of a handoff: nobody else suffers, and the pair works again.

    QUEUED     Submit came, Reserve has not left               RESERVING  decode has granted, Grant has not left
    MID_FRAME  a frame is being copied, by the victim          UNACKED    every byte is there and adopted, Ack has not left
    COMMITTED  handed over; decode generates

One call waits at each step when the fault strikes; the slow tests look at every step alone, with the product's own lease.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.faults.fault_rig import (
    FULL,
    QUICK,
    Call,
    FaultRouter,
    FaultWorker,
    Fleet,
    Times,
    config_of,
    fleet,
    prompt,
    routing,
    until,
)


class Step(enum.StrEnum):
    QUEUED = "queued"
    RESERVING = "reserving"
    MID_FRAME = "mid frame"
    UNACKED = "unacked"
    COMMITTED = "committed"


class Fault(enum.StrEnum):
    KILL = "killed"  # and replaced once its peer is idle again
    RESTART_SAME = "restarted at the same address"  # before its peer has noticed
    RESTART_NEW = "restarted at a new address"
    STOP = "stopped for longer than the lease"


PACE_S = 0.05  # of a decode step until the fault: 200 tokens last 10 s
IN_ORDER = tuple(reversed(Step))  # a Reserve that is not answered keeps others for that decode worker queued


class Pair:
    """A prefill and a decode worker, their router, and calls that wait at chosen steps."""

    def __init__(self, workers: Fleet, router: FaultRouter, p: FaultWorker, d: FaultWorker) -> None:
        self.fleet, self.router = workers, router
        self.side = {"p": p, "d": d}

    async def bring_to(self, step: Step, victim: str) -> Call:
        p, d = self.side["p"], self.side["d"]
        seq = self.router.epoch << 32 | len(self.router.calls) + 1
        if step is Step.COMMITTED:
            d.ask("pace", PACE_S)
            call = self.router.submit(prompt(100, seq), 200)
            await until(lambda: len(call.decode.tokens.get(seq, ())) > 1 and seq in call.prefill.ended)
            return call
        if step is Step.QUEUED:
            p.ask("hold", "reserve", seq)
            waiting = self.router.sessions["p"].load.num_waiting
            call = self.router.submit(prompt(200, seq), 20)
            await until(lambda: self.router.sessions["p"].load.num_waiting > waiting)
            return call
        holder, kind = {
            Step.RESERVING: (d, "grant"),
            Step.UNACKED: (d, "ack"),
            Step.MID_FRAME: (self.side[victim], "gather" if victim == "p" else "scatter"),
        }[step]
        if step is Step.MID_FRAME:
            holder.ask("copy", kind, 2)  # two frames of seven have gone
        else:
            holder.ask("hold", kind, seq)
        before = holder.ask("held").get(kind, 0)
        call = self.router.submit(prompt(200, seq), 20)
        await until(lambda: holder.ask("held").get(kind, 0) > before, lambda: (step, call.outcome, call.error))
        return call

    async def strike(self, fault: Fault, victim: str, times: Times) -> None:
        worker = self.side[victim]
        other = "d" if victim == "p" else "p"
        if fault is Fault.STOP:
            worker.stop()
        else:
            worker.kill()
        self.release(other)
        struck_s = time.monotonic()
        if fault in (Fault.STOP, Fault.KILL):
            print(f"{other} idle {await self.router.idle(other):.2f} s after {victim} was {fault}")
        if fault is Fault.STOP:
            await asyncio.sleep(struck_s + times.stop_s - time.monotonic())
            worker.go_on()
            self.release(victim)
            return
        again = await self.fleet.restart(worker, same_address=fault is not Fault.RESTART_NEW)
        self.side[victim] = again
        await self.router.meet(again)

    def release(self, name: str) -> None:
        self.side[name].ask("release")
        self.side[name].ask("pace", 0.0)


async def suffer(fault: Fault, victim: str, steps: Sequence[Step], times: Times, mode: str, epoch: int) -> None:
    with fleet() as workers:
        p, d = await workers.start(
            config_of("p", "prefill", times, mode=mode), config_of("d", "decode", times, mode=mode)
        )
        async with routing(epoch, p, d) as router:
            pair = Pair(workers, router, p, d)
            await router.plain()
            await router.idle()
            survivor = d if victim == "p" else p
            held = survivor.ask("resources")
            calls = [await pair.bring_to(step, victim) for step in IN_ORDER if step in steps]
            await pair.strike(fault, victim, times)
            await router.end_of(*calls)
            print([(call.outcome, call.error) for call in calls])
            ended_s = time.monotonic()
            await router.plain()
            print(f"answers again {time.monotonic() - ended_s:.2f} s after the last call's end")
            print(f"idle after {await router.idle():.2f} s")
            await until(lambda: not grown(held, survivor), lambda: grown(held, survivor))


def grown(before: dict[str, Any], worker: FaultWorker) -> dict[str, Any]:
    """What a worker holds more of than before, but for memory."""
    now = worker.ask("resources")
    return {name: (before[name], now[name]) for name in ("fds", "threads", "shared") if now[name] > before[name]}


@pytest.mark.parametrize(
    ("fault", "victim", "mode"),
    [
        (Fault.KILL, "p", "staged"),
        (Fault.KILL, "d", "direct"),
        (Fault.RESTART_SAME, "p", "direct"),
        (Fault.RESTART_SAME, "d", "staged"),
        (Fault.RESTART_NEW, "p", "staged"),
        (Fault.RESTART_NEW, "d", "direct"),
        (Fault.STOP, "p", "direct"),
        (Fault.STOP, "d", "direct"),
    ],
    ids=str,
)
async def test_a_worker_that_fails_with_a_call_at_every_step_harms_no_other_and_the_pair_works_again(
    fault: Fault, victim: str, mode: str
) -> None:
    await suffer(fault, victim, IN_ORDER, QUICK, mode, epoch=0xFA)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("victim", ["p", "d"])
@pytest.mark.parametrize("step", Step, ids=str)
@pytest.mark.parametrize("fault", Fault, ids=str)
async def test_a_worker_that_fails_at_one_step_of_one_call_harms_no_other_and_the_pair_works_again(
    fault: Fault, step: Step, victim: str, mode: str
) -> None:
    await suffer(fault, victim, [step], FULL, mode, epoch=0xFB)
