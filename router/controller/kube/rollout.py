"""One step of an upgrade, or of its way back, which is the same: pods of an older revision are replaced one by one.

Pure: pods as they are in, one step out, found again at the next look until it is done.

    Surge     one more pod, of the new revision, in a pool whose work nobody else could do meanwhile, or where the budget has room
    Replace   an old worker drains, then its pod is evicted and comes back new
    Shrink    the pods that a surge added, once nothing is old there and the room is needed, or nothing is old at all
    Wait      the last step is not done yet
    Pause     it goes on once that is over
    Done

Workers pair up within one fingerprint only, so an upgrade of the model makes two cohorts, and of each a prefill and a decode
worker must be there before it serves anybody. So: an old worker leaves only where some cohort, without it, can serve whole
calls; pools take turns, the one that is furthest behind first; and one at a time, the next one once the last one serves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.request import Role

GOODPUT_FLOOR = 0.9  # of calls that meet their targets; below it nobody else leaves. The promise of an upgrade


@dataclass(frozen=True, slots=True)
class Worker:
    """One pod and who works there."""

    name: str
    home: str
    role: Role
    is_old: bool
    serves: bool
    leaves: bool  # it drains for its end or its return, or its pod is being taken down
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """At one instant."""

    workers: Sequence[Worker]
    surged: Collection[str]  # homes to which this upgrade has added a pod
    num_spare: int | None  # pods that the GPU budget has room for; None: no bound
    goodput: float | None  # of late; None: nobody knows
    stuck: str = ""  # why a new worker does not come up, for too long
    refused: Mapping[str, str] = field(default_factory=dict)  # by home: why no pod can be added to it


@dataclass(frozen=True, slots=True)
class Surge:
    home: str


@dataclass(frozen=True, slots=True)
class Replace:
    worker: str


@dataclass(frozen=True, slots=True)
class Shrink:
    home: str


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


@dataclass(frozen=True, slots=True)
class Pause:
    why: str
    lacks: str = ""  # the home that one more pod would help


@dataclass(frozen=True, slots=True)
class Done:
    pass


Step = Surge | Replace | Shrink | Wait | Pause | Done


def step(now: Progress) -> Step:
    old = [worker for worker in now.workers if worker.is_old]
    if not old:
        return _tidy(now)
    if now.stuck:
        return Pause(f"a new worker does not come up: {now.stuck}")
    if (leaving := _replaced(now.workers)) is not None:
        return Replace(leaving.name) if leaving.is_old else Wait(f"{leaving.name} leaves")
    if coming := [worker.name for worker in now.workers if not worker.serves and not worker.is_old]:
        return Wait(f"{', '.join(coming)} is not up yet")
    if now.goodput is not None and now.goodput < GOODPUT_FLOOR:
        return Pause(
            f"{now.goodput:.0%} of calls meet their targets; below {GOODPUT_FLOOR:.0%} no worker is taken away"
        )
    home = _next_home(now.workers, old)
    can_surge = home not in now.surged and home not in now.refused
    if can_surge and (now.num_spare is None or now.num_spare > 0):
        return Surge(home)
    return _replace(now, [worker for worker in old if worker.home == home]) or _replace(now, old) or _no_way(now, home)


def _replaced(workers: Iterable[Worker]) -> Worker | None:
    return next((worker for worker in workers if worker.leaves), None)


def _next_home(workers: Sequence[Worker], old: Sequence[Worker]) -> str:
    """With the largest part old; of equals the first by name."""
    homes = sorted({worker.home for worker in old})
    return max(homes, key=lambda home: _share_old([w for w in workers if w.home == home]))


def _share_old(workers: Sequence[Worker]) -> float:
    return sum(worker.is_old for worker in workers) / len(workers)


def _replace(now: Progress, candidates: Sequence[Worker]) -> Step | None:
    """One that does not serve first: it costs nobody anything."""
    for worker in sorted(candidates, key=lambda worker: worker.serves):
        rest = [other for other in now.workers if other.name != worker.name and other.serves]
        if not worker.serves or _can_serve(rest):
            return Replace(worker.name)
    return None


def _can_serve(workers: Sequence[Worker]) -> bool:
    """Some cohort has all that a call needs."""
    cohorts: dict[str, set[Role]] = {}
    for worker in workers:
        cohorts.setdefault(worker.fingerprint, set()).add(worker.role)
    return any(Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles for roles in cohorts.values())


def _no_way(now: Progress, home: str) -> Step:
    """The room that another pool's surge took is free once that pool is new."""
    unfinished = {worker.home for worker in now.workers if worker.is_old}
    for other in sorted(set(now.surged) - unfinished):
        return Shrink(other)
    no_room = "the GPU budget has no room: raise it by one worker for the time of the upgrade"
    why = now.refused.get(home, no_room)
    return Pause(f"without one more pod of {home} nobody would serve while its worker is replaced, and {why}", home)


def _tidy(now: Progress) -> Step:
    """What was added goes once everybody else serves."""
    if now.surged and (late := [worker.name for worker in now.workers if not worker.serves]):
        return Wait(f"{', '.join(late)} is not up yet")
    for home in sorted(now.surged):
        return Shrink(home)
    return Done()
