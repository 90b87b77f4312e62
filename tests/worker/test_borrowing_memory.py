"""Weights are borrowed only where the image, the model made of it and the KV cache fit; where files fit alone, they are read."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.model_files import load_model_files
from baton.model_spec import ModelSpec
from engine.loading.weight_image import WeightImage
from engine.loading.weight_manifest import WeightManifest
from engine.torch_runner import load_torch_runner, loading_bytes
from tests.tiny_models import make_tiny_model
from worker.loading import FROM_FILES, FROM_PEER, load_torch_model

NUM_BLOCKS = 2_048  # more bytes than the weights


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_a_worker_that_files_leave_room_for_starts_whether_or_not_it_may_borrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    config = WorkerConfig(
        "new",
        model=ModelConfig(path=str(make_tiny_model(tmp_path / "tiny")), quantization=quantization),
        engine=EngineConfig(num_blocks=NUM_BLOCKS, num_threads=1),
    )
    files = load_model_files(config.model.path)
    files = replace(files, spec=files.spec.quantized(quantization))
    lender = load_torch_runner(files, EngineConfig(num_blocks=1, num_threads=1), "float32").model
    images: list[mmap.mmap] = []
    limit = 0

    def free_bytes() -> int:
        return limit - sum(map(len, images))

    def borrow(spec: ModelSpec, manifest: WeightManifest, buffer: mmap.mmap) -> bool:
        images.append(buffer)
        WeightImage(lender, manifest).read(0, memoryview(buffer))
        return True

    def start(with_borrow: bool) -> str:
        images.clear()
        return load_torch_model(
            config, lambda n: memoryview(bytearray(n)), borrow if with_borrow else None
        ).weights_from

    monkeypatch.setattr("worker.loading.available_memory_bytes", free_bytes)
    monkeypatch.setattr("engine.torch_runner.available_memory_bytes", free_bytes)
    kv_bytes = NUM_BLOCKS * files.spec.kv_layout("float32", config.engine.block_size).block_bytes
    limit = loading_bytes(files.spec, "float32") + kv_bytes
    assert start(with_borrow=False) == FROM_FILES
    assert start(with_borrow=True) == FROM_FILES
    limit += 2 * config.kv.frame_bytes  # the image is smaller than that
    assert start(with_borrow=True) == FROM_PEER
    assert len(images[0]) < 2 * config.kv.frame_bytes
