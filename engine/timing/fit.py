"""Fits efficiencies and harness terms to serving runs: damped Gauss-Newton on logarithms, with priors. Pure numpy.

Every parameter is positive and is fitted as the logarithm of a factor on its prior. Errors are logarithms of predicted over
measured, so twice too slow weighs as much as twice too fast; large ones count linearly (soft L1), so a run with a hiccup cannot
bend the fit. Priors: kernels alone for efficiencies, common values for harness terms, which a campaign with few runs keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.timing.closed_loop import Harness, LoopTerms, tpot_s, ttft_s
from engine.timing.coefficients import Coefficients
from engine.timing.roofline import Efficiency, Terms

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

SCALE = 0.1  # an error of 10 % is where soft L1 turns linear
STEP = 1e-5  # of a logarithm, for the numeric Jacobian: well above the root of double precision, 1.5e-8
MAX_ROUNDS = 60
MAX_DAMPING = 1e6
TOLERANCE = 1e-6  # relative gain of a round that ends the fit
TTFT_WEIGHT = 0.5  # its means hold arrival luck that no step time explains


@dataclass(frozen=True, slots=True)
class Prior:
    value: float
    spread: float  # standard deviation of the logarithm


# Efficiencies: H100 and H200 kernels alone (`python -m bench.timing_kernels`; fp8 at 1,024 rows and more), with little room; the
# overheads and experts, which only serving shows, with much.
EFFICIENCY_PRIORS: Mapping[str, Prior] = {
    "compute_16bit": Prior(0.80, 0.2),
    "compute_8bit": Prior(0.57, 0.2),
    "memory": Prior(0.83, 0.1),
    "expert_compute": Prior(0.5, 0.5),
    "expert_memory": Prior(0.5, 0.5),
    "attention": Prior(0.5, 0.15),
    "kv": Prior(0.8, 0.2),
    "link": Prior(0.33, 0.2),
    "allreduce_s": Prior(5e-6, 0.5),
    "layer_s": Prior(40e-6, 1.0),
    "step_s": Prior(1e-3, 1.0),
}
_PLAIN = ("memory", "expert_compute", "expert_memory", "attention", "kv", "link", "allreduce_s")
_LOOP_NUMBERS = ("num_clients", "num_running", "num_rivals", "output_tokens")
HARNESS_PRIORS: Mapping[str, Prior] = {  # the middle of what campaigns with many runs have
    "host": Prior(1.0, 0.5),  # factor on the overheads: engines differ
    "start_s": Prior(0.04, 1.0),
    "own": Prior(1.2, 0.5),
    "burst": Prior(0.08, 1.0),
    "lost_slots": Prior(0.003, 2.0),
}


@dataclass(frozen=True, slots=True)
class Runs:
    """Serving runs as arrays, one entry each."""

    loop: LoopTerms[Array]
    ttft_s: Array
    tpot_s: Array
    eight_bit: NDArray[np.bool_]  # whether its common weights are multiplied in fp8
    campaign: Indices

    def where(self, chosen: NDArray[np.bool_]) -> Runs:
        return Runs(
            _map_loop(lambda part: part[chosen], self.loop),
            self.ttft_s[chosen],
            self.tpot_s[chosen],
            self.eight_bit[chosen],
            self.campaign[chosen],
        )


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a fit found: one value per name, and one per name and campaign."""

    coefficients: Coefficients
    harness: Mapping[str, Array]  # [campaign]


def predict(runs: Runs, parameters: Parameters) -> tuple[Array, Array]:
    """Return TTFT and TPOT, s, of every run."""
    value = parameters.coefficients
    mine = {name: of_campaign[runs.campaign] for name, of_campaign in parameters.harness.items()}
    every = np.ones_like(runs.tpot_s)
    by = Efficiency(
        compute=np.where(runs.eight_bit, value.compute_8bit, value.compute_16bit),
        layer_s=value.layer_s * mine["host"],
        step_s=value.step_s * mine["host"],
        **{name: getattr(value, name) * every for name in _PLAIN},
    )
    harness = Harness(mine["start_s"], mine["own"], mine["burst"], mine["lost_slots"])
    token_s = tpot_s(runs.loop, by)
    return ttft_s(runs.loop, by, harness, token_s), token_s


def fit(runs: Runs, num_campaigns: int) -> Parameters:
    """Fit all parameters; a campaign without runs keeps the priors."""
    spreads = np.array([prior.spread for prior in EFFICIENCY_PRIORS.values()])
    of_campaigns = np.repeat([prior.spread for prior in HARNESS_PRIORS.values()], num_campaigns)
    spread = np.concatenate([spreads, of_campaigns])

    def residuals(factors: Array) -> Array:
        ttft, tpot = predict(runs, _parameters(factors, num_campaigns))
        errors = np.concatenate([np.log(tpot / runs.tpot_s), TTFT_WEIGHT * np.log(ttft / runs.ttft_s)])
        return np.concatenate([errors / SCALE, factors / spread])

    num_errors = 2 * len(runs.tpot_s)
    return _parameters(gauss_newton(residuals, np.zeros(len(spread)), num_errors), num_campaigns)


def _parameters(factors: Array, num_campaigns: int) -> Parameters:
    num_shared = len(EFFICIENCY_PRIORS)
    scale = np.exp(factors)
    shared = {name: prior.value * float(x) for (name, prior), x in zip(EFFICIENCY_PRIORS.items(), scale, strict=False)}
    own = scale[num_shared:].reshape(len(HARNESS_PRIORS), num_campaigns)
    return Parameters(
        Coefficients(**shared),
        {name: prior.value * x for (name, prior), x in zip(HARNESS_PRIORS.items(), own, strict=True)},
    )


def gauss_newton(residuals: Callable[[Array], Array], start: Array, num_robust: int) -> Array:
    """Minimise soft-L1 of the first `num_robust` residuals plus squares of the others (Levenberg-Marquardt damping)."""
    at, damping = start, 1e-2
    now = residuals(at)
    cost = _cost(now, num_robust)
    for _ in range(MAX_ROUNDS):
        slope = np.stack([(residuals(at + step) - now) / STEP for step in STEP * np.eye(len(at))], axis=1)
        weight = np.ones_like(now)
        weight[:num_robust] = 1 / np.sqrt(1 + now[:num_robust] ** 2)  # soft L1's derivative
        normal = slope.T @ (weight[:, None] * slope)
        downhill = slope.T @ (weight * now)
        while damping < MAX_DAMPING:
            tried = at - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            then = residuals(tried)
            if _cost(then, num_robust) < cost:
                break
            damping *= 4
        else:
            return at
        gain = cost - _cost(then, num_robust)
        at, now, cost, damping = tried, then, cost - gain, damping / 4
        if gain < TOLERANCE * cost:
            return at
    return at


def _cost(residuals: Array, num_robust: int) -> float:
    errors, priors = residuals[:num_robust], residuals[num_robust:]
    return float(2 * np.sum(np.sqrt(1 + errors**2) - 1) + np.sum(priors**2))


def stack(loops: Sequence[LoopTerms[float]]) -> LoopTerms[Array]:
    def terms(parts: Sequence[Terms[float]]) -> Terms[Array]:
        return Terms(**{f.name: np.array([getattr(one, f.name) for one in parts], float) for f in fields(Terms)})

    return LoopTerms(
        terms([one.decode for one in loops]),
        terms([one.mixed for one in loops]),
        terms([one.prompt for one in loops]),
        **{name: np.array([getattr(one, name) for one in loops], float) for name in _LOOP_NUMBERS},
    )


def _map_loop(change: Callable[[Array], Array], loop: LoopTerms[Array]) -> LoopTerms[Array]:
    def terms(one: Terms[Array]) -> Terms[Array]:
        return Terms(**{f.name: change(getattr(one, f.name)) for f in fields(Terms)})

    numbers = {name: change(getattr(loop, name)) for name in _LOOP_NUMBERS}
    return LoopTerms(terms(loop.decode), terms(loop.mixed), terms(loop.prompt), **numbers)
