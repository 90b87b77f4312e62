"""A StepTime whose decode steps are remembered. Exact where the time of n decodes is linear in their context, as rooflines and
fits are; asked once per n, and where it is not linear the question is passed on each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.timing.step_time import Batch, StepTime

_PROBE_TOKENS = 1 << 20  # context at which linearity is judged: beyond what one GPU holds of an 8B model
_SAME = 1e-12  # relative: rounding
_UNKNOWN = (-1.0, -1.0)  # no line is below 0


@dataclass(slots=True)
class FastDecodes:
    """Implements StepTime."""

    times: StepTime
    _lines: dict[int, tuple[float, float] | None] = field(default_factory=dict)  # by n: (s at no context, s per token)

    def step_s(self, batch: Batch) -> float:
        return self.times.step_s(batch)

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        line = self._lines.get(num_decodes, _UNKNOWN)
        if line is _UNKNOWN:
            line = self._lines[num_decodes] = self._line(num_decodes)
        if line is None:
            return self.times.decode_steps_s(num_decodes, context_tokens, num_steps)
        base_s, per_token_s = line
        grown_tokens = num_decodes * (num_steps * (num_steps - 1) // 2)
        return num_steps * base_s + per_token_s * (num_steps * context_tokens + grown_tokens)

    def _line(self, num_decodes: int) -> tuple[float, float] | None:
        none_s, some_s, more_s = (
            self.times.decode_steps_s(num_decodes, n * _PROBE_TOKENS, 1) for n in range(3)
        )  # fmt: skip
        if abs(more_s - some_s - (some_s - none_s)) > _SAME * more_s:
            return None
        return none_s, (more_s - none_s) / (2 * _PROBE_TOKENS)
