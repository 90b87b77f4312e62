"""Which TPOT targets decode workers keep that cannot keep all at once. Pure.

All sequences of a worker share its steps, so the tightest target that is kept limits the batch for everybody. What keeping it
is worth follows from what calls of late asked for:

    worth(t) = value of the calls that want t or slower ones x min(1, tokens/s of batches whose steps keep t / tokens/s they want)

The tightest target kept is the one that is worth most. Where all fit that is the tightest of all; one that would turn away more
than it brings is not kept, and neither is one that a lone sequence misses. A value is a class's weight, "what a call is worth
beside others"; higher priorities are compared first, and have their tokens first, so no crowd of lower ones outbids them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.capacity import KV_HEADROOM, TPOT_SHARE, WorkerLoad, alone_s, growth_s

MEMORY_S = 10.0  # in which what was asked for fades: a hundred calls at ten a second, so rates are known to a tenth
# Times the tokens that are asked for must fit: calls come in clumps, so a batch that fits on average is often too small.
# measured: docs/overload.md
ROOM = 1.2
_LEAST_SEQS = 1e-4  # of a fading sum: its last call came nine MEMORY_S ago, and is forgotten

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Want:
    """What calls of one priority and one TPOT target ask for, per second."""

    priority: int
    tpot_s: float
    value: float
    prompt_tokens: float
    output_tokens: float

    def scaled(self, factor: float) -> Want:
        rates = (factor * rate for rate in (self.value, self.prompt_tokens, self.output_tokens))
        return Want(self.priority, self.tpot_s, *rates)


class Kind(NamedTuple):
    """Of call."""

    priority: int
    tpot_s: float
    slo_class: str


class Wants:
    """What the calls of one router ask for, those that are turned away, too."""

    def __init__(self) -> None:
        self._sums: dict[Kind, Floats] = {}  # value, prompt tokens, sequences: what they would be at `_faded_s`
        self._since_s = math.inf
        self._faded_s = 0.0

    def add(self, kind: Kind, value: float, prompt_tokens: float, num_seqs: int, now_s: float) -> None:
        """A call came. Costs the same however many kinds there are: it counts for more, in place of all others for less."""
        self._since_s = min(self._since_s, now_s)
        if now_s - self._faded_s > MEMORY_S:
            self._fade(now_s)
        sums = self._sums.setdefault(kind, np.zeros(3))
        sums += math.exp((now_s - self._faded_s) / MEMORY_S) * np.array((value, prompt_tokens, num_seqs))

    def rates(self, outputs: Mapping[str, float], now_s: float) -> list[Want]:
        """Of late. `outputs`: by class, mean tokens of a sequence; a class that has none is like the others."""
        self._fade(now_s)
        self._sums = {kind: sums for kind, sums in self._sums.items() if sums[2] >= _LEAST_SEQS}
        seen_s = MEMORY_S * -math.expm1(-max(1.0, now_s - self._since_s) / MEMORY_S)
        usual = sum(outputs.values()) / len(outputs) if outputs else 1.0
        return [
            Want(kind.priority, kind.tpot_s, value, prompt_tokens, num_seqs * outputs.get(kind.slo_class, usual))
            for kind, sums in self._sums.items()
            for value, prompt_tokens, num_seqs in [(sums / seen_s).tolist()]
        ]

    def _fade(self, now_s: float) -> None:
        share, self._faded_s = math.exp((self._faded_s - now_s) / MEMORY_S), now_s
        for sums in self._sums.values():
            sums *= share


@dataclass(frozen=True, slots=True)
class Kept:
    floor_s: float = 0.0  # the tightest TPOT that some worker keeps for a lone sequence; 0 = nobody knows
    tightest_s: float = 0.0  # target; 0: whatever is above the floor

    def __contains__(self, tpot_s: float) -> bool:
        """Whether others wait for this target's sake."""
        return tpot_s >= max(self.floor_s, self.tightest_s)


def kept_targets(workers: Sequence[WorkerLoad], wants: Sequence[Want], seq_tokens: float) -> Kept:
    """`workers` decode; `seq_tokens`: what a sequence comes to hold on average."""
    if not workers:
        return Kept()
    pool = _Pool(workers, seq_tokens)
    floor_s, best_s, most = float(pool.alone_s.min()), 0.0, list[float]()
    wants = [want for want in wants if want.tpot_s >= floor_s]
    for tpot_s in sorted({want.tpot_s for want in wants}):
        worth = _worth(wants, tpot_s, pool.tokens_per_s(tpot_s))
        if worth > most:
            best_s, most = tpot_s, worth
    return Kept(floor_s, best_s)


def _worth(wants: Sequence[Want], tpot_s: float, tokens_per_s: float) -> list[float]:
    """By priority, highest first: value per second of the calls that meet their targets."""
    found = []
    for priority in sorted({want.priority for want in wants}, reverse=True):
        mine = [want for want in wants if want.priority == priority and want.tpot_s >= tpot_s]
        asked = ROOM * sum(want.output_tokens for want in mine)
        served = min(tokens_per_s, asked)
        tokens_per_s -= served
        found.append(sum(want.value for want in mine) * (served / asked if asked else 0.0))
    return found


class _Pool:
    """Decode workers, [workers] each."""

    def __init__(self, workers: Sequence[WorkerLoad], seq_tokens: float) -> None:
        self.alone_s = np.array([alone_s(worker) for worker in workers])
        self._growth_s = np.array([growth_s(worker, seq_tokens) for worker in workers])
        in_memory = KV_HEADROOM / seq_tokens * np.array([worker.kv_tokens for worker in workers])
        self._most = np.minimum(in_memory, [worker.max_seqs for worker in workers])

    def tokens_per_s(self, tpot_s: float) -> float:
        """Of the largest batches that keep it; inf where nobody knows what a step takes."""
        spare_s = TPOT_SHARE * (tpot_s - self.alone_s)
        with np.errstate(divide="ignore", invalid="ignore"):
            in_time = np.where(self._growth_s > 0, 1 + np.floor(spare_s / self._growth_s), np.inf)
            num_seqs = np.where(spare_s >= 0, np.minimum(self._most, in_time), 0.0)
            rates = num_seqs / (self.alone_s + self._growth_s * np.maximum(0.0, num_seqs - 1))
        return float(np.where(num_seqs > 0, rates, 0.0).sum())
