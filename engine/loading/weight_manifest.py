"""Which tensors a model consists of and where each lies when all stand in one piece of memory. Pure; loads no torch.

Two workers whose manifests are equal mean the same by every byte. Sizes follow from shapes, never from what a peer says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from baton.kv_layout import DTYPE_BYTES

ALIGNMENT_BYTES = 64  # of each tensor: a cache line, and more than any dtype asks for


@dataclass(frozen=True, slots=True)
class TensorPlace:
    name: str  # Hugging Face's
    shape: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightManifest:
    dtype: str  # of all tensors: that the model computes in
    places: tuple[TensorPlace, ...]  # in the order of their bytes

    @property
    def nbytes(self) -> int:
        """Of all tensors with the gaps between them."""
        return self.places[-1].offset + self.places[-1].nbytes if self.places else 0


def weight_manifest(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> WeightManifest:
    """`shapes`: by name, in the order that is wanted."""
    return WeightManifest(dtype, tuple(_places(shapes, DTYPE_BYTES[dtype])))


def _places(shapes: Mapping[str, tuple[int, ...]], element_bytes: int) -> Iterator[TensorPlace]:
    offset = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * element_bytes
        yield TensorPlace(name, shape, offset, nbytes)
        offset += -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
