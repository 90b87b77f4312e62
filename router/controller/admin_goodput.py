"""/admin/v1/goodput and /admin/v1/forecast: what calls came to, by class, pool and worker; what is expected. Read only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from fastapi import APIRouter, Depends

from baton import clock
from router.controller.admin_access import Doors
from router.controller.arrivals import TICK_S
from router.controller.controller import Controller
from router.controller.step_model import StepModel
from router.windows import ClassWindow, WorkerWindow, length_quantile


def goodput_routes(controller: Controller, doors: Doors) -> APIRouter:
    api = APIRouter(prefix="/admin/v1", dependencies=[Depends(doors.view)])

    @api.get("/goodput")
    async def goodput() -> dict[str, object]:
        view = controller.measures.view(clock.now_s())
        return {
            "num_routers": view.num_routers,
            "oldest_queued_ms": 1e3 * view.oldest_queued_s,
            "classes": _by_window((window.class_name, window) for window in view.classes),
            "pools": _by_window((window.role, window) for window in view.pools),
            "workers": {
                role: _by_window((window.worker_id, window) for window in view.workers if window.role == role)
                for role in ("prefill", "decode")
            },
        }

    @api.get("/forecast")
    async def forecast() -> dict[str, object]:
        forecasts = controller.measures.forecasts(clock.now_s())
        return {
            "tick_s": TICK_S,
            "classes": {
                of_class.class_name: {
                    "rate_per_s": of_class.rate,
                    "forecasts": [asdict(forecast) for forecast in of_class.forecasts],
                }
                for of_class in forecasts
            },
            "steps": {role: _steps_json(model) for role, model in controller.measures.steps.items()},
        }

    return api


def _by_window(named: Iterable[tuple[str, ClassWindow | WorkerWindow]]) -> dict[str, dict[str, object]]:
    """Name -> "30s", "300s" -> figures."""
    answer: dict[str, dict[str, object]] = {}
    for name, window in named:
        figures = _class_json(window) if isinstance(window, ClassWindow) else _worker_json(window)
        answer.setdefault(name, {})[f"{window.window_s:g}s"] = figures
    return answer


def _worker_json(window: WorkerWindow) -> dict[str, object]:
    return {
        "span_s": window.span_s,
        "num_calls": window.num_calls,
        "attainment": window.attainment,  # of the role's own targets: TTFT, or TPOT and gaps
        "met_per_s": window.per_s(window.num_met),
        "met_tokens_per_s": window.per_s(window.met_tokens),
    }


def _class_json(window: ClassWindow) -> dict[str, object]:
    parts, num_parts = window.parts, window.parts.num_calls
    return {
        "span_s": window.span_s,
        "num_judged": window.num_judged,
        "attainment": window.attainment,
        "met_per_s": window.per_s(window.num_met),
        "met_tokens_per_s": window.per_s(window.met_tokens),
        "missed": {
            "ttft": window.num_missed_ttft,
            "tpot": window.num_missed_tpot,
            "itl": window.num_missed_itl,
            "e2e": window.num_missed_e2e,
            "failed": window.num_failed,
        },
        "ttft_ms": _mean_ms(window.ttft_s, window.num_first_tokens),
        "ttft_parts_ms": {
            "admission": _mean_ms(parts.admission_s, num_parts),
            "queue": _mean_ms(parts.queue_s, num_parts),
            "prefill": _mean_ms(parts.prefill_s, num_parts),
            "network": _mean_ms(parts.network_s, num_parts),
        },
        "handoff_gap_ms": _mean_ms(window.handoff_gap_s, window.num_handoffs),
        "arrived_per_s": window.per_s(window.num_arrived),
        "sequences_per_s": window.per_s(window.num_sequences),
        "cached_share": window.cached_share,
        "prompt_tokens": _lengths_json(window.mean_prompt_tokens, window.prompt_lengths),
        "output_tokens": _lengths_json(window.mean_output_tokens, window.output_lengths),
    }


def _lengths_json(mean: float | None, counts: tuple[float, ...]) -> dict[str, object]:
    """Quantiles are the middles of log buckets: off by 19 % at most."""
    return {"mean": mean, "p50": length_quantile(counts, 0.5), "p99": length_quantile(counts, 0.99)}


def _mean_ms(total_s: float, count: float) -> float | None:
    return 1e3 * total_s / count if count else None


def _steps_json(model: StepModel) -> dict[str, object]:
    return {
        **asdict(model.terms),
        "num_samples": model.num_samples,
        "num_refused": model.num_refused,
        "error": model.error,
    }
