"""All tensors a model needs, each checked against the shape its spec implies.

A tensor that is missing, misshapen or not expected (an unknown bias, say, which would be left out silently) is a ConfigError.
Shapes are compared before a tensor is made, so a hostile file cannot ask for more memory than the spec does. Where the spec says
int8, each matrix of a layer is rounded as it is read, so that one of them at a time is held as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from baton.errors import ConfigError
from baton.model_files import ModelFiles
from engine.loading.gguf_weights import GGUFSource
from engine.loading.safetensors_weights import SafetensorsSource
from engine.loading.weight_manifest import SCALE, is_projection
from engine.models.quantized_linear import quantise
from engine.tensor_parallel.shard import ALONE, Shard

Shapes = Mapping[str, tuple[int, ...]]


def load_weights(files: ModelFiles, shapes: Shapes, dtype: torch.dtype, shard: Shard = ALONE) -> dict[str, Tensor]:
    """Read what `shard` computes of the tensors named by `shapes`, with scales of those that are quantised. Returns fresh ones,
    owned by the caller.

    Raises: ConfigError.
    """
    kind = GGUFSource if files.kind == "gguf" else SafetensorsSource
    weights: dict[str, Tensor] = {}
    for path in files.weights:
        source = kind(path, files.spec)
        found = source.shapes()
        for name, shape in found.items():
            if name not in shapes:
                if source.may_ignore(name):
                    continue
                raise _unusable(path, f"tensor {name} is not part of a {files.spec.architecture} model like this one")
            if shape != shapes[name]:
                raise _unusable(path, f"tensor {name} is {list(shape)}, the configuration says {list(shapes[name])}")
            is_int8 = files.spec.is_int8 and is_projection(name)
            read = _quantised(path, name, source.read(name)) if is_int8 else {name: source.read(name).to(dtype)}
            for part, tensor in read.items():
                mine = shard.cut(part, tensor)
                weights[part] = mine if mine is tensor else mine.clone(memory_format=torch.contiguous_format)
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        raise _unusable(files.weights[0], f"tensor {missing[0]} is missing ({len(missing)} in all)")
    return weights


def _quantised(path: Path, name: str, weight: Tensor) -> dict[str, Tensor]:
    """From what the file holds, so that the same values come out in every compute dtype and for ranks of every degree."""
    values, scales = quantise(weight)
    if not scales.isfinite().all():
        raise _unusable(path, f"tensor {name} holds numbers that are not finite: int8 cannot hold it")
    return {name: values, name + SCALE: scales}


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path}: {why}: fetch the model again", field="model.path")
