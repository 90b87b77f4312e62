"""Requests that cannot be served: refused by name, before any work, and alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest

from baton.errors import Unavailable
from baton.model_files import ModelFiles
from baton.v1 import rpc_status_pb2, serving_pb2, worker_pb2
from router.chat_template import ChatTemplate
from router.detokenizer import TextStream
from tests.router.router_rig import Rig, request, running_rig
from tests.router.stub_worker import StubWorker

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [""]}, "prompt"),
        (TEXT, {"prompt": ["a", "b"]}, "prompt"),
        (TEXT, {"prompt": [1, 512]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": "\ud800"}, "prompt"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 5_000}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        (TEXT, {"prompt": "a", "temperature": float("nan")}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": float("inf")}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": 2.1}, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "a", "min_p": -0.1}, "min_p"),
        (TEXT, {"prompt": "a", "top_k": -2}, "top_k"),
        (TEXT, {"prompt": "a", "seed": -1}, "seed"),
        (TEXT, {"prompt": "a", "seed": 2**64}, "seed"),
        (TEXT, {"prompt": "a", "n": 0}, "n"),
        (TEXT, {"prompt": "a", "n": 17}, "n"),
        (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
        (TEXT, {"prompt": "a", "stop": ["s"] * 17}, "stop"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "logit_bias": {"512": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"9" * 5_000: 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "stop_token_ids": [512]}, "stop_token_ids"),
        (TEXT, {"prompt": "a", "priority": 1_000}, "priority"),
        *(
            (TEXT, {"prompt": "a", name: 10**400}, name)
            for name in ("max_tokens", "min_tokens", "n", "top_k", "priority")
        ),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": USER, "tools": []}, "tools"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": USER, "nonsense": 1}, "nonsense"),
        (CHAT, {"messages": USER, "max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": [{"role": "tool_use", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": "\udfff"}]}, "messages[0].content"),
    ],
)
async def test_http_names_the_field_and_no_worker_hears_of_it(
    rig: Rig, path: str, body: dict[str, object], field: str
) -> None:
    reply = await rig.http.post(path, content=json.dumps(body))
    streamed = await rig.http.post(path, content=json.dumps({**body, "stream": True}))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert streamed.status_code == 400
    assert not rig.prefill.submits


async def test_stream_options_without_stream_are_refused(rig: Rig) -> None:
    reply = await rig.post(TEXT, {"prompt": "a", "stream_options": {"include_usage": True}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (serving_pb2.GenerateRequest(), "input"),
        (serving_pb2.GenerateRequest(prompt=""), "prompt"),
        (serving_pb2.GenerateRequest(chat=serving_pb2.Chat()), "chat.messages"),
        (serving_pb2.GenerateRequest(token_ids=serving_pb2.TokenIds(ids=[])), "token_ids"),
        (serving_pb2.GenerateRequest(token_ids=serving_pb2.TokenIds(ids=[512])), "token_ids"),
        (request(max_tokens=0), "max_tokens"),
        (request(max_tokens=-1), "max_tokens"),
        (request(temperature=float("nan")), "temperature"),
        (request(top_p=0), "top_p"),
        (request(logprobs=-1), "logprobs"),
        (request(n=17), "n"),
        (serving_pb2.GenerateRequest(prompt="a", stop=[""]), "stop"),
        (serving_pb2.GenerateRequest(prompt="a", slo=serving_pb2.Slo(class_name="gold")), "slo.class_name"),
        (serving_pb2.GenerateRequest(prompt="a", request_id="x" * 300), "request_id"),
        (serving_pb2.GenerateRequest(prompt="a", request_id="x\r\ny: z"), "request_id"),
    ],
)
async def test_grpc_names_the_field_in_event_and_status(
    rig: Rig, made: serving_pb2.GenerateRequest, field: str
) -> None:
    answer = await rig.generate(made)
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.error is not None
    assert (answer.error.code, answer.error.field) == ("invalid_request", field)
    assert not rig.prefill.submits


async def test_grpc_error_details_are_googles_error_info_and_bad_request(rig: Rig) -> None:
    answer = await rig.generate(request(max_tokens=0))
    assert answer.status is not None
    pairs: list[tuple[str, str | bytes]] = list(answer.status.trailing_metadata())  # type: ignore[arg-type]
    details = dict(pairs)["grpc-status-details-bin"]
    assert isinstance(details, bytes)
    status = rpc_status_pb2.RpcStatus.FromString(details)
    info, bad = rpc_status_pb2.RpcErrorInfo(), rpc_status_pb2.RpcBadRequest()
    by_url = {detail.type_url.rpartition("/")[2]: detail.value for detail in status.details}
    info.ParseFromString(by_url["google.rpc.ErrorInfo"])
    bad.ParseFromString(by_url["google.rpc.BadRequest"])
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "baton")
    assert [violation.field for violation in bad.field_violations] == ["max_tokens"]


async def test_an_unknown_model_is_not_found(rig: Rig) -> None:
    reply = await rig.post(CHAT, {"model": "gpt-9", "messages": USER})
    answer = await rig.generate(serving_pb2.GenerateRequest(model="gpt-9", prompt="a"))
    assert reply.status_code == 404
    assert reply.json()["error"]["param"] == "model"
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"prompt": "a", "max_tokens": 1e999}', b"[1]", b"null"]
)
async def test_a_body_that_is_no_request_is_a_400(rig: Rig, body: bytes) -> None:
    reply = await rig.http.post(TEXT, content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"]
    assert (await rig.http.get("/healthz")).status_code == 200


async def test_a_ten_megabyte_body_is_refused_and_the_limit_named(rig: Rig) -> None:
    body = json.dumps({"prompt": "a" * 10_000_000}).encode()

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    declared = await rig.http.post(TEXT, content=body)
    undeclared = await rig.http.post(TEXT, content=chunks())
    for reply in (declared, undeclared):
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "body"
        assert "4194304" in reply.json()["error"]["message"]
    assert (await rig.post(TEXT, {"prompt": "a", "max_tokens": 1})).status_code == 200


async def test_an_eight_megabyte_message_is_refused_by_grpc_and_a_300_kb_one_reaches_our_own_check(rig: Rig) -> None:
    large = await rig.generate(request("a" * 8_000_000))
    medium = await rig.generate(request("a" * 300_000))
    just_over = await rig.generate(request("a" * ((4 << 20) + 100)))
    assert large.status is not None
    assert large.status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert medium.error is not None
    assert (medium.error.code, medium.error.field) == ("invalid_request", "prompt")
    assert "the limit is 1024" in medium.error.message
    assert just_over.error is not None
    assert "4194304" in just_over.error.message
    assert (await rig.generate(request(max_tokens=2))).status is None


async def test_length_is_judged_against_the_smaller_pool_and_the_message_says_the_limit(files: ModelFiles) -> None:
    prefill = await StubWorker("p0", worker_pb2.ROLE_PREFILL, num_blocks=32).start()  # 512 tokens
    decode = await StubWorker("d0", worker_pb2.ROLE_DECODE, num_blocks=64).start()  # 1024; the context is 2048
    prefill.peers["d0"] = decode
    async with running_rig(files, [prefill, decode]) as rig:
        replies = [await rig.post(TEXT, {"prompt": [5] * length, "max_tokens": 4}) for length in (511, 512, 513)]
        whole = await rig.post(TEXT, {"prompt": [5] * 500})
        info = await rig.stub.GetModelInfo(serving_pb2.GetModelInfoRequest())
    assert [reply.status_code for reply in replies] == [200, 200, 400]
    assert "513" in replies[2].json()["error"]["message"]
    assert "the limit is 512" in replies[2].json()["error"]["message"]
    assert whole.status_code == 200, whole.text
    assert len(decode.adopted) == 3
    assert whole.json()["usage"]["completion_tokens"] == 1024 - 500 + 1
    assert info.max_prompt_tokens == 512


async def test_bad_calls_fail_alone_among_good_ones(rig: Rig) -> None:
    bad: list[dict[str, object]] = [{"prompt": ""}, {"prompt": "a", "max_tokens": -1}, {"prompt": [9_999]}]
    calls = [
        rig.post(TEXT, bad[n % 3]) if n % 2 else rig.post(TEXT, {"prompt": "a", "max_tokens": 3}) for n in range(50)
    ]
    statuses = [reply.status_code for reply in await asyncio.gather(*calls)]
    assert statuses == [400 if n % 2 else 200 for n in range(50)]
    await rig.idle()


async def test_an_unknown_path_and_a_wrong_method_answer_in_openais_shape(rig: Rig) -> None:
    missing, wrong = await rig.http.get("/v2/nothing"), await rig.http.get(TEXT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert missing.json()["error"]["type"] == wrong.json()["error"]["type"] == "invalid_request_error"


async def test_a_client_that_stops_in_the_middle_of_its_body_harms_nobody(rig: Rig) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", rig.front_end.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    reply: httpx.Response = await rig.post(TEXT, {"prompt": "a", "max_tokens": 1})
    assert reply.status_code == 200


async def test_a_body_that_never_comes_whole_is_refused_after_a_while(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.asgi.READ_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.front_end.http_port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    answer = await reader.readuntil(b"}}")
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"body is not complete" in answer


async def test_tokenising_and_back_are_bounded_and_equal_to_the_stream(rig: Rig) -> None:
    too_long = await rig.post("/v1/tokenize", {"prompt": "a" * 1_000_000})
    assert too_long.status_code == 400
    assert "the limit is" in too_long.json()["error"]["message"]
    table = rig.front_end.calls.table
    ids = [*range(3, 200), *range(3, 200)]
    stream = TextStream(table)
    joined = "".join(stream.push(token_id) for token_id in ids) + stream.finish(cut=False)
    assert (await rig.post("/v1/detokenize", {"tokens": ids})).json() == {"prompt": joined}


# -- chat templates ----------------------------------------------------------------------------------------------------


async def test_a_refusal_that_quotes_a_message_is_short_enough_for_every_client(rig: Rig) -> None:
    rig.front_end.tokenizer._template = ChatTemplate("{{ raise_exception(messages[0]['content']) }}", {})
    chat = serving_pb2.Chat(messages=[serving_pb2.ChatMessage(role="user", content="\U0001f468" * 5_000)])
    answer = await rig.generate(serving_pb2.GenerateRequest(chat=chat))
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.error is not None
    assert len(answer.error.message) < 300


def test_template_syntax_in_a_message_is_plain_text() -> None:
    template = ChatTemplate("{{ messages[0]['content'] }}", {})
    assert template.render([{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


async def test_refused_bodies_are_counted_among_the_outcomes(rig: Rig) -> None:
    for body in (b"{", b"[" * 100_000, b'{"prompt": ""}', b" " * (5 << 20)):
        assert (await rig.http.post(TEXT, content=body)).status_code == 400
    text = (await rig.http.get("/metrics")).text
    assert 'baton_requests_total{api="completions",outcome="invalid_request"} 4.0' in text


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", TEXT, b"{", 400),
        ("POST", TEXT, b'{"prompt": ""}', 400),
        ("POST", CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "hi"}]}', 404),
        ("POST", TEXT, b" " * (5 << 20), 400),
        ("POST", "/v1/tokenize", b"{}", 400),
        ("POST", "/v1/nothing", b"{}", 404),
        ("GET", TEXT, b"", 405),
    ],
)
async def test_every_refusal_carries_the_caller_s_request_id_or_one_of_ours(
    rig: Rig, method: str, path: str, content: bytes, status: int
) -> None:
    named = await rig.http.request(method, path, content=content, headers={"x-request-id": "mine"})
    assert (named.status_code, named.headers["x-request-id"]) == (status, "mine")
    ids = [(await rig.http.request(method, path, content=content)).headers["x-request-id"] for _ in range(2)]
    assert len({*ids, ""}) == 3


async def test_errors_of_a_running_call_carry_its_request_id_too(rig_without_retries: Rig) -> None:
    rig = rig_without_retries
    rig.prefill.script.refuse = Unavailable("not now")
    failed = await rig.http.post(TEXT, json={"prompt": "a"}, headers={"x-request-id": "mine"})
    assert (failed.status_code, failed.headers["x-request-id"]) == (503, "mine")


async def test_a_request_id_that_is_too_long_is_refused_and_comes_back_cut(rig: Rig) -> None:
    for path in (TEXT, "/v1/nothing"):
        reply = await rig.http.post(path, json={"prompt": "a"}, headers={"x-request-id": "x" * 1_000})
        assert reply.is_client_error
        assert reply.headers["x-request-id"] == "x" * 256
