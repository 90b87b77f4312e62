"""Which of four regimes binds a deployment, and what would help: each remedy with what it is guessed to bring. Pure.

prefill-bound              prompts wait too long, while decoding has room
decode latency-bound       most of the TPOT target is a step of one sequence alone: no batch size helps
decode throughput-bound    steps are as long as the target allows because many decode together
memory-limited             KV is full before steps are too long
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from baton.errors import ConfigError
from bench.plan.screen import Guess, Limit, Targets, guess
from bench.plan.space import BUDGETS, WIDTHS, Candidate
from bench.plan.traffic import Load
from bench.sim.deployment import Deployment, Hardware, Layout


class Regime(enum.StrEnum):
    PREFILL = "prefill-bound"
    LATENCY = "decode latency-bound"
    THROUGHPUT = "decode throughput-bound"
    MEMORY = "memory-limited"


@dataclass(frozen=True, slots=True)
class Remedy:
    what: str
    gain: float  # of the rate per GPU, guessed: 0.2 = a fifth more


ALONE_SHARE = 0.5  # of the TPOT target: from there on doubling the batch cannot double the tokens


def regime_of(found: Guess, targets: Targets) -> Regime:
    if found.binding is Limit.MEMORY:
        return Regime.MEMORY
    if found.binding is Limit.PROMPTS:
        return Regime.PREFILL
    return Regime.LATENCY if found.alone_s >= ALONE_SHARE * targets.tpot_s else Regime.THROUGHPUT


LEAST_GAIN = 0.05  # what a guess can tell from nothing


def remedies(candidate: Candidate, load: Load, targets: Targets) -> list[Remedy]:
    """Those whose guess is better, best first."""
    now = guess(candidate, load, targets).rate / candidate.num_gpus
    found = []
    for what, change in _CHANGES:
        try:
            changed = change(candidate.deployment)
            if changed is None:
                continue
            other = replace(candidate, deployment=changed)
            then = guess(other, load, targets).rate / changed.num_gpus
        except ConfigError:  # the changed one does not fit its memory
            continue
        if now > 0 and then / now - 1 >= LEAST_GAIN:
            found.append(Remedy(what, then / now - 1))
    found += [Remedy(what, gain) for what, gain in _looser(candidate, load, targets, now)]
    return sorted(found, key=lambda one: -one.gain)


Change = Callable[[Deployment], Deployment | None]  # None: it is so already


def _fp8_kv(one: Deployment) -> Deployment | None:
    return replace(one, kv_dtype="fp8") if one.kv_dtype in ("bf16", "fp16") else None


def _fp8_weights(one: Deployment) -> Deployment | None:
    return replace(one, weight_dtype="fp8") if one.weight_dtype in ("bf16", "fp16") else None


def _on(name: str) -> Change:
    def change(one: Deployment) -> Deployment | None:
        if one.gpu == name:
            return None
        decode = replace(one.decode_hardware, gpu=name) if one.decode_hardware is not None else None
        return replace(one, gpu=name, decode_hardware=decode)

    return change


def _wider(one: Deployment) -> Deployment | None:
    if 2 * one.tp > max(WIDTHS):
        return None
    decode = one.decode_hardware
    return replace(one, tp=2 * one.tp, decode_hardware=decode and Hardware(decode.gpu, min(8, 2 * decode.tp)))


def _moved(prefill: int) -> Change:
    def change(one: Deployment) -> Deployment | None:
        layout = one.layout
        counts = layout.num_prefill + prefill, layout.num_decode - prefill
        if min(counts) < 1 or not layout.num_prefill:
            return None
        return replace(one, layout=Layout(*counts, layout.num_both))

    return change


def _budget(step: int) -> Change:
    def change(one: Deployment) -> Deployment | None:
        at = BUDGETS.index(one.engine.chunk_tokens) + step
        if not 0 <= at < len(BUDGETS) or (one.layout.num_decode and not one.local_prefill_tokens):
            return None
        engine = replace(one.engine, chunk_tokens=BUDGETS[at], max_num_batched_tokens=BUDGETS[at])
        return replace(one, engine=replace(engine, max_num_seqs=min(engine.max_num_seqs, BUDGETS[at])))

    return change


_CHANGES: tuple[tuple[str, Change], ...] = (
    ("KV cache in fp8: half the bytes, twice the batch", _fp8_kv),
    ("weights in fp8", _fp8_weights),
    ("twice the GPUs per worker (more KV beside one copy of the weights, shorter steps)", _wider),
    ("H200: the same arithmetic, 1.4 x the bandwidth, 1.8 x the memory", _on("h200")),
    ("B200", _on("b200")),
    ("one worker more that prefills, one fewer that decodes", _moved(1)),
    ("one worker fewer that prefills, one more that decodes", _moved(-1)),
    ("the next smaller token budget: shorter mixed steps", _budget(-1)),
    ("the next larger token budget: prompts in fewer steps", _budget(1)),
)


def _looser(candidate: Candidate, load: Load, targets: Targets, now: float) -> Iterator[tuple[str, float]]:
    """Targets are choices, too."""
    for what, looser in (
        ("a TTFT target twice as long", replace(targets, ttft_s=2 * targets.ttft_s)),
        ("a TPOT target a quarter longer", replace(targets, tpot_s=1.25 * targets.tpot_s)),
    ):
        gain = guess(candidate, load, looser).rate / candidate.num_gpus / now - 1 if now > 0 else 0.0
        if gain >= LEAST_GAIN:
            yield what, gain
