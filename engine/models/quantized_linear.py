"""A weight matrix in 8 bits: how it is rounded, and how it is multiplied with.

A row of the weight, that is an output channel, is int8 values and one fp32 scale: w[o, i] ~ value[o, i] * scale[o], scale =
max|w[o]| / 127, symmetric, nearest, ties to even. So a weight is off by at most scale / 2. Only weights are rounded: a product
turns the values back into fp32, a tile of rows at a time, multiplies in fp32, whatever dtype comes, and scales what comes out.

In fp32 this saves memory, not time: turning values back costs about what reading a quarter of the bytes saves. Demo model's
layers (30 x 4 matrices) and 4 matrices of 4096 x 4096, one core of a CPU with AVX2, CPU ms per pass, median of n = 7 (512 rows:
n = 1), in one run:

    rows                          1     8    32   512        1     8    32   512
    Linear, packed fp32        30.5  54.6   122  1391     16.3  29.5  68.5   884
    tiles of 1 MiB             29.2  58.9   118  1309     16.9  40.8  79.4   909
    tiles of 2 MiB (chosen)    27.6  59.9   119  1360     15.2  38.4  75.9   849
    tiles of 8 MiB             32.6  83.6   145  1281     14.4  40.7  77.9   787

The larger the matrix, the more a few rows cost. torch._weight_int8pack_mm takes fp32, but has no fast kernel for it: 105, 883 and
3,412 ms for 1, 8 and 32 rows where Linear took 32.4, 52.5 and 113 (another run, n = 7). oneDNN's int8 products
(onednn.qlinear_pointwise) gave wrong sums here, presumably since 16 bits saturate without VNNI.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engine.loading.weight_manifest import SCALE
from engine.models.linear import Linear

LEVELS = 127  # the greatest value; -128 is not used, so that signs are alike
TILE_BYTES = 2 << 20  # of fp32 at a time; see above
# But at least so many rows. Two matrices of 4096 x 14336 times 1, 32 and 128 rows: 27, 172 and 624 ms with tiles of 36 rows, 24,
# 142 and 430 with 128, 26, 147 and 412 with 256 (Linear: 28, 121 and 417; median of n = 5 in one run)
TILE_ROWS = 128
_TINY = torch.finfo(torch.float32).tiny  # a smaller scale is subnormal: dividing by it is inexact, by 0 infinite


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round weight [out, in] of any float dtype to int8 values [out, in] and fp32 scales [out].

    A row of zeros has zeros; a row that holds infinity or NaN has a scale that is not finite, and must not be used.
    """
    wide = weight.float()
    scales = (torch.linalg.vector_norm(wide, torch.inf, 1) / LEVELS).clamp_min_(_TINY)
    return (wide / scales[:, None]).round_().to(torch.int8), scales


class QuantizedLinear(Linear):
    """A Linear whose weight is int8 values and scales."""

    def __init__(self, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> None:
        """Take values [out, in], scales [out] and bias [out]; the caller drops its own references."""
        self.values, self.scales, self.bias = values, scales, bias
        self.probe_dtype = torch.float32  # so that sums show as they are

    def parts(self) -> Iterator[tuple[str, Linear | Tensor]]:
        yield "weight", self.values
        yield f"weight{SCALE}", self.scales
        if self.bias is not None:
            yield "bias", self.bias

    def dense(self) -> Tensor:
        """The weight [out, in] that it stands for, in fp32."""
        return self.values * self.scales[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, in] to [T, out], computed in fp32, in x's dtype."""
        wide, (num_outputs, num_inputs) = x.float(), self.values.shape
        step = min(num_outputs, max(TILE_ROWS, TILE_BYTES // (num_inputs * wide.itemsize)))
        tile = wide.new_empty(step, num_inputs)  # its memory is warm: one for all tiles
        y = wide.new_empty(len(x), num_outputs)
        for start in range(0, num_outputs, step):
            values = self.values[start : start + step]
            rows = tile[: len(values)].copy_(values)  # exact
            torch.mm(wide, rows.t(), out=y[:, start : start + step])
        y *= self.scales
        if self.bias is not None:
            y += self.bias
        return y.to(x.dtype)
