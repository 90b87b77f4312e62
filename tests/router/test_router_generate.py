"""The life of one call through both APIs: what comes out, from where, and how it is counted."""

from __future__ import annotations

import asyncio

import grpc
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from baton.errors import Internal, InvalidRequest, Overloaded, TransferFailed
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2, worker_pb2
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import EOS, StubWorker, start_pair


async def test_tokens_come_from_prefill_and_decode_in_order_and_done_comes_once(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    asked = asyncio.create_task(rig.generate(request(max_tokens=10)))
    calls = rig.front_end.calls
    await until(lambda: any(call.reports[0].num_tokens for call in calls._running), "prefill's token is there")
    rig.decode.script.decode_gate.set()  # else decode's tokens may be there first, and no gap is left
    answer = await asked
    assert answer.status is None
    assert answer.token_ids == list(range(300, 310))
    assert [chunk.index for chunk in answer.chunks] == list(range(10))
    assert answer.done is not None
    assert answer.done.finish_reason == serving_pb2.FINISH_REASON_LENGTH
    assert answer.done.usage.completion_tokens == 10
    assert answer.done.timings.prefill_worker == "p0"
    assert answer.done.timings.decode_worker == "d0"
    assert answer.done.timings.handoff_gap_ms > 0
    assert answer.done.timings.transport == "loopback"
    await rig.idle()


async def test_all_four_ways_to_ask_give_the_same_text(rig: Rig) -> None:
    body = {"prompt": "hello", "max_tokens": 20}
    grpc_answer = await rig.generate(request(max_tokens=20))
    unary = (await rig.post("/v1/completions", body)).json()
    events = await rig.events("/v1/completions", body)
    streamed = "".join(event["choices"][0]["text"] for event in events if "choices" in event)
    chat = await rig.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20})
    assert unary["choices"][0]["text"] == streamed == grpc_answer.text
    assert chat.json()["choices"][0]["message"]["content"] == grpc_answer.text
    assert events[-1] == {"done": True}


async def test_a_limit_of_one_needs_no_decode_worker(rig: Rig) -> None:
    answer = await rig.generate(request(max_tokens=1))
    unary = (await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 1})).json()
    assert answer.token_ids == [300]
    assert answer.done is not None
    assert answer.done.finish_reason == serving_pb2.FINISH_REASON_LENGTH
    assert answer.done.usage.completion_tokens == unary["usage"]["completion_tokens"] == 1
    assert unary["choices"][0]["finish_reason"] == "length"
    assert rig.decode.adopted == []


async def test_end_of_text_as_the_first_token_gives_no_text_and_no_handoff(rig: Rig) -> None:
    rig.prefill.script.tokens = [EOS]
    answer = await rig.generate(request(max_tokens=16))
    assert answer.text == ""
    assert answer.done is not None
    assert answer.done.finish_reason == serving_pb2.FINISH_REASON_STOP
    assert rig.decode.adopted == []


async def test_logprobs_cover_the_first_token_and_are_the_same_streamed_and_whole(rig: Rig) -> None:
    answer = await rig.generate(request(max_tokens=5, logprobs=3, temperature=0))
    entries = [entry for chunk in answer.chunks for entry in chunk.logprobs]
    body = {"prompt": "hello", "max_tokens": 5, "logprobs": 3}
    whole = (await rig.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
    events = await rig.events("/v1/completions", body)
    streamed = [e["choices"][0]["logprobs"] for e in events if e.get("choices") and e["choices"][0]["logprobs"]]
    assert [entry.logprob for entry in entries] == [-0.25, -0.5, -0.75, -1.0, -1.25]
    assert all(len(entry.top) == 3 for entry in entries)
    assert whole["token_logprobs"] == [-0.25, -0.5, -0.75, -1.0, -1.25]
    assert [value for part in streamed for value in part["token_logprobs"]] == whole["token_logprobs"]
    assert [value for part in streamed for value in part["text_offset"]] == whole["text_offset"]


async def test_chat_logprobs_have_openais_shape(rig: Rig) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    content = (await rig.post("/v1/chat/completions", body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.25, -0.5]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


async def test_several_answers_have_their_own_index_and_the_prompt_counts_once(rig: Rig) -> None:
    answers = await asyncio.gather(*(rig.generate(request(max_tokens=8, n=3, seed=1)) for _ in range(20)))
    for answer in answers:
        assert answer.done is not None
        assert [end.choice for end in answer.done.choices] == [0, 1, 2]
        assert answer.done.usage.completion_tokens == 24
        assert {chunk.choice for chunk in answer.chunks} == {0, 1, 2}
    samples = {submit.request.sampling.sample_index for submit in rig.prefill.submits}
    prompt_tokens = {answer.done.usage.prompt_tokens for answer in answers if answer.done}
    assert samples == {0, 1, 2}
    assert prompt_tokens == {len(rig.prefill.submits[0].request.token_ids)}
    await rig.idle()


async def test_several_answers_share_one_prefill_of_their_prompt(files: ModelFiles) -> None:
    prefills = [await StubWorker(f"p{number}", worker_pb2.ROLE_PREFILL).start() for number in range(2)]
    decodes = [await StubWorker(f"d{number}", worker_pb2.ROLE_DECODE).start() for number in range(2)]
    for prefill in prefills:
        prefill.peers = {decode.worker_id: decode for decode in decodes}
        prefill.script.prefill_gate.clear()
    prompt = serving_pb2.TokenIds(ids=range(10, 110))
    made = serving_pb2.GenerateRequest(token_ids=prompt, sampling=serving_pb2.Sampling(n=4, max_tokens=6))
    async with running_rig(files, [*prefills, *decodes]) as rig:
        await until(lambda: all(len(p.told_peers) == 2 for p in prefills), "every pair is linked")
        call = asyncio.create_task(rig.generate(made))
        await until(lambda: any(p.submits for p in prefills), "the first answer is submitted")
        await asyncio.sleep(0.05)
        assert sum(len(p.submits) for p in prefills) == 1
        for prefill in prefills:
            prefill.script.prefill_gate.set()
        answer = await call
        await rig.idle()
    assert sorted(len(p.submits) for p in prefills) == [0, 4]
    assert all(decode.adopted for decode in decodes)
    assert answer.done is not None
    assert (answer.done.usage.prompt_tokens, answer.done.usage.completion_tokens) == (100, 24)
    assert answer.done.usage.cached_tokens == 0


@pytest.mark.parametrize("alias", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_limit_reach_the_workers_as_one(rig: Rig, alias: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], alias: 40}
    reply = (await rig.post("/v1/chat/completions", body)).json()
    assert reply["usage"]["completion_tokens"] == 40
    assert [submit.request.sampling.max_tokens for submit in rig.prefill.submits] == [40]


async def test_min_tokens_above_one_is_no_fault_on_the_prefill_leg(rig: Rig) -> None:
    body = {"prompt": "hello", "max_tokens": 50, "min_tokens": 10, "stop": ["zzz"], "n": 2, "logprobs": 1}
    reply = await rig.post("/v1/completions", body)
    assert reply.status_code == 200
    assert {submit.request.sampling.min_tokens for submit in rig.prefill.submits} == {10}


async def test_cached_tokens_are_those_of_the_prefill_workers_prefix_lookup(rig: Rig) -> None:
    body = {"prompt": list(range(10, 110)), "max_tokens": 4}
    first = (await rig.post("/v1/completions", body)).json()["usage"]
    second = (await rig.post("/v1/completions", body)).json()["usage"]
    third = (await rig.events("/v1/completions", {**body, "stream_options": {"include_usage": True}}))[-2]["usage"]
    assert first["prompt_tokens"] == second["prompt_tokens"] == third["prompt_tokens"] == 100
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == third["prompt_tokens_details"]["cached_tokens"] == 96


@pytest.mark.parametrize(("options", "expected"), [(None, 0), ({}, 0), ({"include_usage": True}, 1)])
async def test_usage_is_streamed_once_and_only_if_asked_for(rig: Rig, options: object, expected: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    events = await rig.events(
        "/v1/chat/completions", body | ({"stream_options": options} if options is not None else {})
    )
    with_usage = [position for position, event in enumerate(events) if event.get("usage")]
    assert len(with_usage) == expected
    if expected:
        assert with_usage == [len(events) - 2]
        assert events[-2]["choices"] == []
        assert events[-2]["baton"]["decode_worker"] == "d0"


async def test_duplicates_are_dropped(rig: Rig) -> None:
    rig.prefill.script.duplicate = rig.decode.script.duplicate = True
    answer = await rig.generate(request(max_tokens=10))
    assert answer.token_ids == list(range(300, 310))


async def test_a_token_that_never_comes_ends_the_call_as_worker_lost(rig_without_retries: Rig) -> None:
    rig = rig_without_retries
    rig.decode.script.skip_index = 3
    answer = await rig.generate(request(max_tokens=10))
    assert answer.token_ids == [300, 301, 302]
    assert answer.error is not None
    assert answer.error.code == "worker_lost"
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    await rig.idle()


async def test_a_decode_worker_that_dies_mid_stream_ends_the_call_naming_it(rig_without_retries: Rig) -> None:
    rig = rig_without_retries
    rig.decode.script.decode_gate.clear()
    rig.decode.script.pause_at = 5
    call = asyncio.create_task(rig.generate(request(max_tokens=10)))
    await until(lambda: bool(rig.decode.adopted), "decode has the sequence")
    await asyncio.sleep(0.05)
    await rig.decode.kill()
    answer = await call
    assert answer.token_ids == [300, 301, 302, 303, 304]
    assert answer.error is not None
    assert answer.error.code == "worker_lost"
    assert "decode worker d0 was lost" in answer.error.message
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    assert answer.done is None


async def test_half_an_answer_never_passes_for_a_whole_one(rig_without_retries: Rig) -> None:
    """A worker ends a sequence as cancelled that nobody here cancelled."""
    rig = rig_without_retries
    rig.decode.script.give_up_at = 3
    answer = await rig.generate(request(max_tokens=10))
    reply = await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 10})
    assert answer.token_ids == [300, 301, 302]
    assert answer.done is None
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    assert reply.status_code == 503
    await rig.idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_token_ids_come_over_http_only_if_asked_for(rig: Rig, path: str, body: dict[str, object]) -> None:
    plain = (await rig.post(path, body | {"max_tokens": 5})).json()["choices"][0]
    asked = body | {"max_tokens": 5, "return_token_ids": True}
    whole = (await rig.post(path, asked)).json()["choices"][0]
    events = await rig.events(path, asked)
    streamed = [token_id for e in events if e.get("choices") for token_id in e["choices"][0].get("token_ids", [])]
    assert "token_ids" not in plain
    assert whole["token_ids"] == streamed == list(range(300, 305))


async def test_the_model_list_says_context_and_vocabulary(rig: Rig) -> None:
    (model,) = (await rig.http.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"], model["vocab_size"]) == ("tiny", 2048, 512)


async def test_a_prefill_worker_that_fails_after_adoption_does_not_end_the_call(rig: Rig) -> None:
    """The link broke between adoption and Ack: prefill reports a failed transfer, decode has the sequence."""
    rig.prefill.script.fail_handoff = TransferFailed("the Ack did not come")
    rig.decode.script.decode_gate.clear()
    call = asyncio.create_task(rig.generate(request(max_tokens=10)))
    await until(lambda: bool(rig.decode.adopted) and not rig.prefill.num_open, "decode has it, prefill reported")
    await asyncio.sleep(0.05)
    rig.decode.script.decode_gate.set()
    answer = await call
    assert answer.status is None
    assert answer.token_ids == list(range(300, 310))
    await rig.idle()


async def test_a_transfer_that_failed_for_good_ends_the_call_with_prefills_reason(rig_without_retries: Rig) -> None:
    rig = rig_without_retries
    rig.prefill.script.fail_handoff = TransferFailed("KV did not arrive")
    rig.prefill.script.lose_handoff = True
    answer = await rig.generate(request(max_tokens=10))
    assert answer.token_ids == [300]
    assert answer.error is not None
    assert answer.error.code == "transfer_failed"
    await rig.idle()


async def test_a_stream_that_fails_has_an_error_event_and_no_done_and_the_official_client_raises(
    rig_without_retries: Rig,
) -> None:
    rig = rig_without_retries
    rig.decode.script.fail_after = (5, TransferFailed("KV did not arrive"))
    body = {"prompt": "hello", "max_tokens": 10}
    events = await rig.events("/v1/completions", body)
    whole = await rig.post("/v1/completions", body)
    assert events[-1]["error"]["code"] == "transfer_failed"
    assert len(events) == 6
    assert whole.status_code == 503
    client = openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0)
    async with client:
        stream = await client.completions.create(model="tiny", prompt="hello", max_tokens=10, stream=True)
        with pytest.raises(openai.APIError, match="KV did not arrive"):
            async for _ in stream:
                pass


async def test_the_official_client_chats_streamed_and_whole(rig: Rig) -> None:
    async with openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0) as client:
        messages: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hi"}]
        whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=12, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        models = [model.id async for model in client.models.list()]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert models == ["tiny"]


async def test_a_failure_before_the_first_token_is_tried_once_more_elsewhere(files: ModelFiles) -> None:
    prefill, decode = await start_pair()
    other = await StubWorker("p1", worker_pb2.ROLE_PREFILL).start()
    other.peers["d0"] = decode
    for worker in (prefill, other):
        worker.script.fail_prefill = TransferFailed("not now")
    async with running_rig(files, [prefill, other, decode]) as rig:
        await until(lambda: all(p.told_peers for p in (prefill, other)), "both prefill workers are linked")
        failed = await rig.generate(request(max_tokens=4))
        other.script.fail_prefill = None
        served = [await rig.generate(request(max_tokens=4)) for _ in range(3)]
        await rig.idle()
    assert failed.error is not None
    assert failed.error.code == "transfer_failed"
    assert (len(prefill.submits) >= 1, len(other.submits) >= 1) == (True, True)
    assert [answer.token_ids for answer in served] == [[300, 301, 302, 303]] * 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("the engine says no", field="sampling"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("queue full", retry_after_s=3), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Internal("defect"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_workers_own_error_keeps_its_status_and_is_not_tried_again(
    rig: Rig, error: Exception, status: grpc.StatusCode
) -> None:
    rig.prefill.script.refuse = error  # type: ignore[assignment]
    answer = await rig.generate(request(max_tokens=4))
    assert answer.status is not None
    assert answer.status.code() is status
    assert len(rig.prefill.submits) == 1
    await rig.idle()


async def test_a_deadline_ends_the_call_on_both_apis_and_frees_the_workers(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    answer = await rig.generate(request(max_tokens=10), timeout=0.3)
    reply = await rig.http.post(
        "/v1/completions", json={"prompt": "hello"}, headers={"x-request-timeout-ms": "300"}
    )  # fmt: skip
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"
    await rig.idle()


async def test_a_call_can_be_aborted_by_its_label(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    labelled = request(max_tokens=10)
    labelled.request_id = "mine"
    call = asyncio.create_task(rig.generate(labelled))
    await until(lambda: bool(rig.decode.adopted), "decode has the sequence")
    reply = await rig.stub.Abort(serving_pb2.AbortRequest(request_id="mine"))
    answer = await call
    assert reply.num_aborted == 1
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await rig.stub.Abort(serving_pb2.AbortRequest(request_id="mine"))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    await rig.idle()


async def test_two_calls_with_one_label_get_their_own_answers(rig: Rig) -> None:
    def labelled(max_tokens: int) -> serving_pb2.GenerateRequest:
        made = request(max_tokens=max_tokens)
        made.request_id = "r1"
        return made

    short, long = await asyncio.gather(rig.generate(labelled(3)), rig.generate(labelled(6)))
    assert (len(short.token_ids), len(long.token_ids)) == (3, 6)
    assert len({submit.request.seq for submit in rig.prefill.submits}) == 2
