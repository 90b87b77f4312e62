"""One direction of an emulated network card: flows take turns, frame by frame, at the card's rate. Pure.

A frame occupies the card from its start to its end; the next one starts when it ends, or when it comes if that is later. The
flow whose turn it is is the one that was served longest ago, so n busy flows get 1/n of the rate each.

Sender and receiver of a frame each have one. The sender's lets a frame go at its START, the receiver's has it at its END: so an
undisturbed frame takes its length once, not twice, as it does where bits leave one card while they enter the other. Senders
that share a receiver (incast) share its rate, receivers that share a sender share that one's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Served(Generic[T]):
    item: T
    start_s: float
    end_s: float


@dataclass(slots=True)
class Nic(Generic[T]):
    """Instants are the caller's clock; every call's `now_s` is at least that of the call before."""

    _flows: dict[int, deque[tuple[T, float, float]]] = field(default_factory=dict)  # (item, came, length), by turn
    _free_s: float = 0.0  # when the last frame that has started ends

    def put(self, flow: int, item: T, length_s: float, now_s: float) -> None:
        """A frame of `flow` wants the card for `length_s`."""
        self._flows.setdefault(flow, deque()).append((item, now_s, length_s))

    def forget(self, flow: int) -> None:
        """Drop what waits of a flow."""
        self._flows.pop(flow, None)

    def next_start_s(self) -> float | None:
        """When the next frame starts, None if none waits."""
        came_s = min((queue[0][1] for queue in self._flows.values()), default=None)
        return None if came_s is None else max(self._free_s, came_s)

    def start_next(self, now_s: float) -> Served[T] | None:
        """Start the next frame if that is due. Late calls lose no time: a frame starts when it should have."""
        start_s = self.next_start_s()
        if start_s is None or start_s > now_s:
            return None
        flow = next(flow for flow, queue in self._flows.items() if queue[0][1] <= start_s)
        queue = self._flows.pop(flow)
        item, _, length_s = queue.popleft()
        if queue:
            self._flows[flow] = queue  # behind the others: their turn first
        self._free_s = start_s + length_s
        return Served(item, start_s, self._free_s)
