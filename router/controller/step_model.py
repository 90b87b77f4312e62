"""How long a step of one role takes, learned from what workers' steps took. Pure: samples in, seconds out.

    t = a + max(b * tokens, w) + c * ctx + d * sum(n^2)          DESIGN section 9

tokens: computed in the step; ctx: tokens whose KV its decodes read; sum(n^2): over prompt chunks, here (query, context) pairs,
which are n^2/2 for a whole prompt and right for a chunk of one, too. What is learned, in this order:

    1. nothing yet       the roofline
    2. MIN_SAMPLES       how far off the roofline is as a whole: the median of their ratios
    3. from then on      each term, by fading least squares of relative errors, so a step of 1 ms counts as much as one of 1 s;
                         what samples do not tell apart stays in the roofline's proportions

b and w are two unknowns of which each sample shows one: the one that the model of the moment says binds. Nothing absurd gets
in: samples that cannot be are refused, and one far off counts as MAX_RATIO off, so that a slowed GPU is followed and a stalled
process hardly noticed; a model that is off by HOPELESS goes back to 1. `error` is the rolling median of relative errors of
what was predicted BEFORE each sample was learned from.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from engine.timing.batch import Batch, StepTime

MEMORY = 1 - 1 / 512  # per sample: with eight workers sampled each second a minute, long enough for every kind of step
PRIOR_WEIGHT = 1.0  # of the roofline, in samples
SOLVE_EACH = 8  # samples; solving costs 30 us and a single sample moves little
NUM_ERRORS = 128
MIN_SAMPLES = 16  # fewer have no median worth the name
MAX_RATIO = 3.0  # of a sample to what was expected. Steps of one kind vary by 1.3 at most: shared/traces/calibration
MAX_STEP_S = 60.0  # lease and heartbeats have ended a worker whose steps take longer
HOPELESS = 0.5  # median error: what was learned is of other GPUs, or of a slower clock
MAX_TOKENS = 1e7  # a step's; the largest budgets are near 1e5
MAX_CONTEXT = 1e10
MAX_PAIRS = 1e13  # of one prompt of 4 million tokens

_CHUNK, _CONTEXT = 8_192, 65_536  # tokens where compute binds on every GPU of today, and where KV outweighs the rest

Vector = npt.NDArray[np.float64]  # [a, b, w, c, d], as shares of the roofline's


@dataclass(frozen=True, slots=True)
class Terms:
    """Coefficients of the formula, seconds."""

    fixed_s: float  # a
    s_per_token: float  # b: compute
    weights_s: float  # w: reading the weights once
    s_per_context_token: float  # c: reading its KV
    s_per_pair: float  # d: attention of prompts

    def step_s(self, work: StepWork) -> float:
        matrices_s = max(self.s_per_token * work.tokens, self.weights_s)
        return self.fixed_s + matrices_s + self.s_per_context_token * work.context + self.s_per_pair * work.pairs


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step computes, or the mean of some."""

    tokens: float
    context: float = 0.0
    pairs: float = 0.0

    @property
    def is_possible(self) -> bool:
        return 0 < self.tokens <= MAX_TOKENS and 0 <= self.context <= MAX_CONTEXT and 0 <= self.pairs <= MAX_PAIRS


def terms_of(step_time: StepTime) -> Terms:
    """The formula that comes closest to a priced step: slopes at loads where one term grows alone."""
    lone_s = step_time.step_s(Batch((), 1, 0))
    long, short = (step_time.step_s(Batch(((_CHUNK, before),))) for before in (_CONTEXT, 0))
    s_per_pair = (long - short) / (_CHUNK * _CONTEXT)
    twice = step_time.step_s(Batch(((2 * _CHUNK, 0),)))
    pairs, twice_pairs = (Batch(((n, 0),)).num_prefill_pairs for n in (_CHUNK, 2 * _CHUNK))
    s_per_token = (twice - short - s_per_pair * (twice_pairs - pairs)) / _CHUNK
    fixed_s = max(lone_s / 100, short - s_per_token * _CHUNK - s_per_pair * pairs)  # none is 0: corrections are factors
    return Terms(
        fixed_s=fixed_s,
        s_per_token=s_per_token,
        weights_s=max(lone_s / 100, lone_s - fixed_s),
        s_per_context_token=(step_time.step_s(Batch((), 1, _CONTEXT)) - lone_s) / _CONTEXT,
        s_per_pair=s_per_pair,
    )


@dataclass(frozen=True, slots=True)
class KeptSteps:
    """What a StepModel has learned, for the next process."""

    roofline: tuple[float, ...]  # [5]
    normal: tuple[tuple[float, ...], ...]  # [5, 5]
    right: tuple[float, ...]  # [5]


class StepModel:
    """Of workers that are alike: one role on one shape."""

    def __init__(self, roofline: Terms) -> None:
        """Raises: ValueError: a roofline term that is not a positive number; each is what corrections are measured in."""
        self._roofline = np.array(
            (
                roofline.fixed_s,
                roofline.s_per_token,
                roofline.weights_s,
                roofline.s_per_context_token,
                roofline.s_per_pair,
            )
        )
        if not (np.isfinite(self._roofline).all() and (self._roofline > 0).all()):
            raise ValueError(f"every term of a roofline must be a positive number, not {roofline}")
        self.terms = roofline
        self.num_samples = 0
        self.num_refused = 0
        self._first: list[tuple[StepWork, float]] | None = []  # until there are MIN_SAMPLES
        self._normal = np.zeros((5, 5))  # fading sums of x x'
        self._right: Vector = np.zeros(5)  # and of x y
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)

    @property
    def error(self) -> float | None:
        """Median relative error of the last predictions; None: too few."""
        return median(self._errors) if len(self._errors) >= MIN_SAMPLES else None

    def step_s(self, work: StepWork) -> float:
        return self.terms.step_s(work)

    def kept(self) -> KeptSteps | None:
        """None: nothing is learned yet."""
        if self._first is not None:
            return None
        normal = tuple(tuple(row) for row in self._normal.tolist())
        return KeptSteps(tuple(self._roofline.tolist()), normal, tuple(self._right.tolist()))

    def restore(self, kept: KeptSteps) -> None:
        """Go on from there; its error is judged anew. Raises: ValueError: nobody can have learned that."""
        roofline, normal, right = (np.array(part, dtype=float) for part in (kept.roofline, kept.normal, kept.right))
        if (roofline.shape, normal.shape, right.shape) != ((5,), (5, 5), (5,)):
            raise ValueError("a step model has five terms")
        if not (all(np.isfinite(part).all() for part in (roofline, normal, right)) and (roofline > 0).all()):
            raise ValueError("a step model holds a number that is none, or a roofline that is not positive")
        self._roofline, self._normal, self._right, self._first = roofline, normal, right, None
        self.num_samples = MIN_SAMPLES
        self._solve()

    def observe(self, work: StepWork, step_s: float) -> None:
        """Learn from a step, or from the mean of some."""
        if not (work.is_possible and 0 < step_s <= MAX_STEP_S):  # NaN fails, too
            self.num_refused += 1
            return
        self.num_samples += 1
        if self._first is not None:
            self._begin(work, step_s, self._first)
            return
        expected_s = self.step_s(work)
        self._errors.append(abs(step_s - expected_s) / step_s)
        if expected_s:  # 0: of such work nothing is known, so nothing is absurd
            step_s = min(expected_s * MAX_RATIO, max(expected_s / MAX_RATIO, step_s))
        self._learn(work, step_s)
        if self.num_samples % SOLVE_EACH == 0:
            self._solve()
            if self.error is not None and self.error > HOPELESS:
                self._forget()

    def _begin(self, work: StepWork, step_s: float, first: list[tuple[StepWork, float]]) -> None:
        first.append((work, step_s))
        if len(first) < MIN_SAMPLES:
            return
        self._roofline *= median(taken_s / self.step_s(done) for done, taken_s in first)
        self.terms = Terms(*self._roofline.tolist())
        for done, taken_s in first:
            self._learn(done, taken_s)
        self._first = None
        self._solve()

    def _forget(self) -> None:
        self.terms = Terms(*self._roofline.tolist())
        self._first = []
        self._normal[:], self._right[:] = 0.0, 0.0
        self._errors.clear()

    def _learn(self, work: StepWork, step_s: float) -> None:
        computes = self.terms.s_per_token * work.tokens > self.terms.weights_s
        shape = np.array((1.0, work.tokens * computes, not computes, work.context, work.pairs))
        x = shape * self._roofline / step_s
        self._normal = MEMORY * self._normal + np.outer(x, x)
        self._right = MEMORY * self._right + x

    def _solve(self) -> None:
        """Shares of the roofline that fit best, none below 0: what would be is left out and the rest fitted again."""
        free = np.ones(5, dtype=bool)
        shares: Vector = np.zeros(5)
        while free.any():
            normal = self._normal[np.ix_(free, free)] + PRIOR_WEIGHT * np.eye(int(free.sum()))
            shares[:] = 0.0
            shares[free] = np.linalg.solve(normal, self._right[free] + PRIOR_WEIGHT)
            if (shares[free] >= 0).all():
                break
            free &= shares > 0
        self.terms = Terms(*(shares * self._roofline).tolist())
