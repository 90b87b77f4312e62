"""One API call: admitted, tokenised, answered by n sequences, counted once.

    async with calls.open(spec, arrival_s) as call:
        async for event in call:      Pieces ..., ChoiceFinished per choice, CallDone last
            ...

Leaving the block, however, ends every sequence of the call; a client that does not take its answer makes it be left, by
ClientStuck. Whatever the outcome, the `finally` of `open` counts it: the in-flight count, outcome counters, usage, SLO
verdict and the log line come from there and nowhere else. Event loop only.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.config import RouterConfig
from baton.errors import BatonError, Cancelled, Internal, InvalidRequest, Overloaded, Unavailable
from baton.ids import seq_counter
from baton.log import get_log
from baton.request import FinishReason, Logprobs, Request, SampledToken
from baton.slo import SLO, Verdict
from baton.timings import Timings
from baton.v1 import worker_pb2
from router.admission import MIN_RETRY_AFTER_S, Admission
from router.call_events import CallDone, CallEvent, ChoiceFinished, Outbox, Piece, Queued, Usage
from router.call_spec import CallSpec, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from router.detokenizer import TextStream, TokenTable
from router.fleet import Fleet
from router.handoff import SequenceJob, SequenceReport, serve_sequence
from router.metrics import CallRecord, RouterMetrics, TransferRecord
from router.slo_watch import SloWatch
from router.tokenizer import Tokenizer
from router.validate import Limits, check, resolve

log = get_log("router.call")


SLACK_S = 2.0  # behind the deadline: for the error that the deadline itself makes


class ClientStuck(Cancelled):
    """The client does not take what is sent to it, so neither would it take an error: drop the connection."""


class Call:
    """An answer being made; iterate it once."""

    def __init__(
        self, spec: CallSpec, request_id: str, prompt_tokens: int, n: int, arrival_s: float, backlog_bytes: int
    ) -> None:
        self.spec = spec
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.reports = [SequenceReport() for _ in range(n)]
        self.arrival_s = arrival_s
        self.finished = False
        self.leader_began = (
            asyncio.Event()
        )  # choice 0 has its first token: its prefill worker has the prompt in its cache
        self._outbox = Outbox(backlog_bytes)
        self._patience: asyncio.Timeout | None = None

    def put(self, event: Queued) -> None:
        """Called by the sequences, and by Abort."""
        if not self._outbox.put(event) and self._patience is not None:
            patience, self._patience = self._patience, None
            patience.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def patience(self, until_s: float) -> AsyncIterator[None]:
        """Interrupt the block, wherever it waits, at `until_s` (monotonic) or when the client is too far behind.

        Raises:
            ClientStuck: it was interrupted.
        """
        try:
            async with asyncio.timeout(until_s - time.monotonic()) as self._patience:
                yield
        except TimeoutError:
            raise ClientStuck("the client does not read its answer, or too slowly") from None
        finally:
            self._patience = None

    async def __aiter__(self) -> AsyncIterator[CallEvent]:
        num_open = len(self.reports)
        while num_open:
            for event in await self._outbox.take():
                if isinstance(event, BatonError):
                    raise event
                num_open -= isinstance(event, ChoiceFinished)
                yield event
        self.finished = True
        yield CallDone(self.usage(), self.timings())

    def usage(self) -> Usage:
        """As far as the call has come."""
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=sum(report.num_tokens for report in self.reports),
            cached_tokens=self.reports[0].stats.cached_tokens,
        )

    def timings(self) -> Timings:
        first = self.reports[0]
        started = [report.first_token_s for report in self.reports if report.num_tokens]
        handed_over = first.prefill_worker != first.decode_worker and first.num_tokens > 1
        return Timings(
            queue_ms=max(0.0, (first.submitted_s - self.arrival_s) * 1e3) + first.stats.queue_ms,
            prefill_ms=first.stats.prefill_ms,
            handoff_gap_ms=(first.second_token_s - first.first_token_s) * 1e3 if handed_over else 0.0,
            ttft_ms=(min(started) - self.arrival_s) * 1e3 if started else 0.0,
            tpot_ms=_tpot_ms(first),
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
    ) -> None:
        self._config = config
        self._limits = limits
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._slo_watch = slo_watch
        self._metrics = metrics
        self._admission = Admission(config.max_inflight)
        self._seqs = seq_counter(router_epoch)
        self._running: set[Call] = set()
        self._stopping = False
        self._num_inflight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_inflight(self) -> int:
        return self._num_inflight

    @property
    def table(self) -> TokenTable:
        return self._tokenizer.table

    def abort(self, request_id: str) -> int:
        """End the calls that carry this label; returns how many."""
        named = [call for call in self._running if call.request_id == request_id]
        for call in named:
            call.put(Cancelled("the call was aborted"))
        return len(named)

    def unready_reason(self) -> str:
        """Why no call could be served now; "" = one could."""
        return _stopping().message if self._stopping else self._fleet.unready_reason()

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
            call.put(_stopping())

    def refused(self, api: str, error: BatonError) -> None:
        """Count a call that could not even be parsed."""
        self._metrics.count_outcome(api, error.code)

    @asynccontextmanager
    async def open(self, spec: CallSpec, arrival_s: float) -> AsyncIterator[Call]:
        """Check, admit, tokenise and start a call. `arrival_s` (monotonic) is when its first byte came.

        Raises:
            BatonError: it was refused; or, from the iteration, it failed.
        """
        outcome = "finished"
        call: Call | None = None
        slo: SLO | None = None
        self._num_inflight += 1
        self._idle.clear()
        try:
            check(spec, self._limits)
            slo = self._slo_watch.targets(spec.labels)
            self._admit()
            deadline_s = arrival_s + (spec.labels.timeout_s or self._config.request_timeout_s)
            call, tasks = await self._start(spec, slo, arrival_s, deadline_s)
            try:
                async with call.patience(deadline_s + SLACK_S):
                    yield call
            finally:
                self._running.discard(call)
                await _cancel(tasks)
            if not call.finished:
                outcome = "cancelled"
        except BaseException as error:
            outcome = _outcome(error, call)
            raise
        finally:
            self._num_inflight -= 1
            if not self._num_inflight:
                self._idle.set()
            self._count(spec, slo, call, outcome, arrival_s)

    def _admit(self) -> None:
        if self._stopping:
            raise _stopping()
        if shed := self._admission.decide(self._num_inflight - 1):
            raise Overloaded(shed.reason, retry_after_s=shed.retry_after_s)

    async def _start(
        self, spec: CallSpec, slo: SLO, arrival_s: float, deadline_s: float
    ) -> tuple[Call, list[asyncio.Task[None]]]:
        pools = await self._fleet.wait_for_limits(min(deadline_s, arrival_s + self._config.unavailable_wait_s))
        token_ids = await self._token_ids(spec.prompt, pools.max_prompt_tokens)
        sampling = resolve(spec, len(token_ids), pools, secrets.randbits(64))
        request = Request(
            seq=0,
            token_ids=token_ids,
            sampling=sampling,
            priority=spec.priority or slo.priority,
            slo_class=slo.name,
            request_id=spec.labels.request_id or secrets.token_hex(16),
        )
        call = Call(
            spec, request.request_id, len(token_ids), spec.sampling.n or 1, arrival_s, self._config.client_backlog_bytes
        )
        self._running.add(call)
        tasks = [
            asyncio.create_task(self._answer(call, choice, request, deadline_s), name=f"{request.request_id}/{choice}")
            for choice in range(len(call.reports))
        ]
        return call, tasks

    async def _token_ids(self, prompt: Prompt, max_tokens: int) -> tuple[int, ...]:
        match prompt:
            case TextPrompt(text, field):
                return await self._tokenizer.encode(text, field=field, max_tokens=max_tokens)
            case ChatPrompt(messages, field):
                return await self._tokenizer.encode_chat(messages, field=field, max_tokens=max_tokens)
            case TokenPrompt(token_ids):
                return tuple(token_ids)

    async def _answer(self, call: Call, choice: int, request: Request, deadline_s: float) -> None:
        """Run one choice; its end, good or bad, is the last thing put. The worker-facing boundary of a call.

        Choice 0 leads: the others begin with its first token, on its prefill worker, so the prompt is computed once. A
        leader that fails, or runs out of time, ends the call and with it this task.
        """
        if choice:
            await call.leader_began.wait()
        sampling = replace(request.sampling, sample_index=choice)
        text = TextStream(self._tokenizer.table, call.spec.stop, sampling.min_tokens)
        report = call.reports[choice]
        try:
            job = SequenceJob(
                replace(request, sampling=sampling),
                deadline_s,
                self._config.unavailable_wait_s,
                session_id=call.spec.labels.session_id,
                prefer=call.reports[0].prefill_worker if choice else "",
            )
            await serve_sequence(job, self._fleet, self._seqs, _Sink(call, choice, text), report)
        except BatonError as error:
            call.put(error)
            return
        except Exception:
            log.exception("sequence_failed", request_id=request.request_id)
            call.put(Internal("an internal error ended the call"))
            return
        if text.stop_match is not None:
            report.finish = FinishReason.STOP
        if tail := text.finish(cut=report.finish is FinishReason.LENGTH):
            call.put(Piece(choice, tail, None))
        call.put(ChoiceFinished(choice, report.finish, text.stop_match or ""))

    def _count(self, spec: CallSpec, slo: SLO | None, call: Call | None, outcome: str, arrival_s: float) -> None:
        self._metrics.count_outcome(spec.api, outcome)
        call_s = time.monotonic() - arrival_s
        if call is None:
            if slo is not None and outcome not in ("invalid_request", "not_found", "cancelled"):
                self._judged(slo.name, Verdict.FAILED)
            log.info("call_refused", api=spec.api, outcome=outcome)
            return
        self._admission.observe(call_s)
        assert slo is not None
        usage, timings = call.usage(), call.timings()
        verdict = _verdict(call, slo, timings, call_s, outcome)
        if verdict is not None:
            self._judged(slo.name, verdict)
        self._metrics.observe(_record(call, slo.name, usage, timings, call_s, outcome))
        log.info(
            "call_ended",
            request_id=call.request_id,
            api=spec.api,
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
            num_retries=sum(report.num_retries for report in call.reports),
        )

    def _judged(self, slo_class: str, verdict: Verdict) -> None:
        self._slo_watch.count(slo_class, verdict)
        self._metrics.count_verdict(slo_class, verdict)


class _Sink:
    """Turns one choice's tokens into Pieces."""

    def __init__(self, call: Call, choice: int, text: TextStream) -> None:
        self._call = call
        self._choice = choice
        self._text = text

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        ends_by_token = finish is FinishReason.STOP  # EOS or a stop token: counted, but no text
        text = "" if ends_by_token else self._text.push(token_id)
        self._call.put(Piece(self._choice, text, SampledToken(0, index, token_id, finish, logprobs)))
        self._call.leader_began.set()
        return self._text.stop_match is not None


def _stopping() -> Unavailable:
    return Unavailable("this router is stopping", retry_after_s=MIN_RETRY_AFTER_S)


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(error: BaseException, call: Call | None) -> str:
    if isinstance(error, BatonError):
        return error.code
    if call is not None and call.finished:
        return "finished"
    return "cancelled" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else Internal.code


def _tpot_ms(report: SequenceReport) -> float:
    if report.num_tokens < 2:
        return 0.0
    return (report.last_token_s - report.first_token_s) * 1e3 / (report.num_tokens - 1)


def _itl_p99_ms(report: SequenceReport) -> float:
    """The gap that 99 % of the gaps do not exceed."""
    gaps_s = sorted(report.gaps_s)
    return gaps_s[math.ceil(0.99 * len(gaps_s)) - 1] * 1e3 if gaps_s else 0.0


def _verdict(call: Call, slo: SLO, timings: Timings, call_s: float, outcome: str) -> Verdict | None:
    """None where the caller left or asked for the impossible: nobody missed a target."""
    if outcome in ("cancelled", InvalidRequest.code):
        return None
    if outcome != "finished":
        return Verdict.FAILED
    return slo.verdict(
        ttft_ms=timings.ttft_ms,
        tpot_ms=max(map(_tpot_ms, call.reports)),
        itl_p99_ms=max(map(_itl_p99_ms, call.reports)),
        e2e_ms=call_s * 1e3,
    )


def _transfer(stats: worker_pb2.SeqStats) -> TransferRecord:
    return TransferRecord(
        stats.transport, stats.kv_bytes, stats.kv_transfer_ms / 1e3, stats.exposed_transfer_ms / 1e3
    )  # fmt: skip


def _record(
    call: Call, slo_class: str, usage: Usage, timings: Timings, call_s: float, outcome: str
) -> CallRecord:  # fmt: skip
    first = call.reports[0]
    return CallRecord(
        slo_class=slo_class,
        finished=outcome == "finished",
        ttft_s=timings.ttft_ms / 1e3 if first.num_tokens else None,
        queue_s=timings.queue_ms / 1e3 if first.num_tokens else None,
        handoff_gap_s=timings.handoff_gap_ms / 1e3 if timings.handoff_gap_ms else None,
        gaps_s=[gap for report in call.reports for gap in report.gaps_s],
        call_s=call_s,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        transfers=[_transfer(report.stats) for report in call.reports if report.handed_off],
        local=first.prefill_worker == first.decode_worker,
        num_retries=sum(report.num_retries for report in call.reports),
    )
