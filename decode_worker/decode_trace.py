"""What a sequence's spans say, all told at its end from what was noted on the way (docs/tracing.md has the table)."""

from __future__ import annotations

from baton.errors import BatonError
from baton.tracing import Attributes, Span, Tracer
from decode_worker.decode import Decode
from engine.ports import SequenceStats
from worker.links import peer_worker


def tell(
    tracer: Tracer, decode: Decode, outcome: str, error: BatonError | None, stats: SequenceStats, now_s: float
) -> None:
    """`outcome`: finished | cancelled | failed, or given_up: never adopted."""
    if not decode.request.trace:
        return
    span = tracer.begin("decode", decode.request.trace, decode.arrival_s)
    if not span:
        return
    span.set({"baton.outcome": outcome, "baton.num_preemptions": stats.num_preemptions})
    if error is not None:
        span.fail(error.code)
    if decode.peer:
        _tell_handed_over(span, decode, now_s)
    else:
        _tell_local(span, decode, stats, now_s)
    span.end(now_s)


def _tell_handed_over(span: Span, decode: Decode, now_s: float) -> None:
    span.past("reserve", decode.arrival_s, decode.granted_s or now_s)
    if decode.granted_s:
        received: Attributes = {"baton.prefill_worker": peer_worker(decode.peer), "baton.kv_bytes": decode.nbytes}
        span.past("kv_receive", decode.granted_s, decode.adopted_s or now_s, received)
    if decode.adopted_s:
        span.past("generate", decode.adopted_s, now_s)


def _tell_local(span: Span, decode: Decode, stats: SequenceStats, now_s: float) -> None:
    if not (stats.queue_ms or stats.prefill_ms):
        return  # it was broken off: how far it had come its engine does not say
    began_s = decode.arrival_s + stats.queue_ms / 1e3
    first_token_s = began_s + stats.prefill_ms / 1e3
    span.past("queue", decode.arrival_s, began_s)
    if stats.prefill_ms:
        tokens = {
            "baton.cached_tokens": stats.num_cached_tokens,
            "baton.computed_tokens": stats.num_computed_tokens,
        }
        span.past("compute", began_s, first_token_s, tokens)
        span.past("generate", first_token_s, now_s)
