"""One sequence's life on the workers, in straight-line code that knows what is where.

    1 place     choose prefill and decode workers, or wait for one to come back
    2 submit    prefill gets the request and the decode worker's address; both Sessions deliver here
    3 first     token 0 comes from prefill and goes to the client at once
    4 rest      tokens 1.. come from decode; merged by index, duplicates dropped
    5 end       a token carries the finish reason; the last `Ended` brings the counts
A lost worker, a refusal or a failure before any token reached the client starts again at 1, elsewhere where possible;
after a token it ends the call (with `num_output_tokens` in Submit, continuing it elsewhere is an ordinary submit), unless
it was the prefill worker's and decode has adopted the sequence, perhaps without the prefill worker hearing of it.

Invariants: however the block is left (finish, stop string, error, deadline, cancelled task), every worker that may still
hold the sequence is sent Cancel and both counts are taken back, without an await in between. A retry has a new seq, so
nothing late of the first attempt can enter the second. A hole older than HOLE_S means a worker is lost. Event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.errors import BatonError, DeadlineExceeded, PeerRefused, Unavailable, WorkerLost
from baton.log import get_log
from baton.request import FinishReason, Request, SampledToken
from baton.v1 import worker_pb2
from router.events import (
    AdoptionIsLate,
    HoleIsOld,
    Inbox,
    SequenceEnded,
    SequenceRefused,
    StatsAreLate,
    TimeIsUp,
    TokenArrived,
    WorkerGone,
)
from router.fleet import Fleet, Hold, Placed
from router.placement import Demand

log = get_log("router.handoff")

HOLE_S = 1.0  # DESIGN section 5
STATS_S = 1.0  # the cancel path's bound (DESIGN section 5): after it the counts are taken as they are
# Before the first token. A link to a worker that has just restarted takes up to 1 s to be proved (worker/links.py); more
# tries than this would let a request that kills workers go through the fleet.
MAX_RETRIES = 4
FIRST_BACKOFF_S = 0.1  # doubled each time: the tries span 1.5 s


class TokenSink(Protocol):
    """Takes tokens in order, index 0 first. Never blocks."""

    def token(self, token: SampledToken) -> bool:
        """Returns True when the answer is complete for the router's reasons (a stop string)."""
        ...


@dataclass(slots=True)
class SequenceReport:
    """What became of a sequence; filled while it runs, so that a cancelled call has its counts too."""

    finish: FinishReason = FinishReason.NONE
    num_tokens: int = 0
    submitted_s: float = 0.0  # monotonic; of the last attempt
    first_token_s: float = 0.0
    second_token_s: float = 0.0
    last_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between consecutive tokens, as they arrived here
    prefill_worker: str = ""
    decode_worker: str = ""
    stats: worker_pb2.SeqStats = field(default_factory=worker_pb2.SeqStats)  # of the worker that prefilled
    handed_off: bool = False  # decode has acknowledged the KV
    num_retries: int = 0


@dataclass(slots=True)
class TokenMerge:
    """Puts tokens of two workers in the order of their index. Pure."""

    next_index: int = 0
    _early: dict[int, SampledToken] = field(default_factory=dict)

    def push(self, token: SampledToken) -> list[SampledToken]:
        """The tokens that are now in order; empty for a duplicate or one that comes early."""
        if token.index >= self.next_index:
            self._early.setdefault(token.index, token)
        in_order = []
        while (ready := self._early.pop(self.next_index, None)) is not None:
            in_order.append(ready)
            self.next_index += 1
        return in_order

    @property
    def has_hole(self) -> bool:
        return bool(self._early)


async def serve_sequence(
    request: Request,
    fleet: Fleet,
    seqs: Iterator[int],
    sink: TokenSink,
    report: SequenceReport,
    deadline_s: float,
    unavailable_wait_s: float,
    prefer: str = "",
) -> None:
    """Run one sequence to its end; tokens go to `sink`, everything else is in `report`. `prefer`: a prefill worker that
    has the prompt in its cache.

    Raises:
        BatonError: the sequence did not finish; a token may already have been given to `sink`.
    """
    num_tokens = len(request.token_ids)
    demand = Demand(num_tokens, num_tokens + request.num_tokens_left, await fleet.hash_prompt(request))
    avoid: frozenset[str] = frozenset()
    while True:
        until_s = min(deadline_s, time.monotonic() + unavailable_wait_s)
        placed = await fleet.wait_for_place(demand, avoid, until_s, prefer)
        attempt = _Attempt(replace(request, seq=next(seqs)), placed, sink, report, deadline_s)
        try:
            await attempt.run(demand)
            return
        except Unavailable as error:
            if report.num_tokens or report.num_retries == MAX_RETRIES:
                raise
            log.warning("sequence_retried", request_id=request.request_id, worker=attempt.blamed, reason=error.message)
            avoid |= {attempt.blamed}
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2**report.num_retries, max(0.0, until_s - time.monotonic())))
            report.num_retries += 1


class _Attempt:
    """One submission of a sequence to one pair of workers."""

    def __init__(
        self, request: Request, placed: Placed, sink: TokenSink, report: SequenceReport, deadline_s: float
    ) -> None:
        self._request = request
        self._prefill, self._decode, self._holder = placed.prefill, placed.decode, placed.holder
        self._plan = placed.plan
        self._local = placed.plan.choice.local
        self._sessions = {endpoint.worker_id: endpoint.session for endpoint in (self._prefill, self._decode)}
        self._sink = sink
        self._report = report
        self._deadline_s = deadline_s
        self._inbox = Inbox()
        self._merge = TokenMerge()
        self._may_hold: set[str] = set()  # workers that were not seen to end the sequence
        self._stats_in = False
        self._watched_index = -1  # the missing index a HoleIsOld timer runs for
        self._hold = Hold(0, 0)  # of prefill
        self._prefill_error: BatonError | None = None  # fatal unless decode turns out to have the sequence
        self.blamed = placed.prefill.worker_id  # whom to avoid when this attempt fails

    async def run(self, demand: Demand) -> None:
        with ExitStack() as stack:
            num_lacking = self._plan.lacking_tokens
            if self._local:
                self._hold = stack.enter_context(self._prefill.hold(num_lacking, demand.max_total_tokens))
            else:
                self._hold = stack.enter_context(self._prefill.hold(num_lacking, demand.prompt_tokens))
                stack.enter_context(self._decode.hold(0, demand.max_total_tokens))
            stack.enter_context(self._submitted())
            await self._follow()

    @contextmanager
    def _submitted(self) -> Iterator[None]:
        """Submit; on the way out cancel whatever was not seen to end."""
        seq, loop = self._request.seq, asyncio.get_running_loop()
        self._may_hold = set(self._sessions)
        for session in self._sessions.values():
            session.attach(seq, self._inbox)
        ttl_s = self._deadline_s - time.monotonic()
        deadline = loop.call_later(max(0.0, ttl_s), self._inbox.put, TimeIsUp())
        self._report.submitted_s = time.monotonic()
        self._report.prefill_worker, self._report.decode_worker = self._prefill.worker_id, self._decode.worker_id
        self._prefill.session.submit(
            self._request,
            None if self._local else self._decode.session.peer(),
            ttl_ms=int(ttl_s * 1e3),
            pull_from=self._holder.session.peer() if self._holder is not None else None,
            pull_blocks=self._plan.pull.num_blocks if self._plan.pull is not None else 0,
        )
        try:
            yield
        finally:
            deadline.cancel()
            self._cancel_open()
            for session in self._sessions.values():
                session.detach(seq)

    async def _follow(self) -> None:
        """Read events until the answer is whole and counted."""
        while not self._complete():
            event = await self._inbox.get()
            match event:
                case TokenArrived(worker, token):
                    self._on_token(worker, token)
                case SequenceEnded():
                    self._on_ended(event)
                case SequenceRefused(worker, error):
                    self._on_lost(worker, error)
                case WorkerGone(worker, reason):
                    self._on_lost(worker, WorkerLost(f"{self._part(worker)} worker {worker} was lost: {reason}"))
                case HoleIsOld(index):
                    self._on_old_hole(index)
                case TimeIsUp() if self._report.finish is not FinishReason.NONE:
                    return
                case TimeIsUp():
                    raise DeadlineExceeded(f"the call's time ran out after {self._report.num_tokens} tokens")
                case StatsAreLate():
                    return
                case AdoptionIsLate():
                    self._on_late_adoption()

    def _complete(self) -> bool:
        return self._report.finish is not FinishReason.NONE and self._stats_in

    def _part(self, worker: str) -> str:
        if self._local:
            return "the"
        return "prefill" if worker == self._prefill.worker_id else "decode"

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _on_token(self, worker: str, token: SampledToken) -> None:
        if self._report.finish is not FinishReason.NONE:
            return
        self._hold.waiting_tokens = 0
        for ready in self._merge.push(token):
            if ready.finish is FinishReason.CANCELLED:  # by whom but us? Half an answer must not pass for a whole one
                self._on_lost(worker, Unavailable(f"worker {worker} gave the sequence up"))
                return
            self._clock()
            stop = self._sink.token(ready)
            if stop or ready.finish is not FinishReason.NONE:
                self._finish(ready.finish)
                return
        if self._merge.has_hole:
            self._watch_hole()

    def _clock(self) -> None:
        """Note the arrival of the next token in order."""
        report, now_s = self._report, time.monotonic()
        if report.num_tokens == 0:
            report.first_token_s = now_s
        else:
            report.gaps_s.append(now_s - report.last_token_s)
            if report.num_tokens == 1:
                report.second_token_s = now_s
        report.last_token_s = now_s
        report.num_tokens += 1

    def _finish(self, finish: FinishReason) -> None:
        """The answer is whole: by the engine's rules, or (NONE) by a stop string, after which the workers need not go on."""
        self._report.finish = finish or FinishReason.STOP
        if finish is FinishReason.NONE:
            self._cancel_open()
        asyncio.get_running_loop().call_later(STATS_S, self._inbox.put, StatsAreLate())

    def _cancel_open(self) -> None:
        """Send Cancel, once, to whoever was not seen to end the sequence."""
        while self._may_hold:
            self._sessions[self._may_hold.pop()].cancel(self._request.seq)

    def _watch_hole(self) -> None:
        if self._watched_index != self._merge.next_index:
            self._watched_index = self._merge.next_index
            asyncio.get_running_loop().call_later(HOLE_S, self._inbox.put, HoleIsOld(self._watched_index))

    def _on_old_hole(self, index: int) -> None:
        if self._merge.next_index == index and self._report.finish is FinishReason.NONE:
            worker = self._decode if self._merge.next_index else self._prefill
            self.blamed = worker.worker_id
            raise WorkerLost(f"worker {worker.worker_id} left out token {index} for over {HOLE_S:g} s")

    # -- ends --------------------------------------------------------------------------------------------------------

    def _on_ended(self, event: SequenceEnded) -> None:
        self._may_hold.discard(event.worker)
        if event.worker == self._prefill.worker_id:
            self._report.stats = event.stats
            if self._plan.pull is not None:
                self._prefill.observe_pull(event.stats, self._plan.pull.nbytes)
            self._report.handed_off = event.outcome == worker_pb2.OUTCOME_HANDED_OFF
            self._stats_in = True
            if not self._local:
                self._hold.used_tokens = 0
        if event.outcome == worker_pb2.OUTCOME_FAILED:
            assert event.error is not None
            self._on_lost(event.worker, event.error)
        elif event.outcome == worker_pb2.OUTCOME_CANCELLED and self._report.finish is FinishReason.NONE:
            self._on_lost(event.worker, Unavailable(f"worker {event.worker} gave the sequence up"))
        elif event.outcome == worker_pb2.OUTCOME_FINISHED:
            self._may_hold.clear()  # one that finishes on prefill has cancelled its ticket on decode
            if self._report.finish is FinishReason.NONE:
                self._watch_hole()  # the end overtook tokens, or they are lost

    def _on_lost(self, worker: str, error: BatonError) -> None:
        """A worker will send nothing more. Fatal, unless what it still owed has come from it or from the other one."""
        self._may_hold.discard(worker)
        is_prefill = worker == self._prefill.worker_id
        if self._report.finish is not FinishReason.NONE:
            self._stats_in = self._stats_in or is_prefill
            return
        if is_prefill and not self._local and self._report.num_tokens:
            self._stats_in = True  # what it counted is in, or lost with it
            self._prefill_error = error
            asyncio.get_running_loop().call_later(HOLE_S, self._inbox.put, AdoptionIsLate())
            return
        self.blamed = worker
        if isinstance(error, PeerRefused):  # found out after the pair was chosen; another one may fit
            raise Unavailable(f"{worker} and its decode worker do not fit: {error.message}") from error
        raise error

    def _on_late_adoption(self) -> None:
        """Between adoption and token 1 lies one step of decode: who is silent for longer has not got the KV."""
        if self._report.num_tokens == 1 and self._report.finish is FinishReason.NONE:
            assert self._prefill_error is not None
            raise self._prefill_error
