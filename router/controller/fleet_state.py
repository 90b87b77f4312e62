"""Who is in the fleet: what was wanted, what announced itself, what was lost. Pure state: no clock, socket or thread.

Life of one worker id:
    1. starting   expected by the controller, nothing announced yet
    2. ready      announced {epoch, address}; or draining, where somebody wants that
    3. failed     lost (its Session fell silent) or never started; `reason` says why
    4. ready      the same epoch was heard again, or a restarted process announced a new epoch
    5. draining   no new work. Once idle: it stays so, or becomes standby, or is ended, as `after_drain` says
    6. standby    idle with its weights loaded, until it is wanted again
    7. starting   its machine is gone: whatever ran there may not come back, another process may
    8. forgotten  ended for good: whoever announces that id again is refused, until it is expected anew
An epoch that was replaced never comes back: a split-brain actor that announces it is refused. What was wanted (role,
draining and what follows it, tuning) outlives a restart. Names given here are never given twice. `version` grows with every
change that routers must see or that must be kept, and with nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.errors import NotFound, PeerRefused
from baton.request import Role
from router.controller.autoscaler.facts import Tuning
from router.controller.starts import StartUp

STARTING, READY, DRAINING, STANDBY, FAILED = "starting", "ready", "draining", "standby", "failed"
_MAX_ENDED = 1_000  # ids remembered: an ended process that speaks up does so within seconds


class AfterDrain(enum.StrEnum):
    """What becomes of a draining worker once nothing runs there any more."""

    STAY = ""
    STANDBY = "standby"
    END = "end"
    RETURN = "return"  # its machine takes it down, or will; the next process of this worker takes work again


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the fleet knows it."""

    worker_id: str
    role: Role  # wanted; the worker follows when idle
    state: str = STARTING
    reason: str = ""  # of failed
    draining: bool = False  # wanted
    after_drain: AfterDrain = AfterDrain.STAY  # wanted
    tuning: Tuning | None = None  # wanted; None: as it was started
    extra: bool = False  # asked for at run time, not configured: given up where it does not come up
    epoch: int = 0  # 0 = never announced
    address: str = ""
    pid: int = 0
    shape: str = ""
    fingerprint: str = ""
    num_restarts: int = 0

    @property
    def stays(self) -> bool:
        """It is neither to be ended nor to stand by; it may be away for a while."""
        return self.after_drain in (AfterDrain.STAY, AfterDrain.RETURN)


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a worker says about itself."""

    worker_id: str
    epoch: int
    address: str
    role: Role
    pid: int
    shape: str = ""
    fingerprint: str = ""
    start_up: StartUp = field(default_factory=StartUp)


@dataclass(frozen=True, slots=True)
class SavedFleet:
    """What must outlive the controller."""

    members: tuple[Member, ...] = ()
    replaced_epochs: frozenset[tuple[str, int]] = frozenset()  # (worker_id, epoch) of processes that may not come back
    ended: tuple[str, ...] = ()  # worker ids, oldest first
    num_named: Mapping[str, int] = field(default_factory=dict)  # names given so far, by role
    local_prefill_tokens: int | None = None  # that routers are told; None: as each is configured
    surged_from: Mapping[str, int] = field(
        default_factory=dict
    )  # sizes by pool, of those that have one more for a while

    @property
    def is_new(self) -> bool:
        """No controller was here before."""
        return not (self.members or self.num_named)


class Fleet:
    """All members by id."""

    def __init__(self, saved: SavedFleet | None = None) -> None:
        """With what an earlier controller knew."""
        saved = saved or SavedFleet()
        self.version = 0
        self._members: dict[str, Member] = {member.worker_id: member for member in saved.members}
        self._replaced_epochs: set[tuple[str, int]] = set(saved.replaced_epochs)
        self._ended = dict.fromkeys(saved.ended)
        self._num_named = dict(saved.num_named)
        self._local_prefill_tokens = saved.local_prefill_tokens
        self._surged_from = dict(saved.surged_from)

    def saved(self) -> SavedFleet:
        return SavedFleet(
            self.members(),
            frozenset(self._replaced_epochs),
            tuple(self._ended),
            dict(self._num_named),
            self._local_prefill_tokens,
            dict(self._surged_from),
        )

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members[key] for key in sorted(self._members))

    def get(self, worker_id: str) -> Member:
        """Raises: NotFound."""
        member = self._members.get(worker_id)
        if member is None:
            known = ", ".join(sorted(self._members)) or "none"
            raise NotFound(f"no worker {worker_id!r}; there are: {known}", field="worker_id")
        return member

    def find(self, worker_id: str) -> Member | None:
        return self._members.get(worker_id)

    def expect(self, worker_id: str, role: Role, shape: str = "", *, extra: bool = False) -> None:
        """Enter a worker that is about to be started; one that is already known stays as it is."""
        self._ended.pop(worker_id, None)
        if worker_id not in self._members:
            self._put(Member(worker_id, role, shape=shape, extra=extra))

    def new_name(self, role: Role) -> str:
        """<role>-<number>, never given before."""
        kind = role.name.lower()
        number = self._num_named.get(kind, 0)
        while f"{kind}-{number}" in self._members or f"{kind}-{number}" in self._ended:
            number += 1
        self._num_named[kind] = number + 1
        self.version += 1
        return f"{kind}-{number}"

    def announce(self, said: Announcement) -> Member:
        """Take in a worker's word and return what is wanted of it.

        Raises:
            PeerRefused: this epoch was replaced by a later start of the same worker, or the worker was ended for good.
        """
        if said.worker_id in self._ended:
            raise PeerRefused(f"{said.worker_id} was ended", field="worker_id")
        if (said.worker_id, said.epoch) in self._replaced_epochs:
            raise PeerRefused(f"epoch {said.epoch:016x} of {said.worker_id} was replaced", field="epoch")
        known = self._members.get(said.worker_id, Member(said.worker_id, said.role))
        restarted = known.epoch not in (0, said.epoch)
        if restarted:
            self._replaced_epochs.add((said.worker_id, known.epoch))
        if known.epoch != said.epoch and known.after_drain is AfterDrain.RETURN:
            known = replace(known, draining=False, after_drain=AfterDrain.STAY)
        member = replace(
            known,
            state=_state(known),
            reason="",
            epoch=said.epoch,
            address=said.address,
            pid=said.pid,
            shape=said.shape or known.shape,
            fingerprint=said.fingerprint,
            num_restarts=known.num_restarts + restarted,
        )
        self._put(member)
        return member

    def heard(self, worker_id: str, epoch: int) -> None:
        """A Session to this very process works (again)."""
        member = self._members.get(worker_id)
        if member is not None and member.epoch == epoch and member.state == FAILED:
            self._put(replace(member, state=_state(member), reason=""))

    def lost(self, worker_id: str, epoch: int, reason: str) -> None:
        """A worker fell silent or did not start; ignored where a newer process has announced itself."""
        member = self._members.get(worker_id)
        if member is not None and member.epoch == epoch:
            self._put(replace(member, state=FAILED, reason=reason))

    def vanished(self, worker_id: str) -> None:
        """Its machine is gone, and its process with it; another one may come up in its place."""
        member = self._members.get(worker_id)
        if member is not None and member.epoch:
            self._replaced_epochs.add((worker_id, member.epoch))
            gone = replace(member, state=STARTING, reason="", epoch=0, address="", pid=0)
            self._put(replace(gone, num_restarts=member.num_restarts + 1))

    def want_draining(self, worker_id: str, draining: bool, after: AfterDrain = AfterDrain.STAY) -> Member:
        """Raises: NotFound."""
        member = self.get(worker_id)
        wanted = replace(member, draining=draining, after_drain=after if draining else AfterDrain.STAY)
        if member.state in (READY, DRAINING, STANDBY):
            wanted = replace(wanted, state=_state(wanted))
        self._put(wanted)
        return wanted

    def want_role(self, worker_id: str, role: Role) -> Member:
        """Raises: NotFound."""
        self._put(replace(self.get(worker_id), role=role))
        return self.get(worker_id)

    def want_tuning(self, worker_id: str, tuning: Tuning) -> Member:
        """Raises: NotFound."""
        self._put(replace(self.get(worker_id), tuning=tuning))
        return self.get(worker_id)

    @property
    def local_prefill_tokens(self) -> int | None:
        """That routers are told; None: as each is configured."""
        return self._local_prefill_tokens

    def want_local_prefill(self, max_tokens: int | None) -> None:
        if max_tokens != self._local_prefill_tokens:
            self._local_prefill_tokens = max_tokens
            self.version += 1

    @property
    def surged_from(self) -> Mapping[str, int]:
        """Sizes by pool, of those that have one more for a while, or are about to."""
        return self._surged_from

    def surge_from(self, pool: str, size: int) -> None:
        self._surged_from = {**self._surged_from, pool: size}
        self.version += 1

    def surge_is_over(self, pool: str) -> None:
        if pool in self._surged_from:
            self._surged_from = {name: size for name, size in self._surged_from.items() if name != pool}
            self.version += 1

    def stand_by(self, worker_id: str) -> None:
        """Nothing runs there any more; ignored where it is wanted otherwise meanwhile."""
        member = self._members.get(worker_id)
        if member is not None and member.state == DRAINING and member.after_drain is AfterDrain.STANDBY:
            self._put(replace(member, state=STANDBY))

    def forget(self, worker_id: str) -> None:
        """It is ended for good."""
        member = self._members.pop(worker_id, None)
        if member is not None:
            self._ended[worker_id] = None
            self._replaced_epochs = {
                known for known in self._replaced_epochs if known[0] != worker_id
            }  # all are refused
            while len(self._ended) > _MAX_ENDED:
                self._ended.pop(next(iter(self._ended)))
            self.version += 1

    def _put(self, member: Member) -> None:
        if self._members.get(member.worker_id) != member:
            self._members[member.worker_id] = member
            self.version += 1


def _state(member: Member) -> str:
    """Of one that is there."""
    return DRAINING if member.draining else READY
