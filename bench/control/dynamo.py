"""Dynamo's planner as a baseline: its own decision core, in an interpreter that has it, asked once a tick. Implements Scaler.

The core (ai-dynamo 1.6.1, dynamo/planner/core: state_machine.py, load_scaling.py, throughput_scaling.py, engine_query.py and
load/predictors.py) decides; bench/control/dynamo_child.py feeds it. Its two loops: the throughput loop forecasts calls, prompts
and answers for its next interval and divides by what one engine can do within the targets, which bounds each pool from below;
the load loop adds a worker where every engine of a pool is beyond its target, and takes one away where those that stay would
keep it. It never flips a worker.

What is not its own: step times. Its estimator is a separate package that is not published with it; in its place stand the same
coefficients that our autoscaler learns, so it knows its engines as well as we do.
"""

from __future__ import annotations

import functools
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.request import Role
from bench.control.baselines import resize
from router.controller.autoscaler.acts import Proposal
from router.controller.autoscaler.facts import ClassTraffic, FleetFacts, State, WorkerFacts
from router.controller.step_model import Terms

CHILD = Path(__file__).with_name("dynamo_child.py")
ANSWER_S = 120.0  # a first import of its forecasters takes 20 s on a busy machine


class PlannerFailed(Exception):
    """The interpreter has no planner, or it ended; the message holds the last that it said."""


@dataclass(frozen=True, slots=True)
class DynamoSetting:
    """By Dynamo's names (dynamo/planner/simulation/presets.py has such combinations to search)."""

    throughput: bool
    load: bool
    interval_s: int  # of the throughput loop
    predictor: str  # constant | arima | kalman
    sensitivity: int = 80  # load_scaling_down_sensitivity; the default

    def __str__(self) -> str:
        loops = " + ".join(name for name, on in (("throughput", self.throughput), ("load", self.load)) if on)
        return f"{loops}, {self.interval_s} s, {self.predictor}"


# A quicker look than it ships, since these loads move faster; its defaults (180 s, arima); one loop alone
DYNAMO_SETTINGS = (
    DynamoSetting(throughput=True, load=True, interval_s=60, predictor="constant"),
    DynamoSetting(throughput=True, load=True, interval_s=180, predictor="arima"),
    DynamoSetting(throughput=True, load=False, interval_s=60, predictor="kalman"),
)


class DynamoPlanner:
    """Owns the child process; `close` ends it."""

    def __init__(self, python: str) -> None:
        """Raises: PlannerFailed: this interpreter cannot run it."""
        self._child = subprocess.Popen(  # -P: its own `dynamo`, not this file
            [python, "-P", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.version = str(self.ask({"do": "version"})["version"])
        except PlannerFailed:
            self.close()
            raise

    def ask(self, question: Mapping[str, object]) -> dict[str, object]:
        """Raises: PlannerFailed."""
        assert self._child.stdin is not None, "it is piped"
        assert self._child.stdout is not None, "it is piped"
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except OSError as error:
            raise PlannerFailed(f"the planner's process is gone: {error}") from error
        found = json.loads(line) if line else {"error": f"it ended with status {self._child.wait(ANSWER_S)}"}
        if "error" in found:
            raise PlannerFailed(f"the planner cannot run: {found['error']}")
        return dict(found)

    def close(self) -> None:
        self._child.communicate(timeout=ANSWER_S)


class Dynamo:
    """One run's."""

    def __init__(self, planner: DynamoPlanner, setting: DynamoSetting) -> None:
        self._planner = planner
        self._setting = setting
        self._began = False

    def look(self, facts: FleetFacts) -> Sequence[Proposal]:
        traffic = [one for one in facts.classes if one.rate is not None and math.isfinite(one.rate)]
        if not traffic:
            return ()
        if not self._began:
            self._planner.ask({"do": "begin", **asdict(self._setting), **_deployment(facts, traffic[0])})
            self._began = True
        targets = self._planner.ask({"do": "tick", **_tick(facts, traffic[0])})
        return [
            proposal
            for role, name in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode"))
            if isinstance(size := targets[name], int)
            for proposal in resize(facts, role, size)
        ]


def new_dynamo(python: str, setting: DynamoSetting) -> Dynamo:
    """One run's, of this process's own planner, which goes when the process does. Raises: PlannerFailed."""
    return Dynamo(_planner(python), setting)


@functools.cache
def _planner(python: str) -> DynamoPlanner:
    return DynamoPlanner(python)


def _deployment(facts: FleetFacts, traffic: ClassTraffic) -> dict[str, object]:
    engines = {}
    for role, name in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode")):
        blueprint = facts.blueprints[role]
        engines[name] = {
            "max_num_batched_tokens": blueprint.most.max_num_batched_tokens,
            "max_num_seqs": blueprint.most.max_num_seqs,
            "max_kv_tokens": blueprint.kv_tokens,
        }
    most = facts.budget.max_gpus
    return {
        "engines": engines,
        "max_gpus": -1 if most is None else most,
        "ttft_ms": traffic.slo.ttft_ms,
        "tpot_ms": traffic.slo.tpot_ms,
    }


def _tick(facts: FleetFacts, traffic: ClassTraffic) -> dict[str, object]:
    prompt, cached = _number(traffic.prompt_tokens), _number(traffic.cached_tokens)
    lacking = prompt - cached
    return {
        "now_s": facts.now_s,
        "rate": traffic.rate,
        "isl": prompt,
        "osl": _number(traffic.output_tokens),
        "hit_rate": cached / prompt if prompt else 0.0,
        "pairs_per_token": _number(traffic.prompt_pairs) / lacking if lacking > 0 else 0.0,
        "ttft_ms": traffic.slo.ttft_ms,
        "tpot_ms": traffic.slo.tpot_ms,
        "prefill": _pool(facts, Role.PREFILL),
        "decode": _pool(facts, Role.DECODE),
        "terms": {
            name: _terms(facts.steps[role]) for role, name in ((Role.PREFILL, "prefill"), (Role.DECODE, "decode"))
        },
    }


def _pool(facts: FleetFacts, role: Role) -> dict[str, object]:
    mine = [worker for worker in facts.workers if worker.role is role]
    ready = [worker for worker in mine if worker.state is State.READY]
    return {
        "ready": len(ready),
        "pending": sum(worker.state in (State.PENDING, State.FAILED) for worker in mine),
        "draining": sum(worker.state is State.DRAINING for worker in mine),
        "workers": [_engine(worker) for worker in ready],
    }


def _engine(worker: WorkerFacts) -> dict[str, object]:
    load = worker.load
    if load is None:
        return {"id": worker.worker_id, "num_seqs": 0, "waiting_tokens": 0, "used_tokens": 0, "step_s": 0.0}
    return {
        "id": worker.worker_id,
        "num_seqs": load.num_seqs,
        "waiting_tokens": load.waiting_tokens,
        "used_tokens": load.used_tokens,
        "step_s": _number(load.step_s),
    }


def _terms(terms: Terms) -> dict[str, float]:
    return asdict(terms)


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
