"""What is counted of a call once it is over: its outcome, its verdict, its metrics and the one line it leaves in the log.

Every call comes here exactly once, also one that was refused or cancelled. Event loop only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from baton.errors import InvalidRequest
from baton.log import get_log
from baton.slo import SLO, Verdict
from baton.timings import Timings
from baton.v1 import worker_pb2
from router.call_events import CallDone
from router.metrics import CallRecord, RouterMetrics, TransferRecord
from router.sequence import SequenceReport
from router.slo_watch import SloWatch

if TYPE_CHECKING:
    from router.call import Call

log = get_log("router.call")

# How calls end that nobody but their caller is to blame for: no class's target was missed.
_CALLERS_OWN = ("invalid_request", "not_found", "already_exists", "cancelled")


class Ledger:
    """One router's."""

    def __init__(self, slo_watch: SloWatch, metrics: RouterMetrics) -> None:
        self._slo_watch = slo_watch
        self._metrics = metrics

    def refused(self, api: str, outcome: str, slo: SLO | None) -> None:
        """A call that did not come to be; `slo` unless it could not even be parsed."""
        self._metrics.count_outcome(api, outcome)
        if slo is not None and outcome not in _CALLERS_OWN:
            self._judge(slo.name, Verdict.FAILED)
        log.info("call_refused", api=api, outcome=outcome)

    def ended(self, call: Call, slo: SLO, outcome: str, call_s: float) -> None:
        """A call that was admitted and tokenised, whatever became of it then."""
        api = call.spec.api
        self._metrics.count_outcome(api, outcome)
        done = call.done or CallDone(call.usage(), call.timings())
        usage, timings = done.usage, done.timings
        gaps_s = [sorted(report.gaps_s) for report in call.reports]
        verdict = _verdict(call, slo, timings, gaps_s, call_s, outcome)
        if verdict is not None:
            self._judge(slo.name, verdict)
        first, num_retries = call.reports[0], sum(report.num_retries for report in call.reports)
        self._metrics.observe(
            CallRecord(
                slo_class=slo.name,
                finished=outcome == "finished",
                ttft_s=timings.ttft_ms / 1e3 if first.first_token_s else None,
                queue_s=timings.queue_ms / 1e3 if first.first_token_s else None,
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
        log.info(
            "call_ended",
            request_id=call.request_id,
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


def _verdict(
    call: Call, slo: SLO, timings: Timings, gaps_s: list[list[float]], call_s: float, outcome: str
) -> Verdict | None:
    """None where the caller left or asked for the impossible: nobody missed a target. `gaps_s`: sorted, by choice."""
    if outcome in ("cancelled", InvalidRequest.code):
        return None
    if outcome != "finished":
        return Verdict.FAILED
    return slo.verdict(
        ttft_ms=timings.ttft_ms,
        tpot_ms=max(map(tpot_ms, call.reports)),
        itl_p99_ms=max(map(_p99_ms, gaps_s)),
        e2e_ms=call_s * 1e3,
    )


def _p99_ms(sorted_s: list[float]) -> float:
    """What 99 % do not exceed."""
    return sorted_s[math.ceil(0.99 * len(sorted_s)) - 1] * 1e3 if sorted_s else 0.0


def _transfer(stats: worker_pb2.SeqStats) -> TransferRecord:
    return TransferRecord(
        stats.transport, stats.kv_bytes, stats.kv_transfer_ms / 1e3, stats.exposed_transfer_ms / 1e3
    )  # fmt: skip
