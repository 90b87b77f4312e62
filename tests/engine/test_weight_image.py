"""A model's weights as bytes and back: to the bit, whatever the model did to them, and however the bytes are cut."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.config import EngineConfig
from baton.model_files import ModelFiles, load_model_files
from baton.request import SamplingParams
from engine.loading.weight_image import WeightImage, tensors_of, weight_buffer
from engine.loading.weight_manifest import ALIGNMENT_BYTES, WeightManifest, weight_manifest
from engine.loading.weights import load_weights
from engine.models.architecture import ARCHITECTURES
from engine.models.attention import lay_out
from engine.ports import BatchEntry
from engine.torch_kv_cache import TORCH_DTYPES
from engine.torch_runner import TorchRunner, load_torch_runner
from tests.tiny_models import make_tiny_model

torch.set_num_threads(1)  # tiny tensors: a second thread only waits

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_embeddings": True, "attention_bias": True}),
    ("qwen3", {}),
]


QUANTIZATIONS = ("auto", "int8")


def described(path: Path, quantization: str) -> ModelFiles:
    files = load_model_files(str(path))
    return replace(files, spec=files.spec.quantized(quantization))


def loaded(
    path: Path, dtype: str, quantization: str = "auto", **engine: Any
) -> tuple[TorchRunner, WeightManifest, dict[str, torch.Tensor]]:
    files = described(path, quantization)
    shapes = ARCHITECTURES[files.spec.architecture].tensor_shapes(files.spec)
    runner = load_torch_runner(files, EngineConfig(num_blocks=8, **engine), dtype)
    manifest = weight_manifest(shapes, dtype, files.spec.is_int8)
    return runner, manifest, load_weights(files, shapes, TORCH_DTYPES[dtype])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("architecture", "options"), MODELS)
@pytest.mark.parametrize("piece_bytes", [4_096, 1 << 20])
def test_an_image_gives_back_every_tensor(
    tmp_path: Path, architecture: str, options: dict[str, Any], dtype: str, quantization: str, piece_bytes: int
) -> None:
    runner, manifest, expected = loaded(make_tiny_model(tmp_path, architecture, **options), dtype, quantization)
    image = WeightImage(runner.model, manifest)
    buffer = weight_buffer(-(-manifest.nbytes // piece_bytes) * piece_bytes)
    buffer[:] = b"\xff" * len(buffer)
    for offset in range(0, len(buffer), piece_bytes):
        image.read(offset, memoryview(buffer)[offset : offset + piece_bytes])
    tensors = tensors_of(manifest, buffer)
    assert tensors.keys() == expected.keys()
    assert all(tensors[name].dtype == expected[name].dtype for name in expected)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert not any(buffer[manifest.nbytes :]), "the rest of the last piece is zeros"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_deterministic_model_s_matrices_are_its_weights_too(tmp_path: Path, quantization: str) -> None:
    runner, manifest, expected = loaded(make_tiny_model(tmp_path), "float32", quantization, deterministic=True)
    buffer = weight_buffer(-(-manifest.nbytes // 4_096) * 4_096)
    WeightImage(runner.model, manifest).read(0, memoryview(buffer))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors_of(manifest, buffer).items())


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_made_of_an_image_does_not_keep_its_memory(tmp_path: Path, dtype: str, quantization: str) -> None:
    path = make_tiny_model(tmp_path, "qwen3")
    runner, manifest, _ = loaded(path, dtype, quantization)
    buffer = weight_buffer(-(-manifest.nbytes // 4_096) * 4_096)
    WeightImage(runner.model, manifest).read(0, memoryview(buffer))
    is_kept = weakref.ref(buffer)
    again = load_torch_runner(
        described(path, quantization), EngineConfig(num_blocks=8), dtype, weights=tensors_of(manifest, buffer)
    )
    del buffer
    gc.collect()
    assert is_kept() is None
    assert torch.equal(logits(again), logits(runner)), "to the bit what files give"


@torch.inference_mode()
def logits(runner: TorchRunner) -> torch.Tensor:
    entry = BatchEntry(0, [7 * i % 500 for i in range(40)], 0, range(8), True, SamplingParams(max_tokens=1))
    return runner.model.forward(lay_out([entry], 16), runner.kv_cache.blocks)


def test_int8_matrices_take_a_quarter_of_the_bytes_and_their_scales_follow_them(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    places = {place.name: place for place in loaded(path, "float32", "int8")[1].places}
    whole = {place.name: place for place in loaded(path, "float32")[1].places}
    name = "model.layers.0.mlp.down_proj.weight"
    values, scales = places[name], places[f"{name}_scale"]
    assert (values.dtype, 4 * values.nbytes) == ("int8", whole[name].nbytes)
    assert (scales.dtype, scales.shape, scales.nbytes) == ("float32", values.shape[:1], 4 * values.shape[0])
    assert scales.offset == values.offset + values.nbytes
    embeddings = places["model.embed_tokens.weight"]
    assert (embeddings.dtype, embeddings.nbytes) == ("float32", whole["model.embed_tokens.weight"].nbytes)


def test_a_manifest_s_places_follow_from_shapes_alone() -> None:
    manifest = weight_manifest({"a": (3, 5), "b": (2,), "c": (1,)}, "bfloat16")
    assert [(place.offset, place.nbytes) for place in manifest.places] == [
        (0, 30), (ALIGNMENT_BYTES, 4), (2 * ALIGNMENT_BYTES, 2)
    ]  # fmt: skip
    assert manifest.nbytes == 2 * ALIGNMENT_BYTES + 2
