"""How workers came up, by their own word: where their weights came from, and how long that and the whole start took.

    weights_from   peer: another worker lent them   files: read from disk   none: it has none, as an emulated one
Event loop only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.series import Histogram, Registry

NO_WEIGHTS = "none"
SOURCES = ("peer", "files")  # worker/loading.py
_BUCKETS = (
    0.5,
    1,
    2,
    5,
    10,
    20,
    40,
    80,
    160,
    320,
    640,
)  # s: a small model from a page cache to a large one from a network


@dataclass(frozen=True, slots=True)
class StartUp:
    weights_from: str = NO_WEIGHTS
    weights_s: float = 0.0  # that they took to come and to be laid out
    start_s: float = 0.0  # begin of the process's start -> ready


class Starts:
    """The last start of each worker that is known, and of all a distribution."""

    def __init__(self, registry: Registry) -> None:
        self._by_worker: dict[str, StartUp] = {}
        self._starts = Histogram(
            "baton_worker_start_seconds", "A worker's start, by where its weights came from.", ["weights_from"], registry,
            _BUCKETS,
        )  # fmt: skip
        self._weights = Histogram(
            "baton_worker_weights_seconds", "Of it, until the weights were there.", ["weights_from"], registry, _BUCKETS
        )

    def came_up(self, worker_id: str, start_up: StartUp) -> None:
        """To be called once per process."""
        self._by_worker[worker_id] = start_up
        self._starts.labels(start_up.weights_from).observe(start_up.start_s)
        self._weights.labels(start_up.weights_from).observe(start_up.weights_s)

    def forget(self, worker_id: str) -> None:
        self._by_worker.pop(worker_id, None)

    def weights_from(self) -> Mapping[str, str]:
        """By worker."""
        return {worker_id: start_up.weights_from for worker_id, start_up in self._by_worker.items()}

    def of(self, worker_id: str) -> StartUp | None:
        return self._by_worker.get(worker_id)
