"""Who is in the fleet: what was wanted, what announced itself, what was lost. Pure state: no clock, socket or thread.

Life of one worker id:
    1. starting   expected by the controller, nothing announced yet
    2. ready      announced {epoch, address}; or draining, where an operator wants that
    3. failed     lost (its Session fell silent) or never started; `reason` says why
    4. ready      the same epoch was heard again, or a restarted process announced a new epoch
An epoch that was replaced never comes back: a split-brain actor that announces it is refused. What was wanted (role,
draining) outlives a restart. `version` grows with every change that routers must see, and with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baton.errors import NotFound, PeerRefused
from baton.request import Role

STARTING, READY, DRAINING, FAILED = "starting", "ready", "draining", "failed"


@dataclass(frozen=True, slots=True)
class Member:
    """One worker as the fleet knows it."""

    worker_id: str
    role: Role  # wanted; the worker follows when idle
    state: str = STARTING
    reason: str = ""  # of failed
    draining: bool = False  # wanted
    epoch: int = 0  # 0 = never announced
    address: str = ""
    pid: int = 0
    shape: str = ""
    fingerprint: str = ""
    num_restarts: int = 0


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


class Fleet:
    """All members by id."""

    def __init__(self, members: Iterable[Member] = (), replaced_epochs: Iterable[tuple[str, int]] = ()) -> None:
        """With what an earlier controller knew."""
        self.version = 0
        self._members: dict[str, Member] = {member.worker_id: member for member in members}
        self._replaced_epochs: set[tuple[str, int]] = set(replaced_epochs)

    @property
    def replaced_epochs(self) -> frozenset[tuple[str, int]]:
        """(worker_id, epoch) of processes that may not come back."""
        return frozenset(self._replaced_epochs)

    def members(self) -> tuple[Member, ...]:
        return tuple(self._members[key] for key in sorted(self._members))

    def get(self, worker_id: str) -> Member:
        """Raises: NotFound."""
        member = self._members.get(worker_id)
        if member is None:
            known = ", ".join(sorted(self._members)) or "none"
            raise NotFound(f"no worker {worker_id!r}; there are: {known}", field="worker_id")
        return member

    def expect(self, worker_id: str, role: Role) -> None:
        """Enter a worker that is about to be started; one that is already known stays as it is."""
        if worker_id not in self._members:
            self._put(Member(worker_id, role))

    def announce(self, said: Announcement) -> Member:
        """Take in a worker's word and return what is wanted of it.

        Raises:
            PeerRefused: this epoch was replaced by a later start of the same worker.
        """
        if (said.worker_id, said.epoch) in self._replaced_epochs:
            raise PeerRefused(f"epoch {said.epoch:016x} of {said.worker_id} was replaced", field="epoch")
        known = self._members.get(said.worker_id, Member(said.worker_id, said.role))
        restarted = known.epoch not in (0, said.epoch)
        if restarted:
            self._replaced_epochs.add((said.worker_id, known.epoch))
        member = replace(
            known,
            state=DRAINING if known.draining else READY,
            reason="",
            epoch=said.epoch,
            address=said.address,
            pid=said.pid,
            shape=said.shape,
            fingerprint=said.fingerprint,
            num_restarts=known.num_restarts + restarted,
        )
        self._put(member)
        return member

    def heard(self, worker_id: str, epoch: int) -> None:
        """A Session to this very process works (again)."""
        member = self._members.get(worker_id)
        if member is not None and member.epoch == epoch and member.state == FAILED:
            self._put(replace(member, state=DRAINING if member.draining else READY, reason=""))

    def lost(self, worker_id: str, epoch: int, reason: str) -> None:
        """A worker fell silent or did not start; ignored where a newer process has announced itself."""
        member = self._members.get(worker_id)
        if member is not None and member.epoch == epoch:
            self._put(replace(member, state=FAILED, reason=reason))

    def want_draining(self, worker_id: str, draining: bool) -> Member:
        """Raises: NotFound."""
        member = self.get(worker_id)
        state = member.state
        if state in (READY, DRAINING):
            state = DRAINING if draining else READY
        self._put(replace(member, draining=draining, state=state))
        return self.get(worker_id)

    def want_role(self, worker_id: str, role: Role) -> Member:
        """Raises: NotFound."""
        self._put(replace(self.get(worker_id), role=role))
        return self.get(worker_id)

    def _put(self, member: Member) -> None:
        if self._members.get(member.worker_id) != member:
            self._members[member.worker_id] = member
            self.version += 1
