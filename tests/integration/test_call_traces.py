"""One call is one trace, from the front end through prefill and KV transfer to the last token: real workers, a real collector."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from baton import otlp
from baton.config import EmulationConfig, ModelConfig, RouterConfig, WorkerConfig
from baton.model_files import load_model_files
from baton.v1 import serving_pb2, serving_pb2_grpc
from router.front_end import FrontEnd
from tests.integration.fleet_rig import Fleet, WorkerProcess, fleet
from tests.otlp_collector import Collector, Seen, Tree, collecting, one, tree
from tests.router.router_rig import until
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config

ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{ID}-{PARENT}-01"),)
CALL = "text_completion tiny"
PREFILL: Tree = {"queue": {}, "reserve": {}, "compute": {}, "kv_transfer": {}}
DECODE: Tree = {"reserve": {}, "kv_receive": {}, "generate": {}}
NUM_TOKENS = 200  # over a second of them
SKEW_NS = 500_000_000  # of the dates of two processes on a busy machine; within one the order is exact


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PAUSE_MS", 20)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def asking(num_prompt_tokens: int, max_tokens: int) -> serving_pb2.GenerateRequest:
    sampling = serving_pb2.Sampling(max_tokens=max_tokens, ignore_eos=True)
    ids = [20 + 7 * number % 400 for number in range(num_prompt_tokens)]
    return serving_pb2.GenerateRequest(token_ids=serving_pb2.TokenIds(ids=ids), sampling=sampling)


async def ask(
    stub: serving_pb2_grpc.ServingAsyncStub, made: serving_pb2.GenerateRequest, into: list[int]
) -> serving_pb2.Done:
    async for response in stub.Generate(made, timeout=60.0, metadata=SAMPLED):
        into += response.chunk.token_ids
        if response.HasField("done"):
            return response.done
    raise AssertionError("no end")


@asynccontextmanager
async def scripted(
    folder: Path, collector: Collector, *names: tuple[str, str]
) -> AsyncIterator[serving_pb2_grpc.ServingAsyncStub]:
    """A router and workers of this process."""
    tracing = collector.config()
    workers = [ScriptedWorker(dataclasses.replace(worker_config(*name), tracing=tracing)) for name in names]
    for worker in workers:
        worker.runner.vocab_size = VOCAB_SIZE
    files = load_model_files(str(make_tiny_model(folder / "tiny")))
    async with running(*workers):
        addresses = [worker.server.address for worker in workers]
        front_end = FrontEnd(RouterConfig(http_port=0, grpc_port=0, tracing=tracing), files, addresses)
        await front_end.start()
        try:
            await until(lambda: not front_end.fleet.unready_reason(), "the router is ready")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{front_end.grpc_port}") as channel:
                yield serving_pb2_grpc.ServingStub(channel)
        finally:
            await front_end.stop()


def is_inside(span: Seen, spans: Sequence[Seen]) -> bool:
    [above] = [other for other in spans if other.span_id == span.parent_id]
    skew_ns = 0 if above.instance == span.instance else SKEW_NS
    return above.start_ns - skew_ns <= span.start_ns <= span.end_ns <= above.end_ns + skew_ns


async def test_a_call_that_is_handed_over_is_one_tree_over_router_and_workers(
    tmp_path: Path, collector: Collector
) -> None:
    async with scripted(tmp_path, collector, ("p0", "prefill"), ("d0", "decode")) as stub:
        done = await ask(stub, asking(180, 10), [])
    spans = collector.wait(CALL, "prefill", "decode", trace_id=ID)
    assert tree(spans, PARENT) == {
        CALL: {
            "tokenize": {},
            "admission": {},
            "placement": {},
            "attempt": {"prefill": PREFILL, "decode": DECODE, "stream": {}},
        }
    }
    assert len(spans) == 15 == len(collector.spans)
    assert all(is_inside(span, spans) for span in spans if span.parent_id != PARENT)
    assert not [span.name for span in spans if span.failed]
    prefill, compute, transfer = one(spans, "prefill"), one(spans, "compute"), one(spans, "kv_transfer")
    assert (prefill.service, prefill.instance, prefill.kind) == ("baton-worker", "p0", "SERVER")
    assert (one(spans, "decode").instance, one(spans, "attempt").kind) == ("d0", "CLIENT")
    assert prefill.attributes == {
        "baton.outcome": "handed_off",
        "baton.prompt_tokens": 180,
        "baton.cached_tokens": 0,
        "baton.computed_tokens": 180,
        "baton.num_chunks": 3,
        "baton.num_reroutes": 0,
    }
    assert compute.events == tuple(("baton.chunk", {"baton.computed_tokens": count}) for count in (64, 128, 180))
    assert transfer.attributes["baton.kv_bytes"] == done.timings.kv_bytes > 0
    assert transfer.attributes["baton.decode_worker"] == "d0"
    assert one(spans, "kv_receive").attributes == {
        "baton.prefill_worker": "p0",
        "baton.kv_bytes": done.timings.kv_bytes,
    }
    told = one(spans, "attempt").attributes
    assert (told["baton.computed_tokens"], told["baton.kv_bytes"]) == (180, done.timings.kv_bytes)
    assert told["baton.kv_transport"] == transfer.attributes["baton.kv_transport"] == "loopback"


async def test_a_worker_that_does_both_has_one_span_and_a_repeated_prompt_comes_from_its_cache(
    tmp_path: Path, collector: Collector
) -> None:
    async with scripted(tmp_path, collector, ("w0", "both")) as stub:
        for _ in range(2):
            await ask(stub, asking(180, 5), [])
    local: Tree = {"decode": {"queue": {}, "compute": {}, "generate": {}}, "stream": {}}
    assert [call["attempt"] for call in tree(collector.spans, PARENT)[CALL]] == [local, local]
    computed = [span.attributes["baton.computed_tokens"] for span in collector.spans if span.name == "compute"]
    assert computed == [180, 4]  # of 16 tokens a block, 11 are whole


async def test_one_token_needs_no_decode_worker_and_has_no_span_of_one(tmp_path: Path, collector: Collector) -> None:
    async with scripted(tmp_path, collector, ("p0", "prefill"), ("d0", "decode")) as stub:
        await ask(stub, asking(20, 1), [])
    attempt = tree(collector.spans, PARENT)[CALL]["attempt"]
    assert attempt == {"prefill": {"queue": {}, "compute": {}}, "stream": {}}
    assert one(collector.spans, "prefill").attributes["baton.outcome"] == "finished"


def emulated(worker_id: str, role: str, model: Path, collector: Collector) -> WorkerConfig:
    """One that decodes at the pace of a GPU, so that there is a mid-stream."""
    return WorkerConfig(
        worker_id,
        role=role,
        model=ModelConfig(path=str(model)),
        emulation=EmulationConfig(gpu="h100"),
        tracing=collector.config(),
    )


async def test_a_decode_worker_that_is_killed_in_mid_stream_is_an_event_and_another_one_s_spans_follow(
    tmp_path: Path, collector: Collector
) -> None:
    """Processes of their own, KV over UCX. What the dead one had recorded is lost with it."""
    model = make_tiny_model(tmp_path / "tiny")
    roles = (("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
    configs = [emulated(*names, model, collector) for names in roles]
    prefill, *decoders = workers = [WorkerProcess(config, tmp_path) for config in configs]
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait_ready)
        async with fleet(model, tmp_path, prefill, *decoders, tracing=collector.config()) as cluster:
            dead, other = await _answer_with_a_death(cluster, decoders)
    finally:
        for worker in workers:
            worker.process.terminate()
        ends = {worker.worker_id: await asyncio.to_thread(worker.wait_ended) for worker in workers}
    assert [name for name, wrong in ends.items() if wrong] == [dead]
    spans = collector.wait(CALL, "decode", trace_id=ID)
    root = one(spans, CALL)
    [(event, told)] = root.events
    assert (event, told["baton.worker"], told["error.type"]) == ("baton.sequence_moved", dead, "worker_lost")
    assert told["baton.num_tokens"] >= 5
    first, second = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns)
    assert (first.failed, second.failed, root.failed) == (True, False, False)
    assert (first.attributes["baton.decode_worker"], second.attributes["baton.decode_worker"]) == (dead, other)
    assert tree(spans, first.span_id) == {"prefill": PREFILL, "stream": {}}
    assert tree(spans, second.span_id)["decode"] == DECODE
    assert one(spans, "decode").instance == other


async def _answer_with_a_death(cluster: Fleet, decoders: Sequence[WorkerProcess]) -> tuple[str, str]:
    """Names of who died, and of who went on."""
    await cluster.until_ready()
    for worker in decoders:
        await cluster.until_link("p0", worker.worker_id, "ready")
    tokens: list[int] = []
    answering = asyncio.create_task(ask(cluster.stub, asking(100, NUM_TOKENS), tokens))
    await until(lambda: len(tokens) >= 5, "a stream")
    serving = {e.worker_id for e in cluster.front_end.fleet.endpoints if e.num_inflight} & {"d0", "d1"}
    [dead] = [worker for worker in decoders if worker.worker_id in serving]
    dead.process.kill()
    done = await answering
    assert len(tokens) == done.usage.completion_tokens == NUM_TOKENS
    [other] = {"d0", "d1"} - {dead.worker_id}
    return dead.worker_id, other
