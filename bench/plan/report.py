"""A plan for people (a table and some sentences), for programs (one JSON document) and as a picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from baton.request import Role
from bench.plan.judge import MAX_CALLS, Trial, mean_and_half_width
from bench.plan.plan import Gain, Measured, Plan
from bench.plan.plot import Line, Mark, plot


def render(plan: Plan) -> None:
    """On stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # a pipe has no width to wrap at
    table = Table(title=f"{plan.question.model} {plan.question.weight_dtype}", title_justify="left")
    for column in (
        "",
        "layout",
        "GPUs",
        "$/h",
        "goodput/GPU",
        "$/1M tokens",
        "KV per worker",
        "max batch",
        "budget",
        "window",
    ):
        table.add_column(column)
    for name, measured in (("best", plan.best), ("other kind", plan.other)):
        if measured is not None:
            table.add_row(name, *_row(plan, measured))
    console.print(table)
    for line in sentences(plan):
        console.print(line, markup=False)


def _row(plan: Plan, one: Measured) -> list[str]:
    candidate = one.candidate
    goodput, half = one.goodput
    times = f"{plan.replicas} x ({candidate.describe()})" if plan.replicas > 1 else candidate.describe()
    local = candidate.deployment.local_prefill_tokens
    return [
        times + (f", local prefill up to {local}" if local else ""),
        str(plan.replicas * candidate.num_gpus),
        f"{plan.replicas * candidate.usd_per_hour:.2f}",
        f"{goodput / candidate.num_gpus:.2f}{_plus_minus(half and half / candidate.num_gpus, '.2f')} calls/s",
        f"{one.usd_per_million_tokens:.3f} ({one.usd_per_million_output_tokens:.2f} output)",
        " / ".join(f"{tokens // 1000}k tokens, {nbytes / 1e9:.0f} GB" for tokens, nbytes in kv_budgets(one).values()),
        f"{one.guess.max_batch} (seats {candidate.deployment.engine.max_num_seqs})",
        str(candidate.budget),
        "learned" if candidate.window_s is None else f"{1e3 * candidate.window_s:g} ms",
    ]


def kv_budgets(one: Measured) -> dict[str, tuple[int, float]]:
    """Tokens and bytes of a worker, by role; roles on equal hardware once."""
    deployment = one.candidate.deployment
    found: dict[str, tuple[int, float]] = {}
    for role in sorted(set(deployment.layout.roles)):
        budget = deployment.shape(role).pool_tokens, deployment.shape(role).pool_tokens * deployment.token_bytes
        if budget not in found.values():
            found[Role(role).name.lower()] = budget
    return found


def sentences(plan: Plan) -> list[str]:
    lines = []
    if plan.best.at_rate:
        rate = plan.question.traffic.rate * plan.replicas
        lines.append(f"At {rate:g} calls/s: {'; '.join(attainments(plan.best.at_rate))}.")
    knee, half = plan.best.goodput
    lines.append(
        f"Goodput at the knee {plan.replicas * knee:.2f}{_plus_minus(half and plan.replicas * half, '.2f')} calls/s (95 % "
        f"interval over {len(plan.best.knees)} seeds that the search did not see)."
    )
    if any(one is not None and one.is_cut for one in (plan.best, plan.other)):
        lines.append(
            f"Trials were cut at {MAX_CALLS:,} calls, before their fleets were full: these rates and shares are more than a full "
            "fleet keeps. A plan for a part of the fleet needs fewer calls."
        )
    lines.append(disaggregation(plan.gain))
    lines.append(f"Bound: {plan.regime}. " + (_remedies(plan) or "No remedy is guessed to bring 5 %."))
    lines.append(
        f"{plan.num_calls:,} calls simulated in {plan.num_trials} trials. Not in the intervals: the error of the step times "
        "(docs/timing.md) and traffic that differs from this one."
    )
    return lines


def attainments(trials: Sequence[Trial]) -> list[str]:
    """Of each class over its trials: "chat 98.1 % ± 0.4 (wanted 95 %)"."""
    found = []
    for number, share in enumerate(trials[0].classes):
        shares = [trial.classes[number].attainment for trial in trials]
        known = [one for one in shares if one is not None]
        if not known:
            found.append(f"{share.slo.name}: no call was counted")
            continue
        mean, half = mean_and_half_width(known)
        wanted = f"wanted {100 * share.slo.percentile:g} %"
        found.append(f"{share.slo.name} {100 * mean:.1f} %{_plus_minus(half and 100 * half, '.1f')} ({wanted})")
    return found


def disaggregation(gain: Gain | None) -> str:
    if gain is None:
        return "Disaggregation: nothing to compare with; only one kind of layout holds anything here."
    return (
        f"Disaggregation {gain.verdict}: {100 * gain.mean:+.1f} %{_plus_minus(gain.half_width and 100 * gain.half_width, '.1f')} "
        "goodput per dollar against the best colocated layout, on the same calls."
    )


def _remedies(plan: Plan) -> str:
    most = plan.remedies[:3]
    return (
        ("What would help, as guessed: " + "; ".join(f"{one.what} (+{100 * one.gain:.0f} %)" for one in most) + ".")
        if most
        else ""
    )


def _plus_minus(half: float | None, form: str) -> str:
    return "" if half is None else f" ± {half:{form}}"


# -- programs ----------------------------------------------------------------------------------------------------------


def document(plan: Plan) -> str:
    question = plan.question
    found = {
        "model": question.model,
        "weight_dtype": question.weight_dtype,
        "kv_dtype": question.kv_dtype,
        "offers": [asdict(offer) for offer in question.offers],
        "rate": question.traffic.rate * plan.replicas,
        "classes": [
            asdict(slo) | {"share": share} for slo, share in zip(question.mix.classes, question.mix.shares, strict=True)
        ],
        "replicas": plan.replicas,
        "gpus": plan.num_gpus,
        "usd_per_hour": plan.usd_per_hour,
        "best": _measured(plan.best),
        "other": _measured(plan.other) if plan.other is not None else None,
        "disaggregation": _gain(plan.gain),
        "regime": plan.regime,
        "remedies": [asdict(one) for one in plan.remedies],
        "traffic": {
            "prompt_tokens": plan.load.prompt_tokens,
            "computed_tokens": plan.load.computed_tokens,
            "output_tokens": plan.load.output_tokens,
        },
        "effort": asdict(question.effort),
        "simulated": {"calls": plan.num_calls, "trials": plan.num_trials},
    }
    return json.dumps(found, indent=1, default=str)


def _gain(gain: Gain | None) -> dict[str, object] | None:
    return None if gain is None else {"verdict": gain.verdict, "gain": gain.mean, "half_width": gain.half_width}


def _measured(one: Measured) -> dict[str, object]:
    candidate = one.candidate
    goodput, half = one.goodput
    return {
        "structure": one.structure,
        "layout": asdict(candidate.layout),
        "hardware": {
            role.name.lower(): asdict(candidate.deployment.hardware(role))
            for role in sorted(set(candidate.layout.roles))
        },
        "gpus": candidate.num_gpus,
        "usd_per_hour": candidate.usd_per_hour,
        "settings": {
            "engine.max_num_batched_tokens": candidate.budget,
            "engine.chunk_tokens": candidate.deployment.engine.chunk_tokens,
            "engine.max_num_seqs": candidate.deployment.engine.max_num_seqs,
            "router.local_prefill_tokens": candidate.deployment.local_prefill_tokens,
            "router.queue_window_s": candidate.window_s,
        },
        "kv": {role: {"tokens": tokens, "bytes": nbytes} for role, (tokens, nbytes) in kv_budgets(one).items()},
        "max_batch": one.guess.max_batch,
        "goodput_rps": goodput,
        "goodput_half_width": half,
        "goodput_per_gpu": goodput / candidate.num_gpus,
        "usd_per_million_tokens": one.usd_per_million_tokens,
        "usd_per_million_output_tokens": one.usd_per_million_output_tokens,
        "knees_rps": [knee.rate for knee in one.knees],
        "at_rate": [_trial(trial) for trial in one.at_rate],
        "curve": [_trial(trial) for trial in one.points],
        "guess": {limit.value: rate for limit, rate in one.guess.limits.items()},
    }


def _trial(trial: Trial) -> dict[str, object]:
    return {
        "rate": trial.rate,
        "seed": trial.seed,
        "calls": trial.num_calls,
        "cut": trial.is_cut,
        "goodput_rps": trial.goodput,
        "attainment": {share.slo.name: share.attainment for share in trial.classes},
        "missed": {verdict.value: num for verdict, num in trial.missed.items()},
        "busy": trial.busy,
        "preemptions": trial.preemptions,
    }


# -- a picture ---------------------------------------------------------------------------------------------------------


def picture(plan: Plan) -> str:
    """Attainment of each class against rate, of both layouts."""
    lines = []
    for measured, dashed in ((plan.best, False), (plan.other, True)):
        if measured is None:
            continue
        for number, slo in enumerate(plan.question.mix.classes):
            points = [
                (plan.replicas * trial.rate, share)
                for trial in measured.points
                if (share := trial.classes[number].attainment) is not None
            ]
            lines.append(Line(f"{slo.name}: {measured.candidate.describe()}", points, dashed))
    rate = plan.question.traffic.rate * plan.replicas
    marks = [Mark("wanted", rate)] if plan.question.num_gpus is None else []
    wanted = max(slo.percentile for slo in plan.question.mix.classes)
    return plot(f"{plan.question.model}: calls within their targets", lines, wanted=wanted, marks=marks)
