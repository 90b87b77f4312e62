"""The public gRPC service (serving.proto), its health and its reflection, on the router's event loop.

A call ends in exactly one of: a `done` event and OK, or an `error` event and the status that says the same. When the client
leaves, grpc cancels the handler's task, and with it everything the call holds. Handlers write to the context themselves
instead of being generators: a generator that is abandoned between two writes would be closed by the garbage collector.

Generate and Resume write each token as it comes, or gathered (router/gather.py) where the client asks for it; Session is
router/bulk_session.py. Keepalive, message sizes and ages of connections, and why they are what they are: docs/grpc.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from baton import clock
from baton.config import RouterConfig
from baton.errors import BatonError, ConfigError, Internal, InvalidRequest, NotFound, Unauthenticated
from baton.log import get_log
from baton.model_spec import ModelSpec
from baton.v1 import serving_pb2, serving_pb2_grpc, worker_pb2
from router.bulk_session import STALL_S, BulkSession
from router.call import Call, Calls, ClientStuck
from router.call_events import CallDone, ChoiceFinished, Pieces
from router.fleet import Endpoint, Fleet
from router.gather import Gatherer
from router.grpc_calls import CallMessage, open_call
from router.grpc_errors import error_detail, status_code, status_message, trailing_metadata
from router.grpc_messages import done_to_pb, group_to_chunk, pieces_to_chunk
from router.grpc_tls import server_credentials
from router.labels import EXPLAIN, fields_of
from router.tenants import Tenant
from router.validate import MAX_TIMEOUT_S

log = get_log("router.grpc")

SERVING = serving_pb2.DESCRIPTOR.services_by_name["Serving"]
SERVICE = SERVING.full_name
# Room above max_body_bytes in which our own check, which names the field, answers instead of grpc's.
SLACK_BYTES = 64 << 10
MAX_REPLY_BYTES = 4 << 20  # one event: 20 logprobs take 1 KiB, held-back text at most 512 characters
PING_INTERVAL_MS = 1_000  # clients may ping each second, also without a call: case G1
# Ours find clients that went without a word: their calls cost up to this and the answer's time, and no longer.
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_OPTION = 2**31 - 1  # gRPC's are 32-bit; of a time in milliseconds this one means for ever. grpc_types.h
MIN_TIMEOUT_S = 1e-3  # of a deadline that is just passing; the client has its answer already
SHUTDOWN_S = 1.0  # for calls that were told to end

Context = grpc.aio.ServicerContext[Any, Any]


class ServingApi(serving_pb2_grpc.ServingServicer):
    def __init__(self, config: RouterConfig, spec: ModelSpec, calls: Calls, fleet: Fleet) -> None:
        self._config = config
        self._spec = spec
        self._calls = calls
        self._fleet = fleet

    async def Generate(  # type: ignore[override]  # a writing handler, see the module's docstring
        self, request: serving_pb2.GenerateRequest, context: Context
    ) -> None:
        await self._answer(request, context)

    async def Resume(  # type: ignore[override]
        self, request: serving_pb2.ResumeRequest, context: Context
    ) -> None:
        await self._answer(request, context)

    async def Session(  # type: ignore[override]
        self, request_iterator: AsyncIterator[serving_pb2.SessionCall], context: Context
    ) -> None:
        await self._tenant(context)
        try:
            await BulkSession(self._calls, self._config, _metadata(context), context).run(request_iterator)
        except BatonError as error:
            await _abort(context, error)
        except DecodeError:
            await _abort(context, _unreadable())
        except Exception:
            log.exception("session_failed")
            await _abort(context, Internal("an internal error ended the stream"))

    async def _answer(self, request: CallMessage, context: Context) -> None:
        try:
            timeout_s, limit = _time_left_s(context), self._config.max_body_bytes
            async with open_call(self._calls, request, _metadata(context), timeout_s, limit) as call:
                if request.max_flush_ms:
                    await self._stream_gathered(call, context, request.max_flush_ms / 1e3)
                else:
                    await self._stream(call, context)
                if told := call.explanation():
                    context.set_trailing_metadata(((EXPLAIN, told),))
        except ClientStuck as error:
            await context.abort(status_code(error), status_message(error))
        except BatonError as error:
            await _fail(context, error)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("generate_failed", request_id=request.request_id[:64])
            await _fail(context, Internal("an internal error ended the call"))

    async def _stream(self, call: Call, context: Context) -> None:
        """A message per token, while the client keeps up."""
        ends: list[ChoiceFinished] = []
        async for event in call:
            match event:
                case Pieces():
                    chunk = pieces_to_chunk(event, call.reports[event.choice].num_tokens, self._calls.table)
                    await context.write(serving_pb2.GenerateResponse(chunk=chunk))
                case ChoiceFinished():
                    ends.append(event)
                case CallDone():
                    done = done_to_pb(event, ends, call.request_id)
                    await context.write(serving_pb2.GenerateResponse(done=done))

    async def _stream_gathered(self, call: Call, context: Context, flush_s: float) -> None:
        """A message per choice and `flush_s`."""
        gatherer = Gatherer(self._config.client_backlog_bytes, lambda: call.fail(_stuck()))
        heard = gatherer.audience()
        writer = asyncio.create_task(self._write_groups(gatherer, context, flush_s))
        try:
            try:
                done = await call.tell(heard)
            except ClientStuck:
                raise
            except BatonError:
                await _write_rest(gatherer, writer)
                raise
            await _write_rest(gatherer, writer)
            await context.write(
                serving_pb2.GenerateResponse(done=done_to_pb(done, heard.ends, call.request_id))
            )  # fmt: skip
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write_groups(self, gatherer: Gatherer, context: Context, flush_s: float) -> None:
        is_last, wait_s = False, 0.0  # the first token does not wait
        while not is_last:
            await gatherer.wait(wait_s)
            is_last, wait_s = gatherer.closed, flush_s
            for group in gatherer.take():
                chunk = group_to_chunk(group, self._calls.table)
                await context.write(serving_pb2.GenerateResponse(chunk=chunk))

    async def Abort(self, request: serving_pb2.AbortRequest, context: Context) -> serving_pb2.AbortResponse:
        tenant = await self._tenant(context)
        num_aborted = self._calls.abort(tenant, request.request_id) if request.request_id else 0
        if not num_aborted:
            await _abort(context, NotFound("no running call carries this request_id", field="request_id"))
        return serving_pb2.AbortResponse(num_aborted=num_aborted)

    async def GetModelInfo(
        self, request: serving_pb2.GetModelInfoRequest, context: Context
    ) -> serving_pb2.GetModelInfoResponse:
        await self._tenant(context)
        limits, served = self._fleet.limits(), _mostly_served(self._fleet.endpoints)
        return serving_pb2.GetModelInfoResponse(
            model=self._spec.name,
            architecture=self._spec.architecture,
            fingerprint=served.fingerprint,
            weights_hash=served.weights_hash,
            max_model_len=limits.max_model_len if limits else self._spec.max_model_len,
            max_prompt_tokens=limits.max_prompt_tokens if limits else 0,
            vocab_size=self._spec.vocab_size,
            eos_token_ids=self._spec.eos_token_ids,
        )

    async def GetLoads(self, request: serving_pb2.GetLoadsRequest, context: Context) -> serving_pb2.GetLoadsResponse:
        await self._tenant(context)
        workers = [_worker_load(endpoint) for endpoint in self._fleet.endpoints]
        return serving_pb2.GetLoadsResponse(workers=workers, num_inflight=self._calls.num_inflight)

    async def refuse_unread(self, context: Context, method: str) -> NoReturn:
        """Answer bytes that are no message of `method`."""
        error = _unreadable()
        if method in ("Generate", "Resume"):
            self._calls.refused("grpc", error)
            await _fail(context, error)
        await _abort(context, error)

    async def _tenant(self, context: Context) -> Tenant:
        try:
            return self._calls.tenant(_metadata(context))
        except Unauthenticated as error:
            await _abort(context, error)


def _mostly_served(endpoints: Iterable[Endpoint]) -> worker_pb2.Opened:
    """What one of the workers said that are most alike; an empty one where none has come yet."""
    said = [endpoint.opened for endpoint in endpoints if endpoint.opened is not None]
    if not said:
        return worker_pb2.Opened()
    fingerprint, _ = Counter(opened.fingerprint for opened in said).most_common(1)[0]
    alike = [opened for opened in said if opened.fingerprint == fingerprint]
    return next((opened for opened in alike if opened.weights_hash), alike[0])  # an earlier release does not say it


def _unreadable() -> InvalidRequest:
    return InvalidRequest(
        "the message cannot be read: its bytes, or those of a text in it, are damaged", field="message"
    )


def _stuck() -> ClientStuck:
    return ClientStuck("the client does not read its answer, or too slowly")


async def _write_rest(gatherer: Gatherer, writer: asyncio.Task[None]) -> None:
    """Raises: ClientStuck."""
    gatherer.close()
    try:
        async with asyncio.timeout(STALL_S):
            await writer
    except TimeoutError:
        raise _stuck() from None


class GrpcServer:
    """Binds, serves and stops; `port` is what was bound."""

    def __init__(self, config: RouterConfig, api: ServingApi) -> None:
        """Raises: ConfigError, when the port is taken, or a certificate cannot be used."""
        credentials = server_credentials(config)
        self._leaving: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(
            options=(
                (
                    "grpc.so_reuseport",
                    int(config.shared_ports),
                ),  # a taken port must be an error, unless it is held for us
                ("grpc.max_receive_message_length", config.max_body_bytes + SLACK_BYTES),
                ("grpc.max_send_message_length", MAX_REPLY_BYTES),
                ("grpc.max_concurrent_streams", config.max_concurrent_streams),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", PING_INTERVAL_MS // 2),  # half: clocks differ
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_connection_age_ms", _real_ms(config.max_connection_age_s)),
                ("grpc.max_connection_age_grace_ms", _real_ms(MAX_TIMEOUT_S)),  # no call may be cut by it
            )
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, _handlers(api)),))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # left out of its stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = _address(config.host, config.grpc_port)
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
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

    def leave(self) -> None:
        """Let clients go elsewhere (GOAWAY): no more calls or connections are taken; running calls go on until `stop`."""
        self._leaving = asyncio.create_task(self._server.stop(MAX_TIMEOUT_S))

    async def stop(self) -> None:
        await self._server.stop(SHUTDOWN_S)
        if self._leaving is not None:
            await self._leaving


def _real_ms(seconds: float) -> int:
    return min(int(clock.real_s(seconds) * 1e3), MAX_OPTION)


def _handlers(api: ServingApi) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """As the generated code makes them, but that single messages are read by us: what cannot be read is the client's fault,
    and grpc says UNKNOWN."""
    made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in SERVING.methods:
        kind, handle = GetMessageClass(method.input_type), getattr(api, method.name)
        write = GetMessageClass(method.output_type).SerializeToString
        if method.client_streaming:
            made[method.name] = grpc.stream_stream_rpc_method_handler(handle, kind.FromString, write)
        else:
            new = (
                grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
            )
            made[method.name] = new(_reading(api, method.name, kind, handle), None, write)
    return made


def _reading(
    api: ServingApi, method: str, kind: type[Message], handle: Callable[[Any, Context], Awaitable[object]]
) -> Callable[[bytes, Context], Awaitable[object]]:
    async def read(data: bytes, context: Context) -> object:
        try:
            request = kind.FromString(data)
        except DecodeError:
            await api.refuse_unread(context, method)
        return await handle(request, context)

    return read


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _time_left_s(context: Context) -> float | None:
    left_s: float | None = context.time_remaining()
    return None if left_s is None else min(max(clock.here_s(left_s), MIN_TIMEOUT_S), MAX_TIMEOUT_S)


def _metadata(context: Context) -> Mapping[str, str]:
    pairs = context.invocation_metadata() or ()
    return fields_of([(str(key), value) for key, value in pairs if isinstance(value, str)])


async def _fail(context: Context, error: BatonError) -> NoReturn:
    await context.write(serving_pb2.GenerateResponse(error=error_detail(error)))
    await _abort(context, error)


async def _abort(context: Context, error: BatonError) -> NoReturn:
    await context.abort(status_code(error), status_message(error), trailing_metadata(error))


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
