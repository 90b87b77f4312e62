"""When a sequence is served anew: after an attempt that broke, elsewhere, behind the tokens that the client has.

Sent tokens are neither lost nor repeated nor changed, and the answer goes on at the next index, so a death costs a stream a
pause: noticing it, then computing what nobody caches. What bounds it: attempts in a row that bring no token, moves of one
sequence, and the budget of the whole router (router/retry_budget.py). Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace

from baton import clock
from baton.errors import BatonError, DeadlineExceeded, Internal, Overloaded, Unavailable
from baton.log import get_log
from baton.request import Request
from baton.tracing import Kind
from router import call_trace
from router.call_trace import MOVED
from router.fleet import Fleet
from router.handoff import Attempt, SinkFailed
from router.placement import Demand, NoPlace
from router.prefix_index import Hashes
from router.retry_budget import REFILL_S, RetryBudget
from router.sequence import SequenceJob, SequenceReport, TokenSink

log = get_log("router.moves")

MAX_MOVES = 16  # of one sequence in all: one that kills its worker after each token must end, too
# Doubled each time: four retries span 1.5 s, and a new worker's link is proved within 1 s (worker/links.py).
FIRST_BACKOFF_S = 0.1
# What another worker may do better: one that died, failed by itself, or has no room.
MOVABLE = (Unavailable, Internal, Overloaded)


class Sequences:
    """Serves sequences on the fleet, each as often anew as it takes and the budget allows."""

    def __init__(
        self, fleet: Fleet, seqs: Iterator[int], budget: RetryBudget, max_retries: int, vocab_size: int
    ) -> None:
        """`max_retries`: of one sequence, in a row without a new token; 0 = a broken one is never moved."""
        self._fleet = fleet
        self._seqs = seqs
        self._budget = budget
        self._max_retries = max_retries
        self._vocab_size = vocab_size

    async def serve(self, job: SequenceJob, sink: TokenSink, report: SequenceReport) -> None:
        """Run one sequence to its end; tokens go to `sink`, everything else is in `report`.

        Tokens that `report` begins with are known to the client already: the sink gets those after them.

        Raises:
            BatonError: the sequence did not finish; tokens may already have been given to `sink`.
        """
        failed, num_failed, fingerprint = dict[str, int](), 0, job.fingerprint
        while True:
            num_before = report.num_tokens
            until_s = min(job.deadline_s, clock.now_s() + job.unavailable_wait_s)
            attempt = await self._attempt(job, sink, report, self._to_avoid(failed), fingerprint, until_s)
            try:
                with attempt.span:
                    await attempt.run()
                self._budget.finished()
                return
            except MOVABLE as error:
                num_failed = 1 if report.num_tokens > num_before else num_failed + 1
                failed[attempt.blamed] = attempt.epochs[attempt.blamed]
                if num_failed > self._max_retries or not self._may_move(attempt, self._to_avoid(failed), report, error):
                    raise
                if not self._budget.take(clock.now_s()):
                    message = f"{error.message}; too many sequences are being started again to try this one"
                    raise Unavailable(message, retry_after_s=REFILL_S) from error
                log.warning(
                    "sequence_moved",
                    request_id=job.request.request_id,
                    worker=attempt.blamed,
                    num_tokens=report.num_tokens,
                    reason=error.message,
                )
                job.span.event(MOVED, call_trace.move(attempt.blamed, report.num_tokens, error.code))
            report.num_retries += 1
            if report.num_tokens:  # only the model that made them may go on
                fingerprint = fingerprint or attempt.fingerprint
            if report.num_tokens == num_before:  # else a stream ran, which is to pause as little as can be
                pause_s = FIRST_BACKOFF_S * 2 ** (num_failed - 1)
                await asyncio.sleep(min(pause_s, max(0.0, until_s - clock.now_s())))

    async def _attempt(
        self,
        job: SequenceJob,
        sink: TokenSink,
        report: SequenceReport,
        avoid: frozenset[str],
        fingerprint: str,
        until_s: float,
    ) -> Attempt:
        request = continued(job.request, report.token_ids)
        num_tokens = len(request.token_ids)
        demand = Demand(
            num_tokens,
            num_tokens + request.num_tokens_left,
            await self._hashes(job, request),
            fingerprint=fingerprint,
            explain=job.explain,
            request_id=job.request.request_id,
            session_id=job.session_id,
            ttft_ms=job.ttft_ms,
            tpot_ms=job.tpot_ms,
            itl_p99_ms=job.itl_p99_ms,
            deadline_s=max(0.0, job.deadline_s - clock.now_s()),
        )
        try:
            with job.span.part("placement") as placing:
                placed = await self._fleet.wait_for_place(demand, avoid, until_s, job.prefer)
                call_trace.say_place(placing, placed)
        except Unavailable as error:
            if clock.now_s() < job.deadline_s:
                raise
            raise DeadlineExceeded(f"the call's time ran out while it waited for a worker: {error.message}") from error
        span = job.span.part("attempt", kind=Kind.CLIENT)
        request = replace(request, seq=next(self._seqs), trace=span.trace)
        return Attempt(request, placed, self._fleet, demand, sink, report, job.deadline_s, self._vocab_size, span)

    def _to_avoid(self, failed: Mapping[str, int]) -> frozenset[str]:
        """Of workers that failed, by the epoch in which they did: those that were not born again since."""
        return frozenset(name for name, epoch in failed.items() if self._fleet.epoch_of(name) in (0, epoch))

    async def _hashes(self, job: SequenceJob, request: Request) -> Hashes:
        return await self._fleet.hash_prompt(request) if request.num_output_tokens or not job.hashes else job.hashes

    def _may_move(self, attempt: Attempt, avoid: frozenset[str], report: SequenceReport, error: BatonError) -> bool:
        if isinstance(error, SinkFailed) or report.num_retries >= MAX_MOVES:
            return False
        if not isinstance(error, Unavailable):  # it will say the same again
            other = self._fleet.forecast(attempt.demand, avoid)
            if isinstance(other, NoPlace) or avoid & {other.prefill, other.decode}:
                return False
        return True


def continued(request: Request, token_ids: list[int]) -> Request:
    """The same request, for a worker that goes on behind `token_ids`, which the client has."""
    if not token_ids:
        return request
    return replace(request, token_ids=request.token_ids + tuple(token_ids), num_output_tokens=len(token_ids))
