"""A running model's weights as the bytes of its manifest, and tensors made of such bytes again. Exact to the bit.

The model keeps its matrices fused, and on a CPU packed (models/linear.py), so that the bytes are made when they are read; the
one matrix that was read last is kept unpacked, since its other pages come next. Quantised ones go as they are, values and
scales: nobody rounds them again. `WeightImage.read` runs on the KV thread, beside the engine's: weights never change.
"""

from __future__ import annotations

import mmap
from bisect import bisect_right

import torch
from torch import Tensor

from engine.loading.weight_manifest import TensorPlace, WeightManifest
from engine.models.linear import Linear
from engine.models.llama import Llama
from engine.torch_kv_cache import TORCH_DTYPES

_DTYPES = {**TORCH_DTYPES, "int8": torch.int8}


class WeightImage:
    """What `manifest` says, of `model`. Owns one unpacked matrix; borrows the rest."""

    def __init__(self, model: Llama, manifest: WeightManifest) -> None:
        self._places = manifest.places
        self._starts = [place.offset for place in manifest.places]
        self._sources: dict[str, tuple[Linear | Tensor, int]] = {}  # by name: who holds it, and at which byte it begins
        sizes = {place.name: place.nbytes for place in manifest.places}
        for names, held in model.held():
            start = 0
            for name in names:
                self._sources[name] = held, start
                start += sizes[name]
        assert self._sources.keys() == sizes.keys(), "the model holds other tensors than its shapes say"
        self._unpacked: tuple[Linear | Tensor, Tensor] | None = None  # the last one read

    @torch.inference_mode()
    def read(self, offset: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `offset` on; gaps, and what lies beyond the end, with zeros."""
        target = torch.frombuffer(out, dtype=torch.uint8)
        stop, at = offset + len(target), offset
        for place in self._places[max(0, bisect_right(self._starts, offset) - 1) :]:
            if place.offset >= stop:
                break
            start, end = max(offset, place.offset), min(stop, place.offset + place.nbytes)
            if start < end:
                target[at - offset : start - offset].zero_()
                target[start - offset : end - offset].copy_(self._bytes(place, start, end))
                at = end
        target[at - offset :].zero_()

    def _bytes(self, place: TensorPlace, start: int, end: int) -> Tensor:
        held, first = self._sources[place.name]
        if self._unpacked is None or self._unpacked[0] is not held:
            self._unpacked = None  # the old one goes before the new one comes
            dense = held.dense() if isinstance(held, Linear) else held
            self._unpacked = held, dense.contiguous().view(torch.uint8).reshape(-1)
        shift = first - place.offset
        return self._unpacked[1][start + shift : end + shift]


def weight_buffer(nbytes: int) -> mmap.mmap:
    """Private memory for an image, in huge pages where there are any: those are touched for the first time much quicker."""
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def tensors_of(manifest: WeightManifest, buffer: mmap.mmap) -> dict[str, Tensor]:
    """The tensors of an image by name: views, but for those that a model keeps as they come, lest they keep all of `buffer`."""
    tensors: dict[str, Tensor] = {}
    for place in manifest.places:
        dtype = _DTYPES[place.dtype]
        count = place.nbytes // dtype.itemsize
        view = torch.frombuffer(buffer, dtype=dtype, count=count, offset=place.offset).view(place.shape)
        is_fused = place.name.startswith("model.layers.") and len(place.shape) > 1
        tensors[place.name] = view if is_fused else view.clone()
    return tensors
