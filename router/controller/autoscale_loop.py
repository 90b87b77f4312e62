"""The live control loop: looks at the fleet each tick, asks the Scaler, and acts as far as mode, budget and lease allow.

    each LOOK_S    do what had to wait (levers.settle), measure starts, keep the lease
    each tick_s    facts -> Scaler -> proposals; also at once when targets, mode or budget change

    auto       each proposal is carried out, in order; one that is refused says so and the rest goes on
    advisory   it is only written down
    frozen     nothing is written either; the Scaler is told of the tick all the same

Every decision is logged with inputs and reason, one that stands once: a proposal that comes again in the next tick, with the same
outcome, adds to the metrics only. An error of one look ends that look, never the loop. A controller without the lease is a
spectator: another one acts on this database. While the database is away nobody acts once the lease has run out. Event loop only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from baton import clock
from baton.errors import BatonError
from baton.log import get_log
from router.controller.autoscale_metrics import AutoscaleMetrics
from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.scaler import Scaler, Times
from router.controller.controller import Controller
from router.controller.decisions import Decision
from router.controller.lease import LEASE_S, Leadership
from router.controller.levers import Levers, describe, lever_of
from router.controller.live_facts import LiveFacts
from router.controller.live_times import LiveTimes
from router.controller.settings import ControlSettings, Mode
from router.series import Registry

log = get_log("controller.autoscaler")

LOOK_S = 1.0  # a control tick (in_force.py): drains and starts are settled as often
RENEWALS = 4  # within a lease: two may fail
NOT_DONE = "not_done"  # the input that says why


class LiveScaler(Scaler, Protocol):
    """A Scaler that takes measured times."""

    def measured(self, times: Times) -> None:
        """From now on things take so long."""
        ...


class AutoscaleLoop:
    """One controller's."""

    def __init__(
        self,
        controller: Controller,
        levers: Levers,
        facts: LiveFacts,
        scaler: LiveScaler,
        live_times: LiveTimes,
        lease: Leadership,
        registry: Registry,
        now_s: Callable[[], float] = clock.now_s,
        look_s: float = LOOK_S,
    ) -> None:
        self._live_times = live_times
        self._controller = controller
        self._levers = levers
        self._facts = facts
        self._scaler = scaler
        self._lease = lease
        self._now_s = now_s
        self._look_s = look_s
        self._ticked_s = now_s()
        self._leased_s = float("-inf")
        self._standing: set[tuple[str, object]] = set()  # outcomes of the last tick
        self.metrics = AutoscaleMetrics(registry, controller.fleet, lambda: self.tick_age_s, lambda: self.leads)

    @property
    def leads(self) -> bool:
        """Whether this controller is the one that acts."""
        return self._lease.is_held

    @property
    def tick_age_s(self) -> float:
        """Since the last look at the fleet that came to its end; before it, since the start."""
        return self._now_s() - self._ticked_s

    async def run(self) -> None:
        """Until cancelled."""
        next_tick_s, seen = self._now_s(), self._versions()
        while True:
            try:
                await self._look()
                if self._now_s() >= next_tick_s or seen != self._versions():
                    next_tick_s, seen = self._now_s() + self._live_times.times.tick_s, self._versions()
                    await self._tick()
            except Exception as error:  # this loop's boundary: whatever one look runs into, the next one is made
                log.exception("tick_failed")
                self.metrics.failed(error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._controller.until_changed()

    async def close(self) -> None:
        """Give the lease back, after the loop was cancelled."""
        try:
            await asyncio.to_thread(self._lease.give_back)
        except BatonError as error:
            log.warning("lease_kept", reason=error.message)

    # -- each look ---------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        await self._keep_lease()  # first of all: operators wait for it after a restart
        members = self._controller.fleet.members()
        views = {m.worker_id: view for m in members if (view := self._controller.view(m.worker_id))}
        loads = {name: view.load for name, view in views.items()}
        self._live_times.look(members, loads, self._now_s(), self._controller.starts.weights_from())
        if self._facts.spare_workers is None:  # machines were away
            await self._facts.ask_machines()
        if self._lease.is_held:
            await self._settle()

    async def _settle(self) -> None:
        try:
            async for decision in self._levers.settle():
                await self.record(decision)
        except BatonError as error:  # machines are away; sizes can be looked at all the same
            log.warning("settling_waits", reason=error.message)
            self.metrics.failed(error)

    async def _keep_lease(self) -> None:
        now_s = self._now_s()
        if now_s - self._leased_s < LEASE_S / RENEWALS and self._lease.is_held:
            return
        before, self._leased_s = self._lease.is_held, now_s
        try:
            await asyncio.to_thread(self._lease.take)
        except BatonError as error:
            log.warning("lease_unknown", reason=error.message, is_held=self._lease.is_held)
        if self._lease.is_held is not before:
            log.info("autoscaler_leads" if self._lease.is_held else "autoscaler_follows")

    # -- each tick ---------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        self._scaler.measured(self._live_times.times)
        await self._facts.ask_machines()
        facts = self._facts.facts(self._now_s())
        proposals: Sequence[Proposal] = self._scaler.look(facts)
        if self._settings.mode is Mode.FROZEN:
            proposals = ()
        before, self._standing = self._standing, set()
        for proposal in proposals:
            decision = await self._decide(proposal)
            outcome = _outcome(decision)
            self._standing.add(outcome)
            await self.record(decision, is_new=decision.applied or outcome not in before)
        self._ticked_s = self._now_s()

    async def _decide(self, proposal: Proposal) -> Decision:
        """Carry it out if that is allowed at this moment; what came of it."""
        act = proposal.act
        decision = Decision(lever_of(act), describe(act), proposal.reason, applied=False, inputs=proposal.inputs)
        settings = self._settings
        if settings.mode is not Mode.AUTO:
            return _not_done(decision, f"mode is {settings.mode}")
        async with self._levers.alone:
            await self._keep_lease()  # levers before this one may have taken seconds
            try:
                self._lease.check()
                done = await self._levers.pull_alone(act, settings.budget)
            except BatonError as error:
                return _not_done(decision, error.message)
        return replace(decision, action=done, applied=True)

    async def record(self, decision: Decision, *, is_new: bool = True) -> None:
        """Count a decision, and write it down unless it stands; where the database is away, in this process's log only."""
        self.metrics.decided(decision.lever, decision.applied)
        if not is_new:
            return
        log.info(
            "decision", lever=decision.lever, action=decision.action, applied=decision.applied, reason=decision.reason
        )
        try:
            await self._controller.decide(decision)
        except BatonError as error:
            log.warning("decision_not_kept", action=decision.action, reason=error.message)

    @property
    def _settings(self) -> ControlSettings:
        return self._controller.in_force.settings.revision.value

    def _versions(self) -> tuple[int, int]:
        """Of what an operator may change."""
        in_force = self._controller.in_force
        return in_force.slo.revision.version, in_force.settings.revision.version


def _not_done(decision: Decision, why: str) -> Decision:
    return replace(decision, inputs={**decision.inputs, NOT_DONE: why})


def _outcome(decision: Decision) -> tuple[str, object]:
    """What makes a decision the same as one of the tick before, whatever its numbers."""
    return decision.action, decision.inputs.get(NOT_DONE)
