"""Head vectors in 8 bits: torch's own conversion as the reference, and the error bound of OCP's e4m3."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.kv_fp8 import E4M3_MAX, dequantise, quantise

WORST = {"float32": 3.4e38, "bfloat16": 3.38e38, "float16": 65_504.0}


def round_trip(x: Tensor) -> Tensor:
    return dequantise(quantise(x), x.dtype)


def test_every_byte_means_what_torch_says_it_means() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # the two NaNs, which quantise never writes
    for scale in (1.0, 0.37, 2.0**-120, 2.0**110):
        packed = torch.cat((codes, torch.tensor([scale]).view(torch.uint8)))
        expected = codes.view(torch.float8_e4m3fn).float() * scale
        assert torch.equal(dequantise(packed, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_an_element_is_off_by_a_sixteenth_of_itself_or_less_near_zero(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(1)
    x = (torch.randn(500, 3, 64) * size).to(dtype)
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / E4M3_MAX
    bound = torch.maximum(wide.abs() * 2**-4, scale * 2**-10) * (1 + 2**-20)  # float32's own rounding on top
    error = (dequantise(quantise(x), torch.float32) - wide).abs()
    assert (error <= bound).all()
    assert (error > 0.9 * bound).any(), "the bound is met closely, or the test would pass for wider ones"


@pytest.mark.parametrize("head_dim", [1, 6, 64])
def test_a_vector_takes_its_bytes_and_four_and_keeps_its_greatest_element(head_dim: int) -> None:
    x = torch.randn(5, 2, head_dim)
    packed = quantise(x)
    assert packed.shape == (5, 2, head_dim + 4)
    assert packed.dtype == torch.uint8
    greatest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(round_trip(x).gather(-1, greatest), x.gather(-1, greatest), atol=0, rtol=1e-6)


def test_each_vector_is_rounded_by_itself() -> None:
    x = torch.randn(8, 3, 16)
    alone = torch.stack([quantise(x[t, h]) for t in range(8) for h in range(3)]).view(8, 3, -1)
    assert torch.equal(quantise(x), alone)
    x[4, 1] *= 1e6
    packed = quantise(x)
    assert not torch.equal(packed[4, 1], alone[4, 1])
    packed[4, 1] = alone[4, 1]
    assert torch.equal(packed, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_is_finite_whatever_comes(dtype: str) -> None:
    kind = getattr(torch, dtype)
    tiniest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    hard = torch.tensor(
        [
            [0.0, -0.0, 0.0, 0.0],
            [tiniest, 0.0, -tiniest, 0.0],
            [WORST[dtype], -WORST[dtype], 1.0, tiniest],
            [torch.inf, -torch.inf, torch.nan, 1.0],
            [torch.nan] * 4,
        ],
        dtype=kind,
    )
    back = round_trip(hard)
    assert back.isfinite().all()
    assert not back[0].any()
    torch.testing.assert_close(back[2, :2], hard[2, :2], atol=0, rtol=1e-2)
    assert back[3, 0] > WORST[dtype] * 0.99
    assert quantise(hard)[0, 4:].view(torch.float32) == 1.0


def test_zeroed_bytes_are_zeros() -> None:
    assert not dequantise(torch.zeros(3, 20, dtype=torch.uint8), torch.float32).any()
