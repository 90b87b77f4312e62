"""Fits engine/timing/fitted.py's linear step time to measured steps, by relative error. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.timing.batch import Batch, StepTime
from engine.timing.fitted import Fitted


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    batch: Batch  # of prompts alone or of decodes alone
    seconds: float


def fit_linear(steps: Sequence[MeasuredStep]) -> Fitted:
    """Return the fit of both kinds; all coefficients are at least 0.

    Raises:
        ValueError: fewer than three steps of a kind.
    """
    prompts = [step for step in steps if step.batch.prefills]
    decodes = [step for step in steps if not step.batch.prefills]
    for kind, some in (("prompts", prompts), ("decodes", decodes)):
        if len(some) < 3:
            raise ValueError(f"{len(some)} steps of {kind} cannot fix three coefficients")
    prefill = np.array([[1, step.batch.num_prefill_tokens, 2 * step.batch.num_prefill_pairs] for step in prompts])
    decode = np.array([[1, step.batch.num_decodes, step.batch.decode_context_tokens] for step in decodes])
    return Fitted(_non_negative(prefill, prompts), _non_negative(decode, decodes))


def _non_negative(columns: NDArray[np.float64], steps: Sequence[MeasuredStep]) -> tuple[float, float, float]:
    """Solve without the most negative coefficient until none is: noise must not make longer prompts cheaper."""
    seconds = np.array([step.seconds for step in steps])
    relative = columns / seconds[:, None]
    kept = [0, 1, 2]
    while True:
        found = np.linalg.lstsq(relative[:, kept], np.ones(len(steps)), rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    full = dict(zip(kept, map(float, found), strict=True))
    return full.get(0, 0.0), full.get(1, 0.0), full.get(2, 0.0)


def relative_errors(step_time: StepTime, steps: Sequence[MeasuredStep]) -> NDArray[np.float64]:
    return np.array([step_time.step_s(step.batch) / step.seconds - 1 for step in steps])
