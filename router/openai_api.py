"""The OpenAI HTTP API and the router's own pages, as one ASGI application.

    POST /v1/chat/completions  /v1/completions      streamed (SSE) or whole
    POST /v1/tokenize  /v1/detokenize     GET /v1/models
    GET  /openapi.json
    GET  /healthz   the loop answers      /readyz   a call could be served now      /metrics

Failures: before the first token an HTTP status and OpenAI's error object; in a stream one event `data: {"error": ...}`, after
which the body ends without [DONE] (the official client raises APIError on it). A client that disconnects cancels its call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton import clock
from baton.config import RouterConfig
from baton.errors import BatonError, Internal, InvalidRequest, NotFound, Unauthenticated
from baton.log import get_log
from baton.model_spec import ModelSpec
from router.asgi import (
    error_body,
    explanation_field,
    headers,
    parse_json,
    read_body,
    refuse_unread,
    request_id_field,
    request_id_of,
    send_error,
    send_json,
)
from router.batch.api import BatchApi
from router.batch.line_server import Answered
from router.call import Call, Calls
from router.call_events import ChoiceFinished, Piece, PieceSink
from router.call_spec import CallLabels, ChatPrompt
from router.detokenizer import TextStream
from router.fleet import Fleet
from router.http_protocol import Exchange, exchange_of
from router.labels import REQUEST_ID, labels_from
from router.metrics import RouterMetrics
from router.openai_replies import ChatReply, CompletionReply, Json, Wording
from router.openai_schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from router.openapi import openapi_document
from router.series import CONTENT_TYPE, Gauge
from router.service_tiers import BATCH, tier_of
from router.sse import SseStream
from router.tenants import Tenant
from router.tokenizer import Tokenizer
from router.validate import MAX_LABEL_CHARS, check_prompt, check_token_ids

log = get_log("router.http")

SLICE_S = 0.0005  # of a page's making in one turn of the loop: a call takes some six turns, and is held up by each
LINES_PER_LOOK = 16  # at the clock; they take 15 us


@dataclass(frozen=True, slots=True)
class Post:
    """A request whose sender and body are known."""

    exchange: Exchange
    fields: Mapping[str, str]  # headers
    tenant: Tenant
    body: object  # parsed JSON

    @property
    def request_id(self) -> str:
        return self.fields[REQUEST_ID]


class JsonEndpoint:
    """POST with a JSON body: reads it, runs `answer`, says every error; a client that leaves cancels the answer.

    `on_refused` hears of bodies that `answer` never saw.
    """

    def __init__(
        self,
        max_body_bytes: int,
        tenant_of: Callable[[Mapping[str, str]], Tenant],
        answer: Callable[[Post], Awaitable[None]],
        on_refused: Callable[[BatonError], None] = lambda error: None,
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._tenant_of = tenant_of
        self._answer = answer
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange, fields = exchange_of(scope), headers(scope)
        try:
            tenant = self._tenant_of(fields)
            text = await read_body(exchange, fields, receive, self._max_body_bytes)
        except (InvalidRequest, Unauthenticated) as error:
            self._on_refused(error)
            await refuse_unread(exchange, receive, error, fields[REQUEST_ID])
            return
        except ConnectionError:
            return
        try:
            post = Post(exchange, fields, tenant, parse_json(text))
        except InvalidRequest as error:
            self._on_refused(error)
            send_error(exchange, error, fields[REQUEST_ID])
            return
        task = asyncio.current_task()
        assert task is not None
        exchange.watch(on_gone=task.cancel)
        try:
            await self._run(post, scope["path"])
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
            task.uncancel()

    async def _run(self, post: Post, path: str) -> None:
        exchange = post.exchange
        try:
            if exchange.behind:  # with an earlier answer on this connection: its memory is bounded by one
                await exchange.caught_up()
            if not exchange.gone:
                await self._answer(post)
        except BatonError as error:
            _say(post, error)
        except Exception:
            log.exception("request_failed", request_id=post.request_id[:MAX_LABEL_CHARS], path=path)
            _say(post, Internal("an internal error ended the call"))


def _say(post: Post, error: BatonError) -> None:
    """Answer with an error, unless a part of another answer was sent already: then the end of the connection must do."""
    exchange = post.exchange
    if not exchange.begun:
        send_error(exchange, error, post.request_id)
    elif not exchange.ended:
        exchange.cut()


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_GENERATIONS: Mapping[
    str, tuple[str, type[ChatRequest] | type[CompletionRequest], type[ChatReply] | type[CompletionReply]]
] = {
    CHAT: ("chat", ChatRequest, ChatReply),
    COMPLETIONS: ("completions", CompletionRequest, CompletionReply),
}


class GenerationApi:
    """The two endpoints that generate."""

    def __init__(self, model: str, calls: Calls, backlog_bytes: int) -> None:
        self._model = model
        self._calls = calls
        self._backlog_bytes = backlog_bytes

    async def generate(self, url: str, post: Post) -> None:
        """Answer a POST to one of the two."""
        api, kind, reply_kind = _GENERATIONS[url]
        exchange = post.exchange
        try:
            body = parse(kind, post.body)
            spec = replace(body.spec(labels_from(post.fields)), tenant=post.tenant)
        except BatonError as error:
            self._calls.refused(api, error)
            raise
        async with self._calls.open(spec, exchange.arrival_s) as call:
            token_ids = bool(body.return_token_ids)
            if body.stream:
                reply = reply_kind(self._wording(call, token_ids), self._calls.table)
                uniform = spec.sampling.logprobs is None and not body.return_token_ids
                stream = SseStream(
                    exchange, call.request_id, reply, self._calls.table, self._backlog_bytes, uniform, call.explanation
                )
                await _stream(stream, call, body.include_usage)
            else:
                answer = await self._whole(call, reply_kind, token_ids)
                fields = request_id_field(call.request_id) + explanation_field(call.explanation())
                send_json(exchange, 200, answer, fields)

    async def answer(
        self,
        url: str,
        body: Mapping[str, object],
        tenant: str,
        request_id: str,
        timeout_s: float,
        on_first: Callable[[], None],
    ) -> Answered:
        """A line of a batch, whole, as a call of the class `batch`. Raises: BatonError."""
        api, kind, reply_kind = _GENERATIONS[url]
        try:
            parsed = parse(kind, body)
            labels = CallLabels(request_id, slo_class=BATCH, timeout_s=timeout_s)
            spec = replace(parsed.spec(labels), tenant=self._calls.tenant_named(tenant))
        except BatonError as error:
            self._calls.refused(api, error)
            raise
        async with self._calls.open(spec, clock.now_s()) as call:
            token_ids = bool(parsed.return_token_ids)
            return Answered(call.request_id, await self._whole(call, reply_kind, token_ids, on_first))

    async def _whole(
        self,
        call: Call,
        reply_kind: type[ChatReply] | type[CompletionReply],
        token_ids: bool,
        on_first: Callable[[], None] = lambda: None,
    ) -> Json:
        whole = Whole(on_first)
        done = await call.tell(whole)
        reply = reply_kind(self._wording(call, token_ids), self._calls.table)
        return reply.whole(whole.pieces, whole.ends, done)

    def _wording(self, call: Call, token_ids: bool) -> Wording:
        return Wording(
            call.request_id,
            self._model,
            service_tier=tier_of(call.slo.name, call.request.priority),
            fingerprint=lambda: call.reports[0].fingerprint,
            token_ids=token_ids,
            echo=self._calls.prompt_text(call.spec.prompt) if call.spec.echo else "",
        )


async def _stream(stream: SseStream, call: Call, include_usage: bool) -> None:
    """An error behind the first token becomes the last event; an earlier one is raised, for a status of its own."""
    try:
        done = await call.tell(stream)
    except BatonError as error:
        if not stream.begun:
            raise
        stream.fail(error)
        raise
    stream.finish(done, include_usage)


class Whole:
    """An Audience that keeps everything, and tells of the first."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self.pieces: list[Piece] = []
        self.ends: list[ChoiceFinished] = []

    def choice(self, choice: int, text: TextStream) -> PieceSink:
        return PieceSink(choice, text, self._keep)

    def _keep(self, event: Piece | ChoiceFinished) -> None:
        if isinstance(event, Piece):
            if not self.pieces:
                self._on_first()
            self.pieces.append(event)
        else:
            self.ends.append(event)


class TokenApi:
    """Tokenise and back, with the very tokeniser that calls go through."""

    def __init__(self, spec: ModelSpec, tokenizer: Tokenizer) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._max_tokens = (
            spec.max_model_len
        )  # text certain to exceed it is refused unread: 4 MB would take a thread for 2 s

    async def tokenize(self, post: Post) -> None:
        body = parse(TokenizeRequest, post.body)
        self._check_model(body.model)
        prompt = body.one()
        check_prompt(prompt, self._spec.vocab_size)
        if isinstance(prompt, ChatPrompt):
            ids = await self._tokenizer.encode_chat(
                prompt.messages, field=prompt.field, max_tokens=self._max_tokens, salt=post.tenant.salt
            )
        else:
            ids = await self._tokenizer.encode(
                prompt.text, field=prompt.field, max_tokens=self._max_tokens, salt=post.tenant.salt
            )
        answer = {"tokens": ids, "count": len(ids), "max_model_len": self._spec.max_model_len}
        send_json(post.exchange, 200, answer, request_id_field(post.request_id))

    async def detokenize(self, post: Post) -> None:
        body = parse(DetokenizeRequest, post.body)
        self._check_model(body.model)
        check_token_ids("tokens", body.tokens, self._spec.vocab_size)
        answer = {"prompt": self._tokenizer.decode(body.tokens)}
        send_json(post.exchange, 200, answer, request_id_field(post.request_id))

    def _check_model(self, model: str) -> None:
        if model and model != self._spec.name:
            raise NotFound(f"the model is not served here; {self._spec.name!r} is", field="model")


class Pages:
    """What operators and probes read."""

    def __init__(
        self, spec: ModelSpec, fleet: Fleet, metrics: RouterMetrics, calls: Calls, has_batches: bool
    ) -> None:  # fmt: skip
        self._spec = spec
        self._fleet = fleet
        self._metrics = metrics
        self._calls = calls
        self._started = int(time.time())
        self._has_batches = has_batches
        Gauge("baton_num_requests_inflight", "Calls at this router.", lambda: calls.num_inflight, metrics.registry)

    async def models(self, request: Request) -> Response:
        self._calls.tenant(request.headers)
        model = {"id": self._spec.name, "object": "model", "created": self._started, "owned_by": "baton"}
        limits = self._fleet.limits()
        max_model_len = limits.max_model_len if limits else self._spec.max_model_len
        ours = {"max_model_len": max_model_len, "vocab_size": self._spec.vocab_size}
        return JSONResponse({"object": "list", "data": [{**model, **ours}]}, headers=_request_id(request))

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi_document(self._calls.limits, self._has_batches))

    async def healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        reason = self._calls.unready_reason()
        return PlainTextResponse(f"{reason or 'ready'}\n", status_code=503 if reason else 200)

    async def metrics(self, request: Request) -> Response:
        """In slices, since a thousand workers have 20,000 lines and streams go on meanwhile."""
        lines, until_s = [], clock.now_s() + SLICE_S
        for line in self._metrics.registry.lines():
            lines.append(line)
            if len(lines) % LINES_PER_LOOK == 0 and clock.now_s() > until_s:
                await asyncio.sleep(0)
                until_s = clock.now_s() + SLICE_S
        return Response("".join(lines), media_type=CONTENT_TYPE)


def build_app(
    config: RouterConfig,
    spec: ModelSpec,
    calls: Calls,
    tokenizer: Tokenizer,
    fleet: Fleet,
    metrics: RouterMetrics,
    generation: GenerationApi,
    batches: BatchApi | None,
) -> Front:
    """The whole HTTP side of a router; `batches`: None where there are none."""
    tokens = TokenApi(spec, tokenizer)
    pages = Pages(spec, fleet, metrics, calls, has_batches=batches is not None)
    endpoint = partial(JsonEndpoint, config.max_body_bytes, calls.tenant)
    posts: dict[str, ASGIApp] = {
        CHAT: endpoint(partial(generation.generate, CHAT), partial(calls.refused, "chat")),
        COMPLETIONS: endpoint(partial(generation.generate, COMPLETIONS), partial(calls.refused, "completions")),
        "/v1/tokenize": endpoint(tokens.tokenize),
        "/v1/detokenize": endpoint(tokens.detokenize),
    }
    gets = {
        "/v1/models": pages.models,
        "/openapi.json": pages.openapi,
        "/healthz": pages.healthz,
        "/readyz": pages.readyz,
        "/metrics": pages.metrics,
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
    routes += [Route(path, page, methods=["GET"]) for path, page in gets.items()]
    if batches is not None:
        posts["/v1/files"] = batches.upload
        posts["/v1/batches"] = endpoint(partial(_create_batch, batches))
        routes += batches.routes()
    return Front(
        posts, Starlette(routes=routes, exception_handlers={HTTPException: _http_error, BatonError: _baton_error})
    )


class Front:
    """The ASGI application: POSTs to known paths are looked up, everything else is Starlette's."""

    def __init__(self, posts: Mapping[str, ASGIApp], rest: ASGIApp) -> None:
        self._posts = posts
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._rest
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self._posts.get(scope["path"], app)
        await app(scope, receive, send)


async def _create_batch(batches: BatchApi, post: Post) -> None:
    send_json(post.exchange, 200, await batches.create(post.tenant, post.body))


async def _baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return JSONResponse(error_body(error), status_code=error.http_status, headers=_request_id(request))


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown path or method, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    body = {"message": error.detail, "type": "invalid_request_error", "param": None, "code": "not_found"}
    fields = {**(error.headers or {}), **_request_id(request)}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=fields)


def _request_id(request: Request) -> dict[str, str]:
    return {REQUEST_ID: request_id_of(request.headers)[:MAX_LABEL_CHARS]}
