"""What calls cost: GPU seconds and money, per tenant and per million tokens (docs/cost.md).

A call is charged once, at its end: the prompt tokens that were computed for it and the tokens that were decoded, at what these
take on the workers that made them (router/gpu_time.py). What a fleet costs while it idles is in no tenant's bill; it is in the
price of a million tokens, which is all workers' time by all workers' output. `look` learns from workers' reports once a
second; nothing is done per token. Event loop only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.config import CostConfig
from baton.v1 import worker_pb2
from router.admission_metrics import AdmissionMetrics
from router.fleet import Endpoint, Fleet
from router.gpu_time import GpuTime
from router.sequence import SequenceReport
from router.series import Counter, Registry, header, sample
from router.tenants import Tenant

LOOK_S = 1.0  # two heartbeats: each look has news
FADE_S = 60.0  # of the fleet's price: some answers' length


@dataclass(slots=True)
class _Life:
    """One worker's process."""

    epoch: int
    output_tokens: int  # at the last look
    time: GpuTime = field(default_factory=GpuTime)


class Costs:
    """One router's; a source of lines for its /metrics."""

    def __init__(self, config: CostConfig, fleet: Fleet, registry: Registry, names: AdmissionMetrics) -> None:
        """`names`: bounds the number of tenants told apart."""
        self._config = config
        self._gpus = config.gpus_per_worker  # GPU seconds in a second of a worker
        self._fleet = fleet
        self._names = names
        self._lives: dict[str, _Life] = {}  # by worker
        self._looked_s: float | None = None
        self._fleet_s = 0.0  # of all workers, fading; and what they made in it:
        self._fleet_tokens = 0.0
        self._seconds = Counter(
            "baton_tenant_gpu_seconds", "GPU seconds of a tenant's calls, by what they made.", ["tenant", "kind"],
            registry,
        )  # fmt: skip
        self._usd = Counter(
            "baton_tenant_cost_usd", "What these cost; none where no price is set.", ["tenant"], registry
        )  # fmt: skip
        registry.add(self)

    # -- calls -------------------------------------------------------------------------------------------------------

    def charge(self, tenant: Tenant, reports: Iterable[SequenceReport]) -> None:
        """A call is over, however."""
        prompt_s = output_s = 0.0
        for report in reports:
            if prefill := self._lives.get(report.prefill_worker):
                prompt_s += prefill.time.prompt_s * report.stats.computed_tokens
            if decode := self._lives.get(report.decode_worker):  # the first token came with the prompt
                output_s += decode.time.output_s * max(0, report.num_tokens - 1)
        name = self._names.name(tenant)
        self._seconds.labels(name, "prompt").inc(self._gpus * prompt_s)
        self._seconds.labels(name, "output").inc(self._gpus * output_s)
        if self._config.usd_per_gpu_hour:
            self._usd.labels(name).inc(self._usd_of(prompt_s + output_s))

    def _usd_of(self, worker_s: float) -> float:
        return worker_s * self._gpus * self._config.usd_per_gpu_hour / 3_600

    # -- workers -----------------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> None:
        """Learn from what workers have said since the last look. Call it as often as is convenient."""
        span_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        if self._looked_s is not None and span_s < LOOK_S:
            return
        self._looked_s = now_s
        num_workers, num_tokens, lives = 0, 0, dict[str, _Life]()
        for endpoint in self._fleet.endpoints:
            if (view := endpoint.session.view) is not None:
                life = self._life(endpoint.worker_id, view.opened.epoch, view.load)
                lives[endpoint.worker_id] = life
                life.time.observe(view.load, _prefill_tokens_per_s(self._fleet, endpoint))
                num_workers += 1
                num_tokens += max(0, view.load.output_tokens - life.output_tokens)
                life.output_tokens = view.load.output_tokens
        self._lives = lives
        kept = math.exp(-span_s / FADE_S)
        self._fleet_s = kept * self._fleet_s + num_workers * span_s
        self._fleet_tokens = kept * self._fleet_tokens + num_tokens

    def _life(self, worker_id: str, epoch: int, load: worker_pb2.Load) -> _Life:
        life = self._lives.get(worker_id)
        return life if life is not None and life.epoch == epoch else _Life(epoch, load.output_tokens)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of output, of late: idle time, other routers' calls and prompts included. None: no price, or nobody made any."""
        if not self._config.usd_per_gpu_hour or self._fleet_tokens < 1:
            return None
        return 1e6 * self._usd_of(self._fleet_s) / self._fleet_tokens

    def lines(self) -> Iterator[str]:
        yield header("baton_usd_per_gpu_hour", "As configured; 0 = not known.", "gauge")
        yield sample("baton_usd_per_gpu_hour", "", self._config.usd_per_gpu_hour)
        name = "baton_fleet_usd_per_million_tokens"
        yield header(name, "All connected workers' time by the tokens that they generate, of late.", "gauge")
        if (price := self.usd_per_million_tokens) is not None:
            yield sample(name, "", price)


def _prefill_tokens_per_s(fleet: Fleet, endpoint: Endpoint) -> float:
    return float(fleet.table.prefill_tokens_per_s[endpoint.row])
