"""What acts on the fleet of one controller, put together: machines, levers, facts, planner, loop, operators' orders, metrics."""

from __future__ import annotations

from pathlib import Path

from baton import clock
from baton.config import ClusterConfig
from router.controller.autoscale_loop import AutoscaleLoop
from router.controller.autoscaler.autoscaler import Autoscaler
from router.controller.autoscaler.disaggregation import FallingBack
from router.controller.autoscaler.scaler import Times
from router.controller.controller import Controller
from router.controller.lease import Leadership
from router.controller.levers import Levers, Waits
from router.controller.live_facts import LiveFacts, drains_of, gpus_per_worker
from router.controller.live_times import LiveTimes
from router.controller.memory import Memory, kind_of_workers
from router.controller.planner import planner_of
from router.controller.pool_orders import PoolOrders
from router.controller.pool_scaler import PoolScaler
from router.controller.ray_actors import REVIVE_S


class LiveControl:
    """Create it inside the event loop."""

    def __init__(
        self, controller: Controller, cluster: ClusterConfig, machines: PoolScaler, lease: Leadership, memory_file: Path
    ) -> None:
        """`lease`: the controller's own leadership. `memory_file`: as Memory, which is read here."""
        times = times_of(cluster)
        self.registry = controller.registry
        self.live_times = LiveTimes(times)
        self.facts = LiveFacts(
            controller, cluster, machines, machines.shape_of, lambda: self.live_times.times.start_up_s, clock.now_s()
        )
        self.planner = planner_of(controller, cluster, self.facts.facts)
        sizes = Autoscaler(times, max_standbys=cluster.controller.standby)
        self.memory = Memory(memory_file, kind_of_workers(cluster), self.live_times, controller.measures, sizes)
        levers = Levers(controller, machines, gpus_per_worker(cluster), Waits(drain_s_by_role=drains_of(cluster)))
        self.loop = AutoscaleLoop(
            controller,
            levers,
            self.facts,
            sizes if self.planner is None else FallingBack(sizes, self.planner.disaggregation),
            self.live_times,
            lease,
            self.registry,
        )
        self.orders = PoolOrders(controller, levers, machines.shape_of, self.loop.record, lease)

    async def plan(self) -> None:
        """Until cancelled: ask the planner what it asks by itself."""
        if self.planner is not None:
            await self.planner.run()

    async def close(self) -> None:
        """After its tasks were cancelled."""
        if self.planner is not None:
            self.planner.close()
        await self.memory.save()
        await self.loop.close()


def times_of(cluster: ClusterConfig) -> Times:
    """As configured, until some were measured."""
    config = cluster.controller
    start_up_s = Times().start_up_s + cluster.emulation.start_s
    return Times(
        config.tick_s,
        start_up_s,
        cluster.emulation.flip_s,
        config.dwell_s,
        config.shrink_after_s,
        bring_back_s=REVIVE_S + config.worker_start_timeout_s,
    )
