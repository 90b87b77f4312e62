"""Replies in OpenAI's shapes: chunks of a stream and whole bodies, for chat and for completions.

Beyond OpenAI's fields there is one, `baton`, beside `usage` in the last chunk (if usage was asked for) and in whole bodies: the
call's Timings. Data only: nothing here awaits or sends.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.request import FinishReason, Logprobs, SampledToken
from router.call_events import CallDone, ChoiceFinished, Piece, Pieces
from router.detokenizer import TokenTable
from router.service_tiers import Tier

Json = Mapping[str, object]
MIN_LOGPROB = -9999.0  # OpenAI's word for minus infinity, which JSON cannot say

FINGERPRINT_CHARS = 12  # of 32: two models of one cluster are told apart, which is all that clients do with it

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Wording:
    """What a reply says besides the answer."""

    request_id: str
    model: str
    service_tier: Tier
    fingerprint: Callable[[], str]  # of the workers' model and numerics; asked when there is a first token
    token_ids: bool = False  # each choice says its own
    echo: str = ""  # each choice's text begins with it

    def head(self, prefix: str, kind: str) -> dict[str, object]:
        """Fields that all parts of a reply begin with."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint()[:FINGERPRINT_CHARS]}",
            "service_tier": self.service_tier,
        }


class Reply(Protocol):
    """One call's reply in the shape of one endpoint."""

    def pieces(self, pieces: Pieces) -> Json: ...
    def end(self, end: ChoiceFinished) -> Json: ...
    def usage(self, done: CallDone) -> Json: ...
    def whole(self, pieces: Sequence[Piece], ends: Sequence[ChoiceFinished], done: CallDone) -> Json: ...


class ChatReply:
    """chat.completion and chat.completion.chunk"""

    def __init__(self, wording: Wording, table: TokenTable) -> None:
        self._wording = wording
        self._table = table
        self._begun: set[int] = set()

    @functools.cached_property
    def _head(self) -> Json:
        return self._wording.head("chatcmpl", "chat.completion.chunk")

    def pieces(self, pieces: Pieces) -> Json:
        delta = {"content": pieces.text}
        if pieces.choice not in self._begun:
            self._begun.add(pieces.choice)
            delta = {"role": "assistant", **delta}
        choice = self._choice(pieces.choice, delta, self._logprobs(pieces.parts), None)
        return self._chunk([choice | _token_ids(pieces.parts, self._wording.token_ids)])

    def end(self, end: ChoiceFinished) -> Json:
        return self._chunk([self._choice(end.choice, {}, None, _FINISH[end.finish])])

    def usage(self, done: CallDone) -> Json:
        return {**self._chunk([]), **_usage(done)}

    def whole(self, pieces: Sequence[Piece], ends: Sequence[ChoiceFinished], done: CallDone) -> Json:
        choices = []
        for end in sorted(ends, key=lambda end: end.choice):
            own = [piece for piece in pieces if piece.choice == end.choice]
            message = {"role": "assistant", "content": "".join(piece.text for piece in own)}
            choices.append(
                {
                    "index": end.choice,
                    "message": message,
                    "logprobs": self._logprobs(own),
                    "finish_reason": _FINISH[end.finish],
                }
                | _token_ids(own, self._wording.token_ids)
            )
        return {**self._head, "object": "chat.completion", "choices": choices, **_usage(done)}

    def _chunk(self, choices: list[Json]) -> dict[str, object]:
        return {**self._head, "choices": choices}

    @staticmethod
    def _choice(choice: int, delta: Json, logprobs: Json | None, finish: str | None) -> dict[str, object]:
        return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> Json | None:
        entries = [self._entry(token, logprobs) for token, logprobs in _with_logprobs(pieces)]
        return {"content": entries} if entries else None

    def _entry(self, token: SampledToken, logprobs: Logprobs) -> Json:
        return {
            **self._named(token.token, logprobs.logprob),
            "top_logprobs": [self._named(token_id, value) for token_id, value in _top(logprobs)],
        }

    def _named(self, token_id: int, logprob: float) -> Json:
        name = self._table.name(token_id)
        return {"token": name.decode(errors="replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(name)}


class CompletionReply:
    """text_completion, streamed or not"""

    def __init__(self, wording: Wording, table: TokenTable) -> None:
        self._wording = wording
        self._table = table
        self._offsets: dict[int, int] = {}  # characters of each choice's text so far

    @functools.cached_property
    def _head(self) -> Json:
        return self._wording.head("cmpl", "text_completion")

    def pieces(self, pieces: Pieces) -> Json:
        return self._body([self._choice(pieces.choice, pieces.parts, None)])

    def end(self, end: ChoiceFinished) -> Json:
        return self._body([self._choice(end.choice, [], end)])

    def usage(self, done: CallDone) -> Json:
        return {**self._body([]), **_usage(done)}

    def whole(self, pieces: Sequence[Piece], ends: Sequence[ChoiceFinished], done: CallDone) -> Json:
        choices = [
            self._choice(end.choice, [piece for piece in pieces if piece.choice == end.choice], end)
            for end in sorted(ends, key=lambda end: end.choice)
        ]
        return {**self._body(choices), **_usage(done)}

    def _body(self, choices: list[Json]) -> dict[str, object]:
        return {**self._head, "choices": choices}

    def _choice(self, choice: int, pieces: Sequence[Piece], end: ChoiceFinished | None) -> Json:
        logprobs = self._logprobs(choice, pieces)
        text = "".join(piece.text for piece in pieces)
        if choice not in self._offsets:
            self._offsets[choice] = 0
            text = self._wording.echo + text
        self._offsets[choice] += len(text)
        return {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": _FINISH[end.finish] if end else None,
        } | _token_ids(pieces, self._wording.token_ids)

    def _logprobs(self, choice: int, pieces: Sequence[Piece]) -> Json | None:
        tokens: list[str] = []
        values: list[float] = []
        tops: list[Json] = []
        offsets: list[int] = []
        offset = self._offsets.get(choice, 0)
        for piece in pieces:
            for token, logprobs in _with_logprobs([piece]):
                tokens.append(self._name(token.token))
                values.append(max(logprobs.logprob, MIN_LOGPROB))
                tops.append({self._name(token_id): max(value, MIN_LOGPROB) for token_id, value in _top(logprobs)})
                offsets.append(offset)
            offset += len(piece.text)
        if not tokens:
            return None
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, token_id: int) -> str:
        return self._table.name(token_id).decode(errors="replace")


def _token_ids(pieces: Sequence[Piece], asked: bool) -> dict[str, object]:
    """vLLM's field, for who asked for it: every token that was counted, also those that have no text."""
    return {"token_ids": [piece.token.token for piece in pieces if piece.token is not None]} if asked else {}


def _with_logprobs(pieces: Sequence[Piece]) -> list[tuple[SampledToken, Logprobs]]:
    tokens = [piece.token for piece in pieces if piece.token is not None]
    return [(token, token.logprobs) for token in tokens if token.logprobs is not None]


def _top(logprobs: Logprobs) -> list[tuple[int, float]]:
    return list(zip(logprobs.top_ids, logprobs.top_logprobs, strict=True))


def _usage(done: CallDone) -> dict[str, object]:
    usage = done.usage
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        },
        "baton": done.timings,  # orjson writes dataclasses
    }
