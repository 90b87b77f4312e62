"""serving.proto's messages <-> what calls are made of and what they say. Pure.

The request's own fields win over metadata; a call's gRPC deadline, or its timeout_ms on a Session, over x-request-timeout-ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from baton.errors import InvalidRequest
from baton.request import FinishReason, Logprobs
from baton.v1 import serving_pb2
from router.call_events import CallDone, ChoiceFinished, Pieces
from router.call_spec import CallLabels, CallSpec, ChatPrompt, Prompt, SamplingSpec, TextPrompt, TokenPrompt
from router.detokenizer import TokenTable
from router.gather import Group
from router.labels import labels_from
from router.resume import MAX_WINDOW_S

MAX_FLUSH_MS = 1_000  # tokens that come later than that are no stream


# -- in ----------------------------------------------------------------------------------------------------------------


def to_spec(
    request: serving_pb2.GenerateRequest, metadata: Mapping[str, str], timeout_s: float | None, max_bytes: int
) -> CallSpec:
    """Raises: InvalidRequest."""
    prompt = _prompt(request)
    if (num_bytes := request.ByteSize()) > max_bytes:
        raise InvalidRequest(
            f"the request with {prompt.field} has {num_bytes} bytes; the limit is {max_bytes}", field=prompt.field
        )
    own = CallLabels(
        request_id=request.request_id,
        session_id=request.session_id,
        slo_class=request.slo.class_name,
        slo_ttft_ms=request.slo.ttft_ms if request.slo.HasField("ttft_ms") else None,
        slo_tpot_ms=request.slo.tpot_ms if request.slo.HasField("tpot_ms") else None,
        timeout_s=timeout_s,
    )
    labels = labels_from(metadata, own)
    _check_resumable(request, labels)
    return CallSpec(
        model=request.model,
        prompt=prompt,
        sampling=_sampling(request.sampling),
        stop=tuple(request.stop),
        priority=request.priority,
        labels=labels,
        api="grpc",
        resumable=request.resumable,
        resume_window_s=request.resume_window_ms / 1e3,
    )


def check_flush(max_flush_ms: int) -> None:
    """Raises: InvalidRequest."""
    if max_flush_ms > MAX_FLUSH_MS:
        raise InvalidRequest(
            f"max_flush_ms is {max_flush_ms}; the limit is [0, {MAX_FLUSH_MS}]", field="max_flush_ms"
        )  # fmt: skip


def to_received(request: serving_pb2.ResumeRequest) -> list[Sequence[int]]:
    return [token_ids.ids for token_ids in request.received]


def _check_resumable(request: serving_pb2.GenerateRequest, labels: CallLabels) -> None:
    if request.resumable and not labels.request_id:
        raise InvalidRequest(
            "request_id is empty; the limit of a resumable call is at least 1 character", field="request_id"
        )
    if request.resume_window_ms > MAX_WINDOW_S * 1e3:
        raise InvalidRequest(
            f"resume_window_ms is {request.resume_window_ms}; the limit is [0, {MAX_WINDOW_S * 1e3:g}]",
            field="resume_window_ms",
        )


def _prompt(request: serving_pb2.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return TextPrompt(request.prompt)
    if kind == "chat":
        messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
        return ChatPrompt(messages, field="chat.messages")
    if kind == "token_ids":
        return TokenPrompt(tuple(request.token_ids.ids), field="token_ids")
    raise InvalidRequest("no input is set; the limit is one of prompt, chat, token_ids", field="input")


def _sampling(pb: serving_pb2.Sampling) -> SamplingSpec:
    return SamplingSpec(
        temperature=pb.temperature if pb.HasField("temperature") else None,
        top_p=pb.top_p if pb.HasField("top_p") else None,
        top_k=pb.top_k if pb.HasField("top_k") else None,
        min_p=pb.min_p if pb.HasField("min_p") else None,
        seed=pb.seed if pb.HasField("seed") else None,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else None,
        presence_penalty=pb.presence_penalty if pb.HasField("presence_penalty") else None,
        frequency_penalty=pb.frequency_penalty if pb.HasField("frequency_penalty") else None,
        logit_bias=dict(pb.logit_bias),
        stop_token_ids=tuple(pb.stop_token_ids),
        max_tokens=pb.max_tokens if pb.HasField("max_tokens") else None,
        min_tokens=pb.min_tokens if pb.HasField("min_tokens") else None,
        ignore_eos=pb.ignore_eos,
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        n=pb.n if pb.HasField("n") else None,
    )


# -- out ---------------------------------------------------------------------------------------------------------------


def done_to_pb(done: CallDone, ends: Iterable[ChoiceFinished], request_id: str) -> serving_pb2.Done:
    ends = sorted(ends, key=lambda end: end.choice)
    return serving_pb2.Done(
        finish_reason=_FINISH[ends[0].finish],
        usage=serving_pb2.Usage(**asdict(done.usage)),
        timings=serving_pb2.Timings(**asdict(done.timings)),
        choices=[
            serving_pb2.ChoiceEnd(choice=end.choice, finish_reason=_FINISH[end.finish], stop_match=end.stop_match)
            for end in ends
        ],
        request_id=request_id,
    )


_FINISH = {
    FinishReason.STOP: serving_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: serving_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: serving_pb2.FINISH_REASON_CANCELLED,
}


def pieces_to_chunk(pieces: Pieces, num_tokens: int, table: TokenTable) -> serving_pb2.Chunk:
    """`num_tokens`: of the choice so far, the index of a chunk that is text alone."""
    tokens = pieces.tokens
    return serving_pb2.Chunk(
        text=pieces.text,
        token_ids=[token.token for token in tokens],
        index=tokens[0].index if tokens else num_tokens,
        choice=pieces.choice,
        logprobs=[_logprob(token.token, token.logprobs, table) for token in tokens if token.logprobs is not None],
    )


def group_to_chunk(group: Group, table: TokenTable) -> serving_pb2.Chunk:
    return serving_pb2.Chunk(
        text=group.text,
        token_ids=group.token_ids,
        index=group.first_index,
        choice=group.choice,
        logprobs=_logprobs(group, table),
    )


def groups_to_reply(groups: Sequence[Group], table: TokenTable) -> serving_pb2.SessionReply:
    """All groups in parallel arrays; what is the same everywhere is left out."""
    reply = serving_pb2.SessionReply(
        call=[group.call for group in groups],
        index=[group.first_index for group in groups],
        num_tokens=[len(group.token_ids) for group in groups],
        text=[group.text for group in groups],
        token_ids=[token_id for group in groups for token_id in group.token_ids],
    )
    if any(group.choice for group in groups):
        reply.choice.extend(group.choice for group in groups)
    if any(group.logprobs for group in groups):
        reply.num_logprobs.extend(len(group.logprobs) for group in groups)
        reply.logprobs.extend(entry for group in groups for entry in _logprobs(group, table))
    return reply


def _logprobs(group: Group, table: TokenTable) -> list[serving_pb2.Logprob]:
    if not group.logprobs:
        return []
    return [_logprob(*entry, table) for entry in zip(group.token_ids, group.logprobs, strict=True)]


def _logprob(token_id: int, logprobs: Logprobs, table: TokenTable) -> serving_pb2.Logprob:
    return serving_pb2.Logprob(
        token_id=token_id,
        logprob=logprobs.logprob,
        token=table.name(token_id),
        top=[
            serving_pb2.TopLogprob(token_id=top_id, logprob=logprob, token=table.name(top_id))
            for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ],
    )
