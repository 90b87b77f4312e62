"""How many pods a pool has: one port, adapters for StatefulSets, for others' pods, and for RayClusters (ray_cluster.py).

    get           what is desired, ready, pending, and which pods a smaller size would end
    scale_up      so many more
    scale_down    these very pods, for good

Each write is a compare-and-swap: what was read is decided on, and where somebody else wrote meanwhile it is read and decided
again, a few times. `allows` is asked before each write with the size that it would have; it refuses by raising. A smaller size
ends pods whatever runs there, so callers drain first. Calls block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from baton.errors import Unavailable
from router.controller.kube.api import KubeApi
from router.controller.kube.errors import Conflict

TRIES = 5  # while pods start, a set's status changes several times a second, and its version with it
Allows = Callable[[int], None]  # a size; raises BatonError


@dataclass(frozen=True, slots=True)
class SetSize:
    """Of one pool's pods. Names only of pods that may have one: a StatefulSet's are known before there are any."""

    desired: int
    ready: int
    pending: tuple[str, ...]
    victims: tuple[str, ...]  # all of them, in the order in which they would have to go


class PodPool(Protocol):
    """One pool's pods."""

    @property
    def name(self) -> str:
        """Of the object, for operators."""
        ...

    def desired(self) -> int: ...

    def get(self, ready: Collection[str]) -> SetSize:
        """`ready`: names of pods that are. Raises: Unavailable."""
        ...

    def scale_up(self, num_pods: int, allows: Allows) -> tuple[str, ...]:
        """Names of the pods that will come, or placeholders for them.

        Raises:
            BatonError: as `allows`.
            Unavailable: the API server does not answer, or somebody else keeps writing.
        """
        ...

    def scale_down(self, victims: Collection[str], allows: Allows) -> None:
        """Pods that are not there any more are fine.

        Raises:
            BatonError: as `allows`.
            Unavailable: as above; or others would go in their place, because they are not the last.
        """
        ...


class StatefulSetPool:
    """Pods <set>-0 ... <set>-(n-1); a smaller set ends its last ones."""

    def __init__(self, api: KubeApi, name: str) -> None:
        self._api = api
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def desired(self) -> int:
        return self._api.scale(self._name).desired

    def get(self, ready: Collection[str]) -> SetSize:
        desired = self.desired()
        names = [self._pod(n) for n in range(desired)]
        there = sum(name in ready for name in names)
        return SetSize(desired, there, tuple(n for n in names if n not in ready), tuple(reversed(names)))

    def scale_up(self, num_pods: int, allows: Allows) -> tuple[str, ...]:
        before = self._resize(lambda now: now + num_pods, allows)
        return tuple(self._pod(n) for n in range(before, before + num_pods))

    def scale_down(self, victims: Collection[str], allows: Allows) -> None:
        self._resize(lambda now: self._without(victims, now), allows)

    def _without(self, victims: Collection[str], now: int) -> int:
        """The size without them. Raises: Unavailable: another pod is after one of them."""
        size = now
        while size and self._pod(size - 1) in victims:
            size -= 1
        if stays := sorted(name for name in victims if name in {self._pod(n) for n in range(size)}):
            raise Unavailable(
                f"{self._pod(size - 1)} has to end before {stays[0]}: a StatefulSet ends its last pod first"
            )
        return size

    def _resize(self, decide: Callable[[int], int], allows: Allows) -> int:
        """The size before."""
        for _ in range(TRIES):
            read = self._api.scale(self._name)
            size = decide(read.desired)
            if size == read.desired:
                return read.desired
            allows(size)
            try:
                self._api.put_scale(read, size)
            except Conflict:
                continue
            return read.desired
        raise Unavailable(f"the StatefulSet {self._name} changes faster than it can be scaled", retry_after_s=1.0)

    def _pod(self, ordinal: int) -> str:
        return f"{self._name}-{ordinal}"


class ForeignPool:
    """Pods that somebody else makes and ends (`kubernetes.mode` = external). `pods`: names of those that are there now."""

    def __init__(self, home: str, pods: Callable[[], Collection[str]]) -> None:
        self._home = home
        self._pods = pods

    @property
    def name(self) -> str:
        return self._home

    def desired(self) -> int:
        return len(self._pods())

    def get(self, ready: Collection[str]) -> SetSize:
        names = tuple(sorted(self._pods()))
        there = sum(name in ready for name in names)
        return SetSize(len(names), there, tuple(name for name in names if name not in ready), names)

    def scale_up(self, num_pods: int, allows: Allows) -> tuple[str, ...]:
        raise self._refusal()

    def scale_down(self, victims: Collection[str], allows: Allows) -> None:
        if not set(victims).isdisjoint(self._pods()):
            raise self._refusal()

    def _refusal(self) -> Unavailable:
        return Unavailable("ray.mode is external: somebody else makes and ends pods", field="kubernetes.mode")


def ordinal_of(pod: str) -> int:
    """Of a StatefulSet's pod; -1: it has none."""
    tail = pod.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
