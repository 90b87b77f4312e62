"""The OpenAPI document of the HTTP API, made from the very types and limits that judge its requests.

Request bodies are router/openai_schemas.py's models with router/validate.py's numbers written in; shapes of answers stand here,
since answers are written by hand for speed (router/openai_replies.py). A test calls a router with what the document allows
and forbids, and holds every answer against it. Made at the first GET /openapi.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from baton.timings import Timings
from router.batch import openapi as batch_openapi
from router.batch.api import CreateBatch
from router.labels import EXPLAIN, REQUEST_ID, SESSION_ID, SLO_CLASS, SLO_TPOT_MS, SLO_TTFT_MS, TIMEOUT_MS
from router.openai_schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from router.service_tiers import Tier
from router.validate import (
    BIAS,
    MAX_LABEL_CHARS,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    PRIORITY,
    RANGES,
    ROLES,
    TARGET_MS,
    TIMEOUT_S,
    Limits,
    Range,
)

Schema = dict[str, Any]
Finish = Literal["stop", "length"]
REF = "#/components/schemas/{model}"
_LABEL = {"maxLength": MAX_LABEL_CHARS, "pattern": r"^[^\x00-\x1f\x7f]*$"}


# -- answers -----------------------------------------------------------------------------------------------------------


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PromptTokensDetails(_Closed):
    cached_tokens: int


class Usage(_Closed):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Answer(_Closed):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Tier
    usage: Usage
    baton: Timings


class TopLogprob(_Closed):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Closed):
    content: list[TokenLogprob]


class ChatAnswer(_Closed):
    role: Literal["assistant"]
    content: str


class ChatChoice(_Closed):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextLogprobs(_Closed):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(_Closed):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    token_ids: list[int] | None = None


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class _Chunk(_Closed):
    """One event's data; usage and baton in the last one, if usage was asked for."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: Tier
    usage: Usage | None = None
    baton: Timings | None = None


class Delta(_Closed):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Closed):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    token_ids: list[int] | None = None


class ChatChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChunkChoice(TextChoice):
    finish_reason: Finish | None  # type: ignore[assignment]  # null until the last


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[TextChunkChoice]


class Tokens(_Closed):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(_Closed):
    prompt: str


class Model(_Closed):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    vocab_size: int


class Models(_Closed):
    object: Literal["list"]
    data: list[Model]


class ErrorObject(_Closed):
    message: str
    type: str
    param: str | None
    code: str


class Error(_Closed):
    error: ErrorObject


# -- the document ------------------------------------------------------------------------------------------------------

_ERRORS = {
    "400": "the request cannot be served; `param` names the field",
    "401": "no API key, or an unknown one",
    "404": "another model, or no such path",
    "405": "another method",
    "429": "too much in flight, or more than the key allows; `retry-after` says when to come again",
    "499": "the call was aborted",
    "431": "headers beyond the limit",
    "500": "a defect of ours",
    "503": "nobody can serve it now, or a worker was lost",
    "504": "the call's time is over",
}


def openapi_document(limits: Limits, has_batches: bool = False) -> Schema:
    """OpenAPI 3.1, complete: anything else is refused. `has_batches`: files and batches are served."""
    bodies: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    answers: tuple[type[BaseModel], ...] = (
        ChatCompletion, ChatChunk, Completion, CompletionChunk, Tokens, Text, Models, Error,
    )  # fmt: skip
    if has_batches:
        bodies, answers = (*bodies, CreateBatch), (*answers, *batch_openapi.ANSWERS)
    schemas: Schema = models_json_schema(
        [*((kind, "validation") for kind in bodies), *((kind, "serialization") for kind in answers)], ref_template=REF
    )[1]["$defs"]
    limited = _field_limits(limits)
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest", "Message"):
        for field, schema in schemas[name]["properties"].items():
            _write_in(schema, limited.get(field, {}))
    if has_batches:
        properties = schemas["CreateBatch"]["properties"]
        for field, limit in batch_openapi.CREATE_LIMITS.items():
            properties[field] |= limit
        _write_in(properties["metadata"], limited["metadata"])
    schemas["TokenizeRequest"]["oneOf"] = [_only("prompt", "messages"), _only("messages", "prompt")]
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": "1", "description": "OpenAI's completions and chat, and the router's own pages."},
        "paths": {
            "/v1/chat/completions": _generation("chat", "ChatRequest", "ChatCompletion", "ChatChunk"),
            "/v1/completions": _generation("complete", "CompletionRequest", "Completion", "CompletionChunk"),
            "/v1/tokenize": _post("tokenize", "TokenizeRequest", "Tokens"),
            "/v1/detokenize": _post("detokenize", "DetokenizeRequest", "Text"),
            "/v1/models": _get("models", {"application/json": _ref("Models")}),
            "/healthz": _get("healthz", _TEXT),
            "/readyz": _get("readyz", _TEXT, unready=_TEXT),
            "/metrics": _get("metrics", _TEXT),
            **(batch_openapi.paths(_ref, _error_responses()) if has_batches else {}),
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }  # fmt: skip


def _field_limits(limits: Limits) -> Mapping[str, Mapping[str, Schema]]:
    """For each field, by the JSON type of its value, what else holds for it."""
    token_id = {"minimum": 0, "maximum": limits.vocab_size - 1}
    stop = {"minLength": 1, "maxLength": MAX_STOP_CHARS}
    numbers = {**RANGES, "top_logprobs": RANGES["logprobs"], "priority": PRIORITY, "n": Range(1, limits.max_n)}
    numbers |= {"max_completion_tokens": RANGES["max_tokens"], "seed": Range(0, 2**64 - 1)}
    fields: dict[str, dict[str, Schema]] = {name: {"number": _interval(allowed)} for name, allowed in numbers.items()}
    fields |= {name: {"string": _LABEL} for name in ("user", "safety_identifier", "prompt_cache_key")}
    bias = {
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", **_interval(BIAS)},
    }
    metadata = {
        "maxProperties": MAX_METADATA,
        "propertyNames": {"maxLength": MAX_METADATA_KEY_CHARS},
        "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE_CHARS},
    }
    return fields | {
        "model": {"string": {"enum": ["", limits.model]}},
        "role": {"string": {"enum": [*ROLES, "developer"]}},
        "messages": {"array": {"minItems": 1, "maxItems": MAX_MESSAGES}},
        "prompt": {"string": {"minLength": 1}, "array": {"minItems": 1}},
        "stop": {"string": stop, "array": {"maxItems": limits.max_stop_strings, "items": {"type": "string", **stop}}},
        "stop_token_ids": {"array": {"maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", **token_id}}},
        "tokens": {"array": {"items": {"type": "integer", **token_id}}},
        "logit_bias": {"object": {"maxProperties": MAX_LOGIT_BIAS, **bias}},
        "metadata": {"object": metadata},
    }


def _interval(allowed: Range) -> Schema:
    return {"exclusiveMinimum" if allowed.open_low else "minimum": allowed.low, "maximum": allowed.high}


def _write_in(schema: Schema, limited: Mapping[str, Schema]) -> None:
    """Add limits to the alternatives that have their type."""
    for alternative in schema.get("anyOf", [schema]):
        kind = alternative.get("type")
        alternative |= limited.get("number" if kind == "integer" else kind, {})


def _only(field: str, other: str) -> Schema:
    return {"required": [field], "properties": {field: {"not": {"type": "null"}}, other: {"type": "null"}}}


def _post(name: str, body: str, answer: str) -> Schema:
    return {
        "post": {
            "operationId": name,
            "requestBody": {"required": True, "content": {"application/json": _ref(body)}},
            "responses": {
                "200": {"description": "OK", "content": {"application/json": _ref(answer)}},
                **_error_responses(),
            },
        }
    }


def _generation(name: str, body: str, answer: str, chunk: str) -> Schema:
    made = _post(name, body, answer)
    ok = made["post"]["responses"]["200"]
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _either(chunk, "Error")}
    event = {"type": "object", "properties": {"data": data}, "description": "one event; the last one's data is [DONE]"}
    ok["content"]["text/event-stream"] = {"schema": event}
    ok["headers"] = {REQUEST_ID: {"required": True, "schema": {"type": "string"}}}
    made["post"]["parameters"] = [_header(key, schema) for key, schema in _HEADERS.items()]
    return made


def _header(key: str, schema: Schema) -> Schema:
    return {"in": "header", "name": key, "required": False, "schema": schema}


def _get(name: str, content: Schema, *, unready: Schema | None = None) -> Schema:
    responses = {"200": {"description": "OK", "content": content}, **_error_responses()}
    if unready is not None:
        responses["503"] = {"description": "no call could be served now; the text says why", "content": unready}
    return {"get": {"operationId": name, "responses": responses}}


def _error_responses() -> Schema:
    content, fields = {"application/json": _ref("Error")}, {REQUEST_ID: {"schema": {"type": "string"}}}
    return {status: {"description": why, "headers": fields, "content": content} for status, why in _ERRORS.items()}


def _either(*names: str) -> Schema:
    return {"anyOf": [{"$ref": REF.format(model=name)} for name in names]}


def _ref(name: str) -> Schema:
    return {"schema": {"$ref": REF.format(model=name)}}


_HEADERS: Mapping[str, Schema] = {
    REQUEST_ID: {"type": "string", **_LABEL},
    EXPLAIN: {"type": "string", "description": "1: the answer's header of this name says why it was made where it was"},
    SESSION_ID: {"type": "string", **_LABEL},
    SLO_CLASS: {"type": "string"},
    SLO_TTFT_MS: {"type": "number", **_interval(TARGET_MS)},
    SLO_TPOT_MS: {"type": "number", **_interval(TARGET_MS)},
    TIMEOUT_MS: {"type": "number", "exclusiveMinimum": 0, "maximum": TIMEOUT_S.high * 1e3},
}
_TEXT: Schema = {"text/plain": {"schema": {"type": "string"}}}
