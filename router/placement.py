"""Where a sequence is prefilled and where it is decoded: a table of workers in, a Choice or the reason for none out. Pure.

Three shapes of a choice, each forecast (router/forecast.py, router/flow_back.py) and the best taken:
    remote   a prefill worker and a decode worker, both taking work, of one fingerprint, with a link that may be used
    both     a worker of that role, for itself
    local    a decode worker that computes the prompt, too: where it lacks at most `local_prefill_tokens`, would be sooner than
             any prefill worker, and its running streams keep their time per token, and the gap that a chunk makes in them is
             no longer than the tightest class allows
1. Prefill: the least forecast TTFT, plus OTHERS times its computing, which whoever comes behind waits for, too. So a cached
   beginning is worth what it saves to all.
2. Decode: first one over a proved link, then one with room (memory below HEADROOM, forecast TPOT within the target), then the
   least cost: the share of its memory in use, or of the target that a token takes beyond half of it, whichever is more;
   AFFINITY for the share of the prompt that it does not cache; a little for another fabric, and off for the session's last home.
3. What differs by less than forecasts err (NEARLY) is equal, and of equals the one chosen longest ago is taken. So idle workers
   share the work, a restarted one does not take it all, and routers that see the same do not all run to the same worker.
Every rule compares a worker with the best one, never with an average: leaving others out cannot change the choice, which is
what makes an explanation of the few best replayable (router/explain.py). docs/placement.md has figures and sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from baton.request import Role
from router import flow_back
from router.forecast import Forecasts, forecast
from router.lane_window import LEAST_S
from router.prefix_index import Hashes
from router.worker_table import LINK_COST, LINK_STATES, READY, REFUSED, Floats, Mask, WorkerSnapshot, WorkerTable

HEADROOM = 0.9  # of a decode pool: beyond it a new sequence soon preempts another one, whatever is cached there
# What a whole prompt cached on decode is worth, in shares of its pool. Half: the imbalance at which SGLang's router, which
# knows caches too, lets the load decide (cache_threshold 0.5). Sending a prompt again costs once, a fuller batch every step.
AFFINITY = 0.5
OTHER_FABRIC = 0.25  # the same KV over a slower wire: as much as having half of the prompt cached less
# What computing costs those who come behind, as a multiple of what it costs the prompt itself. Simulated on the mooncake trace
# at full load: 0 -> 1 halves the median TTFT (1.12 -> 0.50 s) and keeps 97 % of the hits instead of 90 %; 0.5 to 2 are alike.
OTHERS = 1.0
# For the worker that has the session's last turn, where its cache is not known to say so: 3 x NEARLY, no more
HOME = 0.15
NEARLY = 0.05  # relative to the best: the fitted step model errs by 6 % in the median (traces, calibration/dynamo_h200)
RELAXED = 0.5  # of the TPOT target: up to it quicker steps gain nobody anything
DEFAULT_TPOT_S = 0.1  # of class interactive, baton/slo.py
AUTO_LOCAL_TOKENS = 512  # one chunk (engine.chunk_tokens): it holds the streams that run there up for one step
SPREAD_TOKENS = 32  # over which a stream makes up for being held up once: a quarter of a median answer (129, azure2023)

# Classes of cost, each beyond whatever the lower ones can sum up to.
_CROWDED = 10.0


def local_limit(configured_tokens: int) -> int:
    """What `router.local_prefill_tokens` comes to: negative = AUTO_LOCAL_TOKENS. The controller goes by it, too."""
    return AUTO_LOCAL_TOKENS if configured_tokens < 0 else configured_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What placement needs to know of a sequence. Tokens."""

    prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens; the last one needs no KV
    hashes: Hashes = field(default_factory=dict)  # of the prompt's blocks
    fingerprint: str = ""  # of the only model that may serve it, since it made the tokens already sent; "" = any
    explain: bool = False  # the caller wants to know why
    request_id: str = ""  # under which the choice can be explained
    session_id: str = ""  # of the conversation
    ttft_ms: float = 0.0  # targets of the call; 0 = not said
    tpot_ms: float = 0.0
    itl_p99_ms: float = 0.0  # the tightest of all classes: who runs on a worker that prefills, too, may be of any
    deadline_s: float = 0.0  # what is left of the call's time; 0 = not said
    home: str = ""  # the decode worker of the session's last turn, as the fleet remembers

    @property
    def tpot_target_s(self) -> float:
        return self.tpot_ms / 1e3 or DEFAULT_TPOT_S


class Score(NamedTuple):
    """Why this pair: lower is better, in this order."""

    unproved_link: bool
    ttft_s: float
    crowded: bool  # the sequence may not fit beside those that decode there, or not keep its target
    decode_cost: float
    last_chosen: int


@dataclass(frozen=True, slots=True)
class Choice:
    """prefill == decode means one worker does both. `score` explains it."""

    prefill: str
    decode: str
    score: Score
    tpot_s: float  # forecast
    shape: str  # remote | both | local | alone
    prefill_row: int
    decode_row: int

    @property
    def local(self) -> bool:
        return self.prefill == self.decode

    @property
    def ttft_s(self) -> float:
        """Forecast."""
        return self.score.ttft_s


@dataclass(frozen=True, slots=True)
class NoPlace:
    """`hopeless`: no worker that could ever serve it is part of the fleet, so waiting is of no use."""

    reason: str
    hopeless: bool


@dataclass(slots=True)
class Outlook:
    """Everything one choice is made from, [rows] each; filled once per call of `place`."""

    workers: WorkerTable
    demand: Demand
    forecasts: Forecasts
    holder: int | None  # the decode row to pull from
    pulled_s: Floats | None  # time to the first token with that pull, inf where it cannot be; None without a holder
    prefill_cost: Floats  # inf where the row cannot prefill for others
    decode_cost: Floats  # inf where the row cannot decode it
    decodes: Mask
    # Rows that the choice hangs on: the best by each measure and those taken. Leaving out any others changes nothing.
    seen: list[int] = field(default_factory=list)

    def pulls(self, row: int) -> bool:
        """Whether the row would rather pull than compute."""
        return self.pulled_s is not None and bool(self.pulled_s[row] < self.forecasts.ttft_s[row])

    def ttft_s(self, row: int) -> float:
        """As a prefill worker for others, by the quicker way."""
        own_s = float(self.forecasts.ttft_s[row])
        return own_s if self.pulled_s is None else min(own_s, float(self.pulled_s[row]))


def place(
    workers: WorkerTable,
    demand: Demand,
    *,
    local_prefill_tokens: int = 0,
    avoid: frozenset[str] = frozenset(),
    prefer: str = "",
) -> Choice | NoPlace:
    """Choose the best pair; workers in `avoid` are taken only where nobody else is left, and among the rest those that
    prefill on `prefer`, which has this prompt in its cache, before any other."""
    outlook = look(workers, demand, avoid)
    return choose(outlook, local_prefill_tokens=local_prefill_tokens, avoid=avoid, prefer=prefer)


def choose(
    outlook: Outlook, *, local_prefill_tokens: int = 0, avoid: frozenset[str] = frozenset(), prefer: str = ""
) -> Choice | NoPlace:
    """`place`, for who wants to see the outlook."""
    for allowed, first in _attempts(outlook.workers, avoid, prefer):
        if choice := _best(outlook, allowed, first, local_prefill_tokens):
            return choice
    alone = _without_partner(outlook)
    for allowed, _ in _attempts(outlook.workers, avoid, ""):
        row = _pick(outlook, np.where(alone, outlook.forecasts.ttft_s, np.inf), allowed)
        if row is not None:
            return _choice(outlook, "alone", row, row, outlook.forecasts.ttft_s[row])
    return _why_not(outlook)


def helps(outlook: Outlook, *, local_prefill_tokens: int, avoid: frozenset[str] = frozenset()) -> bool:
    """Whether a decode worker that has next to no prompt to compute would compute this one."""
    idle = outlook.decodes & (outlook.forecasts.queue_s <= LEAST_S)
    if not local_prefill_tokens or not idle.any():
        return False
    found = choose(outlook, local_prefill_tokens=local_prefill_tokens, avoid=avoid)
    return isinstance(found, Choice) and found.shape == "local" and bool(idle[found.decode_row])


# -- what is known -----------------------------------------------------------------------------------------------------


def look(workers: WorkerTable, demand: Demand, avoid: frozenset[str] = frozenset()) -> Outlook:
    """Forecast the sequence on every worker; those in `avoid` are asked for nothing."""
    topology, forecasts = workers.topology(), forecast(workers, demand.prompt_tokens)
    not_prefill, not_decode, decodes = topology.prefill_cost, topology.decode_cost, topology.decode
    if demand.max_total_tokens > topology.least_pool_tokens or demand.fingerprint:
        same = (workers.fingerprint == workers.code(demand.fingerprint)) | (not demand.fingerprint)
        decodes = decodes & same & (workers.pool_tokens >= demand.max_total_tokens - 1)
        not_decode = np.where(decodes, 0.0, np.inf)
        not_prefill = np.where(same & (workers.pool_tokens >= demand.prompt_tokens), not_prefill, np.inf)
    used_share = workers.used_tokens * topology.per_pool_token
    prefill_cost, pulled_s = forecasts.ttft_s + OTHERS * forecasts.compute_s, None
    holder = flow_back.best_holder(workers, _without(decodes, workers, avoid), used_share)
    if holder is not None:
        ready_s, rest_s = flow_back.pulled(workers, demand.prompt_tokens, forecasts, holder)
        pulled_s = ready_s + rest_s
        prefill_cost = np.minimum(prefill_cost, pulled_s + OTHERS * rest_s)
    return Outlook(
        workers=workers,
        demand=demand,
        forecasts=forecasts,
        holder=holder,
        pulled_s=pulled_s,
        prefill_cost=prefill_cost + not_prefill,
        decode_cost=_decode_cost(workers, demand, forecasts, used_share) + not_decode,
        decodes=decodes,
    )


def _decode_cost(workers: WorkerTable, demand: Demand, forecasts: Forecasts, used_share: Floats) -> Floats:
    """Of the row alone; what depends on who prefills is added by `_pair_cost`."""
    time_share = forecasts.tpot_s * (1 / demand.tpot_target_s)
    used_share_then = used_share + demand.max_total_tokens * workers.topology().per_pool_token
    cost: Floats = np.maximum(used_share, time_share - RELAXED)
    cost += _CROWDED * ((used_share_then > HEADROOM) | (time_share > 1))
    cost += (AFFINITY / demand.prompt_tokens) * forecasts.lacking_tokens
    if (home := workers.row_of.get(demand.home)) is not None:
        cost[home] -= HOME
    return cost


def _pair_cost(outlook: Outlook, prefill: int) -> Floats:
    """Of decoding what this row prefills; inf where they cannot work together."""
    workers = outlook.workers
    cost: Floats = outlook.decode_cost + LINK_COST[workers.links[prefill]]
    if not workers.topology().one_model:
        cost[workers.fingerprint != workers.fingerprint[prefill]] = np.inf
    if workers.fabric[prefill]:
        cost += OTHER_FABRIC * ((workers.fabric != workers.fabric[prefill]) & (workers.fabric > 0))
    return cost


def _without(mask: Mask, workers: WorkerTable, avoid: frozenset[str]) -> Mask:
    if rows := [workers.row_of[name] for name in avoid if name in workers.row_of]:
        mask = mask.copy()
        mask[rows] = False
    return mask


# -- what is best ------------------------------------------------------------------------------------------------------


def _attempts(workers: WorkerTable, avoid: frozenset[str], prefer: str) -> Iterator[tuple[Mask | None, int | None]]:
    """Whom to choose among, and who must prefill, from the best wish to the last resort. None = no such limit."""
    first = workers.row_of.get(prefer)
    for mask in (_without(np.ones(len(workers), np.bool_), workers, avoid), None) if avoid else (None,):
        if first is not None:
            yield mask, first
        yield mask, None


def _best(outlook: Outlook, allowed: Mask | None, first: int | None, local_prefill_tokens: int) -> Choice | None:
    remote = _best_remote(outlook, allowed, first)
    both = _best_both(outlook, allowed, first)
    choice = _better(remote, both) if remote and both else remote or both
    return _best_local(outlook, allowed, first, local_prefill_tokens, choice) or choice


def _better(one: Choice, other: Choice) -> Choice:
    """Of two shapes: a proved link, then an earlier first token, then the cheaper decode worker, then whose turn it is."""
    if one.score.unproved_link != other.score.unproved_link:
        return min(one, other, key=lambda choice: choice.score.unproved_link)
    if abs(one.ttft_s - other.ttft_s) > NEARLY * min(one.ttft_s, other.ttft_s):
        return min(one, other, key=lambda choice: choice.ttft_s)
    if abs(one.score.decode_cost - other.score.decode_cost) > NEARLY:
        return min(one, other, key=lambda choice: choice.score.decode_cost)
    return min(one, other, key=lambda choice: choice.score.last_chosen)


def _best_remote(outlook: Outlook, allowed: Mask | None, first: int | None) -> Choice | None:
    cost = outlook.prefill_cost
    if first is not None:
        cost = np.full(len(cost), np.inf)
        cost[first] = outlook.prefill_cost[first]
    while (prefill := _nearly_least(outlook, cost, allowed)) is not None:
        decode = _nearly_least(outlook, _pair_cost(outlook, prefill), allowed, slack=NEARLY)
        if decode is not None:
            return _choice(outlook, "remote", prefill, decode, outlook.ttft_s(prefill))
        cost = cost.copy() if cost is outlook.prefill_cost else cost
        cost[prefill] = np.inf  # whom it can reach takes nothing, or not this
    return None


def _best_both(outlook: Outlook, allowed: Mask | None, first: int | None) -> Choice | None:
    topology = outlook.workers.topology()
    both = topology.both
    if not topology.any_both:
        return None
    ttft_s = np.where(both & outlook.decodes, outlook.forecasts.ttft_s, np.inf)
    row = _pick(outlook, ttft_s, allowed, first)
    return None if row is None else _choice(outlook, "both", row, row, ttft_s[row])


def _best_local(
    outlook: Outlook, allowed: Mask | None, first: int | None, local_prefill_tokens: int, other: Choice | None
) -> Choice | None:
    """A decode worker that should compute this prompt, in place of `other`."""
    if not local_prefill_tokens:
        return None
    workers, forecasts = outlook.workers, outlook.forecasts
    limit_s = other.ttft_s if other is not None and not other.score.unproved_link else np.inf
    may = outlook.decodes & (forecasts.lacking_tokens <= local_prefill_tokens) & (forecasts.ttft_s < limit_s)
    rows = np.flatnonzero(may & ~workers.topology().both)
    if not len(rows):
        return None
    alone_s, tpot_s, busy = forecasts.ttft_s[rows], forecasts.tpot_s[rows], workers.num_running[rows] > 0
    ttft_s = np.full(len(workers), np.inf)
    ttft_s[rows] = alone_s + busy * workers.step_s[rows]  # the step under way is waited for
    harmed = busy & (tpot_s + alone_s / SPREAD_TOKENS > HEADROOM * outlook.demand.tpot_target_s)
    if outlook.demand.itl_p99_ms:
        held_s = np.minimum(forecasts.compute_s[rows], workers.chunk_tokens[rows] / workers.prefill_tokens_per_s[rows])
        harmed |= busy & (workers.step_s[rows] + held_s > outlook.demand.itl_p99_ms / 1e3)
    ttft_s[rows[harmed]] = np.inf
    ttft_s[ttft_s >= limit_s] = np.inf
    row = _pick(outlook, ttft_s, allowed, first)
    return None if row is None else _choice(outlook, "local", row, row, ttft_s[row])


def _pick(outlook: Outlook, ttft_s: Floats, allowed: Mask | None, first: int | None = None) -> int | None:
    """Of the rows with nearly the least TTFT the cheapest to decode on."""
    if allowed is not None:
        ttft_s = np.where(allowed, ttft_s, np.inf)
    if first is not None:
        return first if ttft_s[first] < np.inf and outlook.decode_cost[first] < np.inf else None
    soonest, least = _least(ttft_s)
    if least == np.inf:
        return None
    outlook.seen.append(soonest)
    cost = np.where(ttft_s <= least + NEARLY * abs(least), outlook.decode_cost, np.inf)
    return _nearly_least(outlook, cost, None, slack=NEARLY)


def _nearly_least(outlook: Outlook, cost: Floats, allowed: Mask | None, slack: float | None = None) -> int | None:
    """Of the rows with nearly the least cost the one chosen longest ago; None where every cost is inf.

    `slack`: what makes no difference; None = NEARLY of the least.
    """
    if allowed is not None:
        cost = np.where(allowed, cost, np.inf)
    best, least = _least(cost)
    if least == np.inf:
        return None
    limit = least + (NEARLY * abs(least) if slack is None else slack)
    near = np.flatnonzero(cost <= limit)
    row = int(near[outlook.workers.last_chosen[near].argmin()])
    outlook.seen += (best, row)
    return row


def _least(cost: Floats) -> tuple[int, float]:
    """A row with the least cost, and that. No number is no reason to choose a worker, or to look at it for ever."""
    best = int(cost.argmin())  # of the first NaN, where there is one
    if np.isnan(cost[best]):
        cost = np.where(np.isnan(cost), np.inf, cost)
        best = int(cost.argmin())
    return best, float(cost[best])


def _choice(outlook: Outlook, shape: str, prefill: int, decode: int, ttft_s: float) -> Choice:
    workers, cost = outlook.workers, float(outlook.decode_cost[decode])
    score = Score(
        unproved_link=bool(prefill != decode and workers.links[prefill, decode] != READY),
        ttft_s=float(ttft_s),
        crowded=cost >= _CROWDED / 2,
        decode_cost=cost,
        last_chosen=int(workers.last_chosen[prefill] + workers.last_chosen[decode]),
    )
    tpot_s = float(outlook.forecasts.tpot_s[decode])
    return Choice(workers.name(prefill), workers.name(decode), score, tpot_s, shape, prefill, decode)


def _without_partner(outlook: Outlook) -> Mask:
    """Decode workers that no prefill worker fits: they must prefill for themselves, however long the prompt is.

    Only where that is certain. A prefill worker that is away, or whose link is down, is waited for.
    """
    workers = outlook.workers
    decodes = outlook.decodes & ~workers.topology().both
    prefills = [
        row for row, fact in enumerate(workers.facts) if fact is not None and _may_prefill(fact, outlook.demand)
    ]
    if not prefills or any(not workers.topology().prefill[row] for row in prefills):
        return np.zeros(len(workers), np.bool_)
    for row in prefills:
        decodes &= (workers.links[row] == REFUSED) | (workers.fingerprint != workers.fingerprint[row])
    return decodes


def _may_prefill(fact: WorkerSnapshot, demand: Demand) -> bool:
    """A worker that is away has no fingerprint to show, and is a reason to wait."""
    return fact.role is Role.PREFILL and (not demand.fingerprint or fact.fingerprint in ("", demand.fingerprint))


# -- why not -----------------------------------------------------------------------------------------------------------

MAX_NAMED = 8  # workers, or pairs of them, in a message


def _why_not(outlook: Outlook) -> NoPlace:
    """Name what is missing: a role nobody has, a role nobody ready has, or a usable link."""
    demand, workers = outlook.demand, [fact for fact in outlook.workers.facts if fact is not None]
    if demand.fingerprint:
        workers = [worker for worker in workers if worker.fingerprint in ("", demand.fingerprint)]
    for role in (Role.PREFILL, Role.DECODE):
        able = [worker for worker in workers if worker.role in (role, Role.BOTH)]
        name = role.name.lower()
        if not able:
            return NoPlace(f"no {name} worker is part of the fleet", hopeless=True)
        if not any(worker.state == "ready" for worker in able):
            detail = _listed([f"{worker.worker_id} is {worker.reason or worker.state}" for worker in able], "; ")
            return NoPlace(f"no {name} worker is ready: {detail}", hopeless=False)
    links = [
        f"{prefill.worker_id} to {decode.worker_id} is {_link(outlook.workers, prefill, decode)}"
        for prefill in workers[: MAX_NAMED**2]
        for decode in workers
        if prefill.state == decode.state == "ready" and prefill.prefills and decode.decodes and prefill is not decode
    ]
    detail = _listed(links, ", ") or "their pools are too small"
    return NoPlace(f"no pair of workers can serve it: {detail}", hopeless=False)


def _listed(items: Sequence[str], separator: str) -> str:
    more = [f"and {len(items) - MAX_NAMED} more"] if len(items) > MAX_NAMED else []
    return separator.join([*items[:MAX_NAMED], *more])


def _link(workers: WorkerTable, prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
    if prefill.fingerprint != decode.fingerprint:
        return "refused (fingerprint)"
    if workers.one_fabric and prefill.fabric and decode.fabric and prefill.fabric != decode.fabric:
        return f"refused (fabric {prefill.fabric!r}, not {decode.fabric!r})"
    state = LINK_STATES[workers.links[workers.row_of[prefill.worker_id], workers.row_of[decode.worker_id]]]
    link = prefill.links.get(decode.worker_id)
    return f"{state} ({link.reason})" if link and link.reason else state
