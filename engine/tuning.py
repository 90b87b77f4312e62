"""Limits of an engine that may change while it runs, and how far. Pure.

What an engine was started with is the most that it may ever be given: memory, kernels and queues were prepared for that.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from baton.config import EngineConfig
from baton.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Tuning:
    """In force together, from a step's beginning."""

    max_num_seqs: int  # sequences that decode in one step
    max_num_batched_tokens: int  # token budget of one step
    chunk_tokens: int  # largest prefill chunk of one sequence in one step

    @classmethod
    def of(cls, config: EngineConfig) -> Tuning:
        return cls(config.max_num_seqs, config.max_num_batched_tokens, config.chunk_tokens)

    def check(self, most: Tuning) -> None:
        """Compare with what the engine was started with.

        Raises:
            InvalidRequest: naming the first field that is out of its limits.
        """
        for field in fields(self):
            value, limit = getattr(self, field.name), getattr(most, field.name)
            if not 1 <= value <= limit:
                message = f"{field.name} = {value}; the limit of this worker is 1 to {limit}, which it was started with"
                raise InvalidRequest(message, field=field.name)
        if self.chunk_tokens > self.max_num_batched_tokens:
            message = f"chunk_tokens = {self.chunk_tokens}; the limit is max_num_batched_tokens = {self.max_num_batched_tokens}"
            raise InvalidRequest(f"{message}: a chunk has to fit in a step", field="chunk_tokens")
        least = min(self.max_num_seqs, most.max_num_batched_tokens)
        if self.max_num_batched_tokens < least:
            message = f"max_num_batched_tokens = {self.max_num_batched_tokens}; the limit is at least {least}"
            raise InvalidRequest(f"{message}: each of max_num_seqs takes one", field="max_num_batched_tokens")
