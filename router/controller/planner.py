"""Everything that a controller asks of the simulator: predictions of changes, and whether disaggregation pays. Owns the process.

Runs on the event loop; `run` is its task.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.config import ClusterConfig
from baton.request import Role
from router.controller.autoscaler.disaggregation import Disaggregation
from router.controller.autoscaler.facts import FleetFacts
from router.controller.controller import Controller
from router.controller.live_forecast import LiveForecast
from router.controller.measured_fleet import WINDOW_S, Measured
from router.controller.pays import Pays
from router.controller.planner_process import PlannerProcess, is_installed


class Planner:
    """Of one controller."""

    def __init__(
        self,
        controller: Controller,
        cluster: ClusterConfig,
        facts: Callable[[float], FleetFacts],
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        """`facts`: of an instant of the monotonic clock."""
        self._controller = controller
        self._facts = facts
        self._now_unix_s = now_unix_s
        budget_s, apart_tokens = cluster.controller.planner_seconds, _apart_tokens(cluster)
        self._process = PlannerProcess(cluster.controller.planner)
        self.forecast = LiveForecast(self._process, self.measured, budget_s)
        self.pays = Pays(self._process, self.measured, apart_tokens, budget_s)
        self.disaggregation = Disaggregation(lambda: self.pays.verdict, apart_tokens)

    def measured(self) -> Measured:
        """Now."""
        now_s, controller = time.monotonic(), self._controller
        models = controller.measures.steps.items()
        return Measured(
            facts=self._facts(now_s),
            windows=controller.measures.view(now_s).classes,
            errors={Role[name.upper()]: model.error for name, model in models if model.error is not None},
            is_settled=self._now_unix_s() - controller.slo.at_unix_s >= WINDOW_S,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self.pays.run()

    def close(self) -> None:
        self._process.close()


def planner_of(controller: Controller, cluster: ClusterConfig, facts: Callable[[float], FleetFacts]) -> Planner | None:
    """None where none is configured, or it is not installed."""
    return Planner(controller, cluster, facts) if is_installed(cluster.controller.planner) else None


def _apart_tokens(cluster: ClusterConfig) -> int:
    """The configured limit of local prefill; -1 = one chunk."""
    tokens = cluster.router.local_prefill_tokens
    return tokens if tokens >= 0 else cluster.engine.chunk_tokens
