"""Going on with a call whose connection broke, perhaps with the router that served it.

Routers keep nothing for it: what the prompt was and which tokens were said is in the journals of the workers
(worker/parked.py). A router that is asked to resume
    1 asks every worker for the call's key, at once; whoever still runs it ends it, and keeps it for this router alone
    2 joins what they tell: of each answer the latest attempt, token 0 from prefill, the rest from decode
    3 takes the answers up where they were (router/call.py): text is made again from token 0, and shown from `next_index` on
so what the client has is neither repeated nor changed. What nobody ran for the window's time is gone: NOT_FOUND. So is a
call of another tenant, whose key is another one. 2 is pure; 1 runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple, Protocol

from baton.errors import AlreadyExists, BatonError, Cancelled, InvalidRequest, NotFound, Unavailable, WorkerLost
from baton.request import FinishReason, Logprobs, Request, Resumption
from baton.v1 import router_state_pb2, worker_pb2
from baton.wire import request_from_pb
from router.call_events import ChoiceSink
from router.call_spec import CallLabels, CallSpec, SamplingSpec, TokenPrompt
from router.detokenizer import TextStream
from router.fleet import Endpoint, Fleet
from router.sequence import SequenceReport

FIND_S = 1.0  # a worker that lives answers within a step; half of the time for which the others hold the call for us
RETRY_S = 1.0  # by then a claim of another router has run out, or its attempt has begun
DEFAULT_WINDOW_S = 30.0  # a restarted router takes 1-2 s, a client's back-off some more
MAX_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class KnownToken:
    """One that was said before; `logprobs` None: not asked for, or lost with the worker that had them."""

    token_id: int
    finish: FinishReason = FinishReason.NONE
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where one answer is taken up."""

    known: tuple[KnownToken, ...] = ()
    num_shown: int = 0  # of these, that the client has
    fingerprint: str = ""  # of the only model that may go on: the one that made them; "" = any


@dataclass(frozen=True, slots=True)
class FoundCall:
    """What the workers know of a call. `request`: choice 0's, as the client made it."""

    spec: CallSpec
    request: Request
    ttl_s: float | None  # what is left of its deadline; None: nobody knows
    answers: tuple[tuple[KnownToken, ...], ...]  # per choice
    fingerprints: tuple[str, ...]  # of the model that each answer was last given to


@dataclass(frozen=True, slots=True)
class Resumed:
    """A call to be taken up; one ResumePoint per choice."""

    found: FoundCall
    points: tuple[ResumePoint, ...]


def call_key(tenant: str, request_id: str) -> bytes:
    """What workers keep a call by. Tenants share none, whatever they call their requests."""
    name = tenant.encode()
    return hashlib.blake2b(
        len(name).to_bytes(4, "little") + name + request_id.encode(), digest_size=16, person=b"baton resume"
    ).digest()


def resumption(spec: CallSpec, tenant: str, slo_class: str) -> Resumption | None:
    """What travels with each of the call's sequences; None where the client did not ask for it."""
    if not spec.resumable:
        return None
    labels = spec.labels
    state = router_state_pb2.CallState(
        request_id=labels.request_id,
        api=spec.api,
        stop=spec.stop,
        n=spec.sampling.n or 1,
        priority=spec.priority,
        slo_class=slo_class,
        slo_ttft_ms=labels.slo_ttft_ms,
        slo_tpot_ms=labels.slo_tpot_ms,
        session_id=labels.session_id,
        logprobs=spec.sampling.logprobs is not None,
    )
    window_s = spec.resume_window_s or DEFAULT_WINDOW_S
    return Resumption(call_key(tenant, labels.request_id), window_s, state.SerializeToString())


class Told(NamedTuple):
    """What one worker keeps of one sequence."""

    fingerprint: str  # of the worker's model
    sequence: worker_pb2.ParkedSequence


class Running(Protocol):
    """A call as this router serves it (router/call.py)."""

    told: asyncio.Event  # nobody serves it any more
    resumed: Resumed | None

    def fail(self, error: BatonError) -> None: ...


class ResumableCalls:
    """The resumable calls that this router serves, and the way to those that nobody does."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._running: dict[bytes, Running] = {}

    def add(self, key: bytes, call: Running) -> None:
        """What other routers serve is not known here: docs/grpc.md.

        Raises:
            AlreadyExists: a new call under the key of one that runs.
            Unavailable: the client resumed it twice at once, and the other one was first.
        """
        if key in self._running and call.resumed is None:
            raise AlreadyExists("a resumable call with this request_id is running; Resume goes on with it")
        if key in self._running:
            raise Unavailable("another connection is about to resume the call", retry_after_s=RETRY_S)
        self._running[key] = call

    def discard(self, key: bytes, call: Running) -> None:
        if self._running.get(key) is call:
            del self._running[key]

    async def find(self, tenant: str, request_id: str) -> FoundCall:
        """End the call wherever it runs, and take over what is known of it.

        Raises:
            InvalidRequest: no request_id.
            NotFound: nobody knows it.
            Unavailable: a worker could not be asked, or another router is about to go on with it.
        """
        if not request_id:
            raise InvalidRequest("request_id is empty; the limit is at least 1 character", field="request_id")
        key = call_key(tenant, request_id)
        if running := self._running.pop(key, None):  # over a connection that broke without our noticing
            running.fail(Cancelled("the client resumed the call on another connection"))
            await running.told.wait()
        return await find_call(self._fleet, key)

    def forget(self, tenant: str, request_id: str) -> None:
        """Nobody shall resume it."""
        for endpoint in self._fleet.endpoints:
            endpoint.session.forget(call_key(tenant, request_id))


# -- 1 ask -------------------------------------------------------------------------------------------------------------


async def find_call(fleet: Fleet, key: bytes) -> FoundCall:
    """Raises: NotFound; Unavailable, where a worker could not be asked or another router is about to go on with it."""
    endpoints = sorted(fleet.endpoints, key=lambda endpoint: (endpoint.session.view is None, endpoint.worker_id))
    # The first one alone: of several routers that ask at once, one gets its claim, and the others claim nothing anywhere.
    answers = [await _ask(endpoint, key) for endpoint in endpoints[:1]]
    answers += await asyncio.gather(*(_ask(endpoint, key) for endpoint in endpoints[1:]))
    if told := [told for answer in answers if not isinstance(answer, WorkerLost) for told in answer]:
        return join(told)
    if lost := next((answer for answer in answers if isinstance(answer, WorkerLost)), None):
        raise Unavailable(f"the call is not known where one could ask: {lost}", retry_after_s=RETRY_S)
    raise NotFound("no such call can be resumed: its window is over, or it never was resumable", field="request_id")


async def _ask(endpoint: Endpoint, key: bytes) -> list[Told] | WorkerLost:
    """Raises: Unavailable, where another router has the call."""
    session, data = endpoint.session, b""
    try:
        async with asyncio.timeout(FIND_S):
            while True:
                found = await session.find(key, len(data))
                if found.claimed:
                    raise Unavailable("another router is about to resume the call", retry_after_s=RETRY_S)
                data += found.data
                if len(data) >= found.total_bytes:
                    fingerprint = endpoint.opened.fingerprint if endpoint.opened is not None else ""
                    return [Told(fingerprint, s) for s in worker_pb2.ParkedCall.FromString(data).sequences]
    except TimeoutError:
        return WorkerLost(f"worker {session.worker_id} did not answer within {FIND_S:g} s")
    except WorkerLost as error:
        return error


# -- 2 join ------------------------------------------------------------------------------------------------------------


def join(told: Sequence[Told]) -> FoundCall:
    """One call of what several workers know of its sequences, at least one."""
    sequences = [entry.sequence for entry in told]
    state = router_state_pb2.CallState.FromString(sequences[0].request.resumption.router_state)
    by_choice: list[list[Told]] = [[] for _ in range(state.n)]
    for entry in told:
        by_choice[entry.sequence.request.sampling.sample_index].append(entry)
    request = _as_made(request_from_pb(sequences[0].request))
    generation = max(sequence.request.resumption.generation for sequence in sequences) + 1
    assert request.resumption is not None
    request = replace(request, resumption=replace(request.resumption, generation=generation))
    ttl_ms = min((sequence.ttl_ms for sequence in sequences if sequence.ttl_ms), default=None)
    return FoundCall(
        spec=_spec(state, request),
        request=request,
        ttl_s=None if ttl_ms is None else ttl_ms / 1e3,
        answers=tuple(_join_choice([entry.sequence for entry in entries]) for entries in by_choice),
        fingerprints=tuple(_latest(entries or told).fingerprint for entries in by_choice),
    )


def _as_made(request: Request) -> Request:
    """Without output, for the first choice."""
    return replace(
        request,
        seq=0,
        token_ids=request.token_ids[: request.num_prompt_tokens],
        num_output_tokens=0,
        sampling=replace(request.sampling, sample_index=0),
    )


def _spec(state: router_state_pb2.CallState, request: Request) -> CallSpec:
    labels = CallLabels(
        request_id=state.request_id,
        session_id=state.session_id,
        slo_class=state.slo_class,
        slo_ttft_ms=state.slo_ttft_ms if state.HasField("slo_ttft_ms") else None,
        slo_tpot_ms=state.slo_tpot_ms if state.HasField("slo_tpot_ms") else None,
    )
    return CallSpec(
        model="",
        prompt=TokenPrompt(request.token_ids),
        sampling=SamplingSpec(n=state.n, logprobs=request.sampling.num_logprobs),
        stop=tuple(state.stop),
        priority=state.priority,
        labels=labels,
        api=state.api,
        resumable=True,
        resume_window_s=request.resumption.window_s if request.resumption is not None else 0.0,
    )


def _attempt(sequence: worker_pb2.ParkedSequence) -> tuple[int, int]:
    """Orders attempts at one sequence: a later one was told all that was sent of the earlier ones."""
    return sequence.request.resumption.generation, sequence.request.seq & 0xFFFF_FFFF


def _latest(told: Sequence[Told]) -> Told:
    return max(told, key=lambda entry: _attempt(entry.sequence))


def _join_choice(sequences: Sequence[worker_pb2.ParkedSequence]) -> tuple[KnownToken, ...]:
    """The tokens of the latest attempt; logprobs of those before it are with earlier ones."""
    if not sequences:
        return ()
    latest = max(map(_attempt, sequences))
    known: dict[int, KnownToken] = {}
    for sequence in sorted(sequences, key=_attempt, reverse=True):
        if _attempt(sequence) == latest:
            for index, token_id in enumerate(_tail(sequence.request)):
                known.setdefault(index, KnownToken(token_id))
        for index, token in _said(sequence):
            have = known.get(index)
            if have is None and _attempt(sequence) == latest:
                known[index] = token
            elif have is not None and have.token_id == token.token_id and have.logprobs is None:
                known[index] = replace(have, logprobs=token.logprobs)
    return tuple(known[index] for index in range(len(known)))


def _tail(request: worker_pb2.Request) -> Iterable[int]:
    return request.token_ids[len(request.token_ids) - request.num_output_tokens :]


def _said(sequence: worker_pb2.ParkedSequence) -> Iterable[tuple[int, KnownToken]]:
    logprobs = {
        entry.entry: Logprobs(entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs))
        for entry in sequence.logprobs
    }
    last = len(sequence.tokens) - 1
    for entry, token_id in enumerate(sequence.tokens):
        finish = FinishReason(sequence.finish_reason if entry == last else FinishReason.NONE)
        yield sequence.request.num_output_tokens + entry, KnownToken(token_id, finish, logprobs.get(entry))


def within(found: FoundCall, vocab_size: int) -> FoundCall:
    """Without what no worker can have meant: a token beyond the vocabulary, and what follows it, is made again."""
    answers = (takewhile(lambda token: token.token_id < vocab_size, known) for known in found.answers)
    return replace(found, answers=tuple(map(tuple, answers)))


# -- 3 take up ---------------------------------------------------------------------------------------------------------


def replay(point: ResumePoint, text: TextStream, sink: ChoiceSink, report: SequenceReport) -> None:
    """Bring one answer to where it was; what the client lacks goes to `sink`. A whole answer has its finish afterwards."""
    for index, token in enumerate(point.known):
        report.token_ids.append(token.token_id)
        if index < point.num_shown:
            text.push(token.token_id, token.finish)
            is_stopped = text.stop_match is not None
        else:
            is_stopped = sink.token(index, token.token_id, token.finish, token.logprobs)
        if is_stopped or token.finish:
            report.finish = token.finish or FinishReason.STOP
            return


def take_up(found: FoundCall, next_index: Sequence[int], received: Sequence[Sequence[int]]) -> Resumed:
    """Where each answer goes on for a client that has `received`, or all below `next_index`; none given: it has nothing.

    Raises:
        InvalidRequest: it says that it has what it cannot have.
        NotFound: it has more than the workers know of.
    """
    n = len(found.answers)
    for field, given in (("next_index", next_index), ("received", received)):
        if given and len(given) != n:
            raise InvalidRequest(f"{field} has {len(given)} entries; the limit is one per choice, {n}", field=field)
    points = []
    for choice, known in enumerate(found.answers):
        has = received[choice] if received else ()
        num_shown = len(has) if received else next_index[choice] if next_index else 0
        answer = _with_received(known, has, found.request.sampling.max_tokens)
        points.append(_point(answer, num_shown, found, found.fingerprints[choice]))
    return Resumed(found, tuple(points))


def _with_received(
    known: tuple[KnownToken, ...], received: Sequence[int], max_tokens: int
) -> tuple[KnownToken, ...]:  # fmt: skip
    if any(token.token_id != token_id for token, token_id in zip(known, received, strict=False)):
        raise InvalidRequest("received is not what was sent of this call", field="received")
    more = received[len(known) :]
    if more and ((known[-1:] and known[-1].finish) or len(received) >= max_tokens):
        raise InvalidRequest(f"received has {len(received)} tokens; the answer has fewer", field="received")
    return known + tuple(KnownToken(token_id) for token_id in more)


def _point(known: tuple[KnownToken, ...], num_shown: int, found: FoundCall, fingerprint: str) -> ResumePoint:
    if num_shown > len(known):
        raise NotFound(
            f"next_index is {num_shown}, and only {len(known)} tokens are known: the worker that made the others is gone; "
            "`received` would help",
            field="next_index",
        )
    if found.request.sampling.num_logprobs is not None:  # what lacks them is made again, unless the client has it
        lacking = (index for index in range(num_shown, len(known)) if known[index].logprobs is None)
        known = known[: next(lacking, len(known))]
    return ResumePoint(known, num_shown, fingerprint if known else "")
