"""Why disaggregation gains what it gains on a chat: the bound that step times set, and what becomes of it in trials.

    python -m bench.plan_bounds

The bound is a fluid of calls of mean length, without waits, handoffs or chance. Apart: one pool's steps hold prompts, the other's
as many decodes as the TPOT target allows, at the ideal ratio of their sizes. Together: every step holds decodes and as many
prompt tokens as come for them. docs/planner.md has the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.slo import SLO
from bench.plan.judge import Judge
from bench.plan.space import OWN_WINDOW_S, SHIPPING_WINDOW_S, Offer, Space
from bench.plan.traffic import load_of
from bench.plan_figures import CHAT
from bench.sim.call import Call
from bench.sim.deployment import STEP_TOKENS, Hardware, Layout
from bench.sim.simulation import Mix
from engine.timing.batch import Batch, StepTime
from engine.timing.step_time import step_time

PROMPT, ANSWER = 735, 200  # CHAT's means
HELD = PROMPT + ANSWER // 2  # tokens of a sequence, at a random moment


@dataclass(frozen=True, slots=True)
class Bound:
    """Calls per second of one worker."""

    prompts: float
    decodes: float
    together: float

    @property
    def apart(self) -> float:
        """Per worker, of both pools."""
        return 1 / (1 / self.prompts + 1 / self.decodes)


def bound_of(times: StepTime, tpot_s: float) -> Bound:
    num_prompts = STEP_TOKENS // PROMPT
    prompts = num_prompts / times.step_s(Batch(((PROMPT, 0),) * num_prompts))

    def decodes_fit(rate: float) -> bool:
        batch = round(rate * ANSWER * tpot_s)  # Little's law
        return times.decode_steps_s(batch, batch * HELD, 1) <= tpot_s

    def both_fit(rate: float) -> bool:
        batch, tokens = round(rate * ANSWER * tpot_s), round(rate * PROMPT * tpot_s)
        return times.step_s(Batch(((tokens, PROMPT // 2),), batch, batch * HELD)) <= tpot_s

    return Bound(prompts, _highest(decodes_fit), _highest(both_fit))


def _highest(fits: Callable[[float], bool]) -> float:
    low, high = 0.0, 1_000.0  # calls per second: more than any worker of a model worth a plan
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def print_bounds() -> None:
    print(
        "model, GPUs, TPOT                     prompts  decodes    apart  together  apart/together   calls/s per worker"
    )
    rows = [("llama-3.1-8b", "h100", 1, ms, False) for ms in (8, 10, 15, 25)]
    rows += [("llama-3.1-8b", "h200", 1, 15, False), ("llama-3.1-8b", "h200", 1, 15, True)]
    rows += [("llama-3.1-70b", "h100", tp, 25, False) for tp in (2, 4)]
    for model, gpu, tp, tpot_ms, measured in rows:
        one = bound_of(step_time(gpu, model, tp, measured=measured), tpot_ms / 1e3)
        name = f"{model}, {tp} x {gpu}, {tpot_ms} ms{', measured' if measured else ''}"
        ratio = one.apart / one.together
        print(f"{name:38}{one.prompts:7.1f}{one.decodes:9.1f}{one.apart:9.1f}{one.together:10.1f}{ratio:16.3f}")


def print_who_is_turned_away() -> None:
    """8B on 4 H200s, at a rate where each layout turns some calls away."""
    space = Space("llama-3.1-8b", [Offer.parse("h200")], (1,), held_tokens=load_of(CHAT).held_tokens)
    where = Hardware("h200")
    for layout, window_s in ((Layout(num_both=4), OWN_WINDOW_S), (Layout(2, 2), SHIPPING_WINDOW_S)):
        one = space.candidate(layout, where, None, budget=640, local_tokens=0, window_s=window_s)
        calls: list[Call] = []
        judge = Judge(CHAT, Mix((SLO("chat", 1_000.0, 15.0),)), on_call=calls.append)
        trial = judge.trial(one, 210.0, num_calls=4_000, seed=0)
        served, away = ([c.row.input_tokens for c in calls if (c.end_s is None) is gone] for gone in (False, True))
        print(
            f"{one.describe()} at {trial.rate:g} calls/s: {100 * (trial.margin + 0.95):.1f} % met, {len(away)} of {len(calls)} "
            f"turned away; prompts served {sum(served) / len(served):.0f} tokens on average, turned away "
            f"{sum(away) / max(1, len(away)):.0f}"
        )


if __name__ == "__main__":
    print_bounds()
    print_who_is_turned_away()
