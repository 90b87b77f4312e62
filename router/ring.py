"""Sums over the last seconds and minutes, in memory that never grows. Pure: instants come in.

    RING_S = 300    |....|....|....|....|   ...   |....|..
                                                     ^ the bucket of now, BUCKET_S long and not yet full

Each bucket is one row of numbers; a row is cleared when its bucket comes round again. A span counts the bucket of now and
those before it, so its oldest edge jumps by BUCKET_S: `Sums.span_s` says how much time the sums really cover, which is less
than asked right after the start. An instant before the newest one counts as the newest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BUCKET_S = 5.0  # a sixth of the short span: sums over it err by at most that much of a step in the load
SHORT_S, LONG_S = 30.0, 300.0  # the controller acts on the short one; operators and histograms want the long one
SPANS_S = (SHORT_S, LONG_S)
NUM_BUCKETS = round(LONG_S / BUCKET_S)

Row = npt.NDArray[np.float64]  # [fields]


@dataclass(frozen=True, slots=True)
class Sums:
    span_s: float  # that they cover
    fields: Row


class Ring:
    """Rows of `num_fields` numbers, one per bucket of time."""

    __slots__ = ("_newest", "_row", "_rows", "_start_s")

    def __init__(self, num_fields: int, now_s: float) -> None:
        self._rows = np.zeros((NUM_BUCKETS, num_fields))
        self._start_s = now_s
        self._newest = math.floor(now_s / BUCKET_S)
        self._row: Row = self._rows[self._newest % NUM_BUCKETS]

    def row(self, now_s: float) -> Row:
        """The bucket of now, to add to at once: it is another one later."""
        bucket = math.floor(now_s / BUCKET_S)
        if bucket > self._newest:
            self._turn_to(bucket)
        return self._row

    def sums(self, now_s: float, span_s: float) -> Sums:
        """Of the last `span_s` seconds, at most LONG_S."""
        self.row(now_s)
        num_buckets = min(NUM_BUCKETS, round(span_s / BUCKET_S))
        oldest = self._newest - num_buckets + 1
        places = np.arange(oldest, self._newest + 1) % NUM_BUCKETS
        began_s = max(self._start_s, oldest * BUCKET_S)
        return Sums(max(0.0, now_s - began_s), self._rows[places].sum(axis=0))

    def _turn_to(self, bucket: int) -> None:
        for stale in range(max(self._newest + 1, bucket - NUM_BUCKETS + 1), bucket + 1):
            self._rows[stale % NUM_BUCKETS] = 0.0
        self._newest = bucket
        self._row = self._rows[bucket % NUM_BUCKETS]
