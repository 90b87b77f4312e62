"""Sends planned calls and records what comes back. One event loop, no threads.

- Open loop: each call leaves when it is due, whether or not earlier ones are done, up to `max_concurrency`; what
  waits there keeps its due instant, so the wait is part of its latency.
- Closed loop: `concurrency` clients, each sends its next call when its last one has ended; one that was turned away waits as
  long as the server asked for, or clients that ask again at once would be the load.
A call always ends in exactly one Record; no failure is retried or dropped.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

from bench.client import CallFailed, CallShed, Client, Finish
from bench.measure import Outcome, Record
from bench.workload import PlannedCall

# How long a client that leaves before its first token stays: past loopback's 0.3 ms, inside most prefills
EARLY_LEAVE_S = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """How calls are paced."""

    max_concurrency: int
    open_loop: bool
    call_timeout_s: float
    duration_s: float | None = (
        None  # a closed loop starts no call after it; an open one ends by its plan's due instants
    )


@dataclass(frozen=True, slots=True)
class LoadResult:
    records: list[Record]  # in order of ending
    started_s: float
    num_waited_at_cap: int  # open loop: arrivals that found max_concurrency calls in flight
    cpu_share: float  # of one core, this process over the load


async def run_load(
    client: Client, calls: Iterator[PlannedCall], load: Load, on_record: Callable[[Record], None] = lambda _record: None
) -> LoadResult:
    """Run all of `calls`."""
    run = _Run(client, load, on_record)
    cpu_s = cpu_seconds()
    if load.open_loop:
        await run.open_loop(calls)
    else:
        await run.closed_loop(calls)
    wall_s = time.perf_counter() - run.started_s
    return LoadResult(run.records, run.started_s, run.num_waited, (cpu_seconds() - cpu_s) / wall_s)


class _Run:
    def __init__(self, client: Client, load: Load, on_record: Callable[[Record], None]) -> None:
        self.records: list[Record] = []
        self.num_waited = 0
        self.started_s = time.perf_counter()
        self._client = client
        self._load = load
        self._on_record = on_record

    async def open_loop(self, calls: Iterator[PlannedCall]) -> None:
        slots = asyncio.Semaphore(self._load.max_concurrency)
        async with asyncio.TaskGroup() as group:
            for call in calls:
                due_s = self.started_s + call.at_s
                await asyncio.sleep(due_s - time.perf_counter())
                group.create_task(self._in_slot(call, due_s, slots))

    async def closed_loop(self, calls: Iterator[PlannedCall]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.max_concurrency):
                group.create_task(self._one_client(calls))

    async def _in_slot(self, call: PlannedCall, due_s: float, slots: asyncio.Semaphore) -> None:
        self.num_waited += slots.locked()
        async with slots:
            await self._perform(call, due_s)

    async def _one_client(self, calls: Iterator[PlannedCall]) -> None:
        ends_s = self.started_s + (self._load.duration_s or float("inf"))
        while time.perf_counter() < ends_s and (call := next(calls, None)) is not None:
            record = await self._perform(call, time.perf_counter())
            await asyncio.sleep(min(record.retry_after_s, max(0.0, ends_s - time.perf_counter())))

    async def _perform(self, call: PlannedCall, due_s: float) -> Record:
        record = await perform(self._client, call, due_s, self._load.call_timeout_s)
        self.records.append(record)
        self._on_record(record)
        return record


@dataclass(slots=True)
class _Seen:
    """What one call has shown so far."""

    times_s: list[float] = field(default_factory=list)  # one per token
    finish: Finish | None = None
    left: bool = False  # the client went away, as planned


async def perform(client: Client, call: PlannedCall, due_s: float, timeout_s: float) -> Record:
    """Send one call and see it through to its end, or leave it as planned."""
    sent_s = time.perf_counter()
    seen = _Seen()
    error_kind, error_message, retry_after_s = "", "", 0.0
    try:
        await _receive(client, call, timeout_s, seen)
        outcome = Outcome.CANCELLED if seen.left else Outcome.COMPLETED
    except CallShed as shed:
        outcome, error_kind, error_message, retry_after_s = Outcome.SHED, shed.kind, str(shed), shed.retry_after_s
    except CallFailed as failure:
        outcome, error_kind, error_message = Outcome.FAILED, failure.kind, str(failure)
    counted = seen.finish or Finish()
    return Record(
        index=call.index,
        outcome=outcome,
        due_s=due_s,
        sent_s=sent_s,
        end_s=time.perf_counter(),
        token_times_s=tuple(seen.times_s),
        prompt_tokens=len(call.token_ids) if counted.prompt_tokens is None else counted.prompt_tokens,
        cached_tokens=counted.cached_tokens,
        usage_tokens=counted.completion_tokens,
        timings=counted.timings,
        error_kind=error_kind,
        error_message=error_message,
        retry_after_s=retry_after_s,
    )


async def _receive(client: Client, call: PlannedCall, timeout_s: float, seen: _Seen) -> None:
    leaves_early = call.cancel_after_tokens == 0
    try:
        async with (
            asyncio.timeout(EARLY_LEAVE_S if leaves_early else timeout_s),
            aclosing(client.stream(call)) as events,
        ):
            async for event in events:
                if isinstance(event, Finish):
                    seen.finish = event
                    continue
                seen.times_s.extend([time.perf_counter()] * event.count)
                if call.cancel_after_tokens is not None and len(seen.times_s) >= call.cancel_after_tokens:
                    seen.left = True
                    return
    except TimeoutError:
        if not leaves_early:
            raise CallFailed("timeout", f"no end within {timeout_s:g} s") from None
        seen.left = True
        return
    if seen.finish is None:
        raise CallFailed("truncated", "the stream ended without saying so")
    if not seen.times_s:
        raise CallFailed("empty", "the answer has no tokens")


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
