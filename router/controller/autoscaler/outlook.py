"""What a layout would come to: which share of each class's calls would meet its targets. Pure.

`Evaluator` is the seam; a simulation may stand behind it. `Analytic` is ours: microseconds, no state, queueing formulas.

    first token   prompts wait for one of n prefill workers as in M/M/n, Erlang's C: P(wait > t) = C exp(-(n - busy) t / service),
                  each class behind those of its priority and above. M/M, since prompts vary by about their mean (azure, mooncake)
    pace          a worker's batch B solves B = tokens/s * step(B) (Little 1961) and varies as a Poisson count of the whole pool,
                  evenly spread; a class keeps its pace where the batch is below what its target, memory and seats allow
    both          the two at once: steps carry prompts (need.py), and prompts wait for room in steps

Where a pool is overrun nobody would be in time; but admission sheds what cannot be, so the share falls as capacity / load does.
Near saturation prefill is told worse than it is, since M/M/n serves whoever is late and admission turns them away: 76 % for
96 % where a pool is busy at 87 %. That is left as the room that a rising load needs: docs/autoscaler.md, bench/outlook_error.py.
Source: Erlang 1917; Kleinrock, Queueing Systems I, 1975, 3.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from baton.request import Role
from router.controller.autoscaler import need
from router.controller.autoscaler.layouts import Kinds, Layout
from router.controller.autoscaler.need import Kind
from router.controller.autoscaler.traffic import ClassLoad, Load
from router.controller.step_model import StepWork

FADED = 1e-17  # of a sum of floats, that no longer changes it
NEVER = 1e-30  # a share of calls that is none


@dataclass(frozen=True, slots=True)
class Scene:
    """What does not change from layout to layout."""

    kinds: Kinds
    load: Load
    waiting_tokens: float = 0.0  # of prompts, in queues now


@dataclass(frozen=True, slots=True)
class Outlook:
    attainment: Mapping[str, float]  # by class: share of its calls


class Evaluator(Protocol):
    def outlook(self, layout: Layout, scene: Scene) -> Outlook: ...


class Analytic:
    """Queueing formulas."""

    def outlook(self, layout: Layout, scene: Scene) -> Outlook:
        shares = _shares(layout, scene)
        attainment = dict.fromkeys((of_class.slo.name for of_class in scene.load.classes), 0.0)
        for (prefill, decode), share in shares.items():
            load = scene.load.times(share)
            for of_class in load.classes:
                name = of_class.slo.name
                first = _first_token(scene, prefill, layout.of(prefill), load, of_class, scene.waiting_tokens * share)
                attainment[name] += share * first * _pace(scene, decode, layout.of(decode), load, of_class)
        return Outlook(attainment)


def is_keepable(of_class: ClassLoad, load: Load, kinds: Kinds) -> bool:
    """Whether its targets hold for a mean call that is alone on a worker. Of roles without step times nothing is known."""
    decodes = [kinds[role] for role in (Role.DECODE, Role.BOTH) if role in kinds]
    prefills = [kinds[role] for role in (Role.PREFILL, Role.BOTH) if role in kinds]
    in_pace = any(need.batch_within(kind, load, need.pace_limit_s(of_class)) >= 1 for kind in decodes)
    return in_pace and any(_alone_s(kind, of_class) < of_class.slo.ttft_ms / 1e3 for kind in prefills)


def _shares(layout: Layout, scene: Scene) -> dict[tuple[Role, Role], float]:
    """How calls divide between workers of both and pairs of pools: as what each can carry."""
    kinds, load = scene.kinds, scene.load
    carried = {
        (Role.PREFILL, Role.DECODE): min(
            _carries(layout.prefill, Role.PREFILL, kinds, load), _carries(layout.decode, Role.DECODE, kinds, load)
        ),
        (Role.BOTH, Role.BOTH): _carries(layout.both, Role.BOTH, kinds, load),
    }
    total = sum(carried.values())
    return {roles: capacity / total for roles, capacity in carried.items() if capacity > 0} if total else {}


def _carries(num: int, role: Role, kinds: Kinds, load: Load) -> float:
    """In multiples of the load."""
    if not num or role not in kinds:
        return 0.0
    busy = need.prefill_busy(kinds[role], load) if role is Role.PREFILL else need.decode_busy(kinds[role], load)
    return num / busy if busy else 1e9


# -- first token -------------------------------------------------------------------------------------------------------


def _first_token(scene: Scene, role: Role, num: int, load: Load, of_class: ClassLoad, waiting_tokens: float) -> float:
    kind = scene.kinds[role]
    before = replace(load, classes=tuple(c for c in load.classes if c.slo.priority >= of_class.slo.priority))
    slowdown = _slowdown(kind, load, num) if role is Role.BOTH else 1.0
    busy = slowdown * (need.prefill_busy(kind, before) + need.backlog_busy(kind, load, waiting_tokens))
    own_s = slowdown * _alone_s(kind, of_class)
    room_s = of_class.slo.ttft_ms / 1e3 - own_s
    if room_s <= 0:
        return math.exp(-own_s / (room_s + own_s))  # those that are shorter by so much, where lengths are exponential
    service_s = busy / before.rate if before.rate else 0.0
    return _or_shed(1.0 - _late(num, busy, room_s / service_s if service_s else math.inf), num, busy)


def _alone_s(kind: Kind, of_class: ClassLoad) -> float:
    """A mean prompt's own steps."""
    num_steps = math.ceil(of_class.lacking_tokens / kind.tuning.max_num_batched_tokens)
    terms = kind.terms
    matrices_s = max(terms.s_per_token * of_class.lacking_tokens, num_steps * terms.weights_s)
    return num_steps * terms.fixed_s + matrices_s + terms.s_per_pair * of_class.pairs


def _slowdown(kind: Kind, load: Load, num: int) -> float:
    """How much longer prompts take because decodes have part of each step."""
    batch = min(_batch(kind, load, num), need.most_seqs(kind, load)[0])
    budget = kind.tuning.max_num_batched_tokens
    room = max(1.0, budget - batch)
    full_s = kind.terms.step_s(StepWork(budget, batch * load.context_tokens))
    return (full_s / room) / (kind.terms.step_s(StepWork(budget)) / budget)


def _late(num: int, busy: float, room_in_services: float) -> float:
    """P(wait > room) in M/M/n."""
    if busy >= num:
        return 1.0
    if busy <= 0 or math.isinf(room_in_services):
        return 0.0
    # 1 / Erlang's B is the sum of num! / (num - j)! / busy^j. Its terms grow while num - j > busy and fade then, so about
    # sqrt(num) of them say all there is to say, however large the pool
    inverse, term = 1.0, 1.0
    for k in range(num, 0, -1):
        term *= k / busy
        inverse += term
        if term < FADED * inverse or inverse > 1 / NEVER:
            break
    blocked = 1 / inverse
    waits = blocked / (1 - (busy / num) * (1 - blocked))
    return waits * math.exp(-(num - busy) * room_in_services)


# -- pace --------------------------------------------------------------------------------------------------------------


def _pace(scene: Scene, role: Role, num: int, load: Load, of_class: ClassLoad) -> float:
    kind = scene.kinds[role]
    most, _ = need.most_seqs(kind, load)
    allowed = min(most, need.batch_within(kind, load, need.pace_limit_s(of_class)))
    if allowed < 1:
        return 0.0  # no batch at all keeps it
    batch = _batch(kind, load, num)
    capacity = num * allowed / need.step_s(kind, load, allowed)
    if math.isinf(batch):
        return _or_shed(0.0, capacity, load.outputs_per_s)
    return _or_shed(_below(allowed, batch, batch / num), capacity, load.outputs_per_s)


def _batch(kind: Kind, load: Load, num: int) -> float:
    """Sequences that run in each of the workers; inf where they cannot keep up."""
    return need.steady_batch(kind, load, load.outputs_per_s / num)


def _below(limit: float, mean: float, variance: float) -> float:
    """P(count <= limit), normal."""
    if variance <= 0:
        return 1.0
    return 0.5 * math.erfc(-(limit + 0.5 - mean) / math.sqrt(2 * variance))


def _or_shed(share: float, capacity: float, load: float) -> float:
    """At the least what is left if admission turns away what comes too late: half at capacity, less in proportion beyond."""
    return max(share, 0.5 * min(1.0, capacity / load if load else 1.0))
