"""Whole workers in this process, with a scripted engine that verifies every byte of KV it reads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable

from baton.config import EngineConfig, KVTransferConfig, WorkerConfig
from baton.kv_layout import KVLayout
from baton.model_spec import ModelSpec
from baton.v1 import worker_pb2
from engine.scripted_runner import ScriptedRunner
from worker.loading import LoadedModel
from worker.server import WorkerServer

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
EOS = 7
PATIENCE_S = 60.0  # generous: tests wait for behaviour, they do not time it
SPEC = ModelSpec(
    name="scripted", architecture="llama", num_layers=2, hidden_size=32, ffn_size=64, num_heads=2, num_kv_heads=2,
    head_dim=16, vocab_size=1_000, rope_theta=10_000.0, norm_eps=1e-5, max_model_len=2_048, tie_embeddings=True,
    eos_token_ids=(EOS,), weights_hash="w",
)  # fmt: skip


class ScriptedWorker:
    """One WorkerServer whose runner is at hand."""

    def __init__(self, config: WorkerConfig, num_blocks: int = 256, spec: ModelSpec = SPEC) -> None:
        self.runner = ScriptedRunner(LAYOUT, num_blocks)
        self.fatal: list[BaseException] = []
        self.server = WorkerServer(config, self.fatal.append, lambda *_: LoadedModel(spec, self.runner))
        self.config = config

    @property
    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.config.worker_id, epoch=self.server.epoch, address=self.server.address)


def worker_config(
    worker_id: str,
    role: str,
    *,
    max_queued_seqs: int = 1_024,
    outbox_bytes: int = 4 << 20,
    port: int = 0,
    tls_dir: str = "",
    **kv: object,
) -> WorkerConfig:
    """A worker of this process; `kv` are fields of KVTransferConfig."""
    return WorkerConfig(
        worker_id,
        role=role,
        port=port,
        tls_dir=tls_dir,
        outbox_bytes=outbox_bytes,
        engine=EngineConfig(chunk_tokens=64, max_queued_seqs=max_queued_seqs),
        kv=dataclasses.replace(KVTransferConfig(transport="loopback"), **kv),  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def running(*workers: ScriptedWorker) -> AsyncIterator[None]:
    """Start them, and stop them whatever happens."""
    started: list[ScriptedWorker] = []
    try:
        for worker in workers:
            worker.server.start()
            started.append(worker)
        yield
    finally:
        for worker in reversed(started):
            worker.server.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody announces to tests."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def worker_threads(before: set[threading.Thread]) -> set[str]:
    """Names of threads begun since `before`, without those that gRPC and asyncio keep for a whole process."""
    names = {thread.name for thread in set(threading.enumerate()) - before}
    return {name for name in names if "_poll_wrapper" not in name} - {"asyncio_0"}
