"""The router as a process of its own, and its conversations with the controller."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.config import ModelConfig, RouterConfig
from baton.config_load import to_json
from baton.errors import ConfigError
from baton.model_files import ModelFiles
from baton.slo import Verdict
from baton.v1 import control_pb2, control_pb2_grpc, serving_pb2_grpc, worker_pb2
from router.front_end import FrontEnd
from tests.router.router_rig import request, running_rig, until
from tests.router.stub_worker import StubWorker
from tests.silent_control import SilentControl

# Serves like `python -m router.main`, then tells what it had loaded.
LISTING = "import json, sys; from router.main import main; main(); print(json.dumps(sorted(sys.modules)))"


async def test_a_router_process_serves_without_weights_and_has_loaded_neither_torch_nor_ray(
    model_dir: Path, tmp_path: Path
) -> None:
    small = tmp_path / "tiny"
    shutil.copytree(model_dir, small, ignore=shutil.ignore_patterns("*.safetensors*", "*.sha256.json", "*.digest.json"))
    worker = await StubWorker("b0").start()
    command = [sys.executable, "-c", LISTING, "--model", str(small), "--workers", worker.address]
    process = await asyncio.create_subprocess_exec(
        *command, "--http-port", "0", "--grpc-port", "0", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        assert ready["pid"] == process.pid
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{ready['http_port']}", timeout=30) as client:
            reply = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3})
            assert reply.json()["usage"]["completion_tokens"] == 3
        process.terminate()
        modules = set(json.loads(await process.stdout.readline()))
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await worker.kill()
    assert "router.main" in modules
    assert not modules & {"torch", "ray", "ucxx", "engine", "kubernetes"}


@pytest.mark.parametrize(("option", "field"), [("--http-port", "http_port"), ("--grpc-port", "grpc_port")])
def test_a_taken_port_is_one_line_that_names_the_option(
    model_dir: Path, tmp_path: Path, option: str, field: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = RouterConfig(http_port=0, grpc_port=0, model=ModelConfig(path=str(model_dir)))
        config = dataclasses.replace(config, **{field: taken.getsockname()[1]})
        (tmp_path / "router.json").write_text(to_json(config))
        command = [sys.executable, "-m", "router.main", "--config", str(tmp_path / "router.json")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if line.startswith("router: ")]
    assert len(lines) == 1
    assert option in lines[0]


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "router.main", "--model", str(tmp_path / "nothing"), "--http-port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [line.startswith("router: model") for line in done.stderr.splitlines()] == [True]


@pytest.mark.parametrize("second_signal", [False, True])
async def test_a_terminated_router_lets_calls_end_and_takes_no_new_ones_until_it_is_told_twice(
    model_dir: Path, second_signal: bool
) -> None:
    worker = await StubWorker("b0").start()
    worker.script.decode_gate.clear()
    command = [sys.executable, "-m", "router.main", "--model", str(model_dir), "--workers", worker.address]
    process = await asyncio.create_subprocess_exec(
        *command, "--http-port", "0", "--grpc-port", "0", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        base_url = f"http://127.0.0.1:{ready['http_port']}"
        no_keep_alive = httpx.Limits(max_keepalive_connections=0)  # idle connections are closed, perhaps while we write
        async with (
            httpx.AsyncClient(base_url=base_url, timeout=30, limits=no_keep_alive) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{ready['grpc_port']}") as channel,
        ):
            stub, health = serving_pb2_grpc.ServingStub(channel), health_pb2_grpc.HealthStub(channel)
            answer = aiter(stub.Generate(request(max_tokens=4)))
            assert (await anext(answer)).chunk.token_ids == [300]
            watch = aiter(health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Serving")))
            while (await anext(watch)).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            process.terminate()
            status = await client.get("/readyz")
            while status.status_code == 200:
                status = await client.get("/readyz")
            refused = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
            assert (await anext(watch)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "stopping" in status.text
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.headers["connection"] == "close", "its client may go elsewhere"
            with pytest.raises(grpc.aio.AioRpcError) as moved:  # told to go elsewhere, but there is nobody
                await anext(aiter(stub.Generate(request(max_tokens=1))))
            assert moved.value.code() is grpc.StatusCode.UNAVAILABLE
            if second_signal:
                process.terminate()
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    _ = [response async for response in answer]
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            else:
                worker.script.decode_gate.set()
                rest = [response async for response in answer]
                assert [t for response in rest for t in response.chunk.token_ids] == [301, 302, 303]
                assert rest[-1].done.usage.completion_tokens == 4
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await worker.kill()


async def test_a_drain_that_takes_too_long_ends_and_an_idle_one_ends_at_once(files: ModelFiles) -> None:
    async with running_rig(files, drain_s=0.2) as rig:
        rig.decode.script.decode_gate.clear()
        call = asyncio.create_task(rig.generate(request(max_tokens=4)))
        await until(lambda: bool(rig.decode.adopted), "decode has the sequence")
        await rig.front_end.drain(asyncio.Event())
        assert rig.front_end.calls.num_inflight == 1
        rig.decode.script.decode_gate.set()
        assert (await call).status is None
        await rig.idle()
    async with running_rig(files) as rig:
        await asyncio.wait_for(rig.front_end.drain(asyncio.Event()), 10)  # the limit is 600 s


async def test_every_line_that_a_router_logs_is_json_and_none_has_a_prompt_in_it(model_dir: Path) -> None:
    worker = await StubWorker("b0").start()
    command = [sys.executable, "-m", "router.main", "--model", str(model_dir), "--workers", worker.address]
    process = await asyncio.create_subprocess_exec(
        *command, "--http-port", "0", "--grpc-port", "0", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await process.stdout.readline())
        base_url = f"http://127.0.0.1:{ready['http_port']}"
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            for body in ({"prompt": "my secret"}, {"prompt": "my secret", "stop": ""}, {"prompt": ["my secret"] * 2}):
                await client.post("/v1/completions", json={**body, "max_tokens": 3})
        _, writer = await asyncio.open_connection("127.0.0.1", ready["http_port"])
        writer.write(b"no http at all, my secret\r\n\r\n")
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        async with httpx.AsyncClient(base_url=base_url, timeout=30) as client:
            await client.get("/healthz")
        process.terminate()
        _, logs = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await worker.kill()
    events = [json.loads(line)["event"] for line in logs.splitlines()]
    assert {"router_started", "call_ended", "call_refused"} <= set(events)
    assert b"secret" not in logs


@pytest.mark.parametrize("taken_option", ["http", "grpc"])
async def test_a_taken_port_leaves_nothing_open_behind_it(files: ModelFiles, taken_option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"http_port": 0, "grpc_port": 0, f"{taken_option}_port": taken.getsockname()[1]}
        before = listening()
        with pytest.raises(ConfigError, match=f"--{taken_option}-port"):
            FrontEnd(RouterConfig(**ports), files)
        assert listening() == before


def listening() -> set[int]:
    """TCP ports that this process listens on."""
    connections = psutil.Process().net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


class ControlStub(SilentControl):
    """A controller that says what the test put in, and keeps what it is told."""

    def __init__(self) -> None:
        self.states: asyncio.Queue[control_pb2.ControlState] = asyncio.Queue()
        self.reports: list[control_pb2.RouterReport] = []

    async def Watch(self, request: object, context: object) -> AsyncIterator[control_pb2.ControlState]:
        while True:
            yield await self.states.get()

    async def Report(self, request: control_pb2.RouterReport, context: object) -> control_pb2.ReportResponse:
        self.reports.append(request)
        return control_pb2.ReportResponse()


async def test_the_controller_names_fleet_and_targets_and_hears_verdicts_and_its_death_changes_nothing(
    files: ModelFiles,
) -> None:
    worker = await StubWorker("b0").start()
    control = ControlStub()
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(control, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    record = control_pb2.WorkerRecord(worker_id="b0", address=worker.address, role=worker_pb2.ROLE_BOTH, state="ready")

    def state(version: int, ttft_ms: float) -> control_pb2.ControlState:
        target = control_pb2.SloClass(name="interactive", ttft_ms=ttft_ms, tpot_ms=60_000, percentile=0.95)
        return control_pb2.ControlState(
            workers=[record], slo=control_pb2.SloSet(version=version, classes=[target]), fleet_version=version
        )

    control.states.put_nowait(state(1, ttft_ms=60_000))
    async with running_rig(files, [], wait_ready=False, control_address=f"127.0.0.1:{port}") as rig:
        rig.workers.append(worker)
        await until(lambda: not rig.front_end.fleet.unready_reason(), "the fleet is known")
        assert (await rig.generate(request(max_tokens=3))).status is None
        control.states.put_nowait(state(2, ttft_ms=0.1))
        await until(lambda: rig.front_end.slo_watch.version == 2, "the new targets are in force")
        assert (await rig.generate(request(max_tokens=3))).status is None
        await until(lambda: bool(control.reports) and control.reports[-1].slo_version == 2, "a report names them")
        await until(lambda: bool(control.reports[-1].verdicts[0].num_missed_ttft), "a report has both verdicts")
        report = control.reports[-1]
        counted = report.verdicts[0]
        assert (counted.class_name, counted.num_met, counted.num_missed_ttft) == ("interactive", 1, 1)
        [short, _] = [window for window in report.class_windows if window.class_name == "interactive"]
        assert (short.num_met, short.num_missed_ttft, short.num_arrived) == (1, 1, 2)
        assert [(total.class_name, total.num_arrived) for total in report.arrived] == [("interactive", 2)]
        assert {window.worker_id for window in report.worker_windows} == {"b0"}
        assert [view.worker_id for view in report.workers] == ["b0"]
        await server.stop(None)
        assert (await rig.generate(request(max_tokens=3))).token_ids == [300, 301, 302]
        await rig.idle()


async def test_targets_of_one_call_override_its_class_and_verdicts_are_metrics(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        slow = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
        fast = {"x-slo-ttft-ms": "0.1", "x-slo-class": "batch"}
        for headers in (slow, fast):
            body = {"prompt": "a", "max_tokens": 3}
            assert (await rig.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        bad = await rig.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-slo-ttft-ms": "soon"})
        await rig.idle()
        text = (await rig.http.get("/metrics")).text
        verdicts = rig.front_end.slo_watch.verdicts
    assert bad.json()["error"]["param"] == "x-slo-ttft-ms"
    assert verdicts["interactive"][Verdict.MET] == verdicts["batch"][Verdict.TTFT] == 1
    assert 'baton_goodput_total{slo_class="interactive"} 1.0' in text
    assert 'baton_request_slo_violation_total{slo_class="batch",type="ttft"} 1.0' in text
    assert 'baton_time_to_first_token_seconds_count{slo_class="interactive"} 1.0' in text
    assert 'baton_handoff_gap_seconds_count{slo_class="batch"} 1.0' in text
    assert 'baton_generation_tokens_total{slo_class="batch"} 3.0' in text
    assert 'baton_kv_transfer_bytes_total{transport="loopback"} 8192.0' in text
