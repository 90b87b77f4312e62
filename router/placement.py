"""Where a sequence is prefilled and where it is decoded: snapshots in, a Choice or the reason for none out. Pure.

A pair (prefill, decode) may be chosen where both take work, share a fingerprint, their link is up, and each pool can hold
the sequence. A `both` worker is a pair with itself; so is a decode worker for a prompt of which it lacks at most
`local_prefill_tokens`, or for any prompt where no prefill worker of the fleet fits it. Among the candidates the least Score
wins: a proved link first, then prompt tokens to be computed before the first token can come, then decode memory and what it
caches of the conversation, then whoever was chosen longest ago (so that idle workers share the work and a restarted one does
not take it all). A conversation stays with its decode worker because that one caches it, whatever it is called, and only
while there is room. Power of two choices over forecasts is a later step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.request import Role
from router.prefix_index import Hashes, PrefixRoot
from router.rates import DEFAULT_KV_BYTES_PER_S, DEFAULT_PREFILL_TOKENS_PER_S

HEADROOM = 0.9  # of a decode pool: beyond it a new sequence soon preempts another one, whatever is cached there
# What a whole prompt cached on decode is worth, in shares of its pool. Half: the imbalance at which SGLang's router, which
# knows caches too, lets the load decide (cache_threshold 0.5). Sending a prompt again costs once, a fuller batch every step.
AFFINITY = 0.5


@dataclass(frozen=True, slots=True)
class LinkView:
    """A prefill worker's link to one decode worker."""

    epoch: int  # of the peer the link was made with
    state: str  # connecting | ready | refused | lost
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as placement sees it. Reported loads are merged with what this router has in flight there."""

    worker_id: str
    epoch: int
    role: Role
    state: str  # connecting | ready | draining
    fingerprint: str = ""
    pool_tokens: int = 0  # what all of its KV blocks hold
    waiting_tokens: int = 0  # prompt tokens not yet computed
    used_tokens: int = 0  # KV of running sequences and reservations
    last_chosen: int = 0  # serial number of the last placement here, 0 = never
    root: PrefixRoot | None = None  # what its block hashes depend on
    cached_tokens: int = 0  # leading ones of the prompt at hand, in whole blocks, as far as it has said
    token_bytes: int = 0  # KV of one token
    step_s: float = 0.0
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    kv_bytes_per_s: float = DEFAULT_KV_BYTES_PER_S  # of what it pulls
    links: Mapping[str, LinkView] = field(default_factory=dict)  # by decode worker
    reason: str = ""  # why it is not ready

    @property
    def prefills(self) -> bool:
        return self.role in (Role.PREFILL, Role.BOTH)

    @property
    def decodes(self) -> bool:
        return self.role in (Role.DECODE, Role.BOTH)


@dataclass(frozen=True, slots=True)
class Demand:
    """What placement needs to know of a sequence. Tokens."""

    prompt_tokens: int
    max_total_tokens: int  # prompt + max_tokens; the last one needs no KV
    hashes: Hashes = field(default_factory=dict)  # of the prompt's blocks
    fingerprint: str = ""  # of the only model that may serve it, since it made the tokens already sent; "" = any


class Score(NamedTuple):
    """Lower is better, the first field that differs decides."""

    unproved_link: bool
    waiting_tokens: int  # to be computed before the first token: those queued, then its own; a pull counts by its time
    crowded: bool  # the sequence may not fit beside those that decode there
    decode_cost: float  # share of decode memory in use, and AFFINITY for the share of the prompt that it does not cache
    last_chosen: int
    names: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Choice:
    """prefill == decode means one worker does both. `score` explains it."""

    prefill: str
    decode: str
    score: Score

    @property
    def local(self) -> bool:
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class NoPlace:
    """`hopeless`: no worker that could ever serve it is part of the fleet, so waiting is of no use."""

    reason: str
    hopeless: bool


def place(
    workers: Sequence[WorkerSnapshot],
    demand: Demand,
    *,
    local_prefill_tokens: int = 0,
    avoid: frozenset[str] = frozenset(),
    prefer: str = "",
) -> Choice | NoPlace:
    """Choose the best pair; workers in `avoid` are taken only where nobody else is left, and among the rest those that
    prefill on `prefer`, which has this prompt in its cache, before any other."""
    if demand.fingerprint:  # a worker that is away has none to show, and is a reason to wait
        workers = [worker for worker in workers if worker.fingerprint in ("", demand.fingerprint)]
    ready = [worker for worker in workers if worker.state == "ready"]
    candidates = list(_candidates(ready, demand, local_prefill_tokens)) or list(_without_partner(workers, demand))
    candidates = [c for c in candidates if c.prefill not in avoid and c.decode not in avoid] or candidates
    candidates = [c for c in candidates if c.prefill == prefer] or candidates
    if candidates:
        return min(candidates, key=lambda choice: choice.score)
    return _why_not(workers, ready)


def _candidates(ready: Sequence[WorkerSnapshot], demand: Demand, local_prefill_tokens: int) -> Iterable[Choice]:
    prefills = [
        worker for worker in ready if worker.role is Role.PREFILL and worker.pool_tokens >= demand.prompt_tokens
    ]
    costs = [_own_tokens(prefill, demand, ready) for prefill in prefills]
    for decode in ready:
        if not can_decode(decode, demand):
            continue
        if decode.role is Role.BOTH or demand.prompt_tokens - decode.cached_tokens <= local_prefill_tokens:
            yield _score(decode, decode, demand, demand.prompt_tokens - decode.cached_tokens, proved=True)
        for prefill, own_tokens in zip(prefills, costs, strict=True):
            link = link_state(prefill, decode)
            if link in ("ready", "connecting"):
                yield _score(prefill, decode, demand, own_tokens, proved=link == "ready")


def _own_tokens(prefill: WorkerSnapshot, demand: Demand, ready: Sequence[WorkerSnapshot]) -> int:
    """What the prompt costs a prefill worker, in tokens to compute: what it lacks, less where some holder can send it."""
    costs = [float(demand.prompt_tokens - prefill.cached_tokens)]
    for holder in ready:
        num_pulled = holder.cached_tokens - prefill.cached_tokens
        if num_pulled > 0 and can_lend(holder, prefill):
            token_cost = holder.token_bytes / prefill.kv_bytes_per_s * prefill.prefill_tokens_per_s
            costs.append(demand.prompt_tokens - holder.cached_tokens + num_pulled * token_cost)
    return round(min(costs))


def can_decode(worker: WorkerSnapshot, demand: Demand) -> bool:
    return worker.state == "ready" and worker.decodes and worker.pool_tokens >= demand.max_total_tokens - 1


def can_lend(holder: WorkerSnapshot, prefill: WorkerSnapshot) -> bool:
    """Whether blocks that one caches are of use to the other, and can go there."""
    return holder.decodes and holder.root == prefill.root and link_state(prefill, holder) == "ready"


def _without_partner(workers: Sequence[WorkerSnapshot], demand: Demand) -> Iterable[Choice]:
    """Decode workers that no prefill worker fits: they must prefill for themselves, however long the prompt is.

    Only where that is certain. A prefill worker that is away, or whose link is down, is waited for.
    """
    prefills = [worker for worker in workers if worker.role is Role.PREFILL]
    for decode in workers:
        fits = decode.role is Role.DECODE and can_decode(decode, demand)
        refused = all(prefill.state == "ready" and link_state(prefill, decode) == "refused" for prefill in prefills)
        if fits and prefills and refused:
            yield _score(decode, decode, demand, demand.prompt_tokens - decode.cached_tokens, proved=True)


def link_state(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
    """connecting | ready | refused | lost; a link of an earlier epoch says nothing of this one."""
    if prefill.fingerprint != decode.fingerprint:
        return "refused"
    link = prefill.links.get(decode.worker_id)
    if link is None or link.epoch != decode.epoch:
        return "connecting"
    return link.state


def _score(prefill: WorkerSnapshot, decode: WorkerSnapshot, demand: Demand, own_tokens: int, *, proved: bool) -> Choice:
    used_share = decode.used_tokens / decode.pool_tokens
    lacking_share = 1 - decode.cached_tokens / demand.prompt_tokens
    return Choice(
        prefill.worker_id,
        decode.worker_id,
        Score(
            unproved_link=not proved,
            waiting_tokens=prefill.waiting_tokens + own_tokens,
            crowded=decode.used_tokens + demand.max_total_tokens > HEADROOM * decode.pool_tokens,
            decode_cost=round(used_share + AFFINITY * lacking_share, 2),  # a hundredth is no reason to prefer one
            last_chosen=prefill.last_chosen + decode.last_chosen,
            names=(prefill.worker_id, decode.worker_id),
        ),
    )


def _why_not(workers: Sequence[WorkerSnapshot], ready: Sequence[WorkerSnapshot]) -> NoPlace:
    """Name what is missing: a role nobody has, a role nobody ready has, or a usable link."""
    for role in (Role.PREFILL, Role.DECODE):
        able = [worker for worker in workers if worker.role in (role, Role.BOTH)]
        name = role.name.lower()
        if not able:
            return NoPlace(f"no {name} worker is part of the fleet", hopeless=True)
        if not any(worker in ready for worker in able):
            detail = "; ".join(f"{worker.worker_id} is {worker.reason or worker.state}" for worker in able)
            return NoPlace(f"no {name} worker is ready: {detail}", hopeless=False)
    links = [
        f"{prefill.worker_id} to {decode.worker_id} is {link_state(prefill, decode)}{_link_reason(prefill, decode)}"
        for prefill in ready
        for decode in ready
        if prefill.prefills and decode.decodes and prefill is not decode
    ]
    return NoPlace(
        f"no pair of workers can serve it: {', '.join(links) or 'their pools are too small'}", hopeless=False
    )


def _link_reason(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
    if prefill.fingerprint != decode.fingerprint:
        return " (fingerprint)"
    link = prefill.links.get(decode.worker_id)
    return f" ({link.reason})" if link and link.reason else ""
