"""A weight matrix, stored the way this CPU multiplies it fastest.

In fp32 on a CPU, oneDNN's own blocked layout is 1.3 to 1.9 times faster than row-major at the batch sizes of decode, because
nothing is repacked per call (demo model, one core, ms per step of all layers: batch 8 57 -> 32, batch 32 111 -> 72, 512 tokens
1,277 -> 997; measured here). Only the packed copy is kept. The ops are torch's private ones, the same that its compiler
emits; torch is pinned to a minor version and a test compares them with F.linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """y = x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take weight [out, in] and bias [out]; the caller drops its own reference to `weight`."""
        self.packed = weight.dtype == torch.float32 and weight.is_cpu and torch._C._has_mkldnn
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight
        self.bias = bias
        self.probe_dtype = weight.dtype  # of x, where its kernel is tried: fixed_linear.py

    def parts(self) -> Iterator[tuple[str, Linear | Tensor]]:
        """Yield what it was made of, each as the name of its tensor ends, and whole by rows; a Linear stands for `dense`."""
        yield "weight", self
        if self.bias is not None:
            yield "bias", self.bias

    def dense(self) -> Tensor:
        """The weight [out, in] as it was given; a copy where it is packed."""
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, in] to [T, out]."""
        if not self.packed:
            return F.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y
