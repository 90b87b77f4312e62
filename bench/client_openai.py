"""Calls to any OpenAI-compatible URL: POST, then SSE chunks, over `bench.http_wire`.

Prompts travel in the first of these forms that the target takes, found by one-token probes (`prepare`), or as told:
- completions-ids   /v1/completions, the planned token ids: exact lengths
- completions-text  /v1/completions, text of about as many tokens
- chat              /v1/chat/completions, the same text as one user message, so the template's tokens come on top
Chunks are counted by their `token_ids` where the server sends them, else one token each; the final `usage` corrects the sum.
Baton adds a `baton` object of timings next to `usage`.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from baton.timings import Timings
from bench.client import CallFailed, CallShed, Finish, TargetInfo, Tokens
from bench.http_wire import Connection, Head, Pool, SseLines
from bench.workload import SAFE_VOCABULARY, PlannedCall, words_for

Json = dict[str, Any]  # one decoded object from a foreign server; it goes no further than this module
MAX_ERROR_CHARS = 300  # of a body that is quoted in the report
TOO_MANY_REQUESTS = 429
BAD_FINISH = ("cancelled", "abort", "error")  # finish reasons that are not answers


class PromptForm(enum.StrEnum):
    TOKEN_IDS = "completions-ids"
    TEXT = "completions-text"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is PromptForm.CHAT else "/v1/completions"

    @property
    def description(self) -> str:
        if self is PromptForm.TOKEN_IDS:
            return "token ids, exact lengths (/v1/completions)"
        return f"text of about the planned number of tokens ({self.path})"


class OpenAIClient:
    """One target URL. Not for use from several event loops."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        form: PromptForm | None = None,
        ignore_eos: bool = True,
        api_key: str = "",
        slo_class: str = "",
    ) -> None:
        self._pool = Pool(url, {"authorization": f"Bearer {api_key}" if api_key else "", "x-slo-class": slo_class})
        self._model = model
        self._form = form
        self._ignore_eos = ignore_eos

    async def prepare(self) -> TargetInfo:
        entry = await self._model_entry()
        self._model = self._model or str(entry.get("id", ""))
        forms = list(PromptForm) if self._form is None else [self._form]
        refusal: CallFailed | None = None
        for form in forms:
            self._form = form
            try:
                await self._probe()
            except CallFailed as error:
                if error.kind not in ("http_400", "http_404", "http_405", "http_415", "http_422", "http_501"):
                    raise
                refusal = refusal or error
                continue
            return TargetInfo(
                model=self._model,
                prompt_form=form.description,
                vocab_size=int(entry.get("vocab_size") or 0),
                max_model_len=int(entry.get("max_model_len") or 0),
            )
        raise refusal or CallFailed("protocol", "no form of prompt is left to try")

    async def stream(self, call: PlannedCall) -> AsyncGenerator[Tokens | Finish, None]:
        connection, head = await self._pool.send(self._encode(call))
        try:
            if head.status != 200:
                raise await refused(connection, head)
            answer = Answer()
            lines = SseLines()
            async for data in connection.body(head):
                for payload in lines.feed(data):
                    if tokens := answer.take(payload):
                        yield Tokens(tokens)
            yield answer.finish()
        except OSError as error:
            raise CallFailed("disconnected", f"the connection broke mid-stream ({error!r})") from error
        finally:
            self._pool.give(connection)

    async def close(self) -> None:
        self._pool.close()

    async def _model_entry(self) -> Json:
        """The served model's entry of /v1/models; {} where the target has no such list."""
        status, body = await self._pool.fetch("GET", "/v1/models")
        if status != 200:
            return {}
        entries = decode(body).get("data") or []
        return next((e for e in entries if not self._model or e.get("id") == self._model), {})

    async def _probe(self) -> None:
        ids = tuple(SAFE_VOCABULARY[:4])
        async for _event in self.stream(PlannedCall(index=-1, token_ids=ids, max_tokens=1, seed=0)):
            pass

    def _encode(self, call: PlannedCall) -> bytes:
        body: Json = {
            "model": self._model,
            "max_tokens": call.max_tokens,
            "seed": call.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        form = self._form or PromptForm.TOKEN_IDS
        if form is PromptForm.TOKEN_IDS:
            body["prompt"] = call.token_ids
        elif form is PromptForm.TEXT:
            body["prompt"] = words_for(call.token_ids)
        else:
            body["messages"] = [{"role": "user", "content": words_for(call.token_ids)}]
        return self._pool.encode("POST", form.path, orjson.dumps(body))


class Answer:
    """What the SSE payloads of one answer add up to. Sans-io."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._finish_reason = ""
        self._usage: Json = {}
        self._timings: Timings | None = None
        self._done = False

    def take(self, payload: bytes) -> int:
        """Return how many tokens this payload carried.

        Raises:
            CallFailed: an error event, or no JSON.
        """
        if payload == b"[DONE]":
            self._done = True
            return 0
        event = decode(payload)
        if event.get("error"):
            raise error_event(event["error"])
        if event.get("usage"):
            self._usage = event["usage"]
        if event.get("baton"):
            self._timings = timings_of(event["baton"])
        count = sum(self._take_choice(choice) for choice in event.get("choices") or ())
        self._num_tokens += count
        return count

    def _take_choice(self, choice: Json) -> int:
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            return len(token_ids)
        if choice.get("finish_reason"):
            # An answer whose only token has no text (EOS at once) is first seen when it finishes.
            return 1 if has_text(choice) or not self._num_tokens else 0
        return 1 if has_text(choice) or is_held_back(choice) else 0

    def finish(self) -> Finish:
        """Close the answer.

        Raises:
            CallFailed: it was cut, or it is no answer.
        """
        if not self._done or not self._finish_reason:
            missing = "[DONE]" if not self._done else "a finish_reason"
            raise CallFailed("truncated", f"the stream ended after {self._num_tokens} tokens without {missing}")
        if self._finish_reason in BAD_FINISH:
            raise CallFailed(f"finish_{self._finish_reason}", f"the answer ended as {self._finish_reason!r}")
        completion_tokens = self._usage.get("completion_tokens")
        if completion_tokens == 0:
            raise CallFailed("empty", "the answer has no tokens")
        return Finish(
            prompt_tokens=self._usage.get("prompt_tokens"),
            completion_tokens=completion_tokens,
            cached_tokens=int((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
            timings=self._timings,
        )


def has_text(choice: Json) -> bool:
    return bool(choice.get("text") or (choice.get("delta") or {}).get("content"))


def is_held_back(choice: Json) -> bool:
    """Whether this is a token whose text waits for the rest of a UTF-8 character: empty, and not chat's opening `role`."""
    delta = choice.get("delta")
    return choice.get("text") == "" if delta is None else delta.get("content") == "" and "role" not in delta


def decode(payload: bytes) -> Json:
    try:
        event = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise CallFailed("protocol", f"not JSON: {error}") from error
    if not isinstance(event, dict):
        raise CallFailed("protocol", "a JSON object was expected")
    return event


def error_event(error: object) -> CallFailed:
    """An error inside a stream that began with 200."""
    if not isinstance(error, dict):
        return CallFailed("stream_error", str(error)[:MAX_ERROR_CHARS])
    code = error.get("code") or error.get("type") or "unknown"
    return CallFailed(f"stream_error_{code}", str(error.get("message", ""))[:MAX_ERROR_CHARS])


async def refused(connection: Connection, head: Head) -> CallFailed:
    body = b"".join([part async for part in connection.body(head)])
    kind, message = f"http_{head.status}", body.decode(errors="replace")[:MAX_ERROR_CHARS]
    if head.status != TOO_MANY_REQUESTS:
        return CallFailed(kind, message)
    seconds = head.headers.get("retry-after", "")  # or a date, which nobody sends here
    return CallShed(kind, message, float(seconds) if seconds.isdecimal() else 0.0)


def timings_of(baton: Json) -> Timings:
    """Read Baton's timings, whichever of them are there."""

    def number(name: str) -> float:
        return float(baton.get(name) or 0.0)

    def text(name: str) -> str:
        return str(baton.get(name) or "")

    return Timings(
        queue_ms=number("queue_ms"),
        prefill_ms=number("prefill_ms"),
        handoff_gap_ms=number("handoff_gap_ms"),
        ttft_ms=number("ttft_ms"),
        tpot_ms=number("tpot_ms"),
        kv_bytes=int(number("kv_bytes")),
        kv_transfer_ms=number("kv_transfer_ms"),
        transport=text("transport"),
        prefill_worker=text("prefill_worker"),
        decode_worker=text("decode_worker"),
    )
