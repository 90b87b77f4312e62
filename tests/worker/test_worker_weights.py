"""Workers as processes of their own, over UCX and shared memory: one starts with the weights of another, or does not."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from baton.config import EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.keepalive import SERVER_OPTIONS
from baton.model_files import load_model_files
from baton.v1 import control_pb2, control_pb2_grpc, worker_pb2
from engine.loading.weight_manifest import weight_manifest
from engine.models.architecture import ARCHITECTURES
from tests.integration.fleet_rig import WorkerProcess, stopping
from tests.silent_control import SilentControl
from tests.tiny_models import make_tiny_model
from tests.worker.scripted_worker import until
from tests.worker.session_client import SessionClient, request

EPOCH, STREAMING_EPOCH = 0xABC, 0xDEF
NUM_TOKENS = 32
PROMPT = [(31 * i + 7) % 400 + 20 for i in range(40)]
FRAME_BYTES = (64 << 10) + 64  # the model takes 200 frames


class ControlStub(SilentControl):
    """A controller that names whoever announced itself."""

    def __init__(self) -> None:
        self.records: dict[str, control_pb2.WorkerRecord] = {}
        self.asked: list[control_pb2.LendersRequest] = []
        self.address = ""

    async def Announce(self, request: control_pb2.AnnounceRequest, context: object) -> control_pb2.AnnounceResponse:
        self.records[request.worker.worker_id] = request.worker
        return control_pb2.AnnounceResponse(role=request.worker.role)

    async def Lenders(self, request: control_pb2.LendersRequest, context: object) -> control_pb2.LendersResponse:
        self.asked.append(request)
        return control_pb2.LendersResponse(
            workers=[
                worker_pb2.Peer(worker_id=record.worker_id, epoch=record.epoch, address=record.address)
                for record in self.records.values()
            ]
        )


@asynccontextmanager
async def controller() -> AsyncIterator[ControlStub]:
    server, stub = grpc.aio.server(options=SERVER_OPTIONS), ControlStub()
    control_pb2_grpc.add_ControlServicer_to_server(stub, server)
    stub.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield stub
    finally:
        await server.stop(None)


@asynccontextmanager
async def running(
    worker_id: str,
    model: Path,
    control: ControlStub,
    folder: Path,
    module: str = "worker.main",
    quantization: str = "auto",
    **kv: object,
) -> AsyncIterator[WorkerProcess]:
    """One that has announced itself."""
    config = WorkerConfig(
        worker_id,
        control_address=control.address,
        model=ModelConfig(path=str(model), quantization=quantization),
        engine=EngineConfig(num_blocks=256, num_threads=1),
        kv=KVTransferConfig(frame_bytes=FRAME_BYTES, num_slots=2, **kv),  # type: ignore[arg-type]
    )
    worker = WorkerProcess(config, folder, module)
    stop = stopping(worker)
    await asyncio.to_thread(stop.__enter__)
    try:
        await until(lambda: worker_id in control.records)
        yield worker
    finally:
        await asyncio.to_thread(stop.__exit__, None, None, None)


def events(folder: Path, worker_id: str, name: str) -> list[dict[str, object]]:
    """What the worker logged under this name."""
    lines = (folder / f"{worker_id}.log").read_text().splitlines()
    return [said for line in lines if line.startswith("{") and (said := json.loads(line))["event"] == name]


_NUMBERS = itertools.count(1)  # a worker takes each only once


async def answer_of(worker: WorkerProcess) -> Sequence[int]:
    async with SessionClient(worker.address, EPOCH) as router:
        return await answer(router, next(_NUMBERS))


async def answer(router: SessionClient, number: int) -> Sequence[int]:
    seq = router.router_epoch << 32 | number
    router.submit(request(seq, PROMPT, NUM_TOKENS, ignore_eos=True))
    await router.until(lambda: seq in router.ended or seq in router.refused)
    assert seq in router.ended, router.refused[seq]
    assert router.ended[seq].outcome == worker_pb2.OUTCOME_FINISHED
    return router.output(seq)


@asynccontextmanager
async def streaming(worker: WorkerProcess) -> AsyncIterator[SessionClient]:
    """One call after the other, each of which must end well."""

    async def stream() -> None:
        for number in itertools.count(1):
            assert len(await answer(router, number)) == NUM_TOKENS
            if stopping_now.is_set():
                return

    stopping_now = asyncio.Event()
    async with SessionClient(worker.address, STREAMING_EPOCH) as router:
        calls = asyncio.create_task(stream())
        yield router
        stopping_now.set()
        await calls


def without_weights(model: Path, copy: Path) -> Path:
    """A model's small files, and the note of which weights belong to them."""
    load_model_files(str(model))
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden_size=256, ffn_size=512, num_layers=4)


async def test_a_worker_without_weight_files_starts_with_those_of_a_streaming_peer_and_one_of_another_model_does_not(
    model: Path, tmp_path: Path
) -> None:
    async with controller() as control, running("first", model, control, tmp_path) as first:
        assert control.records["first"].weights_from == "files"
        async with streaming(first) as router:
            small = without_weights(model, tmp_path / "small")
            async with running("second", small, control, tmp_path) as second:
                record = control.records["second"]
                assert record.weights_from == "peer"
                assert 0 < record.weights_s <= record.start_s
                assert record.fingerprint == control.records["first"].fingerprint == control.asked[-1].fingerprint
                assert await answer_of(second) == await answer_of(first)
                first_record = control.records.pop("first")
                async with running("third", small, control, tmp_path) as third:  # of one that has borrowed itself
                    assert control.records["third"].weights_from == "peer"
                    assert await answer_of(third) == await answer_of(second)
            control.records = {"first": first_record}
            other = make_tiny_model(tmp_path / "other", seed=1)
            load_model_files(str(other))  # who has read the files knows what weights there should be
            async with running("stranger", other, control, tmp_path) as stranger:
                reasons = [str(said["reason"]) for said in events(tmp_path, "stranger", "weights_not_borrowed")]
                assert reasons
                assert all("weights_hash does not fit" in reason for reason in reasons)
                assert control.records["stranger"].weights_from == "files"
                assert await answer_of(stranger) != await answer_of(first)
            await router.until(lambda: router.load.num_leases == router.load.slots_in_use == 0)
            assert router.load.kv_transfers_failed == 0


async def test_int8_weights_are_lent_as_they_are_and_only_to_who_wants_them_so(model: Path, tmp_path: Path) -> None:
    async with controller() as control, running("first", model, control, tmp_path, quantization="int8") as first:
        small = without_weights(model, tmp_path / "small")
        async with running("second", small, control, tmp_path, quantization="int8") as second:
            assert control.records["second"].weights_from == "peer"
            assert control.records["second"].fingerprint == control.records["first"].fingerprint
            (borrowed,) = events(tmp_path, "second", "weights_borrowed")
            assert await answer_of(second) == await answer_of(first)
        del control.records["second"]
        async with running("whole", model, control, tmp_path) as whole:
            (said,) = events(tmp_path, "whole", "weights_not_borrowed")
            assert "quantization does not fit" in str(said["reason"])
            assert control.records["whole"].weights_from == "files"
            assert len(await answer_of(whole)) == NUM_TOKENS
        files = load_model_files(str(model))
        shapes = ARCHITECTURES[files.spec.architecture].tensor_shapes(files.spec)
        assert borrowed["nbytes"] == weight_manifest(shapes, "float32", is_int8=True).nbytes


async def test_a_lender_that_dies_in_the_middle_leaves_the_files(model: Path, tmp_path: Path) -> None:
    async with controller() as control:
        gated = running("gated", model, control, tmp_path, "tests.worker.gated_lender")
        lender = await gated.__aenter__()
        starting = running("second", model, control, tmp_path)
        begun = asyncio.create_task(starting.__aenter__())
        assert lender.process.stdout is not None
        assert json.loads(await asyncio.to_thread(lender.process.stdout.readline)) == {"lending": True}
        lender.process.kill()
        second = await begun
        try:
            (tried,) = events(tmp_path, "second", "weights_not_borrowed")
            assert tried["peer"] == "gated"
            assert control.records["second"].weights_from == "files"
            assert len(await answer_of(second)) == NUM_TOKENS
        finally:
            await starting.__aexit__(None, None, None)
            with pytest.raises(AssertionError, match="gated ended with -9"):
                await gated.__aexit__(None, None, None)
