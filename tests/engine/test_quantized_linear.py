"""A matrix in int8: what it stands for, what is multiplied, and at which values it must not break."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models import quantized_linear
from engine.models.fixed_linear import ROW_SIZES, FixedLinear, row_sizes
from engine.models.linear import Linear
from engine.models.quantized_linear import QuantizedLinear, quantise

torch.set_num_threads(1)  # tiny tensors: a second thread only waits


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_off_by_half_a_step_of_its_row_at_most(dtype: torch.dtype) -> None:
    weight = (random(50, 70) * torch.logspace(-3, 3, 50)[:, None]).to(dtype)
    values, scales = quantise(weight)
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert torch.equal(scales, weight.float().abs().amax(1) / 127)
    error = (values * scales[:, None] - weight.float()).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())
    assert values.abs().amax(1).tolist() == [127] * 50, "every row uses the whole range"


def test_what_is_a_whole_number_of_steps_is_kept_exactly_and_ties_go_to_even() -> None:
    values, scales = quantise(torch.tensor([[127.0, -126.0, 0.5, 1.5, 2.5, -0.5]]))
    assert scales.tolist() == [1.0]
    assert values.tolist() == [[127, -126, 0, 2, 2, 0]]


@pytest.mark.parametrize("greatest", [0.0, 1e-45, 2e-43, 1e-38, 1.2e-36, 1e38, 3.4e38])
def test_rows_of_zeros_and_of_extreme_numbers_stay_numbers(greatest: float) -> None:
    weight = torch.tensor([[greatest, -greatest, greatest / 2, 0.0]])
    values, scales = quantise(weight)
    assert scales.isfinite().all()
    assert (scales > 0).all()
    stands_for = QuantizedLinear(values, scales).dense()
    assert bool(((stands_for - weight).abs() <= scales * 0.51).all())
    assert torch.equal(values[0, 0], -values[0, 1])


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_shows_in_its_scale(odd: float) -> None:
    _, scales = quantise(torch.tensor([[1.0, odd, 2.0], [1.0, 2.0, 3.0]]))
    assert scales.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("bias", [None, random(100, seed=3)], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(
    ("tile_rows", "tile_bytes"),
    [(1, 0), (7, 0), (1, 30 * 64 * 4), (128, 2 << 20)],
    ids=["row by row", "a rest of 2", "a rest of 10", "one tile"],
)
def test_a_product_is_that_of_the_weight_it_stands_for(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, tile_bytes: int, rows: int, bias: Tensor | None
) -> None:
    monkeypatch.setattr(quantized_linear, "TILE_ROWS", tile_rows)
    monkeypatch.setattr(quantized_linear, "TILE_BYTES", tile_bytes)
    linear, x = QuantizedLinear(*quantise(random(100, 64)), bias), random(rows, 64, seed=1)
    torch.testing.assert_close(linear(x), F.linear(x, linear.dense(), bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    linear = QuantizedLinear(*quantise(random(96, 64)), random(96, seed=3).to(dtype))
    x = random(7, 64, seed=1).to(dtype)
    assert linear.bias is not None
    wide = QuantizedLinear(linear.values, linear.scales, linear.bias.float())(x.float())
    assert linear(x).dtype == dtype
    assert torch.equal(linear(x), wide.to(dtype))


def test_a_sum_may_leave_the_range_of_fp16_where_its_scale_brings_it_back() -> None:
    linear = QuantizedLinear(*quantise(torch.full((1, 4_096), 0.001)))
    x = torch.full((1, 4_096), 2.0, dtype=torch.float16)  # the sum of values is 1,040,384; fp16 ends at 65,504
    assert float(linear(x)) == pytest.approx(8.192, rel=1e-3)


def test_what_it_was_made_of_is_named_and_nothing_is_rounded_again() -> None:
    values, scales = quantise(random(6, 4))
    bias = random(6)
    parts = dict(FixedLinear(QuantizedLinear(values, scales, bias), (1, 2)).parts())
    assert list(parts) == ["weight", "weight_scale", "bias"]
    assert parts["weight"] is values
    assert parts["weight_scale"] is scales
    assert parts["bias"] is bias
    dense = Linear(random(6, 4), bias)
    assert dict(dense.parts()) == {"weight": dense, "bias": bias}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_fixed_sizes_a_row_does_not_depend_on_their_number(dtype: torch.dtype) -> None:
    """All rows: an order that was rounded away where it was tried shows in one sum of 20,000 in bf16."""
    linear = QuantizedLinear(*quantise(random(600, 1_536)))  # two tiles
    fixed = FixedLinear(linear, row_sizes(linear, 1_536, ROW_SIZES))
    x = random(600, 1_536, seed=1).to(dtype)
    whole = fixed(x)
    for rows in (1, 2, 3, 5, 31, 33, 511, 513):
        assert torch.equal(torch.cat([fixed(part) for part in torch.split(x, rows)]), whole), rows
