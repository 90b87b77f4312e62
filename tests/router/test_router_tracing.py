"""What the front end tells a collector of its calls: the tree, whose trace it is, what never is in it. Workers are stubs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton import otlp
from baton.errors import Overloaded
from baton.model_files import ModelFiles
from baton.v1 import serving_pb2, worker_pb2
from tests.otlp_collector import Collector, Seen, Tree, collecting, one, tree
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair
from tests.router.two_routers import resumable, two_routers

ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{ID}-{PARENT}-{flags}" for flags in ("01", "00"))
CHAT = "/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "zebra words"}], "max_tokens": 3}
CALL: Tree = {
    "tokenize": {},
    "admission": {},
    "placement": {},
    "attempt": {"stream": {}},
}  # of stubs, which record nothing


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PAUSE_MS", 20)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@asynccontextmanager
async def traced(files: ModelFiles, collector: Collector, **settings: Any) -> AsyncIterator[Rig]:
    async with running_rig(files, **{"tracing": collector.config(), **settings}) as rig:
        yield rig


async def seen(collector: Collector, name: str = "attempt") -> list[Seen]:
    return await asyncio.to_thread(collector.wait, name)


async def test_a_call_over_http_is_one_trace_of_its_caller_s(files: ModelFiles, collector: Collector) -> None:
    async with traced(files, collector) as rig:
        answer = await rig.http.post(CHAT, json=HELLO, headers={"traceparent": SAMPLED, "tracestate": "v=1"})
        assert answer.status_code == 200
        spans = await seen(collector, "chat tiny")
        [submit] = rig.prefill.submits
    assert tree(spans, PARENT) == {"chat tiny": CALL}
    root, attempt = one(spans, "chat tiny"), one(spans, "attempt")
    assert (root.trace_id, root.state, root.kind) == (ID, "v=1", "SERVER")
    assert submit.request.traceparent == f"00-{ID}-{attempt.span_id}-01"
    assert submit.request.tracestate == "v=1"
    told = root.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "tiny"
    assert told["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"] == 3
    assert told["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.response.id"] == answer.headers["x-request-id"]
    assert (told["baton.outcome"], told["baton.tenant"], told["baton.slo.class"]) == ("finished", "open", "interactive")
    assert (attempt.attributes["baton.prefill_worker"], attempt.attributes["baton.decode_worker"]) == ("p0", "d0")
    assert one(spans, "stream").attributes == {"baton.num_tokens": 3}


async def test_a_call_over_grpc_is_too_and_each_of_its_answers_is_an_attempt(
    files: ModelFiles, collector: Collector
) -> None:
    async with traced(files, collector) as rig:
        metadata = (("traceparent", SAMPLED), ("tracestate", "a=1"), ("tracestate", "b=2"))
        answer = await rig.generate(request(max_tokens=2, n=2), metadata=metadata)
        assert answer.done is not None
        spans = await seen(collector, "text_completion tiny")
    below = tree(spans, PARENT)["text_completion tiny"]
    assert below["attempt"] == [{"stream": {}}, {"stream": {}}]
    root = one(spans, "text_completion tiny")
    assert root.state == "a=1,b=2"
    assert root.attributes["gen_ai.request.choice.count"] == 2


async def test_calls_of_a_stream_of_calls_are_each_a_span_below_the_stream_s_caller(
    files: ModelFiles, collector: Collector
) -> None:
    async with traced(files, collector) as rig:
        starts = [serving_pb2.StartCall(call=number, generate=request(max_tokens=2)) for number in (1, 2)]
        calls = iter([serving_pb2.SessionCall(start=start) for start in starts])
        async for _ in rig.stub.Session(calls, metadata=(("traceparent", SAMPLED),)):
            pass
    assert tree(collector.spans, PARENT) == {"text_completion tiny": [CALL, CALL]}


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", "zz")],
        [("traceparent", SAMPLED), ("traceparent", SAMPLED)],
        [("traceparent", SAMPLED + "0" * 4_000)],
        [("tracestate", "a=1")],
        [("baggage", "user=zebra")],
    ],
)
async def test_a_malformed_trace_is_no_error_and_not_gone_on_with(
    files: ModelFiles, collector: Collector, headers: list[tuple[str, str]]
) -> None:
    async with traced(files, collector) as rig:
        assert (await rig.http.post(CHAT, json=HELLO, headers=headers)).status_code == 200
        spans = await seen(collector, "chat tiny")
    root = one(spans, "chat tiny")
    assert (root.parent_id, root.state) == ("", "")
    assert root.trace_id != ID
    assert "zebra" not in "".join(collector.text)


async def test_what_the_caller_does_not_sample_nobody_records(files: ModelFiles, collector: Collector) -> None:
    async with traced(files, collector) as rig:
        assert (await rig.http.post(CHAT, json=HELLO, headers={"traceparent": UNSAMPLED})).status_code == 200
        [submit] = rig.prefill.submits
    assert not submit.request.traceparent
    assert not collector.spans


async def test_a_router_that_traces_nothing_passes_no_trace_on(rig: Rig) -> None:
    assert (await rig.http.post(CHAT, json=HELLO, headers={"traceparent": SAMPLED})).status_code == 200
    [submit] = rig.prefill.submits
    assert not submit.request.traceparent


async def test_a_refused_call_says_by_what_and_whether_it_is_its_own_fault(
    files: ModelFiles, collector: Collector
) -> None:
    async with traced(files, collector, max_retries=0) as rig:
        assert (await rig.post(CHAT, {**HELLO, "temperature": -1})).status_code == 400
        rig.prefill.script.refuse = Overloaded("full of zebras", retry_after_s=1.0)
        assert (await rig.post(CHAT, HELLO)).status_code == 429
        await asyncio.to_thread(collector.wait, "attempt")
        await until(lambda: sum(span.name == "chat tiny" for span in collector.spans) == 2, "both calls")
    by_code = {span.attributes["error.type"]: span for span in collector.spans if span.name == "chat tiny"}
    assert {code: span.failed for code, span in by_code.items()} == {"invalid_request": False, "overloaded": True}
    attempt = one(collector.spans, "attempt")
    assert (attempt.failed, attempt.attributes["error.type"]) == (True, "overloaded")
    assert "zebra" not in "".join(collector.text)


async def test_of_a_call_that_asks_for_too_much_no_span_failed(files: ModelFiles, collector: Collector) -> None:
    async with traced(files, collector) as rig:
        assert (await rig.post(CHAT, {**HELLO, "max_tokens": 10**6})).status_code == 400
        spans = await seen(collector, "chat tiny")
    assert {span.name: span.attributes["error.type"] for span in spans} == dict.fromkeys(
        ("chat tiny", "tokenize"), "invalid_request"
    )
    assert not [span.name for span in spans if span.failed]


async def test_a_client_that_leaves_ends_its_spans_and_is_to_blame(files: ModelFiles, collector: Collector) -> None:
    async with traced(files, collector) as rig:
        rig.decode.script.decode_gate.clear()
        call = rig.stub.Generate(request(max_tokens=20))
        await anext(aiter(call))
        call.cancel()
        spans = await seen(collector, "text_completion tiny")
        rig.decode.script.decode_gate.set()
    for name in ("text_completion tiny", "attempt"):
        span = one(spans, name)
        assert (span.failed, span.attributes["error.type"]) == (False, "cancelled")
    assert one(spans, "text_completion tiny").attributes["baton.outcome"] == "cancelled"


async def test_a_worker_s_death_in_mid_stream_is_an_event_and_a_second_attempt(
    files: ModelFiles, collector: Collector
) -> None:
    prefill, decode = await start_pair()
    spare = await StubWorker("d1", worker_pb2.ROLE_DECODE).start()
    prefill.peers["d1"] = spare
    async with running_rig(files, [prefill, decode, spare], tracing=collector.config()) as rig:
        for worker in (decode, spare):
            worker.script.pause_at = 5
            worker.script.decode_gate.clear()
        answering = asyncio.create_task(rig.generate(request(max_tokens=8)))
        await until(lambda: bool(decode.adopted or spare.adopted), "one of them has it")
        dead, other = (decode, spare) if decode.adopted else (spare, decode)
        await until(lambda: _num_tokens(rig) == 5, "it paused")
        other.script.decode_gate.set()
        await dead.kill()
        answer = await answering
        assert len(answer.token_ids) == 8
        spans = await seen(collector, "text_completion tiny")
    root = one(spans, "text_completion tiny")
    assert root.events == (
        (
            "baton.sequence_moved",
            {"baton.worker": dead.worker_id, "baton.num_tokens": 5, "error.type": "worker_lost"},
        ),
    )
    assert (root.failed, root.attributes["baton.num_retries"]) == (False, 1)
    first, second = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns)
    assert (first.failed, second.failed) == (True, False)
    assert (first.attributes["baton.num_tokens"], second.attributes["baton.num_tokens"]) == (5, 3)
    assert first.attributes["baton.decode_worker"] == dead.worker_id
    assert second.attributes["baton.decode_worker"] == other.worker_id
    assert tree(spans)["text_completion tiny"]["placement"] == [{}, {}]


async def test_a_resumed_call_is_of_the_trace_of_who_resumes_it_and_names_the_one_it_goes_on_with(
    files: ModelFiles, collector: Collector
) -> None:
    async with two_routers(files, tracing=collector.config()) as rig:
        await rig.broken(resumable(max_tokens=8), 4)
        first = one(await seen(collector, "text_completion tiny"), "text_completion tiny")
        assert first.attributes["baton.outcome"] == "cancelled"
        message = serving_pb2.ResumeRequest(request_id="r1", next_index=[4])
        async for _ in rig.other_stub.Resume(message, metadata=(("traceparent", SAMPLED),)):
            pass
        await asyncio.to_thread(collector.wait, "text_completion tiny", trace_id=ID)
    [again] = [span for span in collector.spans if span.trace_id == ID and span.parent_id == PARENT]
    assert again.links == (first.trace_id,)
    assert again.attributes["baton.resumed"] is True


def _num_tokens(rig: Rig) -> int:
    return sum(report.num_tokens for call in rig.front_end.calls._running for report in call.reports)


async def test_neither_prompt_nor_answer_nor_key_is_in_what_is_sent(
    files: ModelFiles, collector: Collector, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"keys:\n- name: acme\n  sha256: {hashlib.sha256(b'zebra-key').hexdigest()}\n", encoding="utf-8")
    async with traced(files, collector, api_keys_file=str(keys)) as rig:
        headers = {"authorization": "Bearer zebra-key", "x-session-id": "zebra-session", "traceparent": SAMPLED}
        body = {**HELLO, "user": "zebra-user", "stop": ["zebra-stop"], "metadata": {"zebra": "x"}}
        answer = await rig.http.post(CHAT, json=body, headers=headers)
        assert answer.status_code == 200
        spans = await seen(collector, "chat tiny")
    assert one(spans, "chat tiny").attributes["baton.tenant"] == "acme"
    sent = "".join(collector.text)
    assert "zebra" not in sent
    assert answer.json()["choices"][0]["message"]["content"] not in sent


async def test_a_dead_collector_harms_no_call(files: ModelFiles, collector: Collector) -> None:
    config = collector.config()
    async with running_rig(files, await start_pair(), tracing=type(config)("http://127.0.0.1:1")) as rig:
        answers = await asyncio.gather(*(rig.post(CHAT, HELLO) for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        await rig.idle()
