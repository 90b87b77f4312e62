"""Every limit of a call, judged once, here: afterwards nothing about it can be the caller's fault. Pure.

`check` looks at what was written, before any work; `resolve` looks at the tokenised prompt, against the smaller of both
pools, and fills in every default. Each error names the field and the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.errors import InvalidRequest, NotFound
from baton.request import MAX_LOGPROBS, SamplingParams
from baton.slo import MIN_TARGET_MS
from router.call_spec import CallLabels, CallSpec, ChatPrompt, Prompt, SamplingSpec, TextPrompt, TokenPrompt
from router.fleet import PoolLimits

ROLES = ("system", "user", "assistant")  # serving.proto ChatMessage
MAX_MESSAGES = 1_024  # a turn has at least 8 tokens of markup: more cannot fit an 8k context
MAX_LOGIT_BIAS = 1_024  # entries; OpenAI accepts 300
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_CHARS = 512  # of one stop string; as much text may be held back
MAX_LABEL_CHARS = 256  # request_id, session_id: they go into logs; user
MAX_METADATA = 16  # pairs; this and the two below as OpenAI has them
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What does not depend on the workers."""

    model: str
    vocab_size: int
    max_n: int
    max_stop_strings: int


@dataclass(frozen=True, slots=True)
class Range:
    """An interval for a number, said in the message as mathematicians write it."""

    low: float
    high: float
    open_low: bool = False

    def check(self, field: str, value: float) -> None:
        """Raises: InvalidRequest. NaN is in no interval, and an integer may be larger than any float."""
        above = value > self.low if self.open_low else value >= self.low
        if not (above and value <= self.high):
            raise InvalidRequest(f"{field} is {value}; the limit is {self}", field=field)

    def __str__(self) -> str:
        return f"{'(' if self.open_low else '['}{self.low:g}, {self.high:g}]"


# serving.proto, Sampling
_RANGES: tuple[tuple[str, Range, Callable[[SamplingSpec], float | None]], ...] = (
    ("temperature", Range(0, 2), lambda s: s.temperature),
    ("top_p", Range(0, 1, open_low=True), lambda s: s.top_p),
    ("top_k", Range(0, 2**31 - 1), lambda s: s.top_k),
    ("min_p", Range(0, 1), lambda s: s.min_p),
    ("repetition_penalty", Range(0, 10, open_low=True), lambda s: s.repetition_penalty),
    ("presence_penalty", Range(-2, 2), lambda s: s.presence_penalty),
    ("frequency_penalty", Range(-2, 2), lambda s: s.frequency_penalty),
    ("max_tokens", Range(1, 2**31 - 1), lambda s: s.max_tokens),
    ("min_tokens", Range(0, 2**31 - 1), lambda s: s.min_tokens),
    ("logprobs", Range(0, MAX_LOGPROBS), lambda s: s.logprobs),
)
BIAS = Range(-100, 100)
PRIORITY = Range(-100, 100)
RANGES = {name: allowed for name, allowed, _ in _RANGES}  # for the OpenAPI document
TARGET_MS = Range(MIN_TARGET_MS, 3.6e6)  # an hour: beyond it a target is no target
TIMEOUT_S = Range(0, MAX_TIMEOUT_S, open_low=True)


def check(spec: CallSpec, limits: Limits) -> None:
    """Refuse what can be refused before the prompt is tokenised.

    Raises:
        InvalidRequest: a field is outside its limit.
        NotFound: the model is not the one served.
    """
    if spec.model and spec.model != limits.model:
        raise NotFound(f"the model {_shown(spec.model)} is not served here; {limits.model!r} is", field="model")
    _check_labels(spec.labels)
    check_prompt(spec.prompt, limits.vocab_size)
    _check_sampling(spec.sampling, limits)
    _check_stop(spec.stop, limits)
    PRIORITY.check("priority", spec.priority)
    if spec.echo and spec.sampling.logprobs is not None:
        raise InvalidRequest("echo does not go with logprobs: a prompt's own are not computed", field="echo")


def resolve(spec: CallSpec, num_prompt_tokens: int, pools: PoolLimits, seed: int) -> SamplingParams:
    """Judge the lengths and fill in the defaults; `seed` is used where the caller gave none. sample_index is 0.

    Raises:
        InvalidRequest: the prompt, or prompt and max_tokens, exceed what both pools and the model can hold.
    """
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{spec.prompt.field} is empty; the limit is at least 1 token", field=spec.prompt.field)
    if num_prompt_tokens > pools.max_prompt_tokens:
        raise InvalidRequest(
            f"{spec.prompt.field} has {num_prompt_tokens} tokens; the limit is {pools.max_prompt_tokens}",
            field=spec.prompt.field,
        )
    left = min(pools.max_model_len - num_prompt_tokens, pools.decode_tokens - num_prompt_tokens + 1)
    sampling = spec.sampling
    max_tokens = left if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > left:
        raise InvalidRequest(
            f"max_tokens is {max_tokens}; the limit is {left} behind a prompt of {num_prompt_tokens} tokens",
            field="max_tokens",
        )
    min_tokens = sampling.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}; the limit is max_tokens, {max_tokens}", field="min_tokens")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_default(sampling.temperature, 1.0),
        top_p=_default(sampling.top_p, 1.0),
        top_k=sampling.top_k or 0,
        min_p=_default(sampling.min_p, 0.0),
        seed=seed if sampling.seed is None else sampling.seed,
        repetition_penalty=_default(sampling.repetition_penalty, 1.0),
        presence_penalty=_default(sampling.presence_penalty, 0.0),
        frequency_penalty=_default(sampling.frequency_penalty, 0.0),
        logit_bias=tuple(sampling.logit_bias.items()),
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_tokens=min_tokens,
        ignore_eos=sampling.ignore_eos,
        num_logprobs=sampling.logprobs,
    )


def check_prompt(prompt: Prompt, vocab_size: int) -> None:
    """What can be said before it is tokenised. Raises: InvalidRequest."""
    match prompt:
        case TextPrompt(text, field):
            _refuse_empty(field, text)
            check_text(field, text)
        case TokenPrompt(token_ids, field):
            _refuse_empty(field, token_ids)
            check_token_ids(field, token_ids, vocab_size)
        case ChatPrompt(messages, field):
            _refuse_empty(field, messages)
            _check_messages(messages, field)


def _refuse_empty(field: str, value: Sequence[object]) -> None:
    if not value:
        raise InvalidRequest(f"{field} is empty; the limit is at least 1 token", field=field)


def _check_messages(messages: Sequence[Mapping[str, str]], field: str) -> None:
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"{field} has {len(messages)} entries; the limit is {MAX_MESSAGES}", field=field)
    for position, message in enumerate(messages):
        name = f"{field}[{position}]"
        if message["role"] not in ROLES:
            raise InvalidRequest(
                f"{name}.role is {_shown(message['role'])}; the limit is one of {', '.join(ROLES)}",
                field=f"{name}.role",
            )
        check_text(f"{name}.content", message["content"])


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises: InvalidRequest, naming the first id outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{field} contains {wrong}; the limit is the vocabulary, [0, {vocab_size - 1}]", field=field
        )  # fmt: skip


def check_text(field: str, text: str) -> None:
    """Raises: InvalidRequest, for text that is no Unicode (a lone surrogate from a JSON escape)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: a lone surrogate at character {error.start}", field=field
        ) from None


def check_label(field: str, text: str) -> None:
    """Raises: InvalidRequest, for what is too long to be a label, or would break out of a header or a log line."""
    check_text(field, text)
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(f"{field} has {len(text)} characters; the limit is {MAX_LABEL_CHARS}", field=field)
    if not text.isprintable() and any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise InvalidRequest(f"{field} contains a control character", field=field)


def check_metadata(metadata: Mapping[str, str]) -> None:
    """What OpenAI would keep with an answer; here it is only bounded. Raises: InvalidRequest."""
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata has {len(metadata)} pairs; the limit is {MAX_METADATA}", field="metadata")
    for key, value in metadata.items():
        for what, text, limit in (("key", key, MAX_METADATA_KEY_CHARS), ("value", value, MAX_METADATA_VALUE_CHARS)):
            if len(text) > limit:
                raise InvalidRequest(
                    f"metadata has a {what} of {len(text)} characters; the limit is {limit}", field="metadata"
                )


def _default(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _shown(text: str) -> str:
    """A caller's word in a message: short, and safe to log."""
    return ascii(text[:64])


def _check_labels(labels: CallLabels) -> None:
    check_label("request_id", labels.request_id)
    check_label("session_id", labels.session_id)
    for field, target in (("slo.ttft_ms", labels.slo_ttft_ms), ("slo.tpot_ms", labels.slo_tpot_ms)):
        if target is not None:
            TARGET_MS.check(field, target)
    if labels.timeout_s is not None:
        TIMEOUT_S.check("timeout_s", labels.timeout_s)


def _check_sampling(sampling: SamplingSpec, limits: Limits) -> None:
    for field, allowed, value_of in _RANGES:
        if (value := value_of(sampling)) is not None:
            allowed.check(field, value)
    if sampling.seed is not None and not 0 <= sampling.seed < 2**64:
        raise InvalidRequest(f"seed is {sampling.seed}; the limit is [0, 2^64)", field="seed")
    if sampling.n is not None:
        Range(1, limits.max_n).check("n", sampling.n)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias has {len(sampling.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}", field="logit_bias"
        )
    check_token_ids("logit_bias", list(sampling.logit_bias), limits.vocab_size)
    for bias in sampling.logit_bias.values():
        BIAS.check("logit_bias", bias)
    if len(sampling.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids has {len(sampling.stop_token_ids)} entries; the limit is {MAX_STOP_TOKEN_IDS}",
            field="stop_token_ids",
        )
    check_token_ids("stop_token_ids", sampling.stop_token_ids, limits.vocab_size)


def _check_stop(stop: Sequence[str], limits: Limits) -> None:
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequest(
            f"stop has {len(stop)} strings; the limit is {limits.max_stop_strings}", field="stop"
        )  # fmt: skip
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"stop has a string of {len(text)} characters; the limit is [1, {MAX_STOP_CHARS}]", field="stop"
            )
        check_text("stop", text)
