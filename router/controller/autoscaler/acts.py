"""What the autoscaler may do, cheapest first, and what it proposes. Plain data.

Whoever carries an act out (levers.py live, bench/sim/control.py in the simulator) may refuse or fail: nothing is assumed done
until the next facts show it. No act loses a call: flips wait until idle, and who leaves drains first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.request import Role
from router.controller.autoscaler.facts import Tuning
from router.controller.decisions import Input


@dataclass(frozen=True, slots=True)
class Tune:
    """From the next step on."""

    worker_id: str
    tuning: Tuning


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """All routers: prompts that lack at most so many tokens may be prefilled where they decode; 0 = none."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Its running work ends first; weights stay."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Undrain:
    """It was to leave, and is wanted after all."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Wake:
    """A standby begins to serve."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Create:
    """One more worker. Until it is up it is PENDING; whoever starts it gives up after a deadline of its own."""

    role: Role
    shape: str


@dataclass(frozen=True, slots=True)
class Drain:
    """No new work; once idle it is ended, or kept as a standby with its weights loaded."""

    worker_id: str
    keep_standby: bool = False
    or_another: bool = True  # of the same role: some platforms end their workers in an order of their own


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A worker that did not come up in time, or a standby that nobody needs: end it, no call is there."""

    worker_id: str


Act = Tune | LocalPrefill | Flip | Undrain | Wake | Create | Drain | GiveUp


@dataclass(frozen=True, slots=True)
class Proposal:
    act: Act
    reason: str  # a sentence that an operator understands
    inputs: Mapping[str, Input] = field(default_factory=dict)  # the numbers behind it, units in the names
