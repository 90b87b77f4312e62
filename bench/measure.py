"""What a client saw, turned into numbers. Pure: no clock, socket or terminal.

One Record per call, with the time at which each of its tokens reached the client. Instants are seconds on one clock.
- ttft = first token - due instant. In an open loop the due instant is when the call should have left, so waiting at the
  generator's own concurrency cap counts as latency (no coordinated omission); in a closed loop it is when it was sent.
- tpot = (last - first) / (n - 1) of one call; itl = single gaps. Tokens that share one chunk share one instant: gaps of 0.
- handoff gap: what the server measured where it says so, else the client's token 1 -> token 2; the report says which.
- Percentiles are nearest-rank: always a value that was observed, never an interpolation. Only completed calls enter them.
- Goodput counts completed calls that met every target, per second; a call that failed or was shed is a miss, a planned cancel
  is neither.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from baton.slo import SLO, Verdict
from baton.timings import Timings


class Outcome(enum.StrEnum):
    COMPLETED = "completed"
    CANCELLED = "cancelled"  # by the plan of the workload
    SHED = "shed"  # turned away by a server with too much to do
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Record:
    """One call, from the client's side."""

    index: int
    outcome: Outcome
    due_s: float
    sent_s: float
    end_s: float
    token_times_s: tuple[float, ...] = ()  # one per token that was seen
    prompt_tokens: int = 0  # the server's count where it gives one, else the plan's
    cached_tokens: int = 0
    usage_tokens: int | None = None  # the server's count of output tokens
    timings: Timings | None = None
    error_kind: str = ""
    error_message: str = ""
    retry_after_s: float = 0.0  # what a server that turned it away asked for

    @property
    def num_tokens(self) -> int:
        """Output tokens: the server's count where it gives one, since several can share a chunk of text."""
        return len(self.token_times_s) if self.usage_tokens is None else self.usage_tokens

    @property
    def client_wait_ms(self) -> float:
        return 1e3 * (self.sent_s - self.due_s)

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.token_times_s[0] - self.due_s)

    @property
    def e2e_ms(self) -> float:
        return 1e3 * (self.end_s - self.due_s)

    @property
    def tpot_ms(self) -> float | None:
        """None for one-token answers, which have none."""
        if self.num_tokens < 2:
            return None
        return 1e3 * (self.token_times_s[-1] - self.token_times_s[0]) / (self.num_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        return [1e3 * (later - earlier) for earlier, later in pairwise(self.token_times_s)]


@dataclass(frozen=True, slots=True)
class Percentiles:
    n: int
    mean: float = math.nan
    p50: float = math.nan
    p95: float = math.nan
    p99: float = math.nan
    max: float = math.nan


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """The smallest of `ordered` (ascending, not empty) that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(map(float, values))
    if not ordered:
        return Percentiles(n=0)
    return Percentiles(
        n=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        p50=nearest_rank(ordered, 0.50),
        p95=nearest_rank(ordered, 0.95),
        p99=nearest_rank(ordered, 0.99),
        max=ordered[-1],
    )


@dataclass(frozen=True, slots=True)
class SloReport:
    ttft_ms: float
    tpot_ms: float
    num_judged: int  # completed + shed + failed
    verdicts: dict[str, int]  # baton.slo.Verdict -> calls; the first miss wins
    attainment: float  # met / judged
    goodput_per_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    duration_s: float  # load start -> last answer's end
    num_calls: int
    num_completed: int
    num_cancelled: int
    num_shed: int
    num_failed: int
    errors: dict[str, int]  # of calls that failed or were shed
    error_examples: dict[str, str]  # first message of each kind
    prompt_tokens: int  # of completed calls
    cached_tokens: int
    output_tokens: int  # of completed and cancelled calls
    output_tokens_per_s: float
    calls_per_s: float  # completed
    ttft_ms: Percentiles
    client_wait_ms: Percentiles
    handoff_gap_ms: Percentiles
    handoff_gap_source: str
    tpot_ms: Percentiles
    itl_ms: Percentiles
    e2e_ms: Percentiles
    num_unseen_tokens: int  # counted by the server but not seen as chunks of their own: ITL is then per chunk
    num_shipped: int  # calls whose KV went from one worker to another
    kv_bytes: int
    slo: SloReport


GAP_FROM_SERVER = "server"
GAP_FROM_CLIENT = "client token 1 -> token 2"


def summarise(records: Sequence[Record], *, started_s: float, slo: SLO) -> Summary:
    """Fold the records of one load, warm-up excluded by the caller."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    cancelled = [record for record in records if record.outcome is Outcome.CANCELLED]
    failed = [record for record in records if record.outcome in (Outcome.SHED, Outcome.FAILED)]
    num_shed = sum(record.outcome is Outcome.SHED for record in failed)
    duration_s = max((record.end_s for record in records), default=started_s) - started_s
    per_second = 1 / duration_s if duration_s > 0 else 0.0
    gap_source, gaps = handoff_gaps(completed)
    shipped = [record.timings for record in completed if record.timings is not None and record.timings.kv_bytes > 0]
    output_tokens = sum(record.num_tokens for record in completed + cancelled)
    return Summary(
        duration_s=duration_s,
        num_calls=len(records),
        num_completed=len(completed),
        num_cancelled=len(cancelled),
        num_shed=num_shed,
        num_failed=len(failed) - num_shed,
        errors=dict(Counter(record.error_kind for record in failed).most_common()),
        error_examples={record.error_kind: record.error_message for record in reversed(failed)},
        prompt_tokens=sum(record.prompt_tokens for record in completed),
        cached_tokens=sum(record.cached_tokens for record in completed),
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens * per_second,
        calls_per_s=len(completed) * per_second,
        ttft_ms=percentiles(record.ttft_ms for record in completed),
        client_wait_ms=percentiles(record.client_wait_ms for record in completed),
        handoff_gap_ms=percentiles(gaps),
        handoff_gap_source=gap_source,
        tpot_ms=percentiles(record.tpot_ms for record in completed if record.tpot_ms is not None),
        itl_ms=percentiles(gap for record in completed for gap in record.itl_ms),
        e2e_ms=percentiles(record.e2e_ms for record in completed),
        num_unseen_tokens=sum(max(0, record.num_tokens - len(record.token_times_s)) for record in completed),
        num_shipped=len(shipped),
        kv_bytes=sum(timings.kv_bytes for timings in shipped),
        slo=judge(completed, len(failed), per_second, slo),
    )


def handoff_gaps(completed: Sequence[Record]) -> tuple[str, list[float]]:
    """Where the gaps come from, and the gaps (ms) of answers of two tokens or more; the two sources are never mixed.

    A server that reports timings says 0 where one worker did both: no handoff, so no gap.
    """
    answers = [record for record in completed if record.num_tokens > 1]
    measured = [record.timings.handoff_gap_ms for record in answers if record.timings is not None]
    if measured:
        return GAP_FROM_SERVER, [gap_ms for gap_ms in measured if gap_ms > 0]
    return GAP_FROM_CLIENT, [record.itl_ms[0] for record in answers if len(record.token_times_s) > 1]


def judge(completed: Sequence[Record], num_failed: int, per_second: float, slo: SLO) -> SloReport:
    verdicts = Counter(verdict_of(record, slo) for record in completed)
    verdicts[Verdict.FAILED] += num_failed
    num_judged = len(completed) + num_failed
    return SloReport(
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        num_judged=num_judged,
        verdicts={verdict.value: count for verdict, count in verdicts.items() if count},
        attainment=verdicts[Verdict.MET] / num_judged if num_judged else 0.0,
        goodput_per_s=verdicts[Verdict.MET] * per_second,
    )


def verdict_of(record: Record, slo: SLO) -> Verdict:
    itl = sorted(record.itl_ms)
    return slo.verdict(
        ttft_ms=record.ttft_ms,
        tpot_ms=record.tpot_ms or 0.0,
        itl_p99_ms=nearest_rank(itl, 0.99) if itl else 0.0,
        e2e_ms=record.e2e_ms,
    )
