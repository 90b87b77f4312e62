"""The OpenAI API through its official client, streamed and whole, and the same calls over gRPC: one answer, one count."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.model_files import ModelFiles
from baton.v1 import serving_pb2
from router.chat_template import ChatTemplate
from router.openapi import ChatChunk, ChatCompletion, Completion, CompletionChunk
from tests.router.router_rig import Rig, request, until
from tests.router.stub_worker import EOS
from tests.router.test_router_text import FAMILY, byte_ids

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def client(rig: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def say(rig: Rig, tokens: list[int]) -> None:
    """What the workers answer, token 0 from prefill and the rest from decode."""
    rig.prefill.script.tokens = rig.decode.script.tokens = tokens


async def chat(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, int, list[Any]]:
    """(text, finish reason, completion tokens, logprobs) of a chat call; the same streamed and whole."""
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields
    )
    chunks = [chunk async for chunk in stream]
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(part.delta.content or "" for part in parts)
    logprobs = [entry for part in parts if part.logprobs for entry in part.logprobs.content or []]
    choice, usage = whole.choices[0], whole.usage
    assert usage is not None
    assert chunks[-1].usage is not None
    assert text == choice.message.content
    assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
    assert chunks[-1].usage.completion_tokens == usage.completion_tokens
    assert logprobs == (choice.logprobs.content or [] if choice.logprobs else [])
    return text, choice.finish_reason, usage.completion_tokens, logprobs


async def complete(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, int]:
    """(text, finish reason, completion tokens) of a completion; the same streamed and whole."""
    whole = await client.completions.create(model="tiny", **fields)
    stream = await client.completions.create(
        model="tiny", stream=True, stream_options={"include_usage": True}, **fields
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert text == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return text, whole.choices[0].finish_reason, whole.usage.completion_tokens


# -- where prefill ends and decode begins ------------------------------------------------------------------------------


async def test_a_first_token_that_ends_the_text_ends_the_call_on_prefill(client: openai.AsyncOpenAI, rig: Rig) -> None:
    say(rig, [EOS, 300, 301])
    assert (await chat(client, max_tokens=16))[:3] == ("", "stop", 1)
    answer = await rig.generate(request(max_tokens=16))
    assert answer.done is not None
    assert (answer.text, answer.done.finish_reason) == ("", serving_pb2.FINISH_REASON_STOP)
    assert not rig.decode.adopted
    await rig.idle()


async def test_with_ignore_eos_the_same_call_goes_on_to_its_limit(client: openai.AsyncOpenAI, rig: Rig) -> None:
    say(rig, [EOS, 300, 301])
    assert (await chat(client, max_tokens=16, extra_body={"ignore_eos": True}))[1:3] == ("length", 16)
    answer = await rig.generate(request(max_tokens=16, ignore_eos=True))
    assert len(answer.token_ids) == 16


async def test_a_limit_of_one_token_is_kept_and_needs_no_decode_worker(client: openai.AsyncOpenAI, rig: Rig) -> None:
    assert (await chat(client, max_tokens=1))[1:3] == ("length", 1)
    assert (await complete(client, prompt="hello", max_tokens=1))[1:] == ("length", 1)
    assert len((await rig.generate(request(max_tokens=1))).token_ids) == 1
    assert not rig.decode.adopted


async def test_logprobs_begin_with_the_first_token_in_every_shape(client: openai.AsyncOpenAI, rig: Rig) -> None:
    *_, entries = await chat(client, max_tokens=5, logprobs=True, top_logprobs=3)
    whole = await client.completions.create(model="tiny", prompt="hello", max_tokens=5, logprobs=3)
    over_grpc = [
        entry for chunk in (await rig.generate(request(max_tokens=5, logprobs=3))).chunks for entry in chunk.logprobs
    ]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    expected = [-0.25, -0.5, -0.75, -1.0, -1.25]
    assert [entry.logprob for entry in entries] == logprobs.token_logprobs == expected
    assert [entry.logprob for entry in over_grpc] == expected
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 5
    assert [len(entry.top) for entry in over_grpc] == [3] * 5


async def test_n_answers_have_indexes_of_their_own_and_one_prompt(client: openai.AsyncOpenAI, rig: Rig) -> None:
    fields: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "n": 2,
        "temperature": 0.8,
        "seed": 1,
        "max_tokens": 8,
    }
    whole = await client.chat.completions.create(**fields)
    stream = await client.chat.completions.create(**fields, stream=True)
    seen = [chunk.choices[0].index async for chunk in stream]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert set(seen) == {0, 1}
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(rig.prefill.submits[0].request.token_ids)
    assert whole.usage.completion_tokens == 16
    assert {submit.request.sampling.seed for submit in rig.prefill.submits} == {1}
    await rig.idle()


# -- text --------------------------------------------------------------------------------------------------------------


async def test_a_stop_string_over_prefill_and_decode_is_never_shown(
    client: openai.AsyncOpenAI, rig: Rig, files: ModelFiles
) -> None:
    say(rig, byte_ids(files, b"xDEFGHIJy" * 4))
    assert (await chat(client, max_tokens=30, stop="DEFGHIJ"))[:2] == ("x", "stop")
    assert (await chat(client, max_tokens=9, stop=["DEFX"]))[:2] == ("xDEFGHIJy", "length")
    assert (await complete(client, prompt="a", max_tokens=4, stop=["DEFGHIJ"]))[:2] == ("xDEF", "length")


async def test_stop_strings_are_not_looked_for_before_min_tokens(
    client: openai.AsyncOpenAI, rig: Rig, files: ModelFiles
) -> None:
    say(rig, byte_ids(files, b"stopstop" * 4))
    text, finish, _ = await complete(client, prompt="a", max_tokens=30, stop="stop", extra_body={"min_tokens": 4})
    assert (text, finish) == ("stop", "stop")
    assert {submit.request.sampling.min_tokens for submit in rig.prefill.submits} == {4}


@pytest.mark.parametrize("character", [FAMILY, "é"])
async def test_a_character_of_several_tokens_arrives_whole(
    client: openai.AsyncOpenAI, rig: Rig, files: ModelFiles, character: str
) -> None:
    say(rig, [*byte_ids(files, character.encode()), EOS])
    assert (await chat(client, max_tokens=50))[:2] == (character, "stop")


@pytest.mark.parametrize("prompt", ["Say é", [1, 40, 41, 2]])
async def test_echo_begins_every_answer_with_the_prompt(
    client: openai.AsyncOpenAI, rig: Rig, prompt: str | list[int]
) -> None:
    plain, _, count = await complete(client, prompt=prompt, max_tokens=5)
    echoed = await complete(client, prompt=prompt, max_tokens=5, echo=True)
    shown = prompt if isinstance(prompt, str) else rig.front_end.tokenizer.decode(prompt)
    assert echoed == (shown + plain, "length", count)
    both = await client.completions.create(model="tiny", prompt=prompt, max_tokens=5, echo=True, n=2)
    assert [choice.text for choice in both.choices] == [shown + plain] * 2


async def test_echo_of_a_prompt_with_its_logprobs_is_refused_by_name(client: openai.AsyncOpenAI, rig: Rig) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="tiny", prompt="a", echo=True, logprobs=0)
    assert refused.value.param == "echo"
    assert not rig.prefill.submits


# -- counts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_give_one_limit(client: openai.AsyncOpenAI, rig: Rig, alias: str) -> None:
    assert (await chat(client, **{alias: 40}))[1:3] == ("length", 40)
    assert {submit.request.sampling.max_tokens for submit in rig.prefill.submits} == {40}


async def test_cached_tokens_are_those_the_prefill_worker_found(client: openai.AsyncOpenAI) -> None:
    prompt = list(range(10, 110))
    first = await client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    stream = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    *_, last = [chunk async for chunk in stream]
    for usage, cached in ((first.usage, 0), (last.usage, 96)):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (100, cached)


async def test_a_cancelled_stream_has_no_usage_but_is_counted(client: openai.AsyncOpenAI, rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    rig.decode.script.pause_at = 3
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=50, stream=True, stream_options={"include_usage": True}
    )
    chunks = [await anext(stream) for _ in range(3)]
    await stream.close()
    await rig.idle()
    assert not any(chunk.usage for chunk in chunks)
    text = (await rig.http.get("/metrics")).text
    assert 'baton_requests_total{api="chat",outcome="cancelled"} 1' in text
    generated = re.search(r'baton_generation_tokens_total{slo_class="interactive"} (\S+)', text)
    assert generated is not None
    assert float(generated[1]) == 3  # decode waits before the fourth


# -- who asks, and what for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tier", "slo_class", "priority", "said"),
    [
        (None, "interactive", 0, "default"),
        ("auto", "interactive", 0, "default"),
        ("default", "interactive", 0, "default"),
        ("flex", "batch", -10, "flex"),
        ("priority", "interactive", 10, "priority"),
    ],
)
async def test_a_service_tier_is_a_class_and_a_priority_and_the_reply_says_which(
    client: openai.AsyncOpenAI, rig: Rig, tier: Any, slo_class: str, priority: int, said: str
) -> None:
    fields = {} if tier is None else {"service_tier": tier}
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, **fields)
    (submit,) = rig.prefill.submits
    assert (submit.request.slo_class, submit.request.priority) == (slo_class, priority)
    assert whole.service_tier == said


async def test_a_tier_and_a_class_that_differ_are_refused(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(
            model="tiny", messages=MESSAGES, service_tier="flex", extra_headers={"x-slo-class": "interactive"}
        )
    assert refused.value.param == "service_tier"


async def test_the_fingerprint_is_the_workers_and_the_same_in_every_chunk(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3)
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=3, stream=True)
    assert whole.system_fingerprint == "fp_" + 12 * "f"  # tests/router/stub_worker.py
    assert {chunk.system_fingerprint async for chunk in stream} == {whole.system_fingerprint}


async def test_labels_are_taken_and_values_that_ask_for_nothing_are_as_good_as_none(
    client: openai.AsyncOpenAI, rig: Rig
) -> None:
    labels: dict[str, Any] = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "metadata": {"a": "b"}}
    nothing: dict[str, Any] = {
        "store": False,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "tool_choice": "none",
    }
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1, **labels, **nothing)
    again = await client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, whole.choices[0].message, *MESSAGES],
        max_tokens=1,
    )
    body = {"messages": MESSAGES, "max_tokens": 1, "tools": None, "functions": None, "logit_bias": None, "stop": None}
    assert again.choices[0].finish_reason == "length"
    assert (await rig.post(CHAT, body)).status_code == 200
    assert (await rig.post(TEXT, {"prompt": "a", "max_tokens": 1, "best_of": 1, "suffix": None})).status_code == 200


async def test_developer_is_the_system_role_by_its_newer_name(rig: Rig) -> None:
    def ids(role: str) -> Any:
        return rig.post("/v1/tokenize", {"messages": [{"role": role, "content": "Be brief."}, *MESSAGES]})

    assert (await ids("developer")).json() == (await ids("system")).json()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"parallel_tool_calls": True}, "parallel_tool_calls"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"function_call": "auto"}, "function_call"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"store": True}, "store"),
        (CHAT, {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        (CHAT, {"service_tier": "scale"}, "service_tier"),
        (CHAT, {"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        (CHAT, {"metadata": {"k" * 65: ""}}, "metadata"),
        (CHAT, {"metadata": {"k": "v" * 513}}, "metadata"),
        (CHAT, {"user": "u" * 257}, "user"),
        (CHAT, {"safety_identifier": "u" * 257}, "safety_identifier"),
        (CHAT, {"prompt_cache_key": "line\nline"}, "prompt_cache_key"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "tool_calls": []}]}, "messages[0].tool_calls"),
        (CHAT, {"echo": True}, "echo"),
        (TEXT, {"suffix": "x"}, "suffix"),
        (TEXT, {"best_of": 3}, "best_of"),
        (TEXT, {"n": 2, "best_of": 1}, "best_of"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (TEXT, {"prompt": [[1], [2]]}, "prompt"),
        (TEXT, {"max_completion_tokens": 4}, "max_completion_tokens"),
    ],
)  # fmt: skip
async def test_what_is_not_supported_is_refused_by_name(
    client: openai.AsyncOpenAI, rig: Rig, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", **({"messages": MESSAGES} if path == CHAT else {"prompt": "a"}), **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.post(path.removeprefix("/v1"), body=body, cast_to=object)
    assert refused.value.param == param
    assert not rig.prefill.submits


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool_use", "content": "x"}],
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        [{"role": "user"}],
        [],
    ],
)
async def test_messages_that_no_template_can_take_are_a_400_streamed_and_whole(rig: Rig, messages: list[Any]) -> None:
    for stream in (False, True):
        reply = await rig.post(CHAT, {"messages": messages, "stream": stream})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].startswith("messages")
    assert not rig.prefill.submits


@pytest.mark.parametrize("stream", [False, True])
async def test_a_templates_refusal_is_a_400_with_its_reason_before_any_worker_hears_of_it(
    client: openai.AsyncOpenAI, rig: Rig, stream: bool
) -> None:
    alternate = "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    rig.front_end.tokenizer._template = ChatTemplate(alternate + "{{ messages[0].content }}", {})
    with pytest.raises(openai.BadRequestError, match="roles must alternate") as refused:
        await client.chat.completions.create(model="tiny", messages=[*MESSAGES, *MESSAGES], stream=stream)
    assert refused.value.param == "messages"
    assert not rig.prefill.submits


# -- what operators see ------------------------------------------------------------------------------------------------


async def test_the_time_to_a_first_token_is_what_the_client_waits_not_one_stages_share(
    client: openai.AsyncOpenAI, rig: Rig
) -> None:
    """Half a second in a queue that the worker's own figures (3 ms) know nothing of."""
    rig.prefill.script.prefill_gate.clear()

    async def open_late() -> None:
        await until(lambda: bool(rig.prefill.submits), "the worker has the request")
        await asyncio.sleep(0.5)
        rig.prefill.script.prefill_gate.set()

    opening = asyncio.create_task(open_late())
    began_s = time.monotonic()
    stream = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    await anext(stream)
    waited_ms = (time.monotonic() - began_s) * 1e3
    *_, last = [chunk async for chunk in stream]
    await opening
    assert last.model_extra is not None
    said_ms = last.model_extra["baton"]["ttft_ms"]
    text = (await rig.http.get("/metrics")).text
    exported = re.search(r'baton_time_to_first_token_seconds_sum{slo_class="interactive"} (\S+)', text)
    assert exported is not None
    assert 500 <= said_ms <= waited_ms
    assert float(exported[1]) * 1e3 == pytest.approx(said_ms, rel=1e-3)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"return_token_ids": True}, {"stop": "e"}, {"logprobs": True, "top_logprobs": 2}, {"user": "u"}],
    ids=lambda fields: next(iter(fields), "plain"),
)
async def test_every_body_and_event_has_the_documented_shape(rig: Rig, fields: dict[str, Any]) -> None:
    asked = {"stream_options": {"include_usage": True}}
    messages = {"messages": MESSAGES, "max_tokens": 4, **fields}
    text = {"prompt": "hello", "max_tokens": 4, **fields}
    if "logprobs" in fields:
        text = {"prompt": "hello", "max_tokens": 4, "logprobs": 2}
    ChatCompletion.model_validate_json((await rig.post(CHAT, messages)).text)
    Completion.model_validate_json((await rig.post(TEXT, text)).text)
    *chat_events, end = await rig.events(CHAT, {**messages, **asked})
    *text_events, _ = await rig.events(TEXT, {**text, **asked})
    assert end == {"done": True}
    for event in chat_events:
        ChatChunk.model_validate_json(json.dumps(event))
    for event in text_events:
        CompletionChunk.model_validate_json(json.dumps(event))
