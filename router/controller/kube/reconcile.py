"""What has to happen so that fleet and pods agree. Pure: pods, sizes and members in, steps out.

    Expect    a size has a place that the fleet does not know: somebody scaled, or the pod came under a name of its own
    Forget    no size has a place for it and its pod is gone: somebody scaled down, and did not ask us
    Vanish    its pod is gone, or another one (uid) by now, or has lost its address: nobody is behind the worker's address
    Start     its pod runs, and no worker was started there, or none says who it is
    Adopt     its pod runs a worker that an earlier controller started
    Leave     its pod is being taken down: it drains
    Late      its pod does not run, for too long
    Label     its pod's role label says something else

Each is found again at the next look until it is done, so none needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.request import Role
from router.controller.fleet_state import STARTING, AfterDrain, Member
from router.controller.kube.objects import LLMD_ROLE_LABEL, ROLE_LABEL, Pod


@dataclass(frozen=True, slots=True)
class Home:
    """One pool's set of pods."""

    role: Role  # that its pods begin with
    shape: str
    names: tuple[str, ...]  # of pods that its size has a place for


@dataclass(frozen=True, slots=True)
class Expect:
    worker_id: str
    role: Role
    shape: str


@dataclass(frozen=True, slots=True)
class Forget:
    worker_id: str


@dataclass(frozen=True, slots=True)
class Vanish:
    worker_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Start:
    worker_id: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class Adopt:
    worker_id: str
    pod: Pod


@dataclass(frozen=True, slots=True)
class Leave:
    worker_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Late:
    worker_id: str


@dataclass(frozen=True, slots=True)
class Label:
    pod: Pod
    role: Role


Step = Expect | Forget | Vanish | Start | Adopt | Leave | Late | Label


@dataclass(frozen=True, slots=True)
class Situation:
    """At one instant. `homes` are those whose size is known."""

    homes: Mapping[str, Home]
    is_whole: bool  # all homes are known, so what none of them names is nobody's
    pods: Mapping[str, Pod]
    members: Sequence[Member]
    started: Mapping[str, str]  # worker -> uid of the pod that it was started on, as far as this process knows
    live_roles: Mapping[str, Role]  # that workers themselves say
    late: frozenset[str]  # workers whose pods have not run for too long
    may_announce: frozenset[str] = frozenset()  # workers of whom nothing is known, while somebody listens on their pods
    llmd_labels: bool = False


def steps(now: Situation) -> Iterator[Step]:
    known = {member.worker_id for member in now.members}
    for home in now.homes.values():
        for name in home.names:
            if name not in known:
                yield Expect(name, _role_of(now.pods.get(name), home), home.shape)
    named = {name for home in now.homes.values() for name in home.names}
    for member in now.members:
        if now.is_whole and member.worker_id not in named and member.worker_id not in now.pods:
            yield Forget(member.worker_id)
        else:
            yield from _of_member(now, member)


def _of_member(now: Situation, member: Member) -> Iterator[Step]:
    pod, worker_id = now.pods.get(member.worker_id), member.worker_id
    uid = now.started.get(worker_id)
    if member.epoch and (why := _gone(pod, uid)):
        yield Vanish(worker_id, why)
    elif pod is not None and pod.runs and member.after_drain is not AfterDrain.END:
        if uid is None and member.epoch and member.address.rpartition(":")[0] == pod.ip:
            yield Adopt(worker_id, pod)
        elif uid != pod.uid and worker_id not in now.may_announce:
            yield Start(worker_id, pod)
    if pod is not None and pod.is_terminating and member.epoch and not member.draining:
        yield Leave(worker_id, pod.disrupted or "its pod is being deleted")
    if worker_id in now.late and member.state == STARTING:
        yield Late(worker_id)
    if pod is not None and not pod.is_terminating and member.epoch:
        role = now.live_roles.get(worker_id, member.role)
        if any(pod.labels.get(label) != value for label, value in labels_of(role, now.llmd_labels).items()):
            yield Label(pod, role)


def _gone(pod: Pod | None, uid: str | None) -> str:
    """Why nobody is behind the worker's address any more; "" where somebody may be."""
    if pod is None:
        return "its pod is gone"
    if uid is not None and pod.uid != uid:
        return "another pod took its pod's place"
    if pod.phase in ("Failed", "Succeeded"):
        return f"its pod has ended: {pod.reason or pod.phase}"
    return "" if pod.ip else "its pod has lost its address"


def _role_of(pod: Pod | None, home: Home) -> Role:
    """A flip outlives the controller in the label."""
    label = pod.labels.get(ROLE_LABEL, "") if pod else ""
    return next((role for role in Role if role.name.lower() == label), home.role)


def labels_of(role: Role, llmd_labels: bool) -> Mapping[str, str]:
    name = role.name.lower()
    return {ROLE_LABEL: name, LLMD_ROLE_LABEL: name} if llmd_labels else {ROLE_LABEL: name}
