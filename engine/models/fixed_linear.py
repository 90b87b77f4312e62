"""Matrix products whose rows do not depend on how many there are (fixed_sizes.py). Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.errors import ConfigError
from engine.models.fixed_sizes import agreeing, size_for
from engine.models.linear import Linear

# Numbers of rows that are tried: padding costs at most a third, and from 32 on a quarter.
ROW_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
# Products that are compared where they come out in 16 bits. Of a million fp32 sums as 1 row and as 512, 38 to 53 differed once
# rounded to bf16 (3 shapes, n = 0.1 to 1.6 million), so that about 12 of these do.
ROUNDED_NUMBERS = 300_000


class FixedLinear(Linear):
    """A Linear, of any kind, whose rows do not depend on their number."""

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        self._linear, self.bias = linear, linear.bias
        self._sizes = sizes

    def parts(self) -> Iterator[tuple[str, Linear | Tensor]]:
        return self._linear.parts()

    def dense(self) -> Tensor:
        return self._linear.dense()

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, in] to [T, out]."""
        if len(x) in self._sizes or not len(x):
            return self._linear(x)
        parts = torch.split(x, self._sizes[-1])
        return torch.cat([self._padded(part) for part in parts]) if len(parts) > 1 else self._padded(x)

    def _padded(self, x: Tensor) -> Tensor:
        lacking = size_for(self._sizes, len(x)) - len(x)
        return self._linear(F.pad(x, (0, 0, 0, lacking)))[: len(x)]


def row_sizes(linear: Linear, num_inputs: int, candidates: Sequence[int]) -> tuple[int, ...]:
    """At which numbers of rows `linear` gives what it gives at the last of `candidates`, wherever in them a row stands.

    Numbers that are rounded to 16 bits in the end hide most of what the order of their sums changes, but not all. So many are
    compared, in pieces of each size.
    """
    x = torch.randn(candidates[-1], num_inputs, generator=torch.Generator().manual_seed(0)).to(linear.probe_dtype)
    turned = linear(x.roll(1, 0)).roll(-1, 0)
    if not torch.equal(turned, linear(x)):
        raise ConfigError("engine.deterministic: a product's rows depend on their place", field="deterministic")
    num_rows = 1 if linear.probe_dtype == torch.float32 else -(-ROUNDED_NUMBERS // turned.shape[1])

    def rows_at(size: int) -> Tensor:
        pieces = torch.split(x, size)[: -(-num_rows // size)]
        return torch.cat([linear(piece) for piece in pieces if len(piece) == size])  # the last may be shorter

    return agreeing(candidates, rows_at, f"a product of {num_inputs} columns")
