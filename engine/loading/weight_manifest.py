"""Which tensors a model consists of and where each lies when all stand in one piece of memory. Pure; loads no torch.

Two workers whose manifests are equal mean the same by every byte. Sizes follow from shapes, never from what a peer says. Where
weights are quantised at loading, a layer's projections are int8, each followed by its scales (models/quantized_linear.py); all
other tensors, embeddings, head, norms and biases, are in the dtype that the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.kv_layout import DTYPE_BYTES

ALIGNMENT_BYTES = 64  # of each tensor: a cache line, and more than any dtype asks for
SCALE = "_scale"  # the scales of x.weight [out, in] are x.weight_scale [out], as compressed-tensors calls them
_ELEMENT_BYTES = {**DTYPE_BYTES, "int8": 1}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    name: str  # Hugging Face's
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class WeightManifest:
    dtype: str  # that the model computes in, and of all tensors but quantised ones and their scales
    places: tuple[TensorPlace, ...]  # in the order of their bytes

    @property
    def nbytes(self) -> int:
        """Of all tensors with the gaps between them."""
        return self.places[-1].offset + self.places[-1].nbytes if self.places else 0


def is_projection(name: str) -> bool:
    """Whether a tensor is a matrix of a layer: what is quantised."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def weight_manifest(shapes: Mapping[str, tuple[int, ...]], dtype: str, is_int8: bool = False) -> WeightManifest:
    """`shapes`: by name, in the order that is wanted. `is_int8`: whether projections are quantised (ModelSpec.is_int8)."""
    return WeightManifest(dtype, tuple(_places(shapes, dtype, is_int8)))


def _places(shapes: Mapping[str, tuple[int, ...]], dtype: str, is_int8: bool) -> Iterator[TensorPlace]:
    offset = 0
    for name, shape, kind in _tensors(shapes, dtype, is_int8):
        nbytes = math.prod(shape) * _ELEMENT_BYTES[kind]
        yield TensorPlace(name, shape, offset, nbytes, kind)
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _tensors(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, is_int8: bool
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    for name, shape in shapes.items():
        if is_int8 and is_projection(name):
            yield name, shape, "int8"
            yield name + SCALE, shape[:1], "float32"
        else:
            yield name, shape, dtype
