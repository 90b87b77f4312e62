"""At which sizes a product is called: where its kernel's order of sums shows, however few numbers it changes."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.fixed_linear import ROW_SIZES, row_sizes
from engine.models.linear import Linear

torch.set_num_threads(1)  # tiny tensors: a second thread only waits


class WideSums(Linear):
    """A kernel for bf16 that sums in fp32, and fewer than 4 rows in another order: columns from the last to the first."""

    def __call__(self, x: Tensor) -> Tensor:
        x, weight = x.float(), self.weight.float()
        if len(x) < 4:
            x, weight = x.flip(1), weight.flip(1)
        y = x.new_zeros(len(x), len(weight))
        for column in range(x.shape[1]):
            y += x[:, column, None] * weight[:, column]
        return y.bfloat16()


def test_an_order_that_rounding_hides_from_nearly_all_numbers_is_seen() -> None:
    weight = torch.randn(128, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.randn(512, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear = WideSums(weight)
    assert torch.equal(linear(x[:1]), linear(x)[:1]), "one row alone does not show it"
    assert row_sizes(linear, 96, ROW_SIZES) == ROW_SIZES[2:]
