"""From what a load saw, and what the stubs noted, to the figures of `baton bench router`. Pure: numpy arrays in, numbers out.

- Added gap: the gap between two tokens as the client saw it, less the gap between the same two as the stub said them. Both
  are instants of one clock (CLOCK_MONOTONIC of one host), so the stub's own jitter is not in it.
- Cost: CPU seconds of windows of the same length are a fixed part + r x requests + t x tokens. Two windows that differ in
  their streams and two that differ in their requests give t and r; the fixed part, and whatever does not grow, cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.router_bench_load import DONE, Records, Seen

Nanoseconds = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in which a process was watched."""

    wall_s: float
    cpu_s: float
    num_requests: int  # that began
    num_tokens: int  # that reached the client

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.wall_s

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s


@dataclass(frozen=True, slots=True)
class Cost:
    """What one more token, and one more request, costs. Microseconds of CPU."""

    us_per_token: float
    us_per_request: float


class NoFigure(Exception):
    """The load does not carry the figure; says why."""


def window(seen: Seen, from_ns: int, to_ns: int, cpu_s: float) -> Window:
    events, records = seen.events, seen.records
    return Window(
        wall_s=(to_ns - from_ns) / 1e9,
        cpu_s=cpu_s,
        num_requests=_count(records["sent_ns"], from_ns, to_ns),
        num_tokens=_count(events["received_ns"], from_ns, to_ns),
    )


def _count(instants: Nanoseconds, from_ns: int, to_ns: int) -> int:
    return int(np.count_nonzero((instants >= from_ns) & (instants < to_ns)))


def cost(streams: tuple[Window, Window], requests: tuple[Window, Window]) -> Cost:
    """From two windows that differ in running streams and two that differ in requests.

    Raises:
        NoFigure: the windows of a pair hardly differ.
    """
    rows = [_rates(high) - _rates(low) for low, high in (streams, requests)]
    tokens, began, cpu = np.array(rows).T
    try:
        per_token, per_request = np.linalg.solve(np.stack([tokens, began], axis=1), cpu)
    except np.linalg.LinAlgError:
        raise NoFigure("the router did as much under the low load as under the high one") from None
    return Cost(1e6 * float(per_token), 1e6 * float(per_request))


def _rates(part: Window) -> NDArray[np.float64]:
    return np.array([part.num_tokens, part.num_requests, part.cpu_s]) / part.wall_s


def added_gaps_ms(received: Records, said: Records, from_ns: int, to_ns: int) -> NDArray[np.float64]:
    """One value for each token that was received in the window and whose predecessor is known too, on both sides.

    Both are of EVENT: `received` by the load generator, `said` by the stubs. A peer's own stub writes `sent_ns` into the
    text, which the generator has read already; `said` may then be `received` itself.
    """
    both = matched(received, said)
    next_one = np.flatnonzero((both.key[1:] == both.key[:-1] + 1) & (both.key[1:] >> 32 == both.key[:-1] >> 32)) + 1
    inside = next_one[(both.received_ns[next_one] >= from_ns) & (both.received_ns[next_one] < to_ns)]
    gaps_ns = np.diff(both.received_ns, prepend=0) - np.diff(both.said_ns, prepend=0)
    return gaps_ns[inside] / 1e6


@dataclass(frozen=True, slots=True)
class Matched:
    """The tokens that were said and received, in the order of request and index."""

    key: NDArray[np.int64]  # number << 32 | index
    received_ns: Nanoseconds
    said_ns: Nanoseconds


def matched(received: Records, said: Records) -> Matched:
    key, said_key = _keys(received), _keys(said)
    common, at, said_at = np.intersect1d(key, said_key, return_indices=True)
    return Matched(common, received["received_ns"][at], said["sent_ns"][said_at])


def _keys(events: Records) -> NDArray[np.int64]:
    return events["number"].astype(np.int64) << 32 | events["index"].astype(np.int64)


def transit_ms(received: Records, said: Records) -> NDArray[np.float64]:
    """Of each token, from the stub's hands to the client's."""
    both = matched(received, said)
    return (both.received_ns - both.said_ns) / 1e6


def gaps_beyond_usual_ms(received: Records, from_ns: int, to_ns: int) -> NDArray[np.float64]:
    """Where nobody knows when a token was said: the gaps that the client saw, less the median of them all."""
    order = np.lexsort((received["index"], received["number"]))
    ordered = received[order]
    same = np.flatnonzero(ordered["number"][1:] == ordered["number"][:-1]) + 1
    gaps = np.diff(ordered["received_ns"], prepend=0)[same] / 1e6
    instants = ordered["received_ns"][same]
    inside = gaps[(instants >= from_ns) & (instants < to_ns)]
    return inside - np.median(inside) if len(inside) else inside


def check_answers(seen: Seen) -> None:
    """Each finished answer has as many text events as tokens, so that an event is a token in what follows.

    Raises:
        NoFigure: it is not so, or something failed.
    """
    if failures := seen.failures():
        raise NoFigure(failures)
    done = seen.records[seen.records["outcome"] == DONE]
    odd = np.count_nonzero((done["usage_tokens"] > 0) & (done["usage_tokens"] != done["num_events"]))
    if odd:
        raise NoFigure(f"{odd} of {len(done)} answers have other events than tokens")
