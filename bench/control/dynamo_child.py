"""Feeds Dynamo's planner core, one JSON line in, one out; runs in an interpreter that has ai-dynamo, without this repository.

    {"do": "version"} -> {"version"}      {"do": "begin", settings} -> {}      {"do": "tick", facts} -> {"prefill", "decode"}

A tick is what its replay adapter does (dynamo/planner/offline/replay_adapter.py): worker counts, one forward-pass snapshot per
engine, and at the end of each interval the traffic since the last one. The order within a tick is its built-in plugins'
(plugins/builtins/local_planner.py): predict, throughput bound, load decision. Two imports are stood in for: its step-time
estimator, which is not on the public index, by a formula with given coefficients; and prophet, whose forecaster is not used.
"""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Mapping
from typing import Any, ClassVar

Asked = Mapping[str, Any]


class Estimator:
    """Step times from coefficients; `tune` learns nothing, since it knows."""

    terms: ClassVar[dict[str, dict[str, float]]] = {}  # by worker type
    pairs_per_token: ClassVar[float] = 0.0

    def __init__(self, worker_type: str) -> None:
        self._worker_type = worker_type

    @classmethod
    def best_available(cls, config: Asked) -> Estimator:
        return cls(config["worker_type"])

    def tune_with_fpms(self, iterations: object) -> None:
        pass

    def diagnostics(self) -> dict[str, str]:
        return {"readiness": "ready", "source": "given"}

    def estimate_forward_pass_time_ms(self, metrics_by_rank: list[Asked]) -> float:
        [metrics] = metrics_by_rank
        scheduled, terms = metrics["scheduled_requests"], self.terms[self._worker_type]
        prompt, decodes = scheduled["sum_prefill_tokens"], scheduled["num_decode_requests"]
        if not prompt and not decodes:
            return 0.0
        matrices_s = max(terms["s_per_token"] * (prompt + decodes), terms["weights_s"])
        reads_s = terms["s_per_context_token"] * scheduled["sum_decode_kv_tokens"]
        pairs_s = terms["s_per_pair"] * self.pairs_per_token * prompt
        total_s: float = terms["fixed_s"] + matrices_s + reads_s + pairs_s
        return 1e3 * total_s


def stand_in(name: str, **members: object) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def load_core() -> None:
    stand_in("aisimulate_core")
    stand_in("aisimulate_core.sdk", RustForwardPassPerfModel=Estimator, ForwardPassPerfModelConfig=object)
    stand_in("aisimulate_core._native", RustForwardPassPerfModel=Estimator)
    stand_in("prophet", Prophet=object)
    import logging

    logging.disable(logging.CRITICAL)
    from dynamo.planner.core.perf_model import PlannerEnginePerfModel

    PlannerEnginePerfModel._build_ais_config = lambda self: {"worker_type": self._worker_type}


class Planner:
    """One run's."""

    def __init__(self, asked: Asked) -> None:
        from dynamo.planner.config.planner_config import PlannerConfig
        from dynamo.planner.core.load.predictors import LOAD_PREDICTORS
        from dynamo.planner.core.state_machine import PlannerScalingState
        from dynamo.planner.core.types import EngineCapabilities, WorkerCapabilities

        self._interval_s = asked["interval_s"]
        config = PlannerConfig(
            mode="disagg",
            environment="virtual",
            optimization_target="sla",
            pre_deployment_sweeping_mode="none",
            enable_throughput_scaling=asked["throughput"],
            enable_load_scaling=asked["load"],
            throughput_adjustment_interval_seconds=asked["interval_s"],
            load_predictor=asked["predictor"],
            load_scaling_down_sensitivity=asked["sensitivity"],
            max_gpu_budget=asked["max_gpus"],
            prefill_engine_num_gpu=1,
            decode_engine_num_gpu=1,
            ttft_ms=asked["ttft_ms"],
            itl_ms=asked["tpot_ms"],
        )
        engines = {name: EngineCapabilities(num_gpu=1, **limits) for name, limits in asked["engines"].items()}
        self._config = config
        self._state = PlannerScalingState(config, WorkerCapabilities(**engines))
        self._predictors = [LOAD_PREDICTORS[config.load_predictor](config) for _ in range(3)]
        self._last_s: float | None = None
        self._since_s = 0.0  # when the interval began
        self._calls = self._prompt_tokens = self._output_tokens = 0.0

    def tick(self, asked: Asked) -> dict[str, int | None]:
        from dynamo.planner.core.types import FpmObservations

        Estimator.terms = asked["terms"]
        Estimator.pairs_per_token = asked["pairs_per_token"]
        self._config.ttft_ms, self._config.itl_ms = asked["ttft_ms"], asked["tpot_ms"]
        state = self._state
        state.begin_tick()
        state.observe_worker_counts(self._counts(asked))
        fpms = FpmObservations(
            prefill=_prefill_fpms(asked) or None,
            decode=_decode_fpms(asked) or None,
        )
        state.observe_fpm(fpms)
        state.observe_runtime_metadata(kv_hit_rate=asked["hit_rate"])
        decision = self._throughput(asked) if self._config.enable_throughput_scaling else None
        if self._config.enable_load_scaling:
            decision = state.advance_load(fpms, predicted_kv_hit_rate=asked["hit_rate"])
        if decision is None:
            return {"prefill": None, "decode": None}
        return {"prefill": decision.num_prefill, "decode": decision.num_decode}

    def _throughput(self, asked: Asked) -> Any:
        from dynamo.planner.core.types import TrafficObservation

        now_s = asked["now_s"]
        if self._last_s is None:
            self._last_s = self._since_s = now_s
            return None
        calls = asked["rate"] * (now_s - self._last_s)
        self._last_s = now_s
        self._calls += calls
        self._prompt_tokens += calls * asked["isl"]
        self._output_tokens += calls * asked["osl"]
        if now_s - self._since_s < self._interval_s:
            return None
        duration_s, self._since_s = now_s - self._since_s, now_s
        isl = self._prompt_tokens / self._calls if self._calls else math.nan
        osl = self._output_tokens / self._calls if self._calls else math.nan
        traffic = TrafficObservation(duration_s=duration_s, num_req=self._calls, isl=isl, osl=osl)
        for predictor, value in zip(self._predictors, (self._calls, isl, osl), strict=True):
            if math.isfinite(value):
                predictor.add_data_point(value)
        self._calls = self._prompt_tokens = self._output_tokens = 0.0
        num_calls, isl, osl = (predictor.predict_next() for predictor in self._predictors)
        return self._state.advance_throughput_from_prediction(
            traffic,
            predicted_num_req=num_calls,
            predicted_isl=isl,
            predicted_osl=osl,
            predicted_kv_hit_rate=asked["hit_rate"],
        )

    def _counts(self, asked: Asked) -> Any:
        from dynamo.planner.core.types import WorkerCounts

        prefill, decode = asked["prefill"], asked["decode"]
        return WorkerCounts(
            ready_num_prefill=prefill["ready"],
            ready_num_decode=decode["ready"],
            expected_num_prefill=prefill["ready"] + prefill["pending"],
            expected_num_decode=decode["ready"] + decode["pending"],
            prefill_scaling_in_progress=prefill["pending"] > 0,
            decode_scaling_in_progress=decode["pending"] > 0,
        )


def _prefill_fpms(asked: Asked) -> dict[tuple[str, int], Any]:
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, QueuedRequestMetrics, ScheduledRequestMetrics

    return {
        (one["id"], 0): ForwardPassMetrics(
            worker_id=one["id"],
            wall_time=one["step_s"],
            scheduled_requests=ScheduledRequestMetrics(num_prefill_requests=1, sum_prefill_tokens=round(asked["isl"])),
            queued_requests=QueuedRequestMetrics(
                num_prefill_requests=one["num_seqs"], sum_prefill_tokens=one["waiting_tokens"]
            ),
        )
        for one in asked["prefill"]["workers"]
    }


def _decode_fpms(asked: Asked) -> dict[tuple[str, int], Any]:
    from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics

    return {
        (one["id"], 0): ForwardPassMetrics(
            worker_id=one["id"],
            wall_time=one["step_s"],
            scheduled_requests=ScheduledRequestMetrics(
                num_decode_requests=one["num_seqs"], sum_decode_kv_tokens=one["used_tokens"]
            ),
        )
        for one in asked["decode"]["workers"]
    }


def main() -> None:
    planner: Planner | None = None
    answer: Mapping[str, object]
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["do"] == "version":
                load_core()
                from importlib.metadata import version

                import dynamo.planner.core.state_machine  # noqa: F401  whether it can be had

                answer = {"version": version("ai-dynamo")}
            elif asked["do"] == "begin":
                planner, answer = Planner(asked), {}
            else:
                assert planner is not None, "it was not begun"
                answer = planner.tick(asked)
        except ImportError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
