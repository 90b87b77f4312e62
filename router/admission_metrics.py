"""What operators see of admission: who waits, who was turned away and why, and what each tenant takes.

Labels are SLO classes, reasons and the first MAX_TENANTS tenants seen; the others share "other", so cardinality is bounded
whatever a key file holds. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable

from router.series import Counter, Gauge, Histogram, Registry
from router.tenants import Tenant

MAX_TENANTS = 100  # five counters each, with those of router/cost.py: 500 series of one router
OTHER = "other"
# Seconds: around a pump, a window, targets.
_WAIT_BUCKETS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)


class AdmissionMetrics:
    """One router's, in its registry."""

    def __init__(self, registry: Registry) -> None:
        self._waits = Histogram(
            "baton_admission_wait_seconds", "Time in the router's queue of calls that were let in.", ["slo_class"],
            registry, _WAIT_BUCKETS,
        )  # fmt: skip
        self._sheds = Counter(
            "baton_requests_shed", "Calls turned away, by what could not be kept.", ["reason", "slo_class"],
            registry,
        )  # fmt: skip
        self._tokens = Counter(
            "baton_tenant_tokens", "Tokens of a tenant's calls.", ["tenant", "kind"], registry
        )  # fmt: skip
        self._registry = registry
        self._names: set[str] = set()

    def follow(self, length: Callable[[], float], tokens: Callable[[], float]) -> None:
        """Read the queue's size at each scrape."""
        Gauge("baton_admission_queue_length", "Calls that wait for their turn.", length, self._registry)
        Gauge("baton_admission_queue_tokens", "Their prompt tokens.", tokens, self._registry)

    def waited(self, slo_class: str, wait_s: float) -> None:
        self._waits.labels(slo_class).observe(wait_s)

    def shed(self, slo_class: str, reason: str) -> None:
        self._sheds.labels(reason, slo_class).inc()

    def used(self, tenant: Tenant, prompt_tokens: int, output_tokens: int) -> None:
        """A call has ended."""
        name = self.name(tenant)
        self._tokens.labels(name, "prompt").inc(prompt_tokens)
        self._tokens.labels(name, "output").inc(output_tokens)

    def name(self, tenant: Tenant) -> str:
        """Its label."""
        if tenant.name not in self._names and len(self._names) < MAX_TENANTS:
            self._names.add(tenant.name)
        return tenant.name if tenant.name in self._names else OTHER
