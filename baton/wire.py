"""Dataclasses <-> protobuf messages, the only place that knows both."""

from __future__ import annotations

from baton.errors import BatonError, InvalidRequest, error_from_code
from baton.kv_layout import KVLayout
from baton.request import Request, Resumption, SamplingParams
from baton.tracing import NO_TRACE, Trace
from baton.v1 import kv_pb2, worker_pb2

PROTOCOL_VERSION = 1


def request_to_pb(request: Request) -> worker_pb2.Request:
    sampling = request.sampling
    return worker_pb2.Request(
        seq=request.seq,
        token_ids=request.token_ids,
        sampling=worker_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            sample_index=sampling.sample_index,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            bias_ids=[token for token, _ in sampling.logit_bias],
            bias_values=[bias for _, bias in sampling.logit_bias],
            stop_token_ids=sampling.stop_token_ids,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            ignore_eos=sampling.ignore_eos,
            num_logprobs=sampling.num_logprobs,
        ),
        priority=request.priority,
        slo_class=request.slo_class,
        tenant_salt=request.tenant_salt,
        request_id=request.request_id,
        num_output_tokens=request.num_output_tokens,
        resumption=_resumption_to_pb(request.resumption) if request.resumption is not None else None,
        traceparent=request.trace.parent,
        tracestate=request.trace.state,
    )


def _resumption_to_pb(resumption: Resumption) -> worker_pb2.Resumption:
    return worker_pb2.Resumption(
        key=resumption.key,
        window_ms=int(resumption.window_s * 1e3),
        generation=resumption.generation,
        router_state=resumption.router_state,
    )


def _resumption_from_pb(message: worker_pb2.Resumption) -> Resumption:
    return Resumption(message.key, message.window_ms / 1e3, message.router_state, message.generation)


def request_from_pb(message: worker_pb2.Request) -> Request:
    """Rebuild a Request.

    Raises:
        InvalidRequest: lengths that contradict each other; a peer's message is not trusted.
    """
    pb = message.sampling
    if len(pb.bias_ids) != len(pb.bias_values):
        raise InvalidRequest("bias_ids and bias_values differ in length", field="sampling.bias_ids")
    if not message.token_ids:
        raise InvalidRequest("token_ids is empty; the limit is at least 1", field="token_ids")
    if message.num_output_tokens >= len(message.token_ids):
        raise InvalidRequest("num_output_tokens must be below len(token_ids)", field="num_output_tokens")
    sampling = SamplingParams(
        max_tokens=pb.max_tokens,
        temperature=pb.temperature,
        top_p=pb.top_p,
        top_k=pb.top_k,
        min_p=pb.min_p,
        seed=pb.seed,
        sample_index=pb.sample_index,
        repetition_penalty=pb.repetition_penalty,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        logit_bias=tuple(zip(pb.bias_ids, pb.bias_values, strict=True)),
        stop_token_ids=tuple(pb.stop_token_ids),
        min_tokens=pb.min_tokens,
        ignore_eos=pb.ignore_eos,
        num_logprobs=pb.num_logprobs if pb.HasField("num_logprobs") else None,
    )
    request = Request(
        seq=message.seq,
        token_ids=tuple(message.token_ids),
        sampling=sampling,
        num_output_tokens=message.num_output_tokens,
        priority=message.priority,
        slo_class=message.slo_class,
        tenant_salt=message.tenant_salt,
        request_id=message.request_id,
        resumption=_resumption_from_pb(message.resumption) if message.HasField("resumption") else None,
        trace=Trace(message.traceparent, message.tracestate) if message.traceparent else NO_TRACE,
    )
    if request.num_tokens_left < 1:
        raise InvalidRequest("max_tokens leaves nothing to generate; the limit is at least 1", field="max_tokens")
    return request


def error_to_pb(error: BatonError) -> worker_pb2.ErrorInfo:
    return worker_pb2.ErrorInfo(
        code=error.code, message=error.message, field=error.field, retry_after_s=error.retry_after_s
    )


def error_from_pb(message: worker_pb2.ErrorInfo) -> BatonError:
    return error_from_code(message.code, message.message, message.field, message.retry_after_s)


def layout_to_pb(layout: KVLayout) -> kv_pb2.KvLayout:
    return kv_pb2.KvLayout(
        num_layers=layout.num_layers,
        num_components=layout.num_components,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=layout.dtype,
    )
