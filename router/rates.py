"""How fast one worker computes prompts, takes KV in and is granted room, learned from what it reports. Pure: instants never
come in.

Computing: prompt tokens by second of the steps that computed them (Load): a decode worker's other steps say nothing of how fast
it would compute a prompt. Moving: bytes of a pull
by the seconds in which they could move (SeqStats). A pull that was not made teaches nothing, so a rate that once was bad
would stay so for ever: each pull forgone moves it a little towards the default, until one is tried again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.v1 import worker_pb2
from router.lane_window import GrantWait

WEIGHT = 1 / 8  # of the newest sample: RFC 6298 (SRTT), as the workers' step_ms
FORGO_WEIGHT = 1 / 64  # a pull is tried again after some dozens of forgone ones: its cost is then spread over them
MIN_TOKENS = 64  # of a sample: a handful of tokens says more about the fixed cost of a step than about its speed
DEFAULT_PREFILL_TOKENS_PER_S = 338.0  # one core, demo model, fp32. measured: README.md
DEFAULT_KV_BYTES_PER_S = 1.5e9  # staged over TCP, the slowest way that KV goes. measured: DESIGN section 6, run B
# Two round trips of the link, and room, pin and publish on the two engines' threads. measured: 5.0 ms at p50 (4.1-6.5, n = 40)
# for three blocks between idle workers in one process, with 12 runnable processes on 2 cores
PULL_OVERHEAD_S = 0.005


# Workers of one model and shape are taken to compute equally fast unless one is this many times off: what is measured of each
# depends on the prompts it happened to get, by more than half where short ones leave a step's fixed cost uncovered.
SAME_SPEED = 1.5


@dataclass(slots=True)
class PeerSpeed:
    """How fast workers that are alike compute prompts, from the samples of all that do so; until there is one, as fast as
    `others` do. So a newcomer is neither overrun nor left alone."""

    others: PeerSpeed | None = None
    tokens_per_s: float = 0.0  # 0 = nobody has said

    def observe(self, tokens_per_s: float) -> None:
        weight = WEIGHT if self.tokens_per_s else 1.0
        self.tokens_per_s += weight * (tokens_per_s - self.tokens_per_s)
        if self.others is not None:
            self.others.observe(tokens_per_s)

    def expected(self) -> float:
        if self.tokens_per_s:
            return self.tokens_per_s
        return self.others.expected() if self.others is not None else DEFAULT_PREFILL_TOKENS_PER_S

    def of(self, rates: Rates) -> float:
        """What to expect of one of them: what is true of all, unless it clearly differs."""
        own, peers = rates.prefill_tokens_per_s, self.expected()
        differs = max(own, peers) > SAME_SPEED * min(own, peers)
        return own if rates.has_computed and differs else peers


@dataclass(slots=True)
class Rates:
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    kv_bytes_per_s: float = DEFAULT_KV_BYTES_PER_S
    _num_tokens: int = 0  # computed by the time of the last sample
    _num_steps: int = 0
    _busy_s: float = 0.0  # in steps that computed prompts
    has_computed: bool = False  # enough to tell its speed
    grants: GrantWait = field(default_factory=GrantWait)  # on the decode workers that it hands over to

    def observe_load(self, load: worker_pb2.Load) -> bool:
        """Take a worker's totals; those of its whole life are the first sample. Returns whether they told anything."""
        num_tokens = load.prompt_tokens_computed - self._num_tokens
        if load.num_prompt_steps:
            busy_s = load.prompt_steps_busy_s - self._busy_s
        else:  # of an earlier release, which tells of all steps together
            busy_s = 1e-3 * load.step_ms * (load.num_steps - self._num_steps)
        if num_tokens < MIN_TOKENS or not 0 < busy_s < math.inf:
            return False
        self._num_tokens, self._num_steps = load.prompt_tokens_computed, load.num_steps
        self._busy_s = load.prompt_steps_busy_s
        weight = WEIGHT if self.has_computed else 1.0
        self.has_computed = True
        self.prefill_tokens_per_s += weight * (num_tokens / busy_s - self.prefill_tokens_per_s)
        return True

    def observe_pull(self, stats: worker_pb2.SeqStats, asked_bytes: int) -> None:
        """Take a pull's outcome. One that brought nothing only says that the wire is no faster than that."""
        if not 0 < stats.pull_ms < math.inf:
            return
        sample = (stats.pulled_bytes or asked_bytes) / (1e-3 * stats.pull_ms)
        if stats.pulled_bytes or sample < self.kv_bytes_per_s:
            self.kv_bytes_per_s += WEIGHT * (sample - self.kv_bytes_per_s)

    def forgo_pull(self) -> None:
        self.kv_bytes_per_s += FORGO_WEIGHT * (DEFAULT_KV_BYTES_PER_S - self.kv_bytes_per_s)
