"""How long KV takes from one worker to another where NICs are shared. Owns the flows under way.

A flow moves at the lesser of its shares of the sender's outgoing and the receiver's incoming rate, each divided equally among
the flows that use it: incast on a decode worker slows all who send there. What a flow leaves unused because its other end is
the narrower one is not given to others (that would be max-min fairness), so contention is overstated a little, never missed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from bench.sim.clock import Act, Event


@dataclass(slots=True, eq=False)
class Nic:
    """One worker's way into the network, full duplex. Dicts are ordered sets: who is told first must not depend on addresses."""

    bytes_per_s: float
    outgoing: dict[Flow, None] = field(default_factory=dict)
    incoming: dict[Flow, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    source: Nic
    target: Nic
    left_bytes: float  # at `since_s`
    since_s: float
    on_done: Act
    rate: float = 0.0  # bytes/s
    version: int = 0  # of its end's event: an older one is stale

    @property
    def share(self) -> float:
        source, target = self.source, self.target
        return min(source.bytes_per_s / len(source.outgoing), target.bytes_per_s / len(target.incoming))


def send(source: Nic, target: Nic, nbytes: float, now_s: float, on_done: Act) -> list[Event]:
    """Start a flow; `on_done` is told when its last byte is there."""
    flow = Flow(source, target, nbytes, now_s, on_done)
    source.outgoing[flow] = target.incoming[flow] = None
    return _share_anew({**source.outgoing, **target.incoming}, now_s)


def _done(flow: Flow, version: int, now_s: float) -> Iterable[Event]:
    if version != flow.version:
        return ()
    del flow.source.outgoing[flow], flow.target.incoming[flow]
    events = _share_anew({**flow.source.outgoing, **flow.target.incoming}, now_s)
    return [*events, *flow.on_done(now_s)]


def _share_anew(flows: Iterable[Flow], now_s: float) -> list[Event]:
    events = []
    for flow in flows:
        rate = flow.share
        if rate == flow.rate:
            continue
        flow.left_bytes = max(0.0, flow.left_bytes - (now_s - flow.since_s) * flow.rate)
        flow.since_s, flow.rate = now_s, rate
        flow.version += 1
        events.append(Event(now_s + flow.left_bytes / rate, partial(_done, flow, flow.version)))
    return events
