"""The workers of a deployment while it runs: who comes, changes, fails and leaves, and what GPUs that takes.

    create ─▶ PENDING ─ start-up ─▶ READY ◀─ flip once idle ─ FLIPPING        every state ─ dies ─▶ FAILED ─ restart ─▶ READY
                 │          ▲ wake     │ ▲ undrain              ▲ │                                    └─ give up, or nobody
                 │       STANDBY ◀─┐   ▼ │                      │ ▼                                       restarts it ─▶ gone
                 └─ give up ─▶ gone└─ DRAINING ─ idle ─▶ gone   └─ READY

No act loses a call: who flips or leaves is given no new ones and waits until it is idle; a draining worker that takes longer than
its limit dies, and so does whoever is killed: after `detect` its calls are moved. GPUs count from `create` until gone.
Whoever asks for what cannot be is refused and nothing is changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from baton.errors import InvalidRequest
from baton.request import Role
from bench.sim.clock import Event
from bench.sim.delays import Delays
from bench.sim.deployment import Deployment, Hardware
from bench.sim.engine import EngineShape
from bench.sim.router import SimRouter
from bench.sim.worker import Listener, SimWorker, WorkerUse
from engine.tuning import Tuning
from router.controller.autoscaler.facts import State


class Refused(Exception):
    """The fleet cannot do this; the message says why."""


@dataclass(slots=True, eq=False)
class Member:
    """One worker's place in the fleet, whatever process fills it."""

    worker_id: str
    role: Role  # that it has, or will have once it is up or has flipped
    state: State
    since_s: float  # when it came into this state
    hardware: Hardware
    created_s: float
    keep_standby: bool = False  # once drained
    worker: SimWorker | None = None  # None while nothing of it is up
    epoch: int = 0
    version: int = 0  # of its state: what was to follow from an older one is stale
    gone_s: float | None = None

    @property
    def num_gpus(self) -> int:
        return self.hardware.tp

    def hours(self, now_s: float) -> float:
        """That its GPUs were taken for."""
        return ((now_s if self.gone_s is None else self.gone_s) - self.created_s) / 3_600


class Fleet:
    """Acts are methods: they return what follows, and raise Refused."""

    def __init__(
        self,
        deployment: Deployment,
        router: SimRouter,
        listener: Listener,
        *,
        delays: Delays,
        seed: int,
        fast: bool,
    ) -> None:
        self.members: dict[str, Member] = {}
        self.num_stuck = 0  # so many of those that are created from now on never come up
        self.restarts = True  # somebody brings back those that die
        self.deployment = deployment
        self._router = router
        self._listener = listener
        self._delays = delays
        self._rng = random.Random(f"{seed}/fleet")
        self._fast = fast
        self._shapes: dict[Role, EngineShape] = {}
        self._numbers = dict.fromkeys(Role, 0)
        self._gone: list[Member] = []
        self._gone_uses: list[WorkerUse] = []
        for role in deployment.layout.roles:
            member = self._new_member(role, State.PENDING, 0.0)
            self._start(member, 0.0)

    # -- what there is -------------------------------------------------------------------------------------------------

    def gpu_hours(self, now_s: float) -> float:
        return sum(member.num_gpus * member.hours(now_s) for member in (*self._gone, *self.members.values()))

    def usd(self, now_s: float) -> float:
        return sum(
            member.hardware.usd_per_hour * member.hours(now_s) for member in (*self._gone, *self.members.values())
        )

    @property
    def num_gpus(self) -> int:
        return sum(member.num_gpus for member in self.members.values())

    def uses(self, now_s: float) -> list[WorkerUse]:
        """Of every process that ever was."""
        return [*self._gone_uses, *(worker.use(now_s) for worker in self.workers())]

    def workers(self) -> list[SimWorker]:
        """Whose processes live, or are not known to be dead."""
        return [member.worker for member in self.members.values() if member.worker is not None]

    # -- acts ----------------------------------------------------------------------------------------------------------

    def create(self, role: Role, now_s: float) -> list[Event]:
        member = self._new_member(role, State.PENDING, now_s)
        delay_s = self._delays.start_up.draw(self._rng)
        if self.num_stuck:
            self.num_stuck -= 1
            return []
        return [Event(now_s + delay_s, self._later(member, self._start))]

    def drain(self, worker_id: str, now_s: float, *, keep_standby: bool = False) -> list[Event]:
        member = self._find(worker_id, State.READY, State.FLIPPING)
        worker = self._process(member)
        member.role, member.keep_standby = worker.role, keep_standby
        self._enter(member, State.DRAINING, now_s)
        limit = Event(now_s + self._delays.drain_limit_s, self._later(member, self._on_drain_limit))
        told = self._router.on_change(worker, now_s, takes_calls=False)
        return [limit, *told, *self._when_idle(member, now_s)]

    def undrain(self, worker_id: str, now_s: float) -> list[Event]:
        member = self._find(worker_id, State.DRAINING)
        return self._serve(member, now_s)

    def flip(self, worker_id: str, role: Role, now_s: float) -> list[Event]:
        """Raises: Refused: another role's workers have other GPUs."""
        member = self._find(worker_id, State.READY)
        worker = self._process(member)
        if role is worker.role:
            raise Refused(f"{worker_id} has the role {role.name.lower()} already")
        if self.deployment.hardware(role) != self.deployment.hardware(worker.role):
            raise Refused(f"{worker_id} has not the GPUs of a {role.name.lower()} worker")
        member.role = role
        self._enter(member, State.FLIPPING, now_s)
        told = self._router.on_change(worker, now_s, takes_calls=False)
        return [*told, *self._when_idle(member, now_s)]

    def wake(self, worker_id: str, role: Role, now_s: float) -> list[Event]:
        member = self._find(worker_id, State.STANDBY)
        if self.deployment.hardware(role) != self.deployment.hardware(self._process(member).role):
            raise Refused(f"{worker_id} has not the GPUs of a {role.name.lower()} worker")
        member.role = role
        self._enter(member, State.PENDING, now_s)
        return [Event(now_s + self._delays.wake.draw(self._rng), self._later(member, self._awake))]

    def give_up(self, worker_id: str, now_s: float) -> list[Event]:
        """End one that serves nobody."""
        member = self._find(worker_id, State.PENDING, State.STANDBY, State.FAILED)
        self._remove(member, now_s)
        return []

    def tune(self, worker_id: str, tuning: Tuning, now_s: float) -> list[Event]:
        """Raises: Refused: beyond what it was started with."""
        member = self._find(worker_id, State.READY, State.FLIPPING, State.DRAINING)
        worker = self._process(member)
        try:
            tuning.check(worker.engine.shape.most)
        except InvalidRequest as error:
            raise Refused(error.message) from error
        events = worker.tune(tuning, now_s)
        return [*events, *self._router.on_change(worker, now_s, takes_calls=member.state is State.READY)]

    def kill(self, worker_id: str, now_s: float) -> list[Event]:
        """Its process dies, whatever it is doing. With `restarts` somebody brings it back."""
        member = self._find(worker_id, *State)
        if member.worker is None:
            raise Refused(f"{worker_id} is not up")
        noticed_s = now_s + self._delays.detect.draw(self._rng)
        back_s = max(noticed_s, now_s + self._delays.restart.draw(self._rng))
        was_listed = member.state in _LISTED
        events = member.worker.die(now_s)
        member.version += 1  # whatever it was about to do
        events.append(Event(noticed_s, self._later(member, partial(self._on_noticed, was_listed))))
        if self.restarts:
            events.append(Event(back_s, partial(self._restart, member, member.epoch)))
        return events

    # -- what follows --------------------------------------------------------------------------------------------------

    def on_idle(self, worker: SimWorker, now_s: float) -> list[Event]:
        member = self.members.get(worker.worker_id)
        if member is None or member.worker is not worker or worker.is_dead:
            return []
        return self._when_idle(member, now_s)

    def _when_idle(self, member: Member, now_s: float) -> list[Event]:
        worker = self._process(member)
        if worker.open:
            return []
        if member.state is State.FLIPPING:
            return [Event(now_s + self._delays.flip.draw(self._rng), self._later(member, self._flipped))]
        if member.state is State.DRAINING:
            return self._drained(member, now_s)
        return []

    def _start(self, member: Member, now_s: float) -> list[Event]:
        """Its process is up."""
        deployment, member.epoch = self.deployment, member.epoch + 1
        member.worker = SimWorker(
            member.worker_id,
            member.epoch,
            member.role,
            self._shape(member.role),
            self._listener,
            now_s,
            block_bytes=deployment.token_bytes * deployment.engine.block_size,
            nic_bytes_per_s=deployment.nic_bytes_per_s(member.role),
            fast=self._fast,
        )
        self._enter(member, State.READY, now_s)
        return self._router.on_join(member.worker, now_s)

    def _serve(self, member: Member, now_s: float) -> list[Event]:
        self._enter(member, State.READY, now_s)
        return self._router.on_change(self._process(member), now_s, takes_calls=True)

    def _flipped(self, member: Member, now_s: float) -> list[Event]:
        return [*self._take_role(member, now_s), *self._serve(member, now_s)]

    def _take_role(self, member: Member, now_s: float) -> list[Event]:
        """With the limits that such workers begin with."""
        worker = self._process(member)
        worker.role = member.role
        return worker.tune(self._shape(member.role).tuning, now_s)

    def _awake(self, member: Member, now_s: float) -> list[Event]:
        events = self._take_role(member, now_s)
        self._enter(member, State.READY, now_s)
        return [*events, *self._router.on_join(self._process(member), now_s)]

    def _drained(self, member: Member, now_s: float) -> list[Event]:
        events = self._router.on_leave(self._process(member), now_s)
        if member.keep_standby:
            self._enter(member, State.STANDBY, now_s)
        else:
            self._remove(member, now_s)
        return events

    def _on_drain_limit(self, member: Member, now_s: float) -> list[Event]:
        worker = self._process(member)
        events = [*worker.die(now_s), *self._router.on_leave(worker, now_s)]
        self._remove(member, now_s)
        return events

    def _on_noticed(self, was_listed: bool, member: Member, now_s: float) -> list[Event]:
        """That it died."""
        worker = self._process(member)
        self._forget_process(member, now_s)
        if member.state is State.DRAINING or not self.restarts:
            self._remove(member, now_s)
        else:
            self._enter(member, State.FAILED, now_s)
        return self._router.on_leave(worker, now_s) if was_listed else []

    def _restart(self, member: Member, epoch: int, now_s: float) -> list[Event]:
        if member.gone_s is not None or member.epoch != epoch:
            return []
        return self._start(member, now_s)

    # -- members -------------------------------------------------------------------------------------------------------

    def _new_member(self, role: Role, state: State, now_s: float) -> Member:
        name = role.name.lower()
        worker_id = f"{name}-{self._numbers[role]}"
        self._numbers[role] += 1
        member = Member(worker_id, role, state, now_s, self.deployment.hardware(role), created_s=now_s)
        self.members[worker_id] = member
        return member

    def _shape(self, role: Role) -> EngineShape:
        """One per role: workers share what is remembered of step times."""
        if role not in self._shapes:
            self._shapes[role] = self.deployment.worker_shape(role)
        return self._shapes[role]

    def _enter(self, member: Member, state: State, now_s: float) -> None:
        member.state, member.since_s = state, now_s
        member.version += 1

    def _later(self, member: Member, act: Callable[[Member, float], list[Event]]) -> Callable[[float], Iterable[Event]]:
        """Do it unless the worker is in another state by then."""
        version = member.version
        return lambda now_s: act(member, now_s) if member.version == version else ()

    def _find(self, worker_id: str, *states: State) -> Member:
        member = self.members.get(worker_id)
        if member is None:
            raise Refused(f"there is no worker {worker_id}")
        if member.state not in states:
            raise Refused(f"{worker_id} is {member.state}, not {' or '.join(states)}")
        if member.worker is not None and member.worker.is_dead:
            raise Refused(f"{worker_id} does not answer")
        return member

    def _process(self, member: Member) -> SimWorker:
        assert member.worker is not None, "nothing of it is up"
        return member.worker

    def _forget_process(self, member: Member, now_s: float) -> None:
        if member.worker is not None:
            self._gone_uses.append(member.worker.use(now_s))
            member.worker = None

    def _remove(self, member: Member, now_s: float) -> None:
        member.gone_s = now_s
        member.version += 1
        self._forget_process(member, now_s)
        self._gone.append(self.members.pop(member.worker_id))


_LISTED = (State.READY, State.DRAINING, State.FLIPPING)  # by the router
