"""What one worker's KV plane looks like to operators: failures by reason, and a KvStatus of what links and plane know.

Runs on the event loop; reads what the KV thread has published.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from baton.v1 import worker_pb2
from kv_transfer.events import IncomingClosed, KVEvent, OutgoingClosed, TransportSettings
from kv_transfer.failure import failure_reason
from kv_transfer.pair import PairStatus
from worker.links import PeerLink


class TransferFailures:
    """Counts transfers that failed, by reason, on whichever side this worker was. A closed set of reasons bounds it."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, event: KVEvent) -> None:
        if isinstance(event, OutgoingClosed | IncomingClosed) and event.reason:
            self._counts[failure_reason(event.reason)] += 1

    def totals(self) -> dict[str, int]:
        return dict(self._counts)


def kv_status(
    settings: TransportSettings, links: Sequence[PeerLink], pairs: Mapping[str, PairStatus]
) -> worker_pb2.KvStatus:
    """Join each link with its pair, by the link's key; a link without a data path has totals of 0."""
    status = worker_pb2.KvStatus(transport=settings.kind, version=settings.version, options=settings.options)
    for link in links:
        shown = status.pairs.add(link=link.status())
        pair = pairs.get(link.key)
        if pair is not None:
            shown.mode = pair.mode
            shown.bytes_sent, shown.bytes_received = pair.bytes_sent, pair.bytes_received
            shown.num_sent, shown.num_received = pair.num_sent, pair.num_received
            shown.sending_s = pair.sending_s
    return status
