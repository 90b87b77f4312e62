"""Step time of exactly one model on one set of GPUs, from somebody's measurements of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from engine.timing.batch import Batch


@dataclass(frozen=True, slots=True)
class Fitted:
    """Step time of one model on one set of GPUs, as somebody measured it: linear in tokens, squares and KV.

    Fits of time to first token hold what the front end adds, so a prompt's first chunk carries it.
    """

    prefill: tuple[float, float, float]  # s, s per token, s per token^2
    decode: tuple[float, float, float]  # s, s per sequence, s per KV token
    decode_large: tuple[float, float, float] | None = None  # instead, from `large_from` sequences on
    large_from: int = 0

    def step_s(self, batch: Batch) -> float:
        fixed_s = linear_s = 0.0
        if batch.prefills:
            start_s, token_s, square_s = self.prefill
            begins = any(not before for _new, before in batch.prefills)
            fixed_s = start_s if begins else self.decode[0]
            linear_s = token_s * batch.num_prefill_tokens + square_s * 2 * batch.num_prefill_pairs
        if batch.num_decodes:
            start_s, sequence_s, kv_s = self._decode(batch.num_decodes)
            fixed_s = max(fixed_s, start_s)  # one step reads the weights once
            linear_s += sequence_s * batch.num_decodes + kv_s * batch.decode_context_tokens
        return fixed_s + linear_s

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        if not num_decodes:
            return 0.0
        first_s = self.step_s(Batch((), num_decodes, context_tokens))
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)
        return num_steps * first_s + self._decode(num_decodes)[2] * grown_tokens

    def _decode(self, num_decodes: int) -> tuple[float, float, float]:
        if self.decode_large is not None and num_decodes >= self.large_from:
            return self.decode_large
        return self.decode
