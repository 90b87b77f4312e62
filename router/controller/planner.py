"""Everything that a controller asks of the simulator: predictions of changes, and whether disaggregation pays. Owns the process.

Its policy may tell routers a limit of local prefill. That is handed back as soon as it is the configured one, or nobody is there
who might change it: they go by their configuration again. Runs on the event loop; `run` is its task.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton import clock
from baton.config import ClusterConfig
from baton.log import get_log
from baton.request import Role
from router.controller.autoscaler.disaggregation import Disaggregation
from router.controller.autoscaler.facts import FleetFacts
from router.controller.controller import Controller
from router.controller.live_forecast import LiveForecast
from router.controller.measured_fleet import WINDOW_S, Measured
from router.controller.pays import Pays
from router.controller.planner_process import PlannerProcess, is_installed
from router.controller.settings import Mode
from router.placement import local_limit

log = get_log("controller.planner")


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
        budget_s = cluster.controller.planner_seconds
        apart_tokens = self.apart_tokens = local_limit(cluster.router.local_prefill_tokens)
        self._process = PlannerProcess(cluster.controller.planner)
        self.forecast = LiveForecast(self._process, self.measured, budget_s)
        period_s = cluster.controller.pd_period_s
        self.pays = Pays(self._process, self.measured, apart_tokens, budget_s, period_s=period_s)
        self.disaggregation = Disaggregation(lambda: self.pays.verdict, apart_tokens, period_s)

    def measured(self) -> Measured:
        """Now."""
        now_s, controller = clock.now_s(), self._controller
        models = controller.measures.steps.items()
        return Measured(
            facts=self._facts(now_s),
            windows=controller.measures.view(now_s).classes,
            errors={Role[name.upper()]: model.error for name, model in models if model.error is not None},
            is_settled=clock.here_s(self._now_unix_s() - controller.slo.at_unix_s) >= WINDOW_S,
        )

    async def run(self) -> None:
        """Until cancelled."""
        await self.pays.run()

    def close(self) -> None:
        self._process.close()


def planner_of(controller: Controller, cluster: ClusterConfig, facts: Callable[[float], FleetFacts]) -> Planner | None:
    """None where none is configured, or it is not installed."""
    return Planner(controller, cluster, facts) if is_installed(cluster.controller.planner) else None


async def hand_back(controller: Controller, planner: Planner | None) -> None:
    """Until cancelled: leave the limit of local prefill to the configuration where the planner does not want another one."""
    while True:
        told = controller.fleet.local_prefill_tokens
        mode = controller.in_force.settings.revision.value.mode
        if told is not None and (planner is None or mode is not Mode.AUTO or told == planner.apart_tokens):
            log.info("local_prefill_handed_back", told=told, mode=mode)
            controller.want_local_prefill(None)
        await controller.until_changed()
