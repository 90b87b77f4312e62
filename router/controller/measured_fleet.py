"""What a simulator is told of this fleet: traffic from routers' windows, pools from facts. Pure.

Nothing is guessed: where too few calls came, or a pool's step times are not learned yet, `Unknown` says which and how many it
would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from baton.request import Role
from router.controller.autoscaler.facts import FleetFacts, State, WorkerFacts
from router.controller.step_model import StepWork
from router.controller.what_if import ClassLoad, Question, Scenario, WorkerPool
from router.ring import SPANS_S
from router.windows import ClassWindow

WINDOW_S = max(SPANS_S)
MIN_CALLS = 50  # of a class in the window: below it, of an attainment of 90 %, chance alone makes +-8 points (95 %)
MIN_SPAN_S = 60.0  # that the windows must cover: right after a start there is no telling a burst from a rate
RUN_CALLS = (
    600  # of one seed, that count: an attainment of 90 % to +-2.4 points (95 %), and a few seeds fit into seconds
)
MAX_SEEDS = 8  # beyond, the model's error outweighs chance
TOO_MUCH = "it is too much, or this machine is busy; raise controller.planner_seconds"
_WARM_UP = 2.0  # lengths of a call: twice as long as it takes until decode is as full as it will be
_LEAST_CALLS = 2.0  # lengths of a call that must be looked at, so that long answers count as well
_HOPS_S = 0.001  # of a first token's way, that the simulator has itself: two of its HOP_S
_ROUNDS = 8  # of a fixed point that settles in three or four


class Unknown(Exception):
    """Why nothing can be said."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the controller measures, at one instant."""

    facts: FleetFacts
    windows: Sequence[ClassWindow]
    errors: Mapping[Role, float]  # of the step models, relative; a role whose model has not said is left out
    is_settled: bool  # the classes in force have been so for as long as a window is

    def attained(self, class_name: str) -> tuple[float, float] | None:
        """Calls that met their targets, and all that were judged; None: too few, or by other targets."""
        window = self._window(class_name)
        if window is None or not self.is_settled or window.num_judged < MIN_CALLS:
            return None
        return window.num_met, window.num_judged

    def arrived(self, class_name: str) -> float:
        """Calls in one window."""
        window = self._window(class_name)
        return window.per_s(window.num_arrived) * WINDOW_S if window is not None else 0.0

    def _window(self, class_name: str) -> ClassWindow | None:
        return next((w for w in self.windows if w.window_s == WINDOW_S and w.class_name == class_name), None)


def loads(windows: Iterable[ClassWindow]) -> tuple[ClassLoad, ...]:
    """Of the classes of which enough came. Raises: Unknown: of none."""
    told = [window for window in windows if window.window_s == WINDOW_S]
    if not any(window.span_s >= MIN_SPAN_S for window in told):
        raise Unknown(f"too little traffic to say: it takes {MIN_SPAN_S:g} s of it, and routers have seen less")
    known = [window for window in told if min(window.num_prompts, window.num_outputs) >= MIN_CALLS]
    if not known:
        most = max(min(window.num_prompts, window.num_outputs) for window in told)
        raise Unknown(
            f"too little traffic to say: of no class {MIN_CALLS} calls ended in the last {WINDOW_S:g} s, of one at most {most:g}"
        )
    coming = [window for window in known if window.num_arrived > 0]
    if not coming:
        raise Unknown(f"too little traffic to say: calls ended, but none came in the last {WINDOW_S:g} s")
    return tuple(_load(window) for window in coming)


def _load(window: ClassWindow) -> ClassLoad:
    prompt_tokens, output_tokens = window.mean_prompt_tokens, window.mean_output_tokens
    assert prompt_tokens is not None, "it has prompts"
    assert output_tokens is not None, "it has outputs"
    return ClassLoad(
        window.class_name,
        window.per_s(window.num_arrived),
        window.prompt_lengths,
        window.output_lengths,
        prompt_tokens,
        output_tokens,
        window.cached_share or 0.0,
    )


def network_s(windows: Iterable[ClassWindow]) -> float:
    """A first token's way to and from its worker, as routers measured it, less what the simulator adds itself."""
    parts = [window.parts for window in windows if window.window_s == WINDOW_S]
    num_calls = sum(part.num_calls for part in parts)
    return max(0.0, sum(part.network_s for part in parts) / num_calls - _HOPS_S) if num_calls else 0.0


def pools(facts: FleetFacts) -> tuple[WorkerPool, ...]:
    """Of the workers that serve. Raises: Unknown: too few do, or nobody knows yet how long their steps take."""
    serving: dict[Role, list[WorkerFacts]] = {}
    for worker in facts.workers:
        if worker.state is State.READY and worker.kv_tokens:
            serving.setdefault(worker.role, []).append(worker)
    if not (Role.BOTH in serving or {Role.PREFILL, Role.DECODE} <= serving.keys()):
        raise Unknown("the fleet cannot serve a call: no prefill and decode worker are ready, nor one that does both")
    for role in serving:
        if role not in facts.steps:
            raise Unknown(f"step times of the {role.name.lower()} pool are not learned yet: it has computed too little")
    return tuple(
        WorkerPool(
            role,
            len(workers),
            facts.steps[role],
            sum(worker.kv_tokens for worker in workers) // len(workers),
            workers[0].tuning,
        )
        for role, workers in sorted(serving.items())
    )


def question(
    facts: FleetFacts, windows: Sequence[ClassWindow], scenarios: Sequence[Scenario], budget_s: float
) -> Question:
    """Raises: Unknown: too little traffic."""
    load = loads(windows)
    call_s = max(_call_s(load, scenario.pools) for scenario in scenarios)
    rate = sum(one.rate for one in load)
    warm_up_s = _WARM_UP * call_s
    return Question(
        load=load,
        scenarios=tuple(scenarios),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=facts.link_bytes_per_s,
        network_s=network_s(windows),
        warm_up_s=warm_up_s,
        length_s=warm_up_s + max(RUN_CALLS / rate, _LEAST_CALLS * call_s),
        seeds=tuple(range(MAX_SEEDS)),
        budget_s=budget_s,
    )


def _call_s(load: Sequence[ClassLoad], of: Sequence[WorkerPool]) -> float:
    """How long an answer takes: the mean step at the batch that such a load fills (Little's law), times its tokens."""
    pool = next(pool for pool in of if pool.role is not Role.PREFILL)
    rate = sum(one.rate for one in load)
    output_tokens = sum(one.rate * one.output_tokens for one in load) / rate
    context = sum(one.rate * one.prompt_tokens for one in load) / rate + output_tokens / 2
    num_seqs, step_s = 1.0, 0.0
    for _ in range(_ROUNDS):
        step_s = pool.steps.step_s(StepWork(num_seqs, num_seqs * context))
        num_seqs = min(float(pool.tuning.max_num_seqs), max(1.0, rate * output_tokens * step_s / pool.num_workers))
    return output_tokens * step_s


def slower(scenario: Scenario, name: str, slowness: float) -> Scenario:
    return replace(scenario, name=name, slowness=slowness)
