"""Bodies of the OpenAI HTTP API: strict types, no unknown field. What is well typed is judged in router/validate.py.

A field that is not supported is refused by name, never ignored. Fields of OpenAI's that Baton has not are listed (`Absent`),
so that null, or a value that asks for nothing, is what it is for OpenAI: the same as leaving the field out. Labels that only
OpenAI's own storage would use (`metadata`, `user`) are taken, bounded, and not kept. Every answer to one question stands here
once: `max_completion_tokens` and `max_tokens` are one limit, `service_tier` is an SLO class and a priority.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from baton.errors import InvalidRequest
from router.call_spec import CallLabels, CallSpec, ChatPrompt, Prompt, SamplingSpec, TextPrompt, TokenPrompt
from router.service_tiers import Tier, priority_of, slo_class_of
from router.validate import check_label, check_metadata

MAX_ID_DIGITS = 10  # of a u32


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


Absent: TypeAlias = None  # the type of a field that may only be null: OpenAI has it, Baton has not


class StreamOptions(_Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(_Strict):
    type: Literal["text"]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: str
    content: str | list[TextPart]
    refusal: Absent = None  # null in OpenAI's answers, which clients send back as they came
    audio: Absent = None
    function_call: Absent = None
    tool_calls: Absent = None

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = (
            "system" if self.role == "developer" else self.role
        )  # OpenAI's newer word for it; templates know the older
        return {"role": role, "content": text}


_LABEL_FIELDS = frozenset(("service_tier", "user", "safety_identifier", "prompt_cache_key", "metadata"))


class _Generation(_Strict):
    """Fields that both endpoints have."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    priority: int | None = None
    return_token_ids: bool | None = None  # vLLM's name for it
    service_tier: Tier | None = None
    user: str | None = None
    safety_identifier: str | None = None  # OpenAI's newer name for it
    prompt_cache_key: str | None = None  # OpenAI's word for a session id
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def _labels(self, labels: CallLabels) -> CallLabels:
        """With what the body says; a session id of the headers' wins."""
        if self.model_fields_set.isdisjoint(_LABEL_FIELDS):
            return labels
        check_label("user", self.user or "")
        check_label("safety_identifier", self.safety_identifier or "")
        check_label("prompt_cache_key", self.prompt_cache_key or "")
        check_metadata(self.metadata or {})
        return replace(
            labels,
            session_id=labels.session_id or self.prompt_cache_key or "",
            slo_class=slo_class_of(self.service_tier, labels.slo_class),
        )

    def _spec(
        self,
        prompt: Prompt,
        labels: CallLabels,
        api: str,
        max_tokens: int | None,
        logprobs: int | None,
        echo: bool = False,
    ) -> CallSpec:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", field="stream_options")
        if self.store or (self.stream_options and self.stream_options.include_obfuscation):
            field = "store" if self.store else "stream_options"
            raise InvalidRequest(f"{field} asks for what this server does not do; leave it out", field=field)
        return CallSpec(
            model=self.model,
            prompt=prompt,
            sampling=SamplingSpec(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                seed=self.seed,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias=_biases(self.logit_bias or {}),
                stop_token_ids=tuple(self.stop_token_ids or ()),
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                ignore_eos=bool(self.ignore_eos),
                logprobs=logprobs,
                n=self.n,
            ),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            priority=priority_of(self.service_tier, self.priority),
            labels=self._labels(labels),
            echo=echo,
            api=api,
        )


class ChatRequest(_Generation):
    """POST /v1/chat/completions"""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    tool_choice: Literal["none"] | None = None
    reasoning_effort: Literal["none"] | None = None
    tools: Absent = None
    parallel_tool_calls: Absent = None
    functions: Absent = None
    function_call: Absent = None
    audio: Absent = None
    prediction: Absent = None
    verbosity: Absent = None
    web_search_options: Absent = None

    def spec(self, labels: CallLabels) -> CallSpec:
        prompt = ChatPrompt([message.plain() for message in self.messages])
        return self._spec(prompt, labels, "chat", self._limit(), self._num_logprobs())

    def _limit(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise InvalidRequest(
                "max_tokens and max_completion_tokens are two names of one limit and differ", field="max_tokens"
            )
        return self.max_completion_tokens

    def _num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Generation):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Absent = None

    def spec(self, labels: CallLabels) -> CallSpec:
        if self.best_of not in (None, self.n or 1):
            raise InvalidRequest(f"best_of is {self.best_of}; the limit is n, {self.n or 1}", field="best_of")
        prompt = _one_prompt(self.prompt)
        return self._spec(prompt, labels, "completions", self.max_tokens, self.logprobs, bool(self.echo))


class TokenizeRequest(_Strict):
    """POST /v1/tokenize: plain text, or messages through the chat template."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None

    def one(self) -> TextPrompt | ChatPrompt:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give one of prompt and messages", field="prompt")
        if self.messages is not None:
            return ChatPrompt([message.plain() for message in self.messages])
        return TextPrompt(self.prompt or "")


class DetokenizeRequest(_Strict):
    """POST /v1/detokenize"""

    model: str = ""
    tokens: list[int]


Body = TypeVar("Body", bound=BaseModel)


def parse(kind: type[Body], data: object) -> Body:
    """Raises: InvalidRequest, naming the first field that does not fit."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            raise InvalidRequest(f"{field} is not a field that this server knows", field=field) from None
        if first["type"] == "none_required":
            raise InvalidRequest(f"{field} is not supported by this server", field=field) from None
        raise InvalidRequest(f"{field}: {first['msg']}", field=field) from None


def _path(location: Sequence[int | str]) -> str:
    """messages[0].role; below other fields pydantic names union members, which mean nothing to a caller."""
    if not location:
        return "body"
    if location[0] != "messages":
        return ascii(str(location[0])[:64])[1:-1]
    path = "messages"
    for part in location[1:3]:
        path += f"[{part}]" if isinstance(part, int) else f".{ascii(part[:64])[1:-1]}"
    return path


def _biases(biases: dict[str, float]) -> dict[int, float]:
    """JSON keys are strings."""
    result: dict[int, float] = {}
    for key, value in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS):
            raise InvalidRequest("logit_bias has a key that is no token id", field="logit_bias")
        result[int(key)] = value
    return result


def _one_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> Prompt:
    """One prompt per call: a list of several would be several calls under one deadline."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if not prompt or isinstance(prompt[0], int):
        return TokenPrompt([token_id for token_id in prompt if isinstance(token_id, int)], field="prompt")
    if len(prompt) > 1:
        raise InvalidRequest(f"prompt has {len(prompt)} entries; the limit is 1 prompt per call", field="prompt")
    only = prompt[0]
    return TextPrompt(only) if isinstance(only, str) else TokenPrompt(only, field="prompt")
