"""The router's two conversations with the controller: `Watch` tells it the fleet and the SLO classes, `Report` says what its
clients saw, once a second.

The controller may be away at any time: the last state stays in force and both are tried again. One that vanished without a
word is noticed by pings. Reports are totals since this router's start, so one that is lost is contained in the next. Event
loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from baton import clock
from baton.keepalive import CLIENT_OPTIONS
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust, why_failed
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from router.explain import told_json
from router.fleet import Endpoint, Fleet
from router.goodput import Goodput
from router.session import CHANNEL_OPTIONS
from router.slo_watch import SloWatch
from router.windows import class_pb, worker_pb

log = get_log("router.control")

RETRY_S = 0.5  # one heartbeat (DESIGN section 5); SLO changes must be in force within a second
REPORT_S = 1.0
REPORT_SHARE = 0.01  # of the loop's time: a report on a thousand workers takes some 50 ms
MAX_REPORT_S = 4.0  # the controller counts a router that it has not heard of for 5 s as gone
ITEMS_PER_SLICE = 25  # workers, or windows: about a millisecond
MAX_LINKS = 64  # of one worker
CALL_TIMEOUT_S = 5.0  # an answer that takes longer is of no use to a report each second


_CHANNEL_OPTIONS = (*CHANNEL_OPTIONS, *CLIENT_OPTIONS)

Item = TypeVar("Item")
Told = TypeVar("Told")


class CallCounts(Protocol):
    """What is told of calls (router/call.py)."""

    goodput: Goodput

    @property
    def num_inflight(self) -> int: ...

    def oldest_queued_s(self) -> float: ...

    def queued_tokens(self) -> int: ...


class ControlClient:
    """Runs until closed."""

    def __init__(
        self,
        address: str,
        router_id: str,
        fleet: Fleet,
        slo_watch: SloWatch,
        calls: CallCounts,
        trust: PeerTrust = PLAIN,
    ) -> None:
        self._address = address
        self._trust = trust
        self._router_id = router_id
        self._fleet = fleet
        self._slo_watch = slo_watch
        self._calls = calls
        self._asked: set[str] = set()  # request ids that the controller wants explained
        self._hurry = asyncio.Event()  # the next report is awaited
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._report())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self) -> None:
        told = False  # one line per outage
        while True:
            try:
                async with self._channel() as channel:
                    stub = control_pb2_grpc.ControlStub(channel)
                    async for state in stub.Watch(control_pb2.WatchRequest(router_id=self._router_id)):
                        told = False
                        self._fleet.apply(state.workers)
                        self._slo_watch.apply(state.slo)
                        is_told = state.HasField("local_prefill_tokens")
                        self._fleet.limit_local_prefill(state.local_prefill_tokens if is_told else None)
                        self._ask(state.explain)
            except grpc.aio.AioRpcError as error:
                if not told:
                    log.warning("controller_away", reason=why_failed(error))
                    told = True
            except Exception:  # RPC boundary: a state that makes no sense must not end the watching
                log.exception("control_state_refused")
            await asyncio.sleep(RETRY_S)

    async def _report(self) -> None:
        while True:
            try:
                async with (
                    self._channel() as channel
                ):  # a new one after each failure: certificates may have been renewed
                    await self._report_over(control_pb2_grpc.ControlStub(channel))
            except grpc.aio.AioRpcError as error:
                log.debug("report_failed", reason=why_failed(error))
            except Exception:  # RPC boundary: a report that cannot be made must not end the reporting
                log.exception("report_failed")
            await self._pause()

    async def _report_over(self, stub: control_pb2_grpc.ControlAsyncStub) -> None:
        """Raises: AioRpcError, never returns otherwise."""
        while True:
            report, cost_s = await self._current()
            await stub.Report(report, timeout=clock.real_s(CALL_TIMEOUT_S))
            await self._pause(min(max(REPORT_S, cost_s / REPORT_SHARE), MAX_REPORT_S))

    async def _pause(self, pause_s: float = REPORT_S) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()

    def _channel(self) -> grpc.aio.Channel:
        return self._trust.channel(self._address, Part.CONTROLLER, _CHANNEL_OPTIONS)

    def _ask(self, request_ids: Iterable[str]) -> None:
        """Report at once what is known of these requests."""
        self._asked.update(request_ids)
        if self._asked:
            self._hurry.set()

    def _explained(self) -> list[control_pb2.Explained]:
        asked, self._asked = self._asked, set()
        return [
            control_pb2.Explained(request_id=name, json=told_json(self._fleet.explanations.get(name))) for name in asked
        ]

    async def _current(self) -> tuple[control_pb2.RouterReport, float]:
        """The report, made in slices between which streams get their tokens, and what it took, in seconds."""
        goodput, now_s = self._calls.goodput, clock.now_s()
        views, views_s = await _in_slices(self._fleet.endpoints, _view)
        classes, classes_s = await _in_slices(goodput.class_windows(now_s), class_pb)
        workers, workers_s = await _in_slices(goodput.worker_windows(now_s), worker_pb)
        report = control_pb2.RouterReport(
            router_id=self._router_id,
            slo_version=self._slo_watch.version,
            verdicts=self._slo_watch.totals(),
            workers=views,
            num_inflight=self._calls.num_inflight,
            pid=os.getpid(),
            explained=self._explained(),
            class_windows=classes,
            worker_windows=workers,
            arrived=[
                control_pb2.ClassArrivals(class_name=name, num_arrived=count)
                for name, count in self._calls.goodput.arrivals()
            ],
            oldest_queued_s=self._calls.oldest_queued_s(),
            queued_tokens=self._calls.queued_tokens(),
        )
        return report, views_s + classes_s + workers_s


async def _in_slices(items: Iterable[Item], told: Callable[[Item], Told]) -> tuple[list[Told], float]:
    """All of them told, and the seconds that took; other tasks run between slices."""
    rest, result, cost_s = iter(items), list[Told](), 0.0
    while True:
        began_s = clock.now_s()
        part = [told(item) for item in islice(rest, ITEMS_PER_SLICE)]
        cost_s += clock.now_s() - began_s
        result += part
        if len(part) < ITEMS_PER_SLICE:
            return result, cost_s
        await asyncio.sleep(0)


def _view(endpoint: Endpoint) -> control_pb2.WorkerView:
    view, state = endpoint.session.view, endpoint.state
    return control_pb2.WorkerView(
        worker_id=endpoint.worker_id,
        epoch=endpoint.session.epoch,
        state=state,
        reason=endpoint.health.reason if state == "ejected" else "",
        load=view.load if view else None,
        links=worth_telling(list(view.links.values())) if view else (),
    )


def worth_telling(links: list[worker_pb2.LinkStatus]) -> list[worker_pb2.LinkStatus]:
    """All, or, of very many, the first that are not as they should be: 500 x 500 ready ones are 15 MB that nobody reads."""
    if len(links) <= MAX_LINKS:
        return links
    return [link for link in links if link.state != "ready"][:MAX_LINKS]
