"""What flowing KV back is worth on real conversations: the router's own placement and policy, replayed over a trace.

    python -m bench.flow_back path/to/agentic_coding.jsonl.gz

Each request goes on with its session: it repeats the last prompt (as far as the trace says that it is shared), the answer to
it where the whole of it is, and adds to them. Prefill workers cache prompts, decode workers prompts and answers, both whole
sessions, the one used longest ago evicted first. Nothing queues: forecasts are those of an idle fleet, so what is compared is
the work itself. Pure but for reading the file; sessions start `SESSION_GAP_S` apart, in the trace's order.
"""

from __future__ import annotations

import gzip
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.kv_layout import DEFAULT_BLOCK_SIZE
from baton.request import Role
from bench.traces import MAX_TOKENS, TraceError, json_rows, reading
from router.flow_back import Decision, Pull, best, options
from router.placement import Choice, Demand, place
from router.prefix_index import PrefixRoot
from router.rates import DEFAULT_KV_BYTES_PER_S, DEFAULT_PREFILL_TOKENS_PER_S
from router.worker_table import LinkView, WorkerSnapshot, table_of

TRACE_BLOCK_TOKENS = 64  # of the agentic trace
SESSION_GAP_S = 300.0  # some 25 sessions overlap, about as many as the pools of PROFILES hold
ROOT = PrefixRoot("replay", "auto", DEFAULT_BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    at_s: float
    session: str
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int  # leading ones that are the beginning of the last prompt
    repeats_all: bool  # of the last prompt, so that its answer follows it


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on some hardware and wire."""

    name: str
    prefill_tokens_per_s: float
    kv_bytes_per_s: float
    token_bytes: int
    pool_tokens: int  # of each worker
    step_s: float


# Llama-3.1-8B FP8 on one H200: slope of the measured TTFT and ITL at batch 32 (calibration/dynamo_h200); KV in bf16: 32 layers
# x 8 heads x 128 x 2 x 2 B; 100 GB of the 141 GB hold KV. InfiniBand: 400 Gb/s at 85 %, which is not measured here.
H200 = {"prefill_tokens_per_s": 1 / 15.18e-6, "token_bytes": 131_072, "pool_tokens": 760_000, "step_s": 6.7e-3}
PROFILES = (
    Profile("8B, H200, InfiniBand", kv_bytes_per_s=42.5e9, **H200),  # type: ignore[arg-type]
    Profile("8B, H200, TCP", kv_bytes_per_s=DEFAULT_KV_BYTES_PER_S, **H200),  # type: ignore[arg-type]
    Profile("demo model, one core, TCP", DEFAULT_PREFILL_TOKENS_PER_S, DEFAULT_KV_BYTES_PER_S, 46_080, 760_000, 0.05),
)

Policy = Callable[[Sequence[Decision]], Decision]


def always_compute(decisions: Sequence[Decision]) -> Decision:
    return decisions[0]


def always_pull(decisions: Sequence[Decision]) -> Decision:
    pulls = [decision for decision in decisions if isinstance(decision, Pull)]
    return max(pulls, key=lambda pull: pull.num_blocks, default=decisions[0])


POLICIES: dict[str, Policy] = {"always compute": always_compute, "always pull": always_pull, "policy": best}


class SessionCache:
    """What one worker caches of each session: its first tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._tokens: OrderedDict[str, int] = OrderedDict()  # used longest ago first
        self._sum = 0

    def get(self, session: str) -> int:
        return self._tokens.get(session, 0)

    def put(self, session: str, num_tokens: int) -> None:
        self._sum += num_tokens - self._tokens.pop(session, 0)
        self._tokens[session] = num_tokens
        while self._sum > self._capacity_tokens:
            self._sum -= self._tokens.popitem(last=False)[1]


@dataclass(slots=True)
class Outcome:
    """Totals of one replay."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    pulled_bytes: int = 0
    shipped_bytes: int = 0  # prefill -> decode
    num_pulls: int = 0
    ttft_s: list[float] = field(default_factory=list)  # forecasts

    def percentile_s(self, percent: int) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


class Replay:
    """A fleet without queues."""

    def __init__(self, profile: Profile, policy: Policy, *, num_prefill: int = 4, num_decode: int = 4) -> None:
        self.outcome = Outcome()
        self._profile = profile
        self._policy = policy
        self._prefill = {f"prefill-{n}": SessionCache(profile.pool_tokens) for n in range(num_prefill)}
        self._decode = {f"decode-{n}": SessionCache(profile.pool_tokens) for n in range(num_decode)}
        self._last_chosen = dict.fromkeys((*self._prefill, *self._decode), 0)
        self._last: dict[str, Turn] = {}  # by session
        # Where nothing is pulled placement must know it, or it sends turns away from the prefill worker that caches them.
        self._decode_root = replace(ROOT, kv_dtype="other") if policy is always_compute else ROOT

    def serve(self, turn: Turn) -> None:
        demand = Demand(turn.prompt_tokens, turn.prompt_tokens + turn.output_tokens)
        workers = self._snapshots(turn)
        choice = place(table_of(workers), demand)
        assert isinstance(choice, Choice), choice
        by_id = {worker.worker_id: worker for worker in workers}
        prefill, decode = by_id[choice.prefill], by_id[choice.decode]
        holders = [worker for worker in workers if worker.decodes and worker.root == prefill.root]
        decision = self._policy(options(turn.prompt_tokens, prefill, holders))
        source = by_id[decision.worker_id] if isinstance(decision, Pull) else prefill
        self._count(turn, decision, turn.prompt_tokens - source.cached_tokens, decode.cached_tokens)
        self._prefill[choice.prefill].put(turn.session, turn.prompt_tokens)
        self._decode[choice.decode].put(turn.session, turn.prompt_tokens + turn.output_tokens - 1)
        for worker_id in (choice.prefill, choice.decode):
            self._last_chosen[worker_id] = len(self.outcome.ttft_s)
        self._last[turn.session] = turn

    def _count(self, turn: Turn, decision: Decision, num_computed: int, num_on_decode: int) -> None:
        outcome = self.outcome
        outcome.prompt_tokens += turn.prompt_tokens
        outcome.computed_tokens += num_computed
        outcome.shipped_bytes += (turn.prompt_tokens - num_on_decode) * self._profile.token_bytes
        outcome.ttft_s.append(decision.forecast_s)
        if isinstance(decision, Pull):
            outcome.num_pulls += 1
            outcome.pulled_bytes += decision.nbytes

    def _snapshots(self, turn: Turn) -> list[WorkerSnapshot]:
        links = {worker_id: LinkView(1, "ready") for worker_id in self._decode}
        return [
            WorkerSnapshot(
                worker_id,
                1,
                role,
                "ready",
                pool_tokens=self._profile.pool_tokens,
                last_chosen=self._last_chosen[worker_id],
                root=ROOT if role is Role.PREFILL else self._decode_root,
                cached_tokens=self._usable(turn, cache.get(turn.session)),
                token_bytes=self._profile.token_bytes,
                step_s=self._profile.step_s,
                prefill_tokens_per_s=self._profile.prefill_tokens_per_s,
                kv_bytes_per_s=self._profile.kv_bytes_per_s,
                links=links if role is Role.PREFILL else {},
            )
            for role, caches in ((Role.PREFILL, self._prefill), (Role.DECODE, self._decode))
            for worker_id, cache in caches.items()
        ]

    def _usable(self, turn: Turn, num_cached: int) -> int:
        """Of what a worker caches of the session: whole blocks that this prompt repeats, never its last token."""
        last = self._last.get(turn.session)
        if last is None:
            return 0
        same = last.prompt_tokens + last.output_tokens if turn.repeats_all else turn.shared_tokens
        usable = min(num_cached, same, turn.prompt_tokens - 1)
        return usable - usable % DEFAULT_BLOCK_SIZE


def replay(turns: Iterable[Turn], profile: Profile, policy: Policy) -> Outcome:
    fleet = Replay(profile, policy)
    for turn in turns:
        if turn.prompt_tokens + turn.output_tokens <= profile.pool_tokens:
            fleet.serve(turn)
    return fleet.outcome


def parse_agentic(lines: Iterable[str]) -> list[Turn]:
    """Turns in order of arrival. Raises: TraceError: a row that is not as it should be (it is named)."""
    turns, starts_s, last = [], dict[str, float](), dict[str, tuple[float, int]]()
    for row in json_rows(lines):
        session = str(row.get("s"))
        start_s = starts_s.setdefault(session, SESSION_GAP_S * len(starts_s))
        last_s, last_tokens = last.get(session, (None, 0))
        at_s, prompt_tokens = row.instant("t", last_s), row.tokens("in")
        num_shared = row.count("p", least=0, most=MAX_TOKENS // TRACE_BLOCK_TOKENS)
        turns.append(
            Turn(
                at_s=start_s + at_s,
                session=session,
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, row.tokens("out", least=0)),  # 0: broken off before the first token
                shared_tokens=num_shared * TRACE_BLOCK_TOKENS,
                repeats_all=0 < last_tokens // TRACE_BLOCK_TOKENS <= num_shared,
            )
        )
        last[session] = at_s, prompt_tokens
    return sorted(turns, key=lambda turn: turn.at_s)


def main(path: Path) -> int:
    if not path.is_file():
        print(f"trace {path} is not there; get agentic_coding.jsonl.gz from kv-cache-tester", file=sys.stderr)
        return 2
    try:
        with reading(path), gzip.open(path, "rt", encoding="utf-8") as lines:
            turns = parse_agentic(lines)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{len(turns)} requests, {len({turn.session for turn in turns})} sessions, 4 prefill + 4 decode workers")
    for profile in PROFILES:
        print(
            f"\n{profile.name}\n{'':16}{'computed':>10}{'pulls':>8}{'back GB':>10}{'forth GB':>10}{'TTFT p50':>10}{'p99 s':>8}"
        )
        for name, policy in POLICIES.items():
            outcome = replay(turns, profile, policy)
            print(
                f"{name:16}{outcome.computed_tokens / outcome.prompt_tokens:>10.2%}{outcome.num_pulls:>8}"
                f"{outcome.pulled_bytes / 1e9:>10.0f}{outcome.shipped_bytes / 1e9:>10.0f}"
                f"{outcome.percentile_s(50):>10.3f}{outcome.percentile_s(99):>8.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
