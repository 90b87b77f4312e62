"""How many workers of each role a load needs, from what their steps take. Pure; DESIGN section 9, step 5.

    prefill  rate * t_prefill / 0.80 + backlog / T_drain
    decode   rate * E[out] * t_step / B* / 0.85
    both     rate * E[out] * t_step' / B' / 0.85          t_step': a step that also carries the prompts of whom it will decode

B*: the largest batch whose step keeps the strictest target of a token's time that can be kept at all, and whose KV fits. It is
whole, so where targets leave room for two or three a step that is told 1 % longer would halve it, and one told 1 % shorter
double it again: a smaller batch counts at once, a larger one once steps half a BAND longer would allow it, too.
A step of B sequences that each last E[out] steps begins B / E[out] new ones, so that is how many prompts it carries where one
worker does both. Sizes are fractions here; rounding up is whose who asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.request import Role
from router.controller.autoscaler.facts import Tuning
from router.controller.autoscaler.traffic import ClassLoad, Load
from router.controller.step_model import StepWork, Terms

BAND = 1.1  # twice the step model's error (6 % in the median: docs/goodput.md), and what 30 s of 10 calls/s vary by
HALF_BAND = math.sqrt(BAND)
PREFILL_BUSY = 0.80  # DESIGN section 9, step 5: beyond it prompts wait for one another
DECODE_BUSY = 0.85  # likewise: batches vary, and the fullest worker misses first
# Of a TPOT target, that a full batch's step may take. Admission goes further (router/capacity.py), but by a mean sequence: a
# long one in a batch of a few makes a step a tenth longer. measured: docs/adr/0015-targets-are-kept-for-their-worth.md
PACE_SHARE = 0.85
KV_SHARE = 0.9  # of a pool: beyond it the next sequence soon preempts another. As router/placement.py, HEADROOM
DRAIN_BACKLOG_S = (
    60.0  # in which what waits beyond the targets should be gone: about a start-up, so as long as help takes
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What the workers of a role are like."""

    role: Role
    terms: Terms
    tuning: Tuning  # as far as it may be raised
    kv_tokens: int  # 0 = not known: no limit
    num_gpus: int = 1
    usd_per_hour: float = 1.0  # of a worker; only proportions count
    shape: str = ""
    batches: Mapping[str, float] = field(default_factory=dict)  # by class, that its pace allowed at the last look


@dataclass(frozen=True, slots=True)
class Decoding:
    """The best that one worker of a kind can do for a load."""

    batch: float  # B*
    step_s: float
    limit: str  # what ends it: "tpot" | "kv" | "seqs" | "none keeps its tpot"

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s


def prompt_s(kind: Kind, lacking_tokens: float, pairs: float) -> float:
    """What a prompt costs a prefill worker that always has enough of them to fill its steps."""
    budget = kind.tuning.max_num_batched_tokens
    full_s = kind.terms.step_s(StepWork(budget))
    return full_s / budget * lacking_tokens + kind.terms.s_per_pair * pairs


def prefill_busy(kind: Kind, load: Load) -> float:
    """Workers that would be busy all the time."""
    return prompt_s(kind, load.lacking_per_s, load.pairs_per_s)


def pace_limit_s(slo: ClassLoad) -> float:
    """That a step may take."""
    targets_ms = [PACE_SHARE * slo.slo.tpot_ms]
    if slo.slo.itl_p99_ms is not None:
        targets_ms.append(slo.slo.itl_p99_ms)
    return min(targets_ms) / 1e3


def step_s(kind: Kind, load: Load, batch: float) -> float:
    """Of a mean step with so many sequences."""
    one = _work_per_seq(kind, load)
    return kind.terms.step_s(StepWork(batch * one.tokens, batch * one.context, batch * one.pairs))


def batches_in_pace(kind: Kind, load: Load) -> dict[str, float]:
    """By class, the whole batch that keeps its pace; 0: none does."""
    return {of_class.slo.name: _batch_in_pace(kind, load, of_class) for of_class in load.classes}


def _batch_in_pace(kind: Kind, load: Load, of_class: ClassLoad) -> float:
    limit_s = pace_limit_s(of_class)
    now, surely = (whole(batch_within(kind, load, limit)) for limit in (limit_s, limit_s / HALF_BAND))
    return min(now, max(surely, kind.batches.get(of_class.slo.name, now)))


def decoding(kind: Kind, load: Load) -> Decoding:
    """B* and its step."""
    most, limit = most_seqs(kind, load)
    batches = list(batches_in_pace(kind, load).values())
    keepable = [batch for batch in batches if batch >= 1]
    if batches and not keepable:  # no size of the pool helps those targets, so they do not count
        limit = "none keeps its tpot"
    elif keepable and min(keepable) < most:
        most, limit = min(keepable), "tpot"
    return Decoding(most, step_s(kind, load, most), limit)


def decode_busy(kind: Kind, load: Load) -> float:
    """Workers with a batch of B* all the time."""
    return load.outputs_per_s / decoding(kind, load).tokens_per_s


def backlog_busy(kind: Kind, load: Load, waiting_tokens: float) -> float:
    """Workers that take DRAIN_BACKLOG_S for the prompts that wait beyond what may: no wait within the strictest target keeps
    more than a target's arrivals waiting (Little 1961)."""
    allowed = load.lacking_per_s * min((of_class.slo.ttft_ms / 1e3 for of_class in load.classes), default=0.0)
    beyond = max(0.0, waiting_tokens - allowed)
    pairs = beyond * load.pairs_per_s / load.lacking_per_s if load.lacking_per_s else 0.0
    return prompt_s(kind, beyond, pairs) / DRAIN_BACKLOG_S


def most_seqs(kind: Kind, load: Load) -> tuple[float, str]:
    """That a worker may run, whatever its pace, and what ends it: "seqs" or "kv"."""
    seqs = float(kind.tuning.max_num_seqs)
    in_kv = KV_SHARE * kind.kv_tokens / load.context_tokens if kind.kv_tokens and load.context_tokens else math.inf
    return (seqs, "seqs") if seqs <= in_kv else (max(1.0, in_kv), "kv")


def batch_within(kind: Kind, load: Load, limit_s: float) -> float:
    """The batch whose step takes just so long."""
    memory, compute = _lines(kind, load)
    return min(_root(limit_s - memory.at_0_s, memory.per_seq_s), _root(limit_s - compute.at_0_s, compute.per_seq_s))


def steady_batch(kind: Kind, load: Load, tokens_per_s: float) -> float:
    """The batch at which a worker makes so many tokens a second: B = tokens_per_s * step_s(B). inf: it never does."""
    return max(_root(tokens_per_s * line.at_0_s, 1 - tokens_per_s * line.per_seq_s) for line in _lines(kind, load))


def deviation(kind: Kind, load: Load, num_seqs: float, num_workers: int) -> float:
    """By how much the sequences of a pool vary, one standard deviation, where they are so many on average. More than a Poisson
    count, since the more there are the longer each stays: their variance is their mean by the share of a step that does not
    grow with them (processor sharing, whatever the lengths: Cohen 1979)."""
    fixed_s = max(line.at_0_s for line in _lines(kind, load))
    return math.sqrt(num_seqs * step_s(kind, load, num_seqs / num_workers) / fixed_s) if fixed_s else 0.0


@dataclass(frozen=True, slots=True)
class _Line:
    """A step's time by its batch."""

    at_0_s: float
    per_seq_s: float


def _lines(kind: Kind, load: Load) -> tuple[_Line, _Line]:
    """Bound by memory, bound by compute: a step takes the longer of the two."""
    terms, one = kind.terms, _work_per_seq(kind, load)
    reads_s = terms.s_per_context_token * one.context + terms.s_per_pair * one.pairs
    return (
        _Line(terms.fixed_s + terms.weights_s, reads_s),
        _Line(terms.fixed_s, reads_s + terms.s_per_token * one.tokens),
    )


def _work_per_seq(kind: Kind, load: Load) -> StepWork:
    if kind.role is not Role.BOTH or not load.outputs_per_s:
        return StepWork(1.0, load.context_tokens)
    begun = 1 / load.outputs_per_s  # of all the fleet's prompts, per token that comes out
    return StepWork(1.0 + begun * load.lacking_per_s, load.context_tokens, begun * load.pairs_per_s)


def whole(batch: float) -> float:
    """As many as fit, but for a rounding error."""
    return math.floor(batch + 1e-9) if math.isfinite(batch) else batch


def _root(room: float, slope: float) -> float:
    """Where a line from 0 with this slope reaches `room`."""
    if room <= 0:
        return 0.0
    return room / slope if slope > 0 else math.inf
