"""KV in 8 bits: how a head vector becomes bytes and numbers again. The one place that knows, for engine and kv_transfer alike.

A head vector of D numbers is D bytes of e4m3 (OCP 8-bit Floating Point Specification, section 5: 4 exponent bits, 3 of
mantissa, no infinities, greatest 448), then its scale as a little-endian float32: x[i] ~ value[i] * scale, scale = max|x| / 448.
Each token and head has its own scale, so that a token never rescales another one and nothing happens at a block's edge.

An element is off by at most max(|x[i]| / 2^4, scale / 2^10): half a unit in the last of 4 significant bits, or of a subnormal.
What is written is always finite, and so are zeroed bytes, which is what unfilled slots hold.

Pure functions of tensors, called on any thread. Loads torch, so front ends never import it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from baton.kv_layout import SCALE_BYTES

E4M3_MAX = 448.0  # OFP8 table 1
_TINY = torch.finfo(torch.float32).tiny  # a smaller scale is subnormal: dividing by it is inexact, by 0 infinite
_REBIAS = 256.0  # e4m3's exponent bias is 7, float16's is 15: the same bits mean 2^8 less there


def quantise(x: Tensor) -> Tensor:
    """Round head vectors x [..., D] of any float dtype to bytes [..., D + 4]. NaN becomes 0, infinity the dtype's greatest."""
    wide = torch.nan_to_num(x).float()
    amax = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, (amax / E4M3_MAX).clamp_min(_TINY), 1.0)  # [..., 1]
    values = (wide / scale).to(torch.float8_e4m3fn)  # to nearest, ties to even
    return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), -1)


def dequantise(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Read bytes [..., D + 4] as numbers [..., D] of `dtype`.

    A value's bits are moved to where float16 has them and converted from there. That is exact for all but NaN, which is
    never written, and 8 times faster than torch's own conversion (2,048 tokens x 3 x 64, one core: 157 against 1,268 us).
    """
    head_dim = packed.shape[-1] - SCALE_BYTES
    scale = packed[..., head_dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # [..., 1], aligned
    bits = packed[..., :head_dim].view(torch.int8).to(torch.int16)  # s.eeee.mmm, s repeated up to bit 15
    bits <<= 7
    bits &= ~0x4000  # bit 14 is float16's first exponent bit: 0, as e4m3 has one less
    return (bits.view(torch.float16).float() * (scale * _REBIAS)).to(dtype)
