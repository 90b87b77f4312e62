"""What is counted of a call once it is over: its outcome, its verdict, its metrics and the one line it leaves in the log.

Every call comes here exactly once, also one that was refused or cancelled; a new one also when it arrives. Event loop only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton import clock
from baton.errors import CALLERS_OWN, InvalidRequest
from baton.log import get_log
from baton.slo import SLO, Verdict
from baton.timings import Timings
from baton.v1 import worker_pb2
from router import call_trace
from router.call_events import CallDone
from router.goodput import Goodput, Served, TTFTSplit, split_ttft
from router.metrics import CallRecord, RouterMetrics, TransferRecord
from router.sequence import SequenceReport
from router.slo_watch import SloWatch

if TYPE_CHECKING:
    from router.call import Call

log = get_log("router.call")


class Ledger:
    """One router's."""

    def __init__(self, slo_watch: SloWatch, metrics: RouterMetrics, goodput: Goodput) -> None:
        self._slo_watch = slo_watch
        self._metrics = metrics
        self._goodput = goodput

    def arrived(self, slo: SLO) -> None:
        """A new call of a known class, whatever becomes of it."""
        self._goodput.arrived(slo.name, clock.now_s())

    def read(self, call: Call, slo: SLO, cached_tokens: int) -> None:
        """Its prompt is tokenised; `cached_tokens` of it are known to some worker."""
        self._goodput.read(slo.name, call.prompt_tokens, cached_tokens, len(call.reports), clock.now_s())

    def refused(self, api: str, outcome: str, slo: SLO | None) -> None:
        """A call that did not come to be; `slo` unless it could not even be parsed."""
        self._metrics.count_outcome(api, outcome)
        if slo is not None and outcome not in CALLERS_OWN:
            self._judge(slo.name, Verdict.FAILED)
            self._goodput.refused(slo.name, clock.now_s())
        log.info("call_refused", api=api, outcome=outcome)

    def ended(self, call: Call, slo: SLO, outcome: str, call_s: float) -> None:
        """A call that was admitted and tokenised, whatever became of it then."""
        api = call.spec.api
        self._metrics.count_outcome(api, outcome)
        done = call.done or CallDone(call.usage(), call.timings())
        usage, timings = done.usage, done.timings
        gaps_s = [sorted(report.gaps_s) for report in call.reports]
        pace = _Pace(max(map(tpot_ms, call.reports)), max(map(_p99_ms, gaps_s)))
        split = _split(call, timings)
        verdict = _verdict(slo, timings, pace, call_s, outcome)
        if verdict is not None:
            self._judge(slo.name, verdict)
            self._goodput.ended(_served(call, slo, verdict, timings, pace, split), clock.now_s())
        first, num_retries = call.reports[0], sum(report.num_retries for report in call.reports)
        self._metrics.observe(
            CallRecord(
                slo_class=slo.name,
                finished=outcome == "finished",
                ttft_s=timings.ttft_ms / 1e3 if first.first_token_s else None,
                queue_s=timings.queue_ms / 1e3 if first.first_token_s else None,
                ttft_split=split,
                handoff_gap_s=first.handoff_gap_s,
                gaps_s=gaps_s,
                call_s=call_s,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
                transfers=[_transfer(report.stats) for report in call.reports if report.handed_off],
                local=first.prefill_worker == first.decode_worker,
                num_retries=num_retries,
            )
        )
        if call.span:
            tenant = self._metrics.admission.name(call.spec.tenant)
            call_trace.say_call(call, tenant, outcome, verdict, usage, timings)
        log.info(
            "call_ended",
            request_id=call.request_id,
            trace_id=call.span.trace_id,
            api=api,
            outcome=outcome,
            slo_class=slo.name,
            verdict=verdict,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            ttft_ms=round(timings.ttft_ms, 3),
            handoff_gap_ms=round(timings.handoff_gap_ms, 3),
            call_ms=round(call_s * 1e3, 3),
            prefill_worker=timings.prefill_worker,
            decode_worker=timings.decode_worker,
            num_retries=num_retries,
        )

    def _judge(self, slo_class: str, verdict: Verdict) -> None:
        self._slo_watch.count(slo_class, verdict)
        self._metrics.count_verdict(slo_class, verdict)


def tpot_ms(report: SequenceReport) -> float:
    """Of the tokens that came here: a resumed call's first ones did not."""
    if not report.gaps_s:
        return 0.0
    return (report.last_token_s - report.first_token_s) * 1e3 / len(report.gaps_s)


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of a call's slowest choice."""

    tpot_ms: float
    itl_p99_ms: float


def _verdict(slo: SLO, timings: Timings, pace: _Pace, call_s: float, outcome: str) -> Verdict | None:
    """None where the caller left or asked for the impossible: nobody missed a target."""
    if outcome in ("cancelled", InvalidRequest.code):
        return None
    if outcome != "finished":
        return Verdict.FAILED
    return slo.verdict(
        ttft_ms=timings.ttft_ms, tpot_ms=pace.tpot_ms, itl_p99_ms=pace.itl_p99_ms, e2e_ms=call_s * 1e3
    )  # fmt: skip


def _split(call: Call, timings: Timings) -> TTFTSplit | None:
    """Of the choice that leads; None without a token, or where its worker has not said how long it took."""
    first = call.reports[0]
    if not first.first_token_s or not first.submitted_s:
        return None
    stats = first.stats
    return split_ttft(
        timings.ttft_ms / 1e3, first.submitted_s - call.arrival_s, stats.queue_ms / 1e3, stats.prefill_ms / 1e3
    )  # fmt: skip


def _served(
    call: Call, slo: SLO, verdict: Verdict, timings: Timings, pace: _Pace, split: TTFTSplit | None
) -> Served:  # fmt: skip
    """A call that failed missed what it had not reached: before its first token TTFT, and nobody decoded; after it the pace."""
    first, failed = call.reports[0], verdict is Verdict.FAILED
    began = first.first_token_s > 0
    return Served(
        slo_class=slo.name,
        verdict=verdict,
        ttft_met=began and timings.ttft_ms <= slo.ttft_ms,
        pace_met=not failed and slo.meets_pace(tpot_ms=pace.tpot_ms, itl_p99_ms=pace.itl_p99_ms),
        ttft_s=timings.ttft_ms / 1e3 if began else None,
        split=split,
        handoff_gap_s=first.handoff_gap_s,
        output_tokens=tuple(report.num_tokens for report in call.reports),
        prefill_worker=first.prefill_worker,
        decode_worker=first.decode_worker if began else "",
    )


def _p99_ms(sorted_s: list[float]) -> float:
    """What 99 % do not exceed."""
    return sorted_s[math.ceil(0.99 * len(sorted_s)) - 1] * 1e3 if sorted_s else 0.0


def _transfer(stats: worker_pb2.SeqStats) -> TransferRecord:
    return TransferRecord(
        stats.transport, stats.kv_bytes, stats.kv_transfer_ms / 1e3, stats.exposed_transfer_ms / 1e3
    )  # fmt: skip
