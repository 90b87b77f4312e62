"""Who starts and ends workers: one port, an adapter per platform. The local one is Ray's (ray_fleet.py).

A scaler knows machines, not traffic: it refuses what does not fit, gives up a start that takes too long, and ends what it is
told to end at once. Whether a worker may end is decided before (levers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.request import Role


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Workers of one shape."""

    desired: int  # that should be there
    ready: int  # that are up, whatever they do
    pending: tuple[str, ...]  # asked for, nothing of them is up yet
    victims: tuple[str, ...]  # any of them may be drained for its end; a StatefulSet offers its last ones
    spare: int | None  # how many more fit on the machines; None: nobody knows


class PoolScaler(Protocol):
    def shape_of(self, role: Role) -> str:
        """Of the workers of a role."""
        ...

    async def get(self, shape: str) -> PoolSize:
        """Raises: Unavailable: the platform does not answer."""
        ...

    async def scale_up(self, role: Role, shape: str) -> str:
        """Ask for one more worker and return its id at once; the fleet shows how far it is. One that is not up after a deadline
        of the platform's own is a failed member that never had an epoch.

        Raises:
            InvalidRequest: there is no such shape.
            Unavailable: it does not fit, or the platform does not answer.
        """
        ...

    def can_end(self, worker_id: str) -> bool:
        """Whether nobody has to be ended before it. A drained worker of which this does not hold waits."""
        ...

    async def scale_down(self, worker_id: str) -> None:
        """End a worker for good, up or pending; one that is not there is fine. Returns once it is gone.

        Raises:
            Unavailable: the platform does not answer; it may still be there.
        """
        ...
