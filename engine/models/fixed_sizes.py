"""Sizes at which a library kernel gives every row the same bits: what batch-invariant numerics rest on.

A kernel sums a row in an order that it picks by the shape of its operands: by the number of rows and, in attention, by the
number of keys. So a deterministic model calls each kernel at a few sizes only, at which it was seen to sum as it does at the
largest of them; what lacks is padded, what is more is cut. Which sizes these are is measured when a model is loaded, on its own
shapes, since CPU and library decide; the largest is always one of them, so that at worst everything is padded to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.errors import ConfigError


def agreeing(sizes: Sequence[int], rows_at: Callable[[int], Tensor], what: str) -> tuple[int, ...]:
    """Those of `sizes`, ascending, at which `rows_at` gives the same bits as at the largest one.

    `rows_at(size)` returns the leading rows of one and the same problem, computed at that size, and perhaps several such.
    Raises: ConfigError where the largest does not even agree with itself.
    """
    reference = rows_at(sizes[-1])
    if not torch.equal(rows_at(sizes[-1]), reference):
        raise ConfigError(f"engine.deterministic: {what} is not reproducible on this machine", field="deterministic")
    return tuple(
        size for size in sizes if torch.equal((rows := rows_at(size)), reference[: len(rows)]) or size == sizes[-1]
    )


def size_for(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)
