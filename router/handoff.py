"""One attempt at a sequence, from Submit to its end: who has it, which tokens are in, what is done when a worker leaves.

States of an attempt (the sequence on one pair of workers, or on one worker that does both):
    1 SUBMITTED   prefill has it. Nothing came yet
    2 STARTED     token 0 came from prefill; the KV is on its way, or adopted
    3 STREAMING   tokens come from decode
    4 WHOLE       the last token came, or the sink wants no more; only the counts are waited for, at most STATS_S
    5 BROKEN      a worker left, failed or lost tokens: what is left of it is cancelled

A BROKEN attempt is followed by another one elsewhere (router/moves.py), which is told every token that the client has. In state
2 not even that is needed where only decode died: prefill, which holds the KV until decode has acknowledged it, is given another
decode worker and ships again (`_reroute`).

Tokens arrive in `on_token`, a plain call from the Session's reader; everything rare arrives in the Inbox and is dealt with in
straight-line code. Event loop only.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from baton import clock
from baton.errors import (
    BatonError,
    DeadlineExceeded,
    Internal,
    PeerRefused,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from baton.log import get_log
from baton.request import FinishReason, Logprobs, Request
from baton.tracing import NO_SPAN, Span
from baton.v1 import worker_pb2
from router import call_trace
from router.call_trace import REROUTED
from router.events import (
    AdoptionIsLate,
    AnswerIsWhole,
    GaveUp,
    HandoffLost,
    HoleIsOld,
    Inbox,
    SequenceEnded,
    SequenceEvent,
    SequenceRefused,
    SinkBroke,
    StatsAreLate,
    TimeIsUp,
    WorkerGone,
)
from router.fleet import Endpoint, Fleet, Placed
from router.holds import Hold
from router.placement import Demand, NoPlace
from router.sequence import SequenceReport, Token, TokenMerge, TokenSink

log = get_log("router.handoff")

HOLE_S = 1.0  # DESIGN section 5
STATS_S = 1.0  # the cancel path's bound (DESIGN section 5): after it the counts are taken as they are


class SinkFailed(Internal):
    """Our own side of an answer failed: no worker's fault, so nothing to be moved for."""


class Attempt:
    """One submission of a sequence to one pair of workers. A `Listener` of both Sessions."""

    def __init__(
        self,
        request: Request,
        placed: Placed,
        fleet: Fleet,
        demand: Demand,
        sink: TokenSink,
        report: SequenceReport,
        deadline_s: float,
        vocab_size: int,
        span: Span = NO_SPAN,
    ) -> None:
        self._request = request
        self._prefill, self._decode, self._holder = placed.prefill, placed.decode, placed.holder
        self._plan, self._explanation = placed.plan, placed.explanation
        self._local = placed.plan.choice.local
        self._fleet = fleet
        self.demand = demand
        self._sink = sink
        self._report = report
        self._deadline_s = deadline_s
        self._vocab_size = vocab_size
        self.span = span  # whoever runs it ends it
        self._inbox = Inbox()
        self._merge = TokenMerge(request.num_output_tokens)
        self._sessions = {endpoint.worker_id: endpoint.session for endpoint in (self._prefill, self._decode)}
        self._may_hold: set[str] = set()  # workers that were not seen to end the sequence
        self._is_first = True  # the next token is this attempt's first
        self._submitted_s = self._first_token_s = 0.0
        self._queued_tokens = 0  # on prefill when it was submitted, its own included
        self._stats_in = False
        self._watched_index = -1  # the missing index a HoleIsOld timer runs for
        self._prefill_hold: Hold | None = None
        self._decode_hold: Hold | None = None
        self._left: set[str] = set()  # decode workers that this attempt was taken away from
        self._num_reroutes = 0
        self._prefill_error: BatonError | None = None  # fatal unless decode turns out to have the sequence
        self.blamed = placed.prefill.worker_id  # whom to avoid when this attempt fails
        self.epochs = {worker_id: session.epoch for worker_id, session in self._sessions.items()}  # of all it went to
        self.fingerprint = ""  # of the workers' model

    async def run(self) -> None:
        """Returns when the answer is whole and counted. Raises: BatonError."""
        deadline: asyncio.TimerHandle | None = None
        try:
            deadline = self._submit()
            await self._follow()
        finally:
            if deadline is not None:
                deadline.cancel()
            self._leave()

    def _leave(self) -> None:
        """Cancel whatever was not seen to end, and hear no more."""
        self._cancel_open()
        for session in self._sessions.values():
            session.detach(self._request.seq)
        for hold in (self._prefill_hold, self._decode_hold):
            if hold is not None:
                hold.release()
        call_trace.say_attempt(self.span, self._report, self._first_token_s, self._num_new)

    def _submit(self) -> asyncio.TimerHandle:
        """Returns the timer of the deadline."""
        num_total = self.demand.max_total_tokens
        num_used = num_total if self._local else self.demand.prompt_tokens
        self._prefill_hold = self._prefill.hold(self._plan.lacking_tokens, num_used)
        if not self._local:
            self._decode_hold = self._decode.hold(0, num_total)
        seq, loop, report = self._request.seq, asyncio.get_running_loop(), self._report
        self._may_hold = set(self._sessions)
        for session in self._sessions.values():
            session.attach(seq, self)
        if self._prefill.session.view is not None:
            self.fingerprint = report.fingerprint = self._prefill.session.view.opened.fingerprint
        now_s = clock.now_s()
        deadline = loop.call_later(max(0.0, self._deadline_s - now_s), self.put, TimeIsUp())
        self._submitted_s, self._queued_tokens = now_s, self._prefill.ledger.waiting_tokens
        if not report.num_tokens:
            report.submitted_s = now_s
        report.prefill_worker, report.decode_worker = self._prefill.worker_id, self._decode.worker_id
        report.explanation = self._explanation
        self._prefill.session.submit(
            self._request,
            None if self._local else self._decode.session.peer(),
            ttl_ms=int((self._deadline_s - now_s) * 1e3),
            pull_from=self._holder.session.peer() if self._holder is not None else None,
            pull_blocks=self._plan.pull.num_blocks if self._plan.pull is not None else 0,
        )
        return deadline

    async def _follow(self) -> None:
        """Read events until the answer is whole and counted."""
        while not self._complete():
            event = await self._inbox.get()
            match event:
                case AnswerIsWhole():
                    pass
                case SequenceEnded(worker) | SequenceRefused(worker) | GaveUp(worker) | WorkerGone(worker) if (
                    worker in self._left
                ):
                    pass  # it came before we left
                case SequenceEnded():
                    self._on_ended(event)
                case SequenceRefused(worker, error):
                    self._may_hold.discard(worker)
                    self._blame(worker, error)
                    self._on_lost(worker, error)
                case GaveUp(worker, error):
                    self._blame(worker, error)
                    self._on_lost(worker, error)
                case SinkBroke():
                    raise SinkFailed("an internal error ended the call")
                case WorkerGone(worker, reason):
                    self._may_hold.discard(worker)
                    self._on_lost(worker, WorkerLost(f"{self._part(worker)} worker {worker} was lost: {reason}"))
                case HandoffLost(error, reroute):
                    if reroute == self._num_reroutes:  # else of a decode worker that was left already
                        self._on_handoff_lost(error)
                case HoleIsOld(index):
                    self._on_old_hole(index)
                case TimeIsUp() if self._whole:
                    return
                case TimeIsUp():
                    raise DeadlineExceeded(f"the call's time ran out after {self._report.num_tokens} tokens")
                case StatsAreLate():
                    return
                case AdoptionIsLate():
                    self._on_late_adoption()

    def put(self, event: SequenceEvent) -> None:
        self._inbox.put(event)

    @property
    def _whole(self) -> bool:
        return self._report.finish is not FinishReason.NONE

    def _complete(self) -> bool:
        return self._whole and self._stats_in

    def _part(self, worker: str) -> str:
        if self._local:
            return "the"
        return "prefill" if worker == self._prefill.worker_id else "decode"

    # -- tokens ------------------------------------------------------------------------------------------------------

    def on_token(
        self, worker: str, index: int, token_id: int, finish: int, logprobs: Logprobs | None, now_s: float
    ) -> None:
        """Give what is now in order to the sink. Called by the Session's reader: raises nothing."""
        report, merge = self._report, self._merge
        if report.finish:
            return
        if token_id >= self._vocab_size or (
            logprobs is not None and max(logprobs.top_ids, default=0) >= self._vocab_size
        ):
            said = f"worker {worker} said a token beyond the vocabulary, [0, {self._vocab_size - 1}]"
            self._inbox.put(GaveUp(worker, Internal(said)))
            return
        try:
            if index == merge.next_index and not finish and not merge.early:  # nearly every token of a stream
                merge.next_index = index + 1
                self._clock(token_id, now_s)
                if self._sink.token(index, token_id, FinishReason.NONE, logprobs):
                    self._finish(FinishReason.NONE)
                return
            self._on_special_token(index, Token(token_id, FinishReason(finish), logprobs), now_s)
        except Exception:  # transport callback: what goes wrong with one answer must not take the Session along
            log.exception("token_failed", request_id=self._request.request_id)
            self._inbox.put(SinkBroke())

    def _on_special_token(self, index: int, token: Token, now_s: float) -> None:
        """The last one, a repeated one, one that comes early, or one that fills a hole, after which others' may follow."""
        merge, first_index = self._merge, self._merge.next_index
        for token_index, ready in enumerate(merge.push(index, token), first_index):
            if ready.finish is FinishReason.CANCELLED:  # by whom but us? Half an answer must not pass for a whole one
                worker = self._owner(token_index)
                self._inbox.put(GaveUp(worker, Unavailable(f"worker {worker} gave the sequence up")))
                return
            self._clock(ready.token_id, now_s)
            stop = self._sink.token(token_index, ready.token_id, ready.finish, ready.logprobs)
            if ready.finish is not FinishReason.NONE and token_index > self._request.num_output_tokens:
                self._may_hold.discard(self._decode.worker_id)  # who said the last token, and needs no Cancel for it
            if stop or ready.finish is not FinishReason.NONE:
                self._finish(ready.finish)
                return
        if merge.early:
            self._watch_hole()

    def _clock(self, token_id: int, now_s: float) -> None:
        """Note the next token in order."""
        report = self._report
        if report.last_token_s:
            report.gaps_s.append(now_s - report.last_token_s)
            if not report.second_token_s:
                report.second_token_s = now_s
        else:
            report.first_token_s = now_s
            report.on_first_token()
        if self._is_first:
            self._is_first = False
            self._first_token_s = now_s
            if self._prefill_hold is not None:
                self._prefill_hold.waiting_tokens = 0
            self._prefill.health.first_token(self._queued_tokens, now_s - self._submitted_s)
        report.last_token_s = now_s
        report.token_ids.append(token_id)

    def _finish(self, finish: FinishReason) -> None:
        """The answer is whole: by the engine's rules, or (NONE) by a stop string, after which the workers need not go on."""
        self._report.finish = finish or FinishReason.STOP
        (self._decode if self._num_new > 1 else self._prefill).health.succeeded(clock.now_s())
        if finish is FinishReason.NONE:
            self._cancel_open()
        if not self._stats_in:
            asyncio.get_running_loop().call_later(STATS_S, self._inbox.put, StatsAreLate())
        self._inbox.put(AnswerIsWhole())

    def _cancel_open(self) -> None:
        """Send Cancel to whoever was not seen to end the sequence."""
        for worker in list(self._may_hold):
            self._cancel(worker, park=self._request.resumption is not None)

    def _cancel(self, worker: str, *, park: bool) -> None:
        """Let a worker end what it may have of the sequence; once."""
        if worker in self._may_hold:
            self._may_hold.discard(worker)
            self._sessions[worker].cancel(self._request.seq, park=park)

    def _watch_hole(self) -> None:
        if self._watched_index != self._merge.next_index:
            self._watched_index = self._merge.next_index
            asyncio.get_running_loop().call_later(HOLE_S, self._inbox.put, HoleIsOld(self._watched_index))

    def _on_old_hole(self, index: int) -> None:
        if self._whole:
            return
        if self._merge.next_index != index:
            if self._decode.worker_id not in self._may_hold:  # it has ended: what lacks now is on its way, or lost, too
                self._watch_hole()
            return
        worker = self._owner(index)
        error = WorkerLost(f"worker {worker} left out token {index} for over {HOLE_S:g} s")
        self._blame(worker, error)
        self._fail(worker, error)

    def _owner(self, index: int) -> str:
        """Who says that token: of an attempt prefill samples the first one."""
        is_first = index == self._request.num_output_tokens
        return (self._prefill if is_first else self._decode).worker_id

    # -- ends --------------------------------------------------------------------------------------------------------

    def _on_ended(self, event: SequenceEnded) -> None:
        self._may_hold.discard(event.worker)
        is_prefill = event.worker == self._prefill.worker_id
        if is_prefill:
            self._count(event)
        if event.outcome == worker_pb2.OUTCOME_FAILED:
            assert event.error is not None
            self._blame(event.worker, event.error)
            self._on_lost(event.worker, event.error, adopted=True)
        elif event.outcome == worker_pb2.OUTCOME_CANCELLED and not self._whole:
            self._on_lost(event.worker, Unavailable(f"worker {event.worker} gave the sequence up"), adopted=True)
        elif event.outcome == worker_pb2.OUTCOME_HANDED_OFF:
            self._prefill.health.succeeded(clock.now_s())
            if event.reroute != self._num_reroutes:  # to one whom we had left when it said so
                raise WorkerLost("the KV went to a decode worker that was lost meanwhile")
        elif event.outcome == worker_pb2.OUTCOME_FINISHED:
            if is_prefill:  # which has cancelled its ticket on decode
                self._may_hold.clear()
            if not self._whole:
                self._watch_hole()  # the end overtook tokens, or they are lost

    def _count(self, event: SequenceEnded) -> None:
        """What prefill did. Of a continued sequence the first attempt's stay: those are of the prompt the client sent."""
        call_trace.say_stats(self.span, event.stats)
        if not self._request.num_output_tokens:
            self._report.stats = event.stats
        if self._plan.pull is not None:
            self._prefill.observe_pull(event.stats, self._plan.pull.nbytes)
        self._prefill.observe_grant(event.stats)
        self._report.handed_off = event.outcome == worker_pb2.OUTCOME_HANDED_OFF
        self._release_prefill()

    def _release_prefill(self) -> None:
        """It has no part in the stream any more, however long that goes on, and nothing more to say of it."""
        self._stats_in = True
        if not self._local and self._prefill_hold is not None:
            self._prefill_hold.release()

    def _on_handoff_lost(self, error: BatonError) -> None:
        if self._num_new > 1:  # decode has it all the same, only prefill was not told: its link broke in between
            self._cancel(self._prefill.worker_id, park=False)
            return
        self._blame(self._decode.worker_id, error)
        self._on_lost(self._decode.worker_id, error)

    def _on_lost(self, worker: str, error: BatonError, *, adopted: bool = False) -> None:
        """A worker will send nothing more. Fatal, unless what it still owed has come from it or from the other one.

        `adopted`: it says so itself, so that it had all of the KV, and prefill has let go of it or is about to.
        """
        is_prefill = worker == self._prefill.worker_id
        if is_prefill:
            self._release_prefill()  # what it counted is in, or lost with it
        if self._whole:
            return
        if is_prefill and self._may_be_adopted():
            self._prefill_error = error
            asyncio.get_running_loop().call_later(HOLE_S, self._inbox.put, AdoptionIsLate())
            return
        if not is_prefill and not adopted and self._reroute(error):
            return
        if not is_prefill and self._prefill_error is not None and self._num_new == 1:
            self._fail(self._prefill.worker_id, self._prefill_error)  # decode lacks what prefill can send no more
        if isinstance(error, PeerRefused):  # found out after the pair was chosen; another one may fit
            error = Unavailable(f"{worker} and its decode worker do not fit: {error.message}")
        self._fail(worker, error)

    def _may_be_adopted(self) -> bool:
        """Whether decode may go on without prefill. Who was named by a Reroute has hardly got the KV before it says so."""
        return not self._local and (self._num_new > 1 or (self._num_new == 1 and not self._num_reroutes))

    def _fail(self, worker: str, error: BatonError) -> NoReturn:
        self.blamed = worker
        raise error

    def _reroute(self, error: BatonError) -> bool:
        """Decode is lost, prefill still has what it computed: let it ship that to another decode worker, if there is one."""
        lost, prefill_id = self._decode, self._prefill.worker_id
        if prefill_id not in self._may_hold or self._num_new > 1:  # with more, the KV that is needed was lost, too
            return False
        self._left.add(lost.worker_id)
        placed = self._fleet.find_place(self.demand, frozenset(self._left), prefer=prefill_id)
        if isinstance(placed, NoPlace) or placed.prefill is not self._prefill or placed.decode.worker_id in self._left:
            return False
        if placed.plan.choice.local:
            return False
        log.warning(
            "handoff_rerouted",
            request_id=self._request.request_id,
            worker=lost.worker_id,
            decode_worker=placed.decode.worker_id,
            reason=error.message,
        )
        self.span.event(REROUTED, call_trace.reroute(lost.worker_id, placed.decode.worker_id, error.code))
        self._drop(lost)
        self.blamed = lost.worker_id
        self._decode = placed.decode
        self._sessions[placed.decode.worker_id] = placed.decode.session
        self.epochs[placed.decode.worker_id] = placed.decode.session.epoch
        self._may_hold.add(placed.decode.worker_id)
        if self._decode_hold is not None:
            self._decode_hold.release()
        self._decode_hold = placed.decode.hold(0, self.demand.max_total_tokens)
        placed.decode.session.attach(self._request.seq, self)
        self._num_reroutes += 1
        self._prefill.session.reroute(self._request.seq, placed.decode.session.peer(), self._num_reroutes)
        self._report.decode_worker = placed.decode.worker_id
        self._report.explanation = placed.explanation
        self._report.num_reroutes += 1
        return True

    def _drop(self, endpoint: Endpoint) -> None:
        """Hear no more of a worker, which gives up what it may have: what it said meanwhile, no client has."""
        self._cancel(endpoint.worker_id, park=False)
        self._sessions.pop(endpoint.worker_id).detach(self._request.seq)

    def _blame(self, worker: str, error: BatonError) -> None:
        """Note a failure of a worker, or of its dealings with the other one; the loss of a Session is noted where it is lost."""
        now_s, first, second = clock.now_s(), self._prefill, self._decode
        if self._local or isinstance(error, Internal):
            self._endpoint(worker).health.failed(error, now_s)
            return
        for endpoint, peer in ((first, second), (second, first)):
            if endpoint.worker_id == worker or isinstance(error, TransferFailed):  # whose fault is a transfer's?
                endpoint.health.failed(error, now_s, peer.worker_id)

    def _endpoint(self, worker: str) -> Endpoint:
        return self._prefill if worker == self._prefill.worker_id else self._decode

    def _on_late_adoption(self) -> None:
        """Between adoption and token 1 lies one step of decode: who is silent for longer has not got the KV."""
        if self._num_new == 1 and not self._whole:
            assert self._prefill_error is not None
            self._fail(self._prefill.worker_id, self._prefill_error)

    @property
    def _num_new(self) -> int:
        """Tokens that came in this attempt."""
        return self._report.num_tokens - self._request.num_output_tokens
