"""Batches outlive routers: each line has one outcome, whatever was killed, lost or taken away meanwhile."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import openai
import pytest
from openai.types import Batch

from baton.config import BatchConfig, ModelConfig, RouterConfig
from baton.config_load import to_json
from baton.errors import WorkerLost
from baton.model_files import ModelFiles
from router.batch import records
from router.batch.records import Batch as Row
from router.batch.records import FileInfo
from router.batch.store import BatchStore, Lease
from tests.router.batch.batch_rig import batch_rig, ended, line, outcomes, send
from tests.router.router_rig import POLL_S, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair

LINES = [line(f"l{i}", max_tokens=1 if i % 2 else 4) for i in range(12)]  # every other one ends on prefill
IDS = {f"l{i}" for i in range(12)}
ODD = {f"l{i}" for i in range(1, 12, 2)}


async def progress(client: openai.AsyncOpenAI, batch: Batch, num_completed: int) -> None:
    """Wait until so many lines are done and on the disk."""
    while True:
        now = await client.batches.retrieve(batch.id)
        if now.request_counts is not None and now.request_counts.completed >= num_completed:
            return
        await asyncio.sleep(0.02)


@asynccontextmanager
async def router_process(
    model_dir: Path, folder: Path, worker: StubWorker
) -> AsyncIterator[tuple[asyncio.subprocess.Process, openai.AsyncOpenAI]]:
    batch = BatchConfig(folder=str(folder / "batch"), lease_s=1.0)
    config = RouterConfig(http_port=0, grpc_port=0, batch=batch, model=ModelConfig(path=str(model_dir)))
    (folder / "router.json").write_text(to_json(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.main", "--config", str(folder / "router.json"), "--workers", worker.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        url = f"http://127.0.0.1:{ready['http_port']}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_that_is_killed_outright_goes_on_where_it_was_and_runs_no_finished_line_again(
    model_dir: Path, tmp_path: Path
) -> None:
    worker = await StubWorker("b0").start()
    worker.script.decode_gate.clear()
    try:
        async with router_process(model_dir, tmp_path, worker) as (process, client):
            batch = await send(client, LINES)
            await progress(client, batch, len(ODD))
            process.send_signal(signal.SIGKILL)
            await process.wait()
        num_before = len(worker.submits)
        worker.script.decode_gate.set()
        async with router_process(model_dir, tmp_path, worker) as (process, client):
            batch = await ended(client, batch.id, within_s=20)
            answers = await outcomes(client, batch.output_file_id)
            process.terminate()
            assert await process.wait() == 0
    finally:
        await worker.kill()
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 12, "completed": 12, "failed": 0}
    assert answers.keys() == IDS
    assert len(worker.submits) - num_before == len(IDS - ODD)
    assert not list((tmp_path / "batch").glob("*.done"))


async def test_a_router_that_stops_hands_its_batch_to_another_at_once(files: ModelFiles, tmp_path: Path) -> None:
    workers = await start_pair()
    workers[1].script.decode_gate.clear()
    long_lease = {"lease_s": 60.0}
    async with batch_rig(files, tmp_path, workers, long_lease) as (rig, client):
        batch = await send(client, LINES)
        await until(lambda: len(workers[1].adopted) >= len(IDS - ODD), "every line has begun")
        rig.workers.clear()  # they outlive this router
    workers[1].script.decode_gate.set()
    async with batch_rig(files, tmp_path, workers, long_lease) as (_, client):
        batch = await ended(client, batch.id)
        assert (await outcomes(client, batch.output_file_id)).keys() == IDS


async def test_of_two_routers_one_runs_a_batch_and_either_answers_for_it(files: ModelFiles, tmp_path: Path) -> None:
    workers = await start_pair()
    async with (
        batch_rig(files, tmp_path, workers) as (first, ours),
        running_rig(files, workers, batch=BatchConfig(folder=str(tmp_path))) as second,
        openai.AsyncOpenAI(base_url=f"{second.base_url}/v1", api_key="none") as theirs,
    ):
        batch = await send(ours, LINES)
        assert (await ended(theirs, batch.id)).status == "completed"
        found = await theirs.batches.retrieve(batch.id)
        assert (await outcomes(theirs, found.output_file_id)).keys() == IDS
        assert len(workers[0].submits) == len(LINES)
        second.workers.clear()
        await first.idle()


async def test_an_owner_that_was_taken_for_dead_gives_up_and_no_line_is_there_twice(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_rig(files, tmp_path) as (rig, client):
        rig.decode.script.decode_gate.clear()
        batch = await send(client, LINES)
        await progress(client, batch, len(ODD))
        store = rig.front_end._batches._runner._tools.store  # type: ignore[union-attr]
        claimed = store.claim(time.time() + 3_600, 0.0)  # as another router would after a lease without a word
        assert claimed is not None
        assert claimed[0].generation == 2
        rig.decode.script.decode_gate.set()
        batch = await ended(client, batch.id)
        assert (await outcomes(client, batch.output_file_id)).keys() == IDS
        assert batch.request_counts is not None
        assert batch.request_counts.completed == len(IDS)
        await rig.idle()


async def test_a_line_that_makes_room_for_interactive_calls_is_run_again(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_rig(files, tmp_path) as (rig, client):
        calls = rig.front_end.calls
        rig.decode.script.decode_gate.clear()
        batch = await send(client, [line(f"l{i}", max_tokens=4) for i in range(6)])
        await until(lambda: len(rig.decode.adopted) == 6, "every line runs")
        real = calls.slack
        slots = rig.front_end._batches._runner._tools.slots  # type: ignore[union-attr]
        slots._slack = lambda: replace(real(), num_waiting=1, num_free=0)
        await until(lambda: len(rig.decode.cancels) == 6, "every line has made room")
        await until(lambda: calls.num_inflight == 0, "no line runs")
        slots._slack = real
        rig.decode.script.decode_gate.set()
        batch = await ended(client, batch.id)
        assert batch.status == "completed"
        assert (await outcomes(client, batch.output_file_id)).keys() == {f"l{i}" for i in range(6)}
        assert slots.num_preempted == 6
        assert "baton_batch_lines_preempted 6.0" in (await rig.http.get("/metrics")).text
        await rig.idle()


async def test_lines_wait_while_no_worker_is_there_and_a_line_that_fails_for_ever_is_told_so(
    files: ModelFiles, tmp_path: Path
) -> None:
    async with batch_rig(files, tmp_path, max_retries=0) as (rig, client):
        rig.prefill.script.fail_prefill = WorkerLost("it died")
        batch = await ended(client, (await send(client, [line("bad")])).id, within_s=20)
        errors = await outcomes(client, batch.error_file_id)
        assert errors["bad"]["response"]["status_code"] == 503
        assert len(rig.prefill.submits) == 5
        await rig.idle()


async def test_a_batch_that_is_late_ends_as_expired_with_what_was_done(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batch.api.WINDOW_S", 4.0)
    async with batch_rig(files, tmp_path) as (rig, client):
        rig.decode.script.decode_gate.clear()
        batch = await ended(client, (await send(client, LINES)).id)
        assert batch.status == "expired"
        assert (await outcomes(client, batch.output_file_id)).keys() == ODD
        errors = await outcomes(client, batch.error_file_id)
        assert errors.keys() == IDS - ODD
        assert {row["error"]["code"] for row in errors.values()} == {"batch_expired"}
        await rig.idle()


async def test_a_renewal_that_the_database_does_behind_the_end_changes_no_count(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began before the batch was finished, and had to wait for the database."""
    change, finish = BatchStore.change, BatchStore.finish
    is_cancelling, is_waiting, is_finished, is_renewed = (threading.Event() for _ in range(4))

    def late_change(store: BatchStore, lease: Lease, until_s: float, step: Callable[[Row], Row]) -> Row:
        is_renewal = isinstance(step, partial) and is_cancelling.is_set()
        if is_renewal:
            is_waiting.set()
            assert is_finished.wait(POLL_S)
        batch = change(store, lease, until_s, step)
        if batch.status is records.Status.CANCELLING:
            is_cancelling.set()
        if is_renewal:
            is_renewed.set()
        return batch

    def finish_behind(store: BatchStore, lease: Lease, outputs: Sequence[FileInfo], step: Callable[[Row], Row]) -> Row:
        assert is_waiting.wait(POLL_S)
        batch = finish(store, lease, outputs, step)
        is_finished.set()
        return batch

    monkeypatch.setattr(BatchStore, "change", late_change)
    monkeypatch.setattr(BatchStore, "finish", finish_behind)
    async with batch_rig(files, tmp_path) as (rig, client):
        rig.decode.script.decode_gate.clear()
        batch = await send(client, [line("short", max_tokens=1), *(line(f"long{i}") for i in range(3))])
        await progress(client, batch, 1)
        await client.batches.cancel(batch.id)
        assert await asyncio.to_thread(is_renewed.wait, POLL_S)
        after = await ended(client, batch.id)
        assert after.status == "cancelled"
        assert after.request_counts is not None
        assert after.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
        await rig.idle()


async def test_nothing_of_a_prompt_or_an_answer_is_logged(
    files: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "baton")
    async with batch_rig(files, tmp_path) as (_, client):
        await ended(
            client, (await send(client, [line("a", prompt="my secret"), line("b", prompt="my secret", n=99)])).id
        )
        await until(lambda: "batch_ended" in caplog.messages, "what is in the database is logged, too")
    events = [(record.getMessage(), str(vars(record))) for record in caplog.records]
    assert {"batch_created", "batch_taken", "batch_ended"} <= {event for event, _ in events}
    assert not any("secret" in fields for _, fields in events)


def test_a_record_survives_its_text() -> None:
    batch = records.Batch("b", "t", "/v1/completions", "f", 1.0, 2.0, faults=(records.LineFault(1, "m", "p"),))
    batch = batch.enter(records.Status.FAILED, 3.0)
    assert records.Batch.from_text(batch.to_text()) == batch
