"""From measured traffic to the fallback and back, through the real simulator: which traffic makes prefill workers worth it.

One prefill and one decode worker of a 70B on two A100. Short answers to prompts that come faster than one worker computes them:
the decode worker has the time to help. Longer answers at a tight pace: every prompt computed among them is felt by all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from baton.request import Role
from baton.slo import SLO
from bench.what_if import answer
from engine.timing.step_time import step_time
from router.controller import measured_fleet
from router.controller.autoscaler.acts import LocalPrefill
from router.controller.autoscaler.disaggregation import PERIOD_S, WHOLE_PROMPTS, Disaggregation
from router.controller.measured_fleet import Measured
from router.controller.pays import Pays
from router.controller.step_model import terms_of
from router.controller.what_if import Answer, Question
from router.windows import ClassWindow
from tests.controller.live_rig import fleet, measured, window

TERMS = terms_of(step_time("a100", "llama-3.1-70b", 2))
CLASSES = (SLO("forms", 2_500.0, 500.0), SLO("chat", 5_000.0, 33.0))
FORMS = window("forms", 4.5, prompt=500, output=8)
CHAT = window("chat", 6.5, prompt=250, output=50)
SEEDS, CALLS = 5, 150  # what a test has the time for; both differences are beyond chance all the same


class Simulator:
    """The product's, in this process, however long it takes; the same question is not worked out twice."""

    def __init__(self) -> None:
        self._known: dict[Question, Answer] = {}

    async def ask(self, question: Question) -> Answer:
        if question not in self._known:
            self._known[question] = answer(replace(question, budget_s=600.0))
        return self._known[question]


class Cluster:
    """Whose routers obey at once."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.limit = 0
        self.traffic: Sequence[ClassWindow] = ()
        self.pays = Pays(Simulator(), self._measured, 0, 5.0, lambda: self.now_s)
        self._policy = Disaggregation(lambda: self.pays.verdict, 0)

    def _measured(self) -> Measured:
        facts = fleet(local_prefill_tokens=self.limit, classes=CLASSES, now_s=self.now_s)
        return measured(replace(facts, steps=dict.fromkeys(Role, TERMS), kv_bytes_per_token=327_680.0), *self.traffic)

    async def period(self) -> str:
        """One verdict and what is done about it; returns the layout that it found in force."""
        self.now_s += PERIOD_S
        await self.pays.look()
        assert self.pays.verdict is not None, self.pays.reason
        for proposal in self._policy.look(self._measured().facts):
            assert isinstance(proposal.act, LocalPrefill)
            self.limit = proposal.act.max_tokens
        return self.pays.verdict.present


async def test_traffic_that_prefill_workers_are_too_few_for_is_prefilled_on_decode_until_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measured_fleet, "MAX_SEEDS", SEEDS)
    monkeypatch.setattr(measured_fleet, "RUN_CALLS", CALLS)
    cluster = Cluster()
    cluster.traffic = (FORMS,)
    assert [await cluster.period(), await cluster.period()] == ["apart", "apart"]
    assert cluster.limit == WHOLE_PROMPTS
    verdict = cluster.pays.verdict
    assert verdict is not None
    assert verdict.pays is False
    assert verdict.local is not None
    assert verdict.local.is_gain

    cluster.traffic = (CHAT,)
    assert [await cluster.period(), await cluster.period()] == ["local", "local"]
    assert cluster.limit == WHOLE_PROMPTS, "two periods must have passed since the last change"
    await cluster.period()
    assert cluster.limit == 0
    assert cluster.pays.verdict is not None
    assert cluster.pays.verdict.local is not None
    assert cluster.pays.verdict.local.is_loss
