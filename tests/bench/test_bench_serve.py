"""Whole loads against scripted servers: what is measured is what was scripted, and nothing that goes wrong is lost."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.cli import add_bench_parser
from bench.client import CallFailed
from bench.client_openai import PromptForm
from bench.http_wire import Pool
from bench.loadgen import perform
from bench.measure import GAP_FROM_CLIENT, GAP_FROM_SERVER, Outcome
from bench.serve import ServeOptions, UsageError, connect, serve
from bench.workload import Lengths, PlannedCall
from tests.bench.scripted_servers import Script, ScriptFor, Seen, grpc_server, openai_server

Server = Callable[[ScriptFor], AbstractAsyncContextManager[tuple[str, Seen]]]
BOTH = pytest.mark.parametrize("server", [openai_server, grpc_server], ids=["http", "grpc"])

REPOSITORY = Path(__file__).parents[2]
QUICK = ServeOptions(
    target="",
    concurrency=4,
    num_requests=12,
    num_warmup=0,
    input_lengths=Lengths(20, 40),
    output_lengths=Lengths(6, 6),
    call_timeout_s=20.0,
)
GENEROUS = 10.0  # times what was scripted: the machine is shared, and only the lower bounds mean much


@BOTH
async def test_the_measured_latencies_are_the_scripted_ones(server: Server) -> None:
    script = Script(first_s=0.08, gap_s=0.06, step_s=0.02)
    async with server(lambda _body: script) as (target, seen):
        result = await serve(replace(QUICK, target=target))
    summary = result.summary
    assert (summary.num_completed, summary.num_failed) == (12, 0)
    assert 79 <= summary.ttft_ms.p50 <= 80 * GENEROUS
    assert 20 <= summary.tpot_ms.p50 <= 28 * GENEROUS  # (60 + 4 * 20) / 5
    assert 12 <= summary.itl_ms.p50 <= 20 * GENEROUS
    assert summary.itl_ms.n == 12 * 5
    assert (summary.handoff_gap_ms.p50, summary.handoff_gap_source) == (12.5, GAP_FROM_SERVER)
    assert (summary.output_tokens, summary.cached_tokens, summary.num_shipped) == (72, 36, 12)
    assert seen.max_inflight <= 4
    assert summary.prompt_tokens == sum(record.prompt_tokens for record in result.records)


@BOTH
async def test_without_server_timings_the_gap_is_the_clients_and_labelled(server: Server) -> None:
    async with server(lambda _body: Script(gap_s=0.06, with_timings=False)) as (target, _):
        summary = (await serve(replace(QUICK, target=target))).summary
    assert summary.handoff_gap_source == GAP_FROM_CLIENT
    assert 40 <= summary.handoff_gap_ms.p50 <= 60 * GENEROUS


@BOTH
async def test_the_same_seed_sends_the_same_prompts(server: Server) -> None:
    sent = []
    for _ in range(2):
        async with server(lambda _body: Script()) as (target, seen):
            await serve(replace(QUICK, target=target, concurrency=1, prompt_form=PromptForm.TOKEN_IDS))
        sent.append([body["prompt"] if isinstance(body, dict) else list(body.token_ids.ids) for body in seen.bodies])
    assert sent[0] == sent[1]


@BOTH
@pytest.mark.parametrize(
    ("script", "http_kind", "grpc_kind"),
    [
        (Script(stop_after=3), "truncated", "truncated"),
        (Script(stop_after=0), "truncated", "truncated"),
        (Script(error_after=2), "stream_error_worker_lost", "error_worker_lost"),
        (Script(status=503), "http_503", "grpc_UNAVAILABLE"),
        (Script(empty=True), "empty", "empty"),
    ],
    ids=["cut", "cut-at-once", "error-event", "refused", "empty"],
)
async def test_whatever_goes_wrong_is_a_failure_counted_by_kind(
    server: Server, script: Script, http_kind: str, grpc_kind: str
) -> None:
    num_calls = 0

    def every_third(body: Any) -> Script:
        nonlocal num_calls
        num_calls += 1
        return script if num_calls % 3 == 0 else Script()

    async with server(every_third) as (target, seen):
        form = PromptForm.TOKEN_IDS  # one probe, which is call 1
        summary = (await serve(replace(QUICK, target=target, prompt_form=form))).summary
    kind = http_kind if target.startswith("http") else grpc_kind
    assert summary.errors == {kind: 4}
    assert (summary.num_completed, summary.num_failed) == (8, 4)
    assert summary.slo.verdicts["failed"] == 4
    assert seen.num_inflight == 0


@BOTH
async def test_calls_that_are_turned_away_are_counted_as_shed_and_clients_wait_as_told(server: Server) -> None:
    num_calls = 0

    def first_two(body: Any) -> Script:
        nonlocal num_calls
        num_calls += 1
        return Script(shed_s=1.0) if 2 <= num_calls <= 3 else Script()  # call 1 is the probe

    async with server(first_two) as (target, _):
        options = replace(QUICK, target=target, concurrency=1, num_requests=4, prompt_form=PromptForm.TOKEN_IDS)
        result = await serve(options)
    summary = result.summary
    assert (summary.num_completed, summary.num_shed, summary.num_failed) == (2, 2, 0)
    assert summary.slo.verdicts["failed"] == 2
    assert summary.duration_s >= 2.0
    assert not result.all_failed


async def test_the_class_travels_as_a_header_and_in_the_message() -> None:
    async with grpc_server(lambda _body: Script()) as (target, seen):
        await serve(replace(QUICK, target=target, num_requests=1, slo_class="batch"))
    assert seen.bodies[0].slo.class_name == "batch"
    assert b"x-slo-class: batch\r\n" in Pool("http://127.0.0.1", {"x-slo-class": "batch", "x": ""}).encode("GET", "/")


async def test_an_http_stream_without_done_is_truncated_however_clean_its_end() -> None:
    async with openai_server(lambda body: Script(done=body["max_tokens"] == 1)) as (target, _):
        summary = (await serve(replace(QUICK, target=target))).summary
    assert summary.errors == {"truncated": 12}
    assert "without [DONE]" in summary.error_examples["truncated"]


async def test_a_call_that_the_grpc_server_cancels_is_a_failure_and_not_lost() -> None:
    async with grpc_server(lambda _body: Script(server_cancels=True)) as (target, _):
        summary = (await serve(replace(QUICK, target=target))).summary
    assert summary.errors == {"grpc_CANCELLED": 12}


@BOTH
async def test_a_call_that_does_not_end_times_out(server: Server) -> None:
    def script_for(body: Any) -> Script:
        is_probe = isinstance(body, dict) and body["max_tokens"] == 1
        return Script(first_s=0 if is_probe else 30)

    async with server(script_for) as (target, _):
        summary = (await serve(replace(QUICK, target=target, num_requests=2, call_timeout_s=0.2))).summary
    assert summary.errors == {"timeout": 2}


@BOTH
@pytest.mark.parametrize("cancel_after", [0, 1, 3])
async def test_a_planned_cancel_reaches_the_server_and_is_no_failure(server: Server, cancel_after: int) -> None:
    script = Script(first_s=0.2, gap_s=0.05, step_s=0.05)
    async with server(lambda _body: script) as (target, seen):
        client = connect(replace(QUICK, target=target))
        await client.prepare()
        call = PlannedCall(index=0, token_ids=(300, 301), max_tokens=200, seed=1, cancel_after_tokens=cancel_after)
        record = await perform(client, call, due_s=0.0, timeout_s=20.0)
        assert record.outcome is Outcome.CANCELLED
        assert len(record.token_times_s) == cancel_after
        async with asyncio.timeout(10):
            await seen.left.wait()
        assert seen.num_inflight == 0
        await client.close()


@BOTH
async def test_an_open_loop_counts_the_wait_at_its_cap_as_latency(server: Server) -> None:
    async with server(lambda _body: Script(first_s=0.1)) as (target, seen):
        options = replace(QUICK, target=target, rate_per_s=200.0, concurrency=2, output_lengths=Lengths(1, 1))
        result = await serve(options)
    assert seen.max_inflight <= 2
    assert result.generator.num_waited_at_cap >= 8
    assert result.summary.ttft_ms.max >= 5 * 100  # 12 calls, 2 at a time, 0.1 s each: the last waits for 5 pairs
    assert result.summary.client_wait_ms.max >= 4 * 100


@BOTH
async def test_an_open_loop_does_not_wait_for_answers(server: Server) -> None:
    async with server(lambda _body: Script(first_s=0.3)) as (target, seen):
        await serve(replace(QUICK, target=target, rate_per_s=500.0, concurrency=None))
    assert seen.max_inflight >= 6


@BOTH
async def test_a_closed_loop_starts_no_call_after_its_duration(server: Server) -> None:
    async with server(lambda _body: Script(first_s=0.1)) as (target, _):
        result = await serve(replace(QUICK, target=target, num_requests=None, duration_s=0.5))
    assert 4 <= result.summary.num_calls <= 24
    assert max(record.sent_s for record in result.records) - result.started_s <= 0.5


@BOTH
async def test_warm_up_calls_are_excluded_but_their_failures_are_told(server: Server) -> None:
    def script_for(body: Any) -> Script:
        seed = body["seed"] if isinstance(body, dict) else body.sampling.seed
        return Script() if seed in measured or seed == 0 else Script(status=503)

    options = replace(QUICK, num_warmup=3, num_requests=5)
    async with server(lambda _body: Script()) as (target, seen):
        await serve(replace(options, target=target, num_warmup=0))
        measured = {body["seed"] if isinstance(body, dict) else body.sampling.seed for body in seen.bodies}
    async with server(script_for) as (target, _):
        result = await serve(replace(options, target=target))
    assert (result.summary.num_calls, result.summary.num_failed) == (5, 0)
    assert (result.generator.num_warmup, result.generator.num_warmup_failed) == (3, 3)


@pytest.mark.parametrize(
    ("refuses", "form"),
    [((), "token ids"), (("ids",), "text of about"), (("ids", "text"), "/v1/chat/completions")],
)
async def test_prompts_travel_in_the_first_form_that_the_target_takes(refuses: tuple[str, ...], form: str) -> None:
    async with openai_server(lambda _body: Script(), refuses=refuses) as (target, _):
        result = await serve(replace(QUICK, target=f"{target}/v1"))
    assert form in result.target.prompt_form
    assert (result.summary.num_completed, result.summary.output_tokens) == (12, 72)


async def test_a_target_that_takes_no_form_says_why() -> None:
    async with openai_server(lambda _body: Script(), refuses=("ids", "text", "chat")) as (target, _):
        with pytest.raises(CallFailed, match="no such prompt here"):
            await serve(replace(QUICK, target=target))


@BOTH
async def test_chunks_of_several_tokens_are_counted_by_token(server: Server) -> None:
    script = Script(gap_s=0.03, step_s=0.03, tokens_per_chunk=3, with_ids=True)
    async with server(lambda _body: script) as (target, _):
        summary = (await serve(replace(QUICK, target=target))).summary
    assert (summary.output_tokens, summary.num_unseen_tokens, summary.itl_ms.n) == (72, 0, 60)


async def test_chunks_of_text_without_ids_are_corrected_by_usage() -> None:
    async with openai_server(lambda _body: Script(step_s=0.03, tokens_per_chunk=3)) as (target, _):
        summary = (await serve(replace(QUICK, target=target))).summary
    assert (summary.output_tokens, summary.num_unseen_tokens, summary.itl_ms.n) == (72, 48, 12)


async def test_whole_answers_leave_their_connection_for_the_next_call() -> None:
    async with openai_server(lambda _body: Script()) as (target, seen):
        await serve(replace(QUICK, target=target, concurrency=2))
    assert seen.num_connections <= 2


async def test_a_trace_is_replayed_in_its_order_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 0, "input_length": 60 + i, "output_length": 3, "hash_ids": [0]} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    async with grpc_server(lambda _body: Script()) as (target, seen):
        options = replace(QUICK, target=target, trace=trace, trace_speed=100.0, concurrency=None, num_requests=None)
        result = await serve(options)
    assert sorted(len(body.token_ids.ids) for body in seen.bodies) == [60, 61, 62, 63, 64]
    assert result.summary.output_tokens == 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": None}, "--concurrency for a closed"),
        ({"rate_per_s": 1.0, "trace": Path("x")}, "--rate and --trace"),
        ({"target": "localhost:1"}, "starts with none of"),
    ],
)
async def test_options_that_do_not_fit_together_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        await serve(replace(replace(QUICK, target="grpc://127.0.0.1:1"), **changes))


def bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    add_bench_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    return int(args.run(args))


FLAGS = ("--concurrency", "2", "--num-requests", "6", "--input-len", "8", "--output-len", "3", "--warmup", "0")


async def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    async with openai_server(lambda _body: Script()) as (target, _):
        argv = ("serve", "--target", target, *FLAGS, "--json", str(out), "--save-requests")
        assert await asyncio.to_thread(bench, *argv) == 0
    printed = capsys.readouterr().out
    for word in ("TTFT", "handoff gap (server)", "TPOT", "ITL", "goodput", "load generator"):
        assert word in printed
    document = json.loads(out.read_text())
    assert document["summary"]["num_completed"] == 6
    assert document["summary"]["ttft_ms"]["n"] == 6
    assert document["config"]["input_lengths"] == {"low": 8, "high": 8, "lognormal": False}
    assert document["machine"]["num_cores"] >= 1
    assert [row["output_tokens"] for row in document["requests"]] == [3] * 6


async def test_the_command_fails_when_every_request_failed(capsys: pytest.CaptureFixture[str]) -> None:
    async with grpc_server(lambda _body: Script(status=503)) as (target, _):
        assert await asyncio.to_thread(bench, "serve", "--target", target, *FLAGS) == 1
    assert "ERROR grpc_UNAVAILABLE x 6, e.g. scripted refusal" in capsys.readouterr().out


async def test_a_target_that_is_not_there_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(bench, "serve", "--target", "http://127.0.0.1:1", *FLAGS) == 2
    assert "no connection to 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [("--rate", "0"), ("--concurrency", "-1"), ("--cancel-ratio", "2"), ("--input-len", "5:1"), ("--rate", "nan")],
)
def test_an_option_out_of_its_range_is_refused(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        bench("serve", *flags)
    assert raised.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_the_benches_load_neither_torch_nor_ray_nor_transformers() -> None:
    script = "import sys, bench.cli; print(sorted({'torch', 'ray', 'transformers', 'rich'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    assert found.stdout.strip() == "[]"
