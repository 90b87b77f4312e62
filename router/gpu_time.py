"""What a worker's tokens cost in seconds of its steps, of late, learned from its totals (Load). Pure.

    prompt_s   of a prompt token that is computed
    output_s   of a token that is decoded: its share of a step, so the busier the batch the less it is
A step with both is shared out: its prompts take what prompts take on such workers alone, the decodes the rest. Every busy
second is some token's; idle ones are nobody's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from baton.v1 import worker_pb2

FADE_S = 30.0  # of busy time, after which a sample counts 1/e: the short window of docs/goodput.md


@dataclass(slots=True)
class _Mean:
    """Seconds per token, fading."""

    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, seconds: float, tokens: float, kept: float) -> None:
        self.seconds = kept * self.seconds + seconds
        self.tokens = kept * self.tokens + tokens

    @property
    def per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class GpuTime:
    """One worker's life. Its totals before the first sample count as one."""

    _busy_s: float = 0.0
    _step_tokens: int = 0
    _prompt_tokens: int = 0
    _prompt: _Mean = field(default_factory=_Mean)
    _output: _Mean = field(default_factory=_Mean)

    @property
    def prompt_s(self) -> float:
        """Per token."""
        return self._prompt.per_token

    @property
    def output_s(self) -> float:
        """Per token."""
        return self._output.per_token

    def observe(self, load: worker_pb2.Load, prefill_tokens_per_s: float) -> None:
        """Take its totals; `prefill_tokens_per_s`: of workers like it, where they compute nothing but prompts."""
        busy_s = load.busy_s - self._busy_s
        if not 0 < busy_s < math.inf:
            return
        num_prompt = max(0, load.prompt_tokens_computed - self._prompt_tokens)
        num_output = max(0, load.step_tokens - self._step_tokens - num_prompt)
        self._busy_s, self._step_tokens = load.busy_s, load.step_tokens
        self._prompt_tokens = load.prompt_tokens_computed
        prompts_s = min(busy_s, num_prompt / prefill_tokens_per_s) if num_output else busy_s
        kept = math.exp(-busy_s / FADE_S)
        self._prompt.add(prompts_s, num_prompt, kept)
        self._output.add(busy_s - prompts_s, num_output, kept)
