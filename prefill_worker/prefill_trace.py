"""What a prompt's spans say, all told at its end from what was noted on the way (docs/tracing.md has the table)."""

from __future__ import annotations

from baton.tracing import Attributes, Span, Tracer
from baton.v1 import worker_pb2
from prefill_worker.prefill import Prefill
from worker.links import peer_worker


def tell(tracer: Tracer, prefill: Prefill, ended: worker_pb2.Ended, now_s: float) -> None:
    """`ended`: what its router is told."""
    if not prefill.request.trace:
        return
    span, stats = tracer.begin("prefill", prefill.request.trace, prefill.arrival_s), ended.stats
    if not span:
        return
    span.set(
        {
            "baton.outcome": worker_pb2.Outcome.Name(ended.outcome).removeprefix("OUTCOME_").lower(),
            "baton.prompt_tokens": len(prefill.request.token_ids),
            "baton.cached_tokens": stats.cached_tokens,
            "baton.computed_tokens": stats.computed_tokens,
            "baton.num_chunks": len(prefill.chunks),
            "baton.num_reroutes": prefill.reroute,
        }
    )
    if ended.HasField("error"):
        span.fail(ended.error.code)
    _tell_parts(span, prefill, stats, now_s)
    span.end(now_s)


def _tell_parts(span: Span, prefill: Prefill, stats: worker_pb2.SeqStats, now_s: float) -> None:
    ended_s = prefill.prefill_ended_s
    given_s = now_s if prefill.started_s is None else prefill.started_s  # all that is known where it was broken off
    began_s = ended_s - stats.prefill_ms / 1e3 if ended_s else given_s
    span.past("queue", prefill.arrival_s, began_s)
    if prefill.granted_s:
        span.past("reserve", prefill.granted_s - prefill.reserve_wait_s, prefill.granted_s)
    if prefill.pull is not None and prefill.started_s is not None and prefill.pull_ended_s:
        pulled = {"baton.kv_bytes": stats.pulled_bytes, "baton.kv_blocks": stats.pulled_blocks}
        span.past("kv_pull", prefill.started_s, prefill.pull_ended_s, pulled)
    if ended_s:
        computing = span.part("compute", began_s)
        for chunk_s, num_computed_tokens in prefill.chunks:
            computing.event("baton.chunk", {"baton.computed_tokens": num_computed_tokens}, chunk_s)
        computing.end(ended_s)
    if prefill.ship_started_s is not None:
        sent: Attributes = {
            "baton.decode_worker": peer_worker(prefill.peer),
            "baton.kv_bytes": stats.kv_bytes,
            "baton.kv_blocks": stats.kv_blocks,
            "baton.kv_transport": stats.transport,
            "baton.num_resends": prefill.num_resends,
        }
        span.past("kv_transfer", prefill.ship_started_s, now_s, sent)
