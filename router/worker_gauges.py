"""Metrics of workers: each one's last report, read at the moment of the scrape. Counters restart with their worker.

One row per metric; a worker without a Session has no rows but `worker_up` and `worker_inflight`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.v1 import worker_pb2
from router.fleet import Fleet

Values = Mapping[str, float]  # by the value of the row's second label; "" where it has none


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    text: str
    values: Callable[[worker_pb2.Opened, worker_pb2.Load], Values]
    label: str = ""  # the second one, after the worker
    is_total: bool = False

    def family(self) -> GaugeMetricFamily | CounterMetricFamily:
        labels = ["worker", self.label] if self.label else ["worker"]
        kind = CounterMetricFamily if self.is_total else GaugeMetricFamily
        return kind(f"baton_{self.name}", self.text, labels=labels)


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
        "outbox_bytes",
        "What the worker wrote and its routers, or peers, have not read.",
        lambda _, load: {"router": load.session_outbox_bytes, "peer": load.link_outbox_bytes},
        "reader",
    ),
)


class WorkerGauges(Collector):
    """Registered once; collected at every scrape."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        yield from self._presence()
        views = [(e.worker_id, e.session.view) for e in self._fleet.endpoints if e.session.view is not None]
        for row in _ROWS:
            family = row.family()
            for worker_id, view in views:
                for label, value in row.values(view.opened, view.load).items():
                    family.add_metric([worker_id, label] if row.label else [worker_id], value)
            yield family

    def _presence(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("baton_worker_up", "1 = its Session is open.", labels=["worker", "role", "state"])
        inflight = GaugeMetricFamily(
            "baton_worker_inflight", "Sequences this router has placed there and not seen end.", labels=["worker"]
        )
        for endpoint in self._fleet.endpoints:
            role = endpoint.role.name.lower()
            up.add_metric([endpoint.worker_id, role, endpoint.state], float(endpoint.session.view is not None))
            inflight.add_metric([endpoint.worker_id], endpoint.num_inflight)
        return (up, inflight)
