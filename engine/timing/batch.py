"""What a step computes, and the protocol of everything that can say how long that takes. Pure types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes."""

    prefills: tuple[tuple[int, int], ...] = ()  # (new tokens, tokens before them) per prompt chunk
    num_decodes: int = 0
    decode_context_tokens: int = 0  # whose KV the decodes read, summed over them

    @property
    def num_prefill_tokens(self) -> int:
        return sum(new for new, _before in self.prefills)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes

    @property
    def num_prefill_pairs(self) -> float:
        """(query, context) pairs of the prompts' causal attention: new x before, and the triangle among the new ones."""
        return sum(new * before + new * (new + 1) / 2 for new, before in self.prefills)


class StepTime(Protocol):
    def step_s(self, batch: Batch) -> float:
        """Return the time of one step; an empty batch takes none."""
        ...

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        """Return the time of `num_steps` steps of decodes alone: the sum of the single ones, each of whose context is
        `num_decodes` tokens longer than the last."""
        ...
