"""Metrics of workers: each one's last report, read at the moment of the scrape. Counters restart with their worker.

One row per metric; a worker without a Session has no rows but `worker_up` and `worker_inflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.v1 import worker_pb2
from router.fleet import Endpoint, Fleet
from router.series import header, labelled, sample
from router.session import WorkerView

Values = Mapping[str, float]  # by the value of the row's second label; "" where it has none


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    text: str
    values: Callable[[worker_pb2.Opened, worker_pb2.Load], Values]
    label: str = ""  # the second one, after the worker
    is_total: bool = False

    @property
    def full_name(self) -> str:
        return f"baton_{self.name}_total" if self.is_total else f"baton_{self.name}"

    def lines(self, views: Sequence[tuple[str, WorkerView]]) -> Iterator[str]:
        name = self.full_name
        yield header(name, self.text, "counter" if self.is_total else "gauge")
        for worker, view in views:  # `worker`: its label, written
            for label, value in self.values(view.opened, view.load).items():
                yield sample(name, f"{labelled([self.label], [label])},{worker}" if self.label else worker, value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_ROWS = (
    _Row("num_requests_running", "Sequences in the worker's engine.", lambda _, load: {"": load.num_running}),
    _Row("num_requests_waiting", "Sequences queued in the worker.", lambda _, load: {"": load.num_waiting}),
    _Row(
        "kv_cache_usage_ratio",
        "Active and reserved blocks of all blocks.",
        lambda opened, load: {"": _ratio(load.active_blocks + load.reserved_blocks, opened.num_blocks)},
    ),
    _Row(
        "kv_blocks",
        "Blocks by what they are used for.",
        lambda _, load: {
            "active": load.active_blocks,
            "reserved": load.reserved_blocks,
            "cached": load.cached_blocks,
            "free": load.free_blocks,
        },
        "use",
    ),
    _Row(
        "kv_transfers_in_flight",
        "Transfers under way: out = blocks held for a peer, in = tickets granted.",
        lambda _, load: {"out": load.num_leases, "in": load.num_tickets},
        "direction",
    ),
    _Row(
        "kv_ring_occupancy_ratio",
        "Slots of peers' rings that hold a frame of this worker, of all its slots there.",
        lambda _, load: {"": _ratio(load.slots_in_use, load.num_slots)},
    ),
    _Row(
        "kv_quarantined_slots",
        "Slots of closed pairs that a peer might still write to.",
        lambda _, load: {"": load.quarantined_slots},
    ),
    _Row(
        "kv_wire_bytes",
        "KV payload that the worker sent and received, failed transfers included.",
        lambda _, load: {"out": load.kv_bytes_sent, "in": load.kv_bytes_received},
        "direction",
        is_total=True,
    ),
    _Row(
        "kv_transfer_failures",
        "Transfers that failed, on whichever side the worker was; both sides count.",
        lambda _, load: load.kv_failures,
        "reason",
        is_total=True,
    ),
    _Row(
        "kv_transfer_expired",
        "Transfers given up by lease, as the worker counts them.",
        lambda _, load: {"": load.kv_transfers_expired},
        is_total=True,
    ),
    _Row(
        "kv_frames_dropped",
        "Frames that were stale, unknown or damaged.",
        lambda _, load: {"": load.kv_frames_dropped},
        is_total=True,
    ),
    _Row(
        "emulation_step_lateness_ratio",
        "How late the worker's emulated steps end, p99 of the last 1,000, as a share of a step; 0 on real GPUs.",
        lambda _, load: {"": load.p99_lateness},
    ),
    _Row(
        "outbox_bytes",
        "What the worker wrote and its routers, or peers, have not read.",
        lambda _, load: {"router": load.session_outbox_bytes, "peer": load.link_outbox_bytes},
        "reader",
    ),
)


class WorkerGauges:
    """A source of lines, of a thousand workers some 20,000."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def lines(self) -> Iterator[str]:
        endpoints = [(labelled(["worker"], [endpoint.worker_id]), endpoint) for endpoint in self._fleet.endpoints]
        yield from _presence(endpoints)
        views = [(worker, endpoint.session.view) for worker, endpoint in endpoints if endpoint.session.view is not None]
        for row in _ROWS:
            yield from row.lines(views)


def _presence(endpoints: Sequence[tuple[str, Endpoint]]) -> Iterator[str]:
    name = "baton_worker_up"
    yield header(name, "1 = its Session is open.", "gauge")
    for worker, endpoint in endpoints:
        labels = f'role="{endpoint.role.name.lower()}",state="{endpoint.state}",{worker}'
        yield sample(name, labels, endpoint.session.view is not None)
    name = "baton_worker_inflight"
    yield header(name, "Sequences this router has placed there and not seen end.", "gauge")
    for worker, endpoint in endpoints:
        yield sample(name, worker, endpoint.num_inflight)
