"""Opens the call that a gRPC message asks for: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from baton import clock
from baton.errors import BatonError
from baton.v1 import serving_pb2
from router.call import Call, Calls
from router.grpc_messages import check_flush, to_received, to_spec
from router.labels import trace_from
from router.resume import take_up, within
from router.validate import check_token_ids

CallMessage = serving_pb2.GenerateRequest | serving_pb2.ResumeRequest


@asynccontextmanager
async def open_call(
    calls: Calls, message: CallMessage, metadata: Mapping[str, str], timeout_s: float | None, max_bytes: int
) -> AsyncIterator[Call]:
    """Raises: BatonError, as Calls.open."""
    arrival_s = clock.now_s()
    try:
        tenant = calls.tenant(metadata)
        check_flush(message.max_flush_ms)
        if isinstance(message, serving_pb2.GenerateRequest):
            spec, resumed = replace(to_spec(message, metadata, timeout_s, max_bytes), tenant=tenant), None
        else:
            received = to_received(message)
            vocab_size = calls.limits.vocab_size
            for token_ids in received:  # first: to look for the call ends it wherever it runs
                check_token_ids("received", token_ids, vocab_size)
            found = within(await calls.resumable.find(tenant.name, message.request_id), vocab_size)
            resumed = take_up(found, message.next_index, received)
            left_s = min((t for t in (timeout_s, found.ttl_s) if t is not None), default=None)
            labels = replace(found.spec.labels, timeout_s=left_s, trace=trace_from(metadata))
            spec = replace(found.spec, tenant=tenant, labels=labels)
    except BatonError as error:
        calls.refused("grpc", error)
        raise
    async with calls.open(spec, arrival_s, resumed) as call:
        yield call
