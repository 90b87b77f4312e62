"""Rotary position embeddings in Hugging Face's half-split convention, computed per step from the positions at hand.

Scaling: none, linear, and llama3. Source of llama3: the Llama 3.1 reference code, apply_scaling.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from baton.model_spec import ModelSpec


class Rope:
    """Angles of one model; tables are not kept, since a step needs only its own T rows."""

    def __init__(self, spec: ModelSpec) -> None:
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim  # [D/2]
        inverse = 1.0 / spec.rope_theta**exponents
        self.inverse = _scaled(inverse, spec.rope_scaling)  # [D/2], fp32

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, D] for positions [T]; the first half of sin is negated for `rotate`."""
        angles = positions[:, None].float() * self.inverse  # [T, D/2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D]; the roll swaps the halves and the signed sin does rotate_half's minus."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def _scaled(inverse: Tensor, rope_scaling: str) -> Tensor:
    if not rope_scaling:
        return inverse
    scaling = json.loads(rope_scaling)
    if scaling.pop("rope_type") == "linear":
        return inverse / float(scaling["factor"])
    return _llama3(inverse, scaling)


def _llama3(inverse: Tensor, scaling: dict[str, float]) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend between."""
    low, high, trained = (
        scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    turns = trained * inverse / (2 * math.pi)  # full rotations within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / scaling["factor"]
