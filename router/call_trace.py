"""What a call's spans say (docs/tracing.md has the table): names and attributes, of OpenTelemetry's GenAI conventions where
those have one, else baton.*.

Source of the names: opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans, state of v1.37 and later. Times, counts and ids
alone: no prompt, no output, no key. A tenant goes by the name that /metrics gives it. Pure, but for what spans do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.request import SamplingParams
from baton.slo import Verdict
from baton.timings import Timings
from baton.tracing import NO_TRACE, Attributes, Span, Tracer
from baton.v1 import worker_pb2
from router.call_events import Usage
from router.call_spec import CallSpec, ChatPrompt
from router.resume import Resumed
from router.sequence import SequenceReport

if TYPE_CHECKING:
    from router.call import Call
    from router.fleet import Placed

PROVIDER = "baton"
MOVED = "baton.sequence_moved"
REROUTED = "baton.handoff_rerouted"


def begin(tracer: Tracer, spec: CallSpec, model: str, arrival_s: float, resumed: Resumed | None) -> Span:
    """The call's own span. `model`: as it is served here, whatever the caller calls it."""
    is_chat = spec.api == "chat" or isinstance(spec.prompt, ChatPrompt)
    operation = "chat" if is_chat else "text_completion"
    came_from = resumed.found.request.trace if resumed is not None else NO_TRACE
    span = tracer.begin(f"{operation} {model}", spec.labels.trace, arrival_s, came_from)
    if span:
        span.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": model,
                "baton.api": spec.api,
                "baton.resumed": resumed is not None,
            }
        )
    return span


def say_call(call: Call, tenant: str, outcome: str, verdict: Verdict | None, usage: Usage, timings: Timings) -> None:
    """What is known of a call at its end."""
    if not call.span:
        return
    reports = call.reports
    said: dict[str, str | int | float | list[str]] = {
        **_asked(call.request.sampling, len(reports)),
        "gen_ai.response.id": call.request_id,
        "gen_ai.response.finish_reasons": [report.finish.name.lower() for report in reports],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "baton.tenant": tenant,
        "baton.slo.class": call.slo.name,
        "baton.outcome": outcome,
        "baton.num_retries": sum(report.num_retries for report in reports),
    }
    if timings.ttft_ms:
        said["gen_ai.response.time_to_first_chunk"] = timings.ttft_ms / 1e3
        said["baton.tpot_ms"] = timings.tpot_ms
        said["baton.handoff_gap_ms"] = timings.handoff_gap_ms
    if verdict is not None:
        said["baton.slo.verdict"] = verdict
    call.span.set(said)


def _asked(sampling: SamplingParams, num_choices: int) -> dict[str, int | float]:
    """As far as it is not the usual: each attribute costs some 2 us here and 3 where it is written."""
    usual = SamplingParams(sampling.max_tokens)
    asked = {
        "gen_ai.request.choice.count": (num_choices, 1),
        "gen_ai.request.temperature": (sampling.temperature, usual.temperature),
        "gen_ai.request.top_p": (sampling.top_p, usual.top_p),
        "gen_ai.request.top_k": (sampling.top_k, usual.top_k),
        "gen_ai.request.frequency_penalty": (sampling.frequency_penalty, usual.frequency_penalty),
        "gen_ai.request.presence_penalty": (sampling.presence_penalty, usual.presence_penalty),
    }
    given = {name: value for name, (value, default) in asked.items() if value != default}
    return {"gen_ai.request.max_tokens": sampling.max_tokens, **given}


def say_place(span: Span, placed: Placed) -> None:
    if span:
        plan = placed.plan
        span.set(
            {
                "baton.prefill_worker": placed.prefill.worker_id,
                "baton.decode_worker": placed.decode.worker_id,
                "baton.local": plan.choice.local,
                "baton.lacking_tokens": plan.lacking_tokens,
                "baton.pull_blocks": plan.pull.num_blocks if plan.pull is not None else 0,
            }
        )


def say_attempt(span: Span, report: SequenceReport, first_token_s: float, num_tokens: int) -> None:
    """`num_tokens` came of it, the first one at `first_token_s`."""
    if span:
        told: Attributes = {"baton.num_tokens": num_tokens}
        workers = {"baton.prefill_worker": report.prefill_worker, "baton.decode_worker": report.decode_worker}
        span.set({**workers, **told})
        if num_tokens:
            span.past("stream", first_token_s, report.last_token_s, told)


def say_stats(span: Span, told: worker_pb2.SeqStats) -> None:
    """What the prefill worker counted, also where it records no spans itself."""
    if span:
        span.set(
            {
                "baton.queue_ms": told.queue_ms,
                "baton.prefill_ms": told.prefill_ms,
                "baton.cached_tokens": told.cached_tokens,
                "baton.computed_tokens": told.computed_tokens,
                "baton.kv_bytes": told.kv_bytes,
                "baton.kv_transfer_ms": told.kv_transfer_ms,
                "baton.kv_transport": told.transport,
            }
        )


def move(worker: str, num_tokens: int, code: str) -> Attributes:
    """Of MOVED: the worker that failed, and what the client had by then."""
    return {"baton.worker": worker, "baton.num_tokens": num_tokens, "error.type": code}


def reroute(lost: str, decode_worker: str, code: str) -> Attributes:
    """Of REROUTED: from which decode worker to which."""
    return {"baton.worker": lost, "baton.decode_worker": decode_worker, "error.type": code}
