"""One API call: admitted, tokenised, answered by n sequences, counted once.

    async with calls.open(spec, arrival_s) as call:
        done = await call.tell(audience)      the audience hears each token within the worker's message, no task between
    or
        async for event in call:              Pieces ..., ChoiceFinished per choice, CallDone last: for writers that wait
            ...

Leaving the block, however, ends every sequence of the call; an iterating client that does not take its answer makes it be
left, by ClientStuck. Whatever the outcome, the `finally` of `open` has it counted (router/ledger.py). Event loop only.
"""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from baton import clock
from baton.config import RouterConfig
from baton.errors import BatonError, Cancelled, Internal, Overloaded, Unauthenticated, Unavailable
from baton.ids import seq_counter
from baton.log import get_log
from baton.request import FinishReason, Logprobs, Request
from baton.slo import SLO
from baton.timings import Timings
from baton.tracing import NO_SPAN, Span, Tracer
from router import call_trace
from router.admission import MIN_RETRY_AFTER_S, Slack, Turn
from router.call_events import Audience, CallDone, CallEvent, ChoiceSink, Outbox, PieceSink, Queued, Usage
from router.call_spec import CallSpec, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.cost import Costs
from router.detokenizer import TextStream, TokenTable
from router.explain import brief_json
from router.fleet import Fleet
from router.goodput import Goodput, GoodputGauges
from router.key_file import KeyFile
from router.ledger import Ledger, tpot_ms
from router.metrics import RouterMetrics
from router.moves import Sequences
from router.placement import Demand
from router.prefix_index import Hashes
from router.resume import ResumableCalls, Resumed, ResumePoint, replay, resumption
from router.retry_budget import RetryBudget
from router.sequence import SequenceJob, SequenceReport
from router.service_tiers import BATCH
from router.slo_watch import SloWatch
from router.tenants import Tenant
from router.tokenizer import Tokenizer
from router.turns import Place, Turns
from router.validate import Limits, check, resolve

log = get_log("router.call")


SLACK_S = 2.0  # behind the deadline: for the error that the deadline itself makes


class ClientStuck(Cancelled):
    """The client does not take what is sent to it, so neither would it take an error: drop the connection."""


Serve = Callable[["Call", int, Audience], Coroutine[None, None, None]]


class Call:
    """An answer being made; hear it once, by `tell` or by iterating."""

    def __init__(
        self,
        spec: CallSpec,
        slo: SLO,
        request: Request,
        deadline_s: float,
        arrival_s: float,
        serve: Serve,
        place: Place,
        backlog_bytes: int,
        resumed: Resumed | None = None,
        span: Span = NO_SPAN,
    ) -> None:
        self.spec = spec
        self.slo = slo  # in force when it came
        self.request = request  # of choice 0, without a seq
        self.request_id = request.request_id
        self.prompt_tokens = len(request.token_ids)
        self.reports = [SequenceReport() for _ in range(spec.sampling.n or 1)]
        self.hashes: Hashes = {}  # of the prompt's blocks
        self.place = place
        self.deadline_s = deadline_s
        self.arrival_s = arrival_s
        self.done: CallDone | None = None  # it ended well
        self.stuck = False  # its reader was interrupted
        self.resumed = resumed  # None: a new call
        self.span = span
        self.told = asyncio.Event()  # nobody serves it any more
        self._serve = serve
        self._teller: asyncio.Task[object] | None = None
        self._failure: BatonError | None = None
        self._backlog_bytes = backlog_bytes
        self._telling: asyncio.Task[None] | None = None  # to the outbox
        self._reader: asyncio.Task[object] | None = None
        self._patience: asyncio.TimerHandle | None = None

    @functools.cached_property
    def leader_began(self) -> asyncio.Event:
        """Choice 0 has a token: its prefill worker has the prompt in its cache. Made where there is more than one choice."""
        return asyncio.Event()

    @functools.cached_property
    def _outbox(self) -> Outbox:
        """Made for writers that wait."""
        return Outbox(self._backlog_bytes)

    async def tell(self, audience: Audience) -> CallDone:
        """Serve every choice to its end.

        Raises:
            BatonError: the call failed; the audience may have heard a part of it.
        """
        try:
            if self._failure is not None:
                raise self._failure
            self._teller = asyncio.current_task()
            if len(self.reports) == 1:
                await self._serve(self, 0, audience)
            else:
                await self._serve_all(audience)
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            _uncancel()
            raise self._failure from None
        finally:
            self._teller = None
            self.told.set()
        self.done = CallDone(self.usage(), self.timings())
        return self.done

    def fail(self, error: BatonError) -> None:
        """End the call with an error that did not come from its sequences."""
        if self._failure is None:
            self._failure = error
            if self._teller is not None:
                self._teller.cancel()

    async def _serve_all(self, audience: Audience) -> None:
        """The first choice that fails ends the others."""
        tasks = [asyncio.create_task(self._serve(self, choice, audience)) for choice in range(len(self.reports))]
        try:
            await asyncio.gather(*tasks)
        finally:
            await _cancel(tasks)

    # -- for writers that wait ---------------------------------------------------------------------------------------

    async def __aiter__(self) -> AsyncIterator[CallEvent]:
        loop = asyncio.get_running_loop()
        self._reader = asyncio.current_task()
        self._patience = loop.call_later(self.deadline_s + SLACK_S - clock.now_s(), self.lose_patience)
        self._telling = asyncio.create_task(self._tell_outbox(), name=self.request_id)
        while True:
            for event in await self._outbox.take():
                if isinstance(event, BatonError):
                    raise event
                yield event
                if isinstance(event, CallDone):
                    return

    def choice(self, choice: int, text: TextStream) -> PieceSink:
        """The call is its own outbox's Audience."""
        return PieceSink(choice, text, self._put)

    def lose_patience(self) -> None:
        """Interrupt the reader, wherever it waits: its time is over, or the client is too far behind."""
        if self._reader is not None and not self.stuck:
            self.stuck = True
            self._reader.cancel()

    async def close(self) -> None:
        """Nobody reads any more."""
        self._reader = None
        if self._patience is not None:
            self._patience.cancel()
        try:
            if self._telling is not None:
                await _cancel([self._telling])
        finally:
            self.told.set()  # also where it never came to be served

    async def _tell_outbox(self) -> None:
        try:
            self._put(await self.tell(self))
        except BatonError as error:
            self._put(error)

    def _put(self, event: Queued) -> None:
        if not self._outbox.put(event):
            self.lose_patience()

    # -- counts ------------------------------------------------------------------------------------------------------

    def explanation(self) -> str:
        """Why its first answer is made where it is, as JSON on one line; "" where nobody asked, or it has no place yet."""
        told = self.reports[0].explanation if self.spec.labels.explain else None
        return brief_json(told) if told is not None else ""

    def usage(self) -> Usage:
        """As far as the call has come."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(report.num_tokens for report in self.reports),
            cached_tokens=self.reports[0].stats.cached_tokens,
        )

    def timings(self) -> Timings:
        first = self.reports[0]
        started = [report.first_token_s for report in self.reports if report.first_token_s]
        return Timings(
            queue_ms=max(0.0, (first.submitted_s - self.arrival_s) * 1e3) + first.stats.queue_ms,
            prefill_ms=first.stats.prefill_ms,
            handoff_gap_ms=(first.handoff_gap_s or 0.0) * 1e3,
            ttft_ms=(min(started) - self.arrival_s) * 1e3 if started else 0.0,
            tpot_ms=tpot_ms(first),
            kv_bytes=sum(report.stats.kv_bytes for report in self.reports),
            kv_transfer_ms=first.stats.kv_transfer_ms,
            transport=first.stats.transport,
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
        )


class Calls:
    """Opens calls and knows the running ones."""

    def __init__(
        self,
        config: RouterConfig,
        limits: Limits,
        tokenizer: Tokenizer,
        fleet: Fleet,
        slo_watch: SloWatch,
        metrics: RouterMetrics,
        router_epoch: int,
        tracer: Tracer,
    ) -> None:
        self._config = config
        self.limits = limits
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._slo_watch = slo_watch
        self._tracer = tracer
        self.goodput = Goodput(clock.now_s())
        metrics.registry.add(GoodputGauges(self.goodput, clock.now_s))
        self._ledger = Ledger(slo_watch, metrics, self.goodput)
        self.costs = Costs(config.cost, fleet, metrics.registry, metrics.admission)
        self._turns = Turns(config, fleet, metrics.admission)
        self.keys = KeyFile(config.api_keys_file)
        budget = RetryBudget(config.max_inflight)
        self._sequences = Sequences(fleet, seq_counter(router_epoch), budget, config.max_retries, limits.vocab_size)
        self.resumable = ResumableCalls(fleet)
        self._running: set[Call] = set()
        self._stopping = False
        self._num_inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        return self._num_inflight

    def oldest_queued_s(self) -> float:
        """How long the call has waited that waits longest for its turn; 0 = none waits."""
        return self._turns.oldest_s()

    def queued_tokens(self) -> int:
        """Of prompts that wait for their turn."""
        return self._turns.queued_tokens()

    def slack(self) -> Slack:
        """What the other classes leave to batches, under the TPOT targets in force."""
        return self._turns.slack(
            BATCH, [slo.pace_ms / 1e3 for slo in self._slo_watch.classes.values() if slo.name != BATCH]
        )

    @property
    def table(self) -> TokenTable:
        return self._tokenizer.table

    def prompt_text(self, prompt: Prompt) -> str:
        """A prompt as an answer that echoes it begins; messages are never echoed."""
        match prompt:
            case TextPrompt(text):
                return text
            case TokenPrompt(token_ids):
                return self._tokenizer.decode(token_ids)
            case ChatPrompt():
                return ""

    def tenant(self, fields: Mapping[str, str]) -> Tenant:
        """Who sends these HTTP headers, or gRPC metadata. Raises: Unauthenticated."""
        return self.keys.ring.tenant(fields)

    def tenant_named(self, name: str) -> Tenant:
        """Whose work was taken earlier. Raises: Unauthenticated, where no key is its any more."""
        tenant = self.keys.ring.tenants.get(name)
        if tenant is None:
            raise Unauthenticated("the API key that sent it is not known here any more", field="authorization")
        return tenant

    def abort(self, tenant: Tenant, request_id: str) -> int:
        """End the tenant's calls that carry this label; returns how many."""
        running = [call for call in self._running if call.request_id == request_id]
        named = [call for call in running if call.spec.tenant.name == tenant.name]  # its limits may be others since
        for call in named:
            call.fail(Cancelled("the call was aborted"))
        self.resumable.forget(tenant.name, request_id)
        return len(named)

    def unready_reason(self) -> str:
        """Why no call could be served now; "" = one could."""
        return _stopping().message if self._stopping else self._fleet.unready_reason()

    @property
    def takes_calls(self) -> bool:
        return not self._stopping

    def close_door(self) -> None:
        """Take no more calls."""
        self._stopping = True

    async def wait_idle(self) -> None:
        """Return once no call is in flight."""
        await self._idle.wait()

    def stop(self) -> None:
        """Take no more calls and end the running ones with an error that says why."""
        self.close_door()
        for call in self._running:
            call.fail(_stopping())

    def refused(self, api: str, error: BatonError) -> None:
        """Count a call that could not even be parsed."""
        self._ledger.refused(api, error.code, None)

    @asynccontextmanager
    async def open(
        self, spec: CallSpec, arrival_s: float, resumed: Resumed | None = None
    ) -> AsyncIterator[Call]:  # fmt: skip
        """Check, admit, tokenise and start a call. `arrival_s` (monotonic) is when its first byte came.

        `resumed`: go on with a call that was checked and tokenised before; `spec` is its own.

        Raises:
            BatonError: it was refused; or, from the iteration, it failed.
        """
        outcome = "finished"
        call: Call | None = None
        slo: SLO | None = None
        place: Place | None = None
        span = call_trace.begin(self._tracer, spec, self.limits.model, arrival_s, resumed)
        self._num_inflight += 1
        self._idle.clear()
        try:
            if resumed is None:
                check(spec, self.limits)
            slo = self._slo_watch.targets(spec.labels)
            if resumed is None:
                self._ledger.arrived(slo)
            place = self._admit(spec, slo)
            deadline_s = arrival_s + (spec.labels.timeout_s or self._config.request_timeout_s)
            with span.part("tokenize"):
                call = await self._start(spec, slo, place, arrival_s, deadline_s, resumed, span)
            try:
                yield call
            except asyncio.CancelledError:
                if not call.stuck:
                    raise
                _uncancel()
                raise ClientStuck("the client does not read its answer, or too slowly") from None
            finally:
                self._running.discard(call)
                if call.request.resumption is not None:
                    self.resumable.discard(call.request.resumption.key, call)
                await call.close()
            if not call.done:
                outcome = "cancelled"
        except BaseException as error:
            outcome = _outcome(error, call)
            if call is None and isinstance(error, Overloaded) and error.field:
                slo = None  # a limit of the caller's key says nothing of the class
            raise
        finally:
            if place is not None:
                place.close()
            self._num_inflight -= 1
            if not self._num_inflight:
                self._idle.set()
            self._count(spec, slo, call, outcome, clock.now_s() - arrival_s)
            if outcome != "finished":
                span.fail(outcome)
            span.end()

    def _count(self, spec: CallSpec, slo: SLO | None, call: Call | None, outcome: str, call_s: float) -> None:
        if call is None or slo is None:
            self._ledger.refused(spec.api, outcome, slo)
        else:
            self._ledger.ended(call, slo, outcome, call_s)
            self.costs.charge(spec.tenant, call.reports)

    def _admit(self, spec: CallSpec, slo: SLO) -> Place:
        """What can be said before the prompt is tokenised."""
        if self._stopping:
            raise _stopping()
        spec.tenant.check(slo.name, spec.priority or slo.priority)
        return self._turns.knock(spec.tenant, spec.sampling.n or 1, slo.name)

    async def _start(
        self,
        spec: CallSpec,
        slo: SLO,
        place: Place,
        arrival_s: float,
        deadline_s: float,
        resumed: Resumed | None,
        span: Span,
    ) -> Call:
        request = (
            resumed.found.request if resumed is not None else await self._request(spec, slo, arrival_s, deadline_s)
        )
        backlog_bytes = self._config.client_backlog_bytes
        call = Call(spec, slo, request, deadline_s, arrival_s, self._serve, place, backlog_bytes, resumed, span)
        call.hashes = await self._fleet.hash_prompt(request)
        cached_tokens = self._fleet.cached_tokens(call.hashes)
        if resumed is None:
            self._ledger.read(call, slo, cached_tokens)
        place.arrive(self._turn(call, slo, cached_tokens), call.reports)
        if request.resumption is not None:
            self.resumable.add(request.resumption.key, call)
        self._running.add(call)
        return call

    def _turn(self, call: Call, slo: SLO, cached_tokens: int) -> Turn:
        request, sampling = call.request, call.request.sampling
        return Turn(
            tenant=call.spec.tenant,
            band=request.priority,
            tokens=len(request.token_ids) - cached_tokens,
            since_s=call.arrival_s,
            slo_class=slo.name,
            ttft_s=slo.ttft_ms / 1e3,
            tpot_s=slo.pace_ms / 1e3,
            class_tpot_s=self._slo_watch.classes.get(slo.name, slo).pace_ms / 1e3,  # it may be gone since
            e2e_s=slo.e2e_ms / 1e3 if slo.e2e_ms is not None else math.inf,
            deadline_s=call.deadline_s,
            num_seqs=len(call.reports),
            prompt_tokens=len(request.token_ids),
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            asks_ttft=call.spec.labels.slo_ttft_ms is not None,
            value=slo.weight,
            was_accepted=call.resumed is not None,
            demand=self._demand(call),
        )

    def _demand(self, call: Call) -> Demand:
        """Of choice 0, as placement will be asked."""
        num_tokens, slo = call.prompt_tokens, call.slo
        return Demand(
            num_tokens,
            num_tokens + call.request.sampling.max_tokens,
            call.hashes,
            session_id=call.spec.labels.session_id,
            ttft_ms=slo.ttft_ms,
            tpot_ms=slo.pace_ms,
            itl_p99_ms=self._slo_watch.itl_p99_ms,
        )

    async def _request(self, spec: CallSpec, slo: SLO, arrival_s: float, deadline_s: float) -> Request:
        pools = await self._fleet.wait_for_limits(min(deadline_s, arrival_s + self._config.unavailable_wait_s))
        token_ids = await self._token_ids(spec.prompt, pools.max_prompt_tokens, spec.tenant.salt)
        sampling = resolve(spec, len(token_ids), pools, secrets.randbits(64))
        return Request(
            seq=0,
            token_ids=token_ids,
            sampling=sampling,
            priority=spec.priority or slo.priority,
            slo_class=slo.name,
            tenant_salt=spec.tenant.salt,
            request_id=spec.labels.request_id or secrets.token_hex(16),
            resumption=resumption(spec, spec.tenant.name, slo.name),
        )

    async def _token_ids(self, prompt: Prompt, max_tokens: int, salt: bytes) -> tuple[int, ...]:
        match prompt:
            case TextPrompt(text, field):
                return await self._tokenizer.encode(text, field=field, max_tokens=max_tokens, salt=salt)
            case ChatPrompt(messages, field):
                return await self._tokenizer.encode_chat(messages, field=field, max_tokens=max_tokens, salt=salt)
            case TokenPrompt(token_ids):
                return tuple(token_ids)

    async def _serve(self, call: Call, choice: int, audience: Audience) -> None:
        """Run one choice: the worker-facing boundary of a call.

        Raises:
            BatonError: it did not finish.
        """
        try:
            await self._serve_choice(call, choice, audience)
        except BatonError:
            raise
        except Exception:
            log.exception("sequence_failed", request_id=call.request_id)
            raise Internal("an internal error ended the call") from None

    async def _serve_choice(self, call: Call, choice: int, audience: Audience) -> None:
        """Wait for a turn, serve, end the answer.

        Choice 0 leads: the others begin with its first token, on its prefill worker, so the prompt is computed once. A
        leader that fails, or runs out of time, ends the call and with it this task.
        """
        request, prefer = call.request, ""
        with call.span.part("admission") if choice == 0 else NO_SPAN:
            await call.place.wait()
        if choice:
            await call.leader_began.wait()
            request = replace(request, sampling=replace(request.sampling, sample_index=choice))
            prefer = call.reports[0].prefill_worker
        text = TextStream(self._tokenizer.table, call.spec.stop, request.sampling.min_tokens)
        sink = audience.choice(choice, text)
        leads = choice == 0 and len(call.reports) > 1
        report = call.reports[choice]
        point = call.resumed.points[choice] if call.resumed is not None else ResumePoint()
        job = SequenceJob(
            request,
            call.deadline_s,
            self._config.unavailable_wait_s,
            session_id=call.spec.labels.session_id,
            ttft_ms=call.slo.ttft_ms,
            tpot_ms=call.slo.pace_ms,
            itl_p99_ms=self._slo_watch.itl_p99_ms,
            explain=call.spec.labels.explain,
            prefer=prefer,
            hashes=call.hashes,
            fingerprint=point.fingerprint,
            span=call.span,
        )
        replay(point, text, sink, report)
        if report.token_ids:
            call.leader_began.set()
        if not report.finish:
            await self._sequences.serve(job, _Leader(sink, call.leader_began) if leads else sink, report)
        if text.stop_match is not None:
            report.finish = FinishReason.STOP
        sink.end(report.finish)


class _Leader:
    """The sink of the choice that the others wait for."""

    def __init__(self, sink: ChoiceSink, began: asyncio.Event) -> None:
        self._sink = sink
        self._began = began

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        self._began.set()
        return self._sink.token(index, token_id, finish, logprobs)


def _stopping() -> Unavailable:
    return Unavailable("this router is stopping", retry_after_s=MIN_RETRY_AFTER_S)


def _uncancel() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(error: BaseException, call: Call | None) -> str:
    if isinstance(error, BatonError):
        return error.code
    if call is not None and call.done:
        return "finished"
    return "cancelled" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else Internal.code
