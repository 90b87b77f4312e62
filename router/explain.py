"""Why a sequence went where it went: the facts a choice was made from, kept small, told as JSON, and played through again.

    Explanation   one choice: the sequence, the best candidates with every number that the policy reads, and how many others
                  were left out for what reason
    Explanations  the last ones of this router, by request_id

Since placement compares every worker with the best one only (router/placement.py), the same policy on these few candidates
makes the same choice: `replay` proves it. Recording copies a dozen columns of a dozen rows; what is readable is made when
somebody asks. No prompt and no token is part of it. Pure.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.request import Role
from router.flow_back import Plan
from router.placement import Choice, Demand, NoPlace, Outlook, choose, look
from router.prefix_index import PrefixRoot
from router.worker_table import CONNECTING, LINK_STATES, Floats, LinkView, WorkerSnapshot, table_of, with_numbers

NUM_BEST = 4  # of each measure: the one taken, and whom it was compared with
MAX_KEPT = 1_024  # requests; a few KB each
KEPT_PER_S = 20.0  # choices, at 36 to 70 us each (docs/placement.md): more than anybody looks at
MAX_CHOICES = 16  # of one request: answers times attempts

Json = dict[str, Any]
_TOLD_OF_DEMAND = [
    field.name for field in fields(Demand) if field.name != "hashes"
]  # what a prompt holds is nobody's business


@dataclass(frozen=True, slots=True)
class Rules:
    """What else a choice depends on."""

    local_prefill_tokens: int = 0
    avoid: frozenset[str] = frozenset()
    prefer: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One choice and what it was made from. Arrays are of the candidates, in the order of their rows."""

    demand: Demand
    rules: Rules
    found: Choice | NoPlace
    plan: Plan | None
    facts: Sequence[WorkerSnapshot]
    numbers: Floats  # [NUMBERS, candidates]
    forecasts: Floats  # [ttft_s, queue_s, tpot_s, prefill_cost, decode_cost; candidates]
    links: npt.NDArray[np.int8]  # [candidates, candidates]
    has_partner: npt.NDArray[np.bool_]  # [paired, proved; candidates]
    left_out: Mapping[str, int]
    is_needed: npt.NDArray[np.bool_]  # [candidates]: the choice hangs on it; the others show what it was better than

    def briefly(self) -> Explanation:
        """With none but the candidates that are needed."""
        keep = np.flatnonzero(self.is_needed)
        return replace(
            self,
            facts=[self.facts[number] for number in keep.tolist()],
            numbers=self.numbers[:, keep],
            forecasts=self.forecasts[:, keep],
            links=self.links[np.ix_(keep, keep)],
            has_partner=self.has_partner[:, keep],
            is_needed=self.is_needed[keep],
        )

    def candidates(self) -> list[WorkerSnapshot]:
        """With links among themselves."""
        epochs = [(fact.worker_id, fact.epoch) for fact in self.facts]
        return [
            with_numbers(_with_links(fact, epochs, codes), self.numbers[:, number])
            for number, (fact, codes) in enumerate(zip(self.facts, self.links, strict=True))
        ]

    def to_json(self) -> Json:
        return {
            "demand": {name: getattr(self.demand, name) for name in _TOLD_OF_DEMAND},
            "rules": {
                "local_prefill_tokens": self.rules.local_prefill_tokens,
                "avoid": sorted(self.rules.avoid),
                "prefer": self.rules.prefer,
            },
            "choice": _choice_json(self.found, self.plan),
            "reason": reason(self),
            "candidates": [self._candidate_json(number, worker) for number, worker in enumerate(self.candidates())],
            "left_out": dict(self.left_out),
        }

    def _candidate_json(self, number: int, worker: WorkerSnapshot) -> Json:
        ttft_s, queue_s, tpot_s, prefill_cost, decode_cost = self.forecasts[:, number].tolist()
        return {
            **asdict(worker),
            "role": worker.role.name.lower(),
            "paired": bool(self.has_partner[0, number]),
            "proved": bool(self.has_partner[1, number]),
            "forecast": {
                "queue_s": queue_s,
                "ttft_s": ttft_s,
                "tpot_s": tpot_s,
                "prefill_cost": _finite(prefill_cost),
                "decode_cost": _finite(decode_cost),
            },
        }


def explain(
    outlook: Outlook, found: Choice | NoPlace, plan: Plan | None, rules: Rules, num_best: int = NUM_BEST
) -> Explanation:
    """Keep what `found` was made from; beside what it hangs on `num_best` of each measure."""
    workers, forecasts, topology = outlook.workers, outlook.forecasts, outlook.workers.topology()
    needed = _needed_rows(outlook, found, rules)
    rows = np.array(sorted(needed | _best_rows(outlook, num_best)), np.intp)
    ttft_s = forecasts.ttft_s[rows]
    if outlook.pulled_s is not None:
        ttft_s = np.minimum(ttft_s, outlook.pulled_s[rows])
    shown = (forecasts.queue_s, forecasts.tpot_s, outlook.prefill_cost, outlook.decode_cost)
    return Explanation(
        demand=outlook.demand,
        rules=rules,
        found=found,
        plan=plan,
        facts=[fact for row in rows.tolist() if (fact := workers.facts[row]) is not None],
        numbers=workers.numbers(rows),
        forecasts=np.stack((ttft_s, *(column[rows] for column in shown))),
        links=workers.links[np.ix_(rows, rows)],
        has_partner=np.stack((topology.paired[rows], topology.proved[rows])),
        left_out=_left_out(outlook, rules, len(rows)),
        is_needed=np.array([row in needed for row in rows.tolist()]),
    )


def _needed_rows(outlook: Outlook, found: Choice | NoPlace, rules: Rules) -> set[int]:
    """Without which the choice might be another one."""
    workers, rows = outlook.workers, set(outlook.seen)
    if outlook.holder is not None:
        rows.add(outlook.holder)
    if isinstance(found, NoPlace):
        rows.update([row for row, fact in enumerate(workers.facts) if fact is not None][: 2 * NUM_BEST])
    elif found.shape == "alone":  # beside some of the prefill workers that refuse it
        rows.update(np.flatnonzero(workers.topology().prefill)[:NUM_BEST].tolist())
    else:
        named = (workers.row_of.get(name) for name in (rules.prefer, outlook.demand.home))
        rows.update(row for row in named if row is not None)
    return rows


def _best_rows(outlook: Outlook, num_rows: int) -> set[int]:
    """The first of each measure."""
    rows = set[int]()
    for cost in (outlook.prefill_cost.copy(), outlook.decode_cost.copy()):
        for _ in range(num_rows):
            row = int(cost.argmin())
            if cost[row] < np.inf:
                rows.add(row)
                cost[row] = np.inf
    return rows


def _left_out(outlook: Outlook, rules: Rules, num_candidates: int) -> dict[str, int]:
    """How many workers could not have it, by the first reason that holds, and how many could but were no better."""
    workers, topology = outlook.workers, outlook.workers.topology()
    able = np.isfinite(outlook.prefill_cost) | np.isfinite(outlook.decode_cost)
    num_workers, num_able = len(workers.row_of), int(np.count_nonzero(able))
    taking = topology.prefill | topology.decode
    num_taking = int(np.count_nonzero(taking))
    unpaired = int(np.count_nonzero(topology.prefill & ~topology.paired))
    return {
        "takes_no_calls": num_workers - num_taking,
        "no_usable_link": unpaired,
        "pool_too_small_or_other_model": num_taking - unpaired - num_able,
        "to_be_avoided": sum(name in workers.row_of for name in rules.avoid),
        "not_better": max(0, num_able - num_candidates),
    }


def reason(explanation: Explanation) -> str:
    """In one sentence."""
    found, plan = explanation.found, explanation.plan
    if isinstance(found, NoPlace):
        return found.reason
    where = {
        "remote": f"{found.prefill} gives the first token soonest, in what it costs those behind it, and hands over to "
        f"{found.decode}, the cheapest decode worker it can reach",
        "both": f"{found.prefill} prefills and decodes",
        "local": f"{found.decode} computes so little of the prompt itself sooner than any prefill worker could, and its "
        "running streams keep their time per token",
        "alone": f"no prefill worker fits {found.decode}, which prefills for itself",
    }[found.shape]
    pulled = (
        f"; {plan.pull.num_blocks} cached blocks are pulled from {plan.pull.worker_id}" if plan and plan.pull else ""
    )
    return f"{where}{pulled}; first token forecast in {found.ttft_s:.3f} s, then {1e3 * found.tpot_s:.1f} ms per token"


def _choice_json(found: Choice | NoPlace, plan: Plan | None) -> Json:
    if isinstance(found, NoPlace):
        return {"none": found.reason, "hopeless": found.hopeless}
    return {
        "shape": found.shape,
        "prefill": found.prefill,
        "decode": found.decode,
        "ttft_s": found.ttft_s,
        "tpot_s": found.tpot_s,
        "score": found.score._asdict(),
        "lacking_tokens": plan.lacking_tokens if plan else None,
        "pull": asdict(plan.pull) if plan and plan.pull else None,
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _with_links(fact: WorkerSnapshot, peers: Sequence[tuple[str, int]], codes: npt.NDArray[np.int8]) -> WorkerSnapshot:
    links = {
        peer: LinkView(epoch, LINK_STATES[code], fact.links[peer].reason if peer in fact.links else "")
        for (peer, epoch), code in zip(peers, codes.tolist(), strict=True)
        if code != CONNECTING
    }
    return replace(fact, links=links)


# -- again -------------------------------------------------------------------------------------------------------------


def replay(told: Mapping[str, Any]) -> Choice | NoPlace:
    """Make the choice again from what `Explanation.to_json` said of it.

    Raises:
        KeyError, TypeError, ValueError: it did not say that.
    """
    candidates = told["candidates"]
    table = table_of(_worker(worker) for worker in candidates)
    rows = [table.row_of[worker["worker_id"]] for worker in candidates]
    paired, proved = np.zeros(len(table), np.bool_), np.zeros(len(table), np.bool_)
    paired[rows], proved[rows] = [w["paired"] for w in candidates], [w["proved"] for w in candidates]
    table.assume(paired, proved)
    rules, demand = told["rules"], Demand(**told["demand"])
    avoid = frozenset(rules["avoid"])
    return choose(
        look(table, demand, avoid),
        local_prefill_tokens=rules["local_prefill_tokens"],
        avoid=avoid,
        prefer=rules["prefer"],
    )


def _worker(told: Mapping[str, Any]) -> WorkerSnapshot:
    known = {f.name: told[f.name] for f in fields(WorkerSnapshot)}
    known["role"] = Role[known["role"].upper()]
    known["root"] = PrefixRoot(**known["root"]) if known["root"] else None
    known["links"] = {peer: LinkView(**link) for peer, link in known["links"].items()}
    return WorkerSnapshot(**known)


def told_json(explanations: Sequence[Explanation]) -> str:
    """As JSON text, oldest first; "" where there is none."""
    return json.dumps([explanation.to_json() for explanation in explanations]) if explanations else ""


def brief_json(explanation: Explanation) -> str:
    """As JSON on one line, short enough for a header."""
    return json.dumps(explanation.briefly().to_json(), separators=(",", ":"))


# -- kept --------------------------------------------------------------------------------------------------------------


class Explanations:
    """The last MAX_KEPT requests' choices; of one request the last MAX_CHOICES, oldest first. Of a router that makes more
    than KEPT_PER_S, those there is room for; a caller who wants to know (x-baton-explain) is always told."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[Explanation]] = OrderedDict()
        self._room = KEPT_PER_S
        self._now_s = 0.0

    def has_room(self, now_s: float) -> bool:
        """Whether one more may be made now; counts it."""
        self._room = min(KEPT_PER_S, self._room + KEPT_PER_S * (now_s - self._now_s))
        self._now_s = now_s
        if self._room < 1:
            return False
        self._room -= 1
        return True

    def add(self, explanation: Explanation) -> None:
        choices = self._kept.setdefault(explanation.demand.request_id, [])
        choices.append(explanation)
        del choices[:-MAX_CHOICES]
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def get(self, request_id: str) -> list[Explanation]:
        return list(self._kept.get(request_id, ()))
