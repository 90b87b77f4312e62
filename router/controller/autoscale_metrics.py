"""What operators see of pools and autoscaler on the controller's /metrics. Event loop only."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator

from baton.request import Role
from router.controller.fleet_state import DRAINING, FAILED, READY, STANDBY, STARTING, Fleet
from router.series import Counter, Gauge, Registry, header, labelled, sample

_STATES = (STARTING, READY, DRAINING, STANDBY, FAILED)


class PoolSizes:
    """baton_pool_size{role,state}: each combination has its line, so that an empty pool is a 0 and not a gap."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def lines(self) -> Iterator[str]:
        name = "baton_pool_size"
        sizes = Tally((member.role, member.state) for member in self._fleet.members())
        yield header(name, "Workers by role and state.", "gauge")
        for role in Role:
            for state in _STATES:
                labels = labelled(("role", "state"), (role.name.lower(), state))
                yield sample(name, labels, sizes[role, state])


class AutoscaleMetrics:
    """One loop's, in the controller's registry."""

    def __init__(
        self, registry: Registry, fleet: Fleet, tick_age_s: Callable[[], float], leads: Callable[[], bool]
    ) -> None:
        """`tick_age_s`: since the last look at the fleet that came to its end. `leads`: whether this controller may act."""
        registry.add(PoolSizes(fleet))
        self._decisions = Counter(
            "baton_autoscaler_decisions", "What was decided; applied=false: refused, failed, or not in mode auto.",
            ["lever", "applied"], registry,
        )  # fmt: skip
        self._failures = Counter(
            "baton_autoscaler_failed_ticks", "Looks at the fleet that ended in an error.", ["error"], registry
        )
        Gauge("baton_autoscaler_last_tick_seconds", "Since the last look at the fleet.", tick_age_s, registry)
        Gauge(
            "baton_autoscaler_is_leader",
            "1: of the controllers on this database, this one acts.",
            leads,
            registry,
        )

    def decided(self, lever: str, applied: bool) -> None:
        self._decisions.labels(lever, str(applied).lower()).inc()

    def failed(self, error: Exception) -> None:
        self._failures.labels(type(error).__name__).inc()
