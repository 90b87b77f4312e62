"""The pools' sets of pods, their sizes as last read, and what a new size may be. Calls of a set block and run on threads.

    read      what each set is to have, from the API server; an unknown size is never taken for 0
    grow      one more, where the GPU budget has room in all sets together, as they are at that moment
    shrink    exactly these, never below a pool's minimum

Event loop, but for what `allows` runs on the thread of the write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

from baton import clock
from baton.config import ClusterConfig
from baton.errors import BatonError, InvalidRequest
from baton.log import get_log
from baton.request import Role
from router.controller.kube.calls import KubeCalls
from router.controller.kube.reconcile import Home
from router.controller.kube.sizes import PodPool, SetSize
from router.controller.ray_fleet import sizes_of
from router.controller.settings import Budget

log = get_log("controller.kube.sizes")


@dataclass(frozen=True, slots=True)
class Pool:
    """One set, as configured."""

    role: Role
    shape: str
    pods: PodPool
    initial: int


class Homes:
    def __init__(
        self,
        pools: Mapping[str, Pool],
        calls: KubeCalls,
        gpus_per_worker: int,
        budget: Callable[[], Budget],
        may_write: Callable[[], None],
        now_s: Callable[[], float] = clock.now_s,
    ) -> None:
        """`pools`: by home. `budget`: in force. `may_write`: asked before each write, raises BatonError where it may not be."""
        self._pools = pools
        self._calls = calls
        self._gpus_per_worker = gpus_per_worker
        self._budget = budget
        self._may_write = may_write
        self._now_s = now_s
        self._sizes: dict[str, SetSize] = {}
        self._read_s: dict[str, float] = {}
        self._ready: Collection[str] = ()

    # -- what there is -----------------------------------------------------------------------------------------------

    async def read(self, ready: Collection[str]) -> None:
        """`ready`: pods that are. What cannot be read stays as it was, and is said."""
        self._ready = ready
        for home, pool in self._pools.items():
            began_s = self._now_s()
            try:
                self._sizes[home] = await self._calls.run(partial(pool.pods.get, ready))
                self._read_s[home] = began_s
            except BatonError as error:
                log.warning("size_unknown", set=pool.pods.name, reason=error.message)

    @property
    def are_known(self) -> bool:
        """All of them, at least once."""
        return self._sizes.keys() == self._pools.keys()

    @property
    def age_s(self) -> float:
        """Of the oldest size; infinite before all are known."""
        return self._now_s() - min(self._read_s.values()) if self.are_known else float("inf")

    def known(self) -> Mapping[str, Home]:
        return {
            home: Home(self._pools[home].role, self._pools[home].shape, tuple(reversed(size.victims)))
            for home, size in self._sizes.items()
        }

    def size(self, home: str) -> SetSize | None:
        return self._sizes.get(home)

    def items(self) -> Mapping[str, Pool]:
        return self._pools

    def home_of(self, role: Role, shape: str) -> str:
        """Where a new worker of this role is made. Raises: InvalidRequest."""
        for home, pool in self._pools.items():
            if pool.role is role and pool.shape == shape:
                return home
        raise InvalidRequest(f"no pool makes {role.name.lower()} workers on {shape!r}", field="shape")

    def over_budget(self) -> str:
        """What is beyond the GPU budget; "" = nothing, or nobody knows."""
        most = self._budget().max_gpus
        desired = {home: size.desired for home, size in self._sizes.items()}
        return "" if most is None else self._beyond(most, desired)

    def num_spare(self) -> int | None:
        """Pods that the GPU budget has room for; None: it has no bound."""
        most = self._budget().max_gpus
        if most is None:
            return None
        return most // self._gpus_per_worker - sum(size.desired for size in self._sizes.values())

    def minimum(self, home: str) -> int:
        """That the set of a pool keeps, whoever of it plays which role at the moment."""
        return self._budget().pools()[home].min_workers

    # -- what is written ---------------------------------------------------------------------------------------------

    async def grow(self, home: str, num_pods: int = 1) -> tuple[str, ...]:
        """Names of the new pods, as far as they are known. Raises: BatonError: it may not be, or the API server is away."""
        pool = self._pools[home]
        names = await self._calls.run(lambda: pool.pods.scale_up(num_pods, lambda size: self._allows_more(home, size)))
        log.info("scaled_up", set=pool.pods.name, by=num_pods, pods=names)
        await self.read(self._ready)
        return names

    async def shrink(self, home: str, victims: Collection[str]) -> None:
        """Raises: BatonError: it may not be, or the API server is away."""
        pool = self._pools[home]
        await self._calls.run(lambda: pool.pods.scale_down(victims, lambda size: self._allows_less(home, size)))
        log.info("scaled_down", set=pool.pods.name, pods=sorted(victims))
        await self.read(self._ready)

    def _allows_more(self, home: str, size: int) -> None:
        """The whole budget at this moment, before anything is written. Raises: BatonError. On the thread of the write."""
        self._may_write()
        most = self._budget().max_gpus
        if most is None:
            return
        desired = {other: size if other == home else pool.pods.desired() for other, pool in self._pools.items()}
        if beyond := self._beyond(most, desired):
            raise InvalidRequest(beyond, field="max_gpus")

    def _beyond(self, most: int, desired: Mapping[str, int]) -> str:
        num_gpus = sum(desired.values()) * self._gpus_per_worker
        parts = " + ".join(f"{number} {home}" for home, number in desired.items())
        return f"max_gpus = {most}: {parts} pods make {num_gpus}" if num_gpus > most else ""

    def _allows_less(self, home: str, size: int) -> None:
        """Raises: BatonError. On the thread of the write."""
        self._may_write()
        if size < self.minimum(home):
            raise InvalidRequest(
                f"{home}.min_workers = {self.minimum(home)}: {size} would stay", field=f"{home}.min_workers"
            )


def configured(
    cluster: ClusterConfig, shape_of: Callable[[Role], str], pods: Callable[[str], PodPool]
) -> dict[str, Pool]:
    """Pools by home: those that are configured with workers, or may have some. `pods`: the set of a home."""
    sizes = sizes_of(cluster)
    roles = (
        [Role.BOTH]
        if sizes[Role.BOTH] and not (sizes[Role.PREFILL] or sizes[Role.DECODE])
        else [Role.PREFILL, Role.DECODE]
    )
    return {role.name.lower(): Pool(role, shape_of(role), pods(role.name.lower()), sizes[role]) for role in roles}
