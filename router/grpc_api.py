"""The public gRPC service (serving.proto), its health and its reflection, on the router's event loop.

A call ends in exactly one of: a `done` event and OK, or an `error` event and the status that says the same. When the client
leaves, grpc cancels the handler's task, and with it everything the call holds. Handlers write to the context themselves
instead of being generators: a generator that is abandoned between two writes would be closed by the garbage collector.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton.config import RouterConfig
from baton.errors import BatonError, ConfigError, Internal, InvalidRequest, NotFound
from baton.log import get_log
from baton.model_spec import ModelSpec
from baton.request import FinishReason, Logprobs, SampledToken
from baton.v1 import serving_pb2, serving_pb2_grpc
from router.call import Call, Calls, ClientStuck
from router.call_events import CallDone, ChoiceFinished, Pieces
from router.call_spec import CallLabels, CallSpec, ChatPrompt, Prompt, SamplingSpec, TextPrompt, TokenPrompt
from router.detokenizer import TokenTable
from router.fleet import Endpoint, Fleet
from router.grpc_errors import error_detail, status_code, status_message, trailing_metadata
from router.labels import labels_from
from router.validate import MAX_TIMEOUT_S

log = get_log("router.grpc")

SERVICE = serving_pb2.DESCRIPTOR.services_by_name["Serving"].full_name
# Room above max_body_bytes in which our own check, which names the field, answers instead of grpc's.
SLACK_BYTES = 64 << 10
MAX_REPLY_BYTES = 4 << 20  # one event: 20 logprobs take 1 KiB, held-back text at most 512 characters
PING_INTERVAL_MS = 1_000  # clients may ping each second, also without a call: case G1
MIN_TIMEOUT_S = 1e-3  # of a deadline that is just passing; the client has its answer already
SHUTDOWN_S = 1.0  # for calls that were told to end

Context = grpc.aio.ServicerContext[serving_pb2.GenerateRequest, serving_pb2.GenerateResponse]


class ServingApi(serving_pb2_grpc.ServingServicer):
    def __init__(self, config: RouterConfig, spec: ModelSpec, calls: Calls, fleet: Fleet) -> None:
        self._config = config
        self._spec = spec
        self._calls = calls
        self._fleet = fleet

    async def Generate(  # type: ignore[override]  # a writing handler, see the module's docstring
        self, request: serving_pb2.GenerateRequest, context: Context
    ) -> None:
        arrival_s = time.monotonic()
        opened = False
        try:
            spec = self._parse(request, context)
            opened = True
            async with self._calls.open(spec, arrival_s) as call:
                await self._stream(call, context)
        except ClientStuck as error:
            await context.abort(status_code(error), status_message(error))
        except BatonError as error:
            if not opened:
                self._calls.refused("grpc", error)
            await _fail(context, error)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("generate_failed", request_id=request.request_id[:64])
            await _fail(context, Internal("an internal error ended the call"))

    async def _stream(self, call: Call, context: Context) -> None:
        ends: list[ChoiceFinished] = []
        async for event in call:
            match event:
                case Pieces():
                    chunk = _chunk(call, event, self._calls.table)
                    await context.write(serving_pb2.GenerateResponse(chunk=chunk))
                case ChoiceFinished():
                    ends.append(event)
                case CallDone():
                    await context.write(serving_pb2.GenerateResponse(done=_done(call, event, ends)))

    async def Abort(
        self, request: serving_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> serving_pb2.AbortResponse:
        num_aborted = self._calls.abort(request.request_id) if request.request_id else 0
        if not num_aborted:
            error = NotFound("no running call carries this request_id", field="request_id")
            await context.abort(status_code(error), status_message(error), trailing_metadata(error))
        return serving_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, request: serving_pb2.GetModelInfoRequest, context: object
    ) -> serving_pb2.GetModelInfoResponse:
        limits = self._fleet.limits()
        return serving_pb2.GetModelInfoResponse(
            model=self._spec.name,
            architecture=self._spec.architecture,
            fingerprint=self._spec.fingerprint,
            max_model_len=limits.max_model_len if limits else self._spec.max_model_len,
            max_prompt_tokens=limits.max_prompt_tokens if limits else 0,
            vocab_size=self._spec.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
        )

    async def GetLoads(self, request: serving_pb2.GetLoadsRequest, context: object) -> serving_pb2.GetLoadsResponse:
        workers = [_worker_load(endpoint) for endpoint in self._fleet.endpoints]
        return serving_pb2.GetLoadsResponse(workers=workers, num_inflight=self._calls.num_inflight)

    def _parse(self, request: serving_pb2.GenerateRequest, context: Context) -> CallSpec:
        prompt = _prompt(request)
        if (num_bytes := request.ByteSize()) > self._config.max_body_bytes:
            raise InvalidRequest(
                f"the request with {prompt.field} has {num_bytes} bytes; the limit is {self._config.max_body_bytes}",
                field=prompt.field,
            )
        return CallSpec(
            model=request.model,
            prompt=prompt,
            sampling=_sampling(request.sampling),
            stop=tuple(request.stop),
            priority=request.priority,
            labels=_labels(request, context),
            api="grpc",
        )


class GrpcServer:
    """Binds, serves and stops; `port` is what was bound."""

    def __init__(self, config: RouterConfig, api: ServingApi) -> None:
        """Raises: ConfigError, when the port is taken."""
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", int(config.shared_ports)),  # a taken port must be an error, unless it is held for us
                ("grpc.max_receive_message_length", config.max_body_bytes + SLACK_BYTES),
                ("grpc.max_send_message_length", MAX_REPLY_BYTES),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),  # half: clocks differ
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_connection_age_ms", int(config.max_connection_age_s * 1e3)),
                ("grpc.max_connection_age_grace_ms", int(MAX_TIMEOUT_S * 1e3)),  # no call may be cut by it
            )
        )
        serving_pb2_grpc.add_ServingServicer_to_server(api, self._server)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # left out of its stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        try:
            self.port = self._server.add_insecure_port(_address(config.host, config.grpc_port))
        except RuntimeError:
            raise ConfigError(
                f"gRPC port {config.grpc_port} on {config.host} cannot be bound (in use?); choose another with --grpc-port",
                field="grpc_port",
            ) from None

    async def start(self) -> None:
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """The service's health is readiness; the server's own ("") is that it answers."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(SERVICE, status)

    async def stop(self) -> None:
        await self._server.stop(SHUTDOWN_S)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- in ----------------------------------------------------------------------------------------------------------------


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


def _labels(request: serving_pb2.GenerateRequest, context: Context) -> CallLabels:
    """The request's own fields win over metadata; the call's gRPC deadline wins over x-request-timeout-ms."""
    own = CallLabels(
        request_id=request.request_id,
        session_id=request.session_id,
        slo_class=request.slo.class_name,
        slo_ttft_ms=request.slo.ttft_ms if request.slo.HasField("ttft_ms") else None,
        slo_tpot_ms=request.slo.tpot_ms if request.slo.HasField("tpot_ms") else None,
        timeout_s=_time_left_s(context),
    )
    return labels_from(_metadata(context), own)


def _time_left_s(context: Context) -> float | None:
    left_s: float | None = context.time_remaining()
    return None if left_s is None else min(max(left_s, MIN_TIMEOUT_S), MAX_TIMEOUT_S)


def _metadata(context: Context) -> Mapping[str, str]:
    pairs = context.invocation_metadata() or ()
    return {str(key): value for key, value in pairs if isinstance(value, str)}


# -- out ---------------------------------------------------------------------------------------------------------------


async def _fail(context: Context, error: BatonError) -> NoReturn:
    await context.write(serving_pb2.GenerateResponse(error=error_detail(error)))
    await context.abort(status_code(error), status_message(error), trailing_metadata(error))


def _done(call: Call, event: CallDone, ends: list[ChoiceFinished]) -> serving_pb2.Done:
    ends = sorted(ends, key=lambda end: end.choice)
    return serving_pb2.Done(
        finish_reason=_FINISH[ends[0].finish],
        usage=serving_pb2.Usage(**asdict(event.usage)),
        timings=serving_pb2.Timings(**asdict(event.timings)),
        choices=[
            serving_pb2.ChoiceEnd(choice=end.choice, finish_reason=_FINISH[end.finish], stop_match=end.stop_match)
            for end in ends
        ],
        request_id=call.request_id,
    )


_FINISH = {
    FinishReason.STOP: serving_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: serving_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: serving_pb2.FINISH_REASON_CANCELLED,
}


def _chunk(call: Call, pieces: Pieces, table: TokenTable) -> serving_pb2.Chunk:
    tokens = pieces.tokens
    return serving_pb2.Chunk(
        text=pieces.text,
        token_ids=[token.token for token in tokens],
        index=tokens[0].index if tokens else call.reports[pieces.choice].num_tokens,
        choice=pieces.choice,
        logprobs=[_logprob(token, token.logprobs, table) for token in tokens if token.logprobs is not None],
    )


def _logprob(token: SampledToken, logprobs: Logprobs, table: TokenTable) -> serving_pb2.Logprob:
    return serving_pb2.Logprob(
        token_id=token.token,
        logprob=logprobs.logprob,
        token=table.name(token.token),
        top=[
            serving_pb2.TopLogprob(token_id=token_id, logprob=logprob, token=table.name(token_id))
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ],
    )


def _worker_load(endpoint: Endpoint) -> serving_pb2.WorkerLoad:
    view = endpoint.session.view
    if view is None:
        return serving_pb2.WorkerLoad(worker=endpoint.worker_id, role=endpoint.role.name.lower(), state="lost")
    load = view.load
    return serving_pb2.WorkerLoad(
        worker=endpoint.worker_id,
        role=endpoint.role.name.lower(),
        state=endpoint.state,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        active_blocks=load.active_blocks,
        reserved_blocks=load.reserved_blocks,
        cached_blocks=load.cached_blocks,
        free_blocks=load.free_blocks,
        epoch=view.opened.epoch,
    )
