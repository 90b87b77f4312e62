"""What the autoscaler looks at: a fleet and its traffic at one instant. Plain values; pure.

Live they come from Sessions and routers' reports, in the simulator from its own workers and router. What nobody knows is None
and decides nothing: a value that is missing, old or no number is left out, it never counts as 0. Instants are the caller's clock.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.request import Role
from baton.slo import SLO
from engine.tuning import Tuning as Tuning
from router.controller.settings import Budget
from router.controller.step_model import Terms
from router.ring import SHORT_S


class State(enum.StrEnum):
    """A worker's, as far as sizes go. PENDING counts as there already: it is on its way."""

    PENDING = "pending"  # asked for; nothing of it is up yet
    STANDBY = "standby"  # up, weights loaded, takes no work
    READY = "ready"
    FLIPPING = "flipping"  # idle soon, then of the other role
    DRAINING = "draining"  # takes no new work
    FAILED = "failed"  # away; somebody else brings it back


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker said of itself."""

    at_s: float  # when
    num_seqs: int  # running or on their way
    waiting_tokens: int  # of prompts
    used_tokens: int  # of KV: active and reserved
    step_s: float  # mean of its last steps
    num_preemptions: int  # since its start
    num_waiting: int = 0  # of num_seqs, that own no KV yet


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    worker_id: str
    role: Role  # that it has, or will have once it is up or has flipped
    state: State
    since_s: float  # when it came into this state
    shape: str  # hardware; a worker flips, and is tuned, like others of its shape only
    num_gpus: int
    kv_tokens: int  # that its pool holds; 0 = not known yet
    tuning: Tuning
    most: Tuning  # what it was started with
    load: WorkerLoad | None = None  # None: it has said nothing yet
    serves: bool = True  # of one that is not up, or away: once it is; False: it is to drain, or to stand by
    leaves: bool = True  # of one that drains, or is to; False: an operator looks after it, and alone takes it back
    stands_by: bool = False  # of one that drains, or is to: what it becomes then


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What one more worker would be."""

    shape: str
    num_gpus: int
    kv_tokens: int  # 0 = not known
    most: Tuning


@dataclass(frozen=True, slots=True)
class ClassTraffic:
    """Of one SLO class, of late. Means are over calls; None: there were none."""

    slo: SLO
    rate: float | None  # calls a second that arrived, also those turned away
    coming_rate: float | None  # forecast for the moment at which a worker asked for now would be ready
    prompt_tokens: float | None
    cached_tokens: float | None  # of them, that some worker has cached
    prompt_pairs: float | None  # (query, context) pairs of what is not cached: n^2/2 of a whole prompt
    output_tokens: float | None
    later_rate: float | None = None  # the most that is likely at any lead there is a forecast for; None: nobody knows
    num_arrived: float = math.inf  # calls that rate and lengths are of: the more, the surer; inf = sure
    judged_s: float = SHORT_S  # in which the calls ended that the next four count: longer where few do
    num_judged: float = 0.0
    num_missed_ttft: float = 0.0
    num_missed_tpot: float = 0.0  # or the gap between two tokens
    num_failed: float = 0.0  # also those turned away

    @property
    def num_met(self) -> float:
        return self.num_judged - self.num_missed_ttft - self.num_missed_tpot - self.num_failed


@dataclass(frozen=True, slots=True)
class FleetFacts:
    now_s: float
    workers: tuple[WorkerFacts, ...]
    classes: tuple[ClassTraffic, ...]
    steps: Mapping[Role, Terms]  # what a step of such a worker takes, learned or assumed
    budget: Budget
    kv_bytes_per_token: float
    link_bytes_per_s: float  # at which KV leaves one worker
    local_prefill_tokens: int  # prompts that lack at most so many tokens may be prefilled where they decode
    queued_tokens: int = 0  # of prompts that no worker has yet
    oldest_queued_s: float = 0.0
    spare_gpus: int | None = None  # that machines have free; None: nobody knows
    missing_s: float = 0.0  # for how long no router has said anything
    usd_per_gpu_hour: Mapping[str, float] = field(default_factory=dict)  # by shape
    # By role; where a role is not named, a new worker is like those that are there, of its role or of another
    blueprints: Mapping[Role, Blueprint] = field(default_factory=dict)
