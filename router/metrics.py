"""The router's metrics, named as DESIGN section 12 says; one registry per process.

Durations are what clients saw, from their first byte at the router; those of KV transfers are each handoff's own, measured by
its prefill worker. Labels are SLO classes, workers, outcomes, reasons and transports only, so cardinality is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.slo import Verdict
from router.admission_metrics import AdmissionMetrics
from router.fleet import Fleet
from router.goodput import TTFTSplit
from router.series import Counter, CounterChild, Histogram, HistogramChild, Registry
from router.worker_gauges import WorkerGauges

# Seconds. From one gRPC message (0.5 ms) to a long prompt on a laptop (2 min), about 2.5 steps per doubling near the targets.
_LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120)
TTFT_PARTS = ("admission", "queue", "prefill", "network")


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One handoff that decode has acknowledged."""

    transport: str
    nbytes: int
    transfer_s: float  # first frame -> Ack
    exposed_s: float  # end of prefill -> Ack


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What one admitted call leaves behind. None = it did not come that far."""

    slo_class: str
    finished: bool
    ttft_s: float | None
    queue_s: float | None
    ttft_split: TTFTSplit | None
    handoff_gap_s: float | None
    gaps_s: Sequence[Sequence[float]]  # by choice, sorted
    call_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    transfers: Sequence[TransferRecord]  # one per choice that was handed over
    local: bool
    num_retries: int


@dataclass(frozen=True, slots=True)
class _ClassSeries:
    """What is counted of every call of one SLO class, found once."""

    ttft: HistogramChild
    queue: HistogramChild
    parts: tuple[HistogramChild, ...]  # of TTFT, in the order of TTFT_PARTS
    gap: HistogramChild
    e2e: HistogramChild
    itl: HistogramChild
    prompt: CounterChild
    output: CounterChild
    queries: CounterChild
    hits: CounterChild
    retries: CounterChild
    local: CounterChild


class RouterMetrics:
    """Counts calls; the lines of its registry are the body of /metrics."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = Registry()
        self.admission = AdmissionMetrics(self.registry)
        self._calls = Counter(
            "baton_requests", "Calls by how they ended: finished, cancelled or an error code.", ["api", "outcome"],
            self.registry,
        )  # fmt: skip
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Gaps between tokens.")
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first prefill step.")
        self._parts = Histogram(
            "baton_time_to_first_token_part_seconds",
            "Where it went: waiting at the router, in the worker's queue, computing, on the way.",
            ["slo_class", "part"],
            self.registry,
            _LATENCY_BUCKETS,
        )
        self._gap = self._histogram("handoff_gap_seconds", "Token 1 to token 2 where two workers made them.")
        self._e2e = self._histogram("request_duration_seconds", "Arrival to the end.")
        self._violations = self._counter("request_slo_violation", "Calls that missed a target.", "type")
        self._goodput = self._counter("goodput", "Calls that met every target of their class.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of calls that got a token.")
        self._output = self._counter("generation_tokens", "Tokens generated.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found on the prefill worker.")
        self._retries = self._counter("request_retries", "Sequences started again before their first token.")
        self._local = self._counter("local_prefill", "Calls whose prompt was computed where it was decoded.")
        self._kv_bytes = Counter(
            "baton_kv_transfer_bytes", "KV handed over for calls.", ["transport"], self.registry
        )  # fmt: skip
        self._kv_seconds = self._histogram("kv_transfer_duration_seconds", "First frame to Ack.", "transport")
        self._kv_exposed = self._histogram(
            "kv_transfer_exposed_seconds", "End of prefill to Ack: what the handoff adds.", "transport"
        )
        self.registry.add(WorkerGauges(fleet))
        self._of_class: dict[str, _ClassSeries] = {}

    def _histogram(self, name: str, text: str, label: str = "slo_class") -> Histogram:
        return Histogram(f"baton_{name}", text, [label], self.registry, _LATENCY_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"baton_{name}", text, ["slo_class", *labels], self.registry)

    def count_outcome(self, api: str, outcome: str) -> None:
        self._calls.labels(api, outcome).inc()

    def count_verdict(self, slo_class: str, verdict: Verdict) -> None:
        if verdict is Verdict.MET:
            self._goodput.labels(slo_class).inc()
        else:
            self._violations.labels(slo_class, verdict.value).inc()

    def observe(self, record: CallRecord) -> None:
        """Take over everything of one call that was admitted and tokenised."""
        of_class = self._of_class.get(record.slo_class) or self._new_class(record.slo_class)
        if record.ttft_s is not None:
            of_class.ttft.observe(record.ttft_s)
            of_class.prompt.inc(record.prompt_tokens)
            of_class.queries.inc(record.prompt_tokens)
            of_class.hits.inc(record.cached_tokens)
            of_class.local.inc(record.local)
        if record.queue_s is not None:
            of_class.queue.observe(record.queue_s)
        if (split := record.ttft_split) is not None:
            seconds = (split.admission_s, split.queue_s, split.prefill_s, split.network_s)
            for part, part_s in zip(of_class.parts, seconds, strict=True):
                part.observe(part_s)
        if record.handoff_gap_s is not None:
            of_class.gap.observe(record.handoff_gap_s)
        if record.finished:
            of_class.e2e.observe(record.call_s)
        for gaps_s in record.gaps_s:
            of_class.itl.observe_sorted(gaps_s)
        of_class.output.inc(record.completion_tokens)
        of_class.retries.inc(record.num_retries)
        for transfer in record.transfers:
            self._kv_bytes.labels(transfer.transport).inc(transfer.nbytes)
            self._kv_seconds.labels(transfer.transport).observe(transfer.transfer_s)
            self._kv_exposed.labels(transfer.transport).observe(transfer.exposed_s)

    def _new_class(self, name: str) -> _ClassSeries:
        series = self._of_class[name] = _ClassSeries(
            ttft=self._ttft.labels(name),
            queue=self._queue.labels(name),
            parts=tuple(self._parts.labels(name, part) for part in TTFT_PARTS),
            gap=self._gap.labels(name),
            e2e=self._e2e.labels(name),
            itl=self._itl.labels(name),
            prompt=self._prompt.labels(name),
            output=self._output.labels(name),
            queries=self._queries.labels(name),
            hits=self._hits.labels(name),
            retries=self._retries.labels(name),
            local=self._local.labels(name),
        )
        return series
