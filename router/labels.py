"""Headers and gRPC metadata that say who asks and what for; the keys are the same in both (DESIGN section 12)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.errors import InvalidRequest
from baton.tracing import NO_TRACE, Trace
from router.call_spec import CallLabels

REQUEST_ID = "x-request-id"
SESSION_ID = "x-session-id"
SLO_CLASS = "x-slo-class"
SLO_TTFT_MS = "x-slo-ttft-ms"
SLO_TPOT_MS = "x-slo-tpot-ms"
TIMEOUT_MS = "x-request-timeout-ms"
EXPLAIN = "x-baton-explain"  # 1: the answer says why it was made where it was
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"  # W3C Trace Context


def labels_from(headers: Mapping[str, str], own: CallLabels | None = None) -> CallLabels:
    """Read the headers; what the request says itself (`own`) wins.

    Raises:
        InvalidRequest: a header that should be a number is none.
    """
    own = own or CallLabels()
    timeout_ms = _number(headers, TIMEOUT_MS)
    return CallLabels(
        request_id=own.request_id or headers.get(REQUEST_ID, ""),
        session_id=own.session_id or headers.get(SESSION_ID, ""),
        slo_class=own.slo_class or headers.get(SLO_CLASS, ""),
        slo_ttft_ms=_first(own.slo_ttft_ms, _number(headers, SLO_TTFT_MS)),
        slo_tpot_ms=_first(own.slo_tpot_ms, _number(headers, SLO_TPOT_MS)),
        timeout_s=_first(own.timeout_s, None if timeout_ms is None else timeout_ms / 1e3),
        explain=own.explain or headers.get(EXPLAIN) == "1",
        trace=trace_from(headers),
    )


def trace_from(headers: Mapping[str, str]) -> Trace:
    """The trace that the caller's call belongs to, as it says."""
    parent = headers.get(TRACEPARENT)
    return Trace(parent, headers.get(TRACESTATE, "")) if parent else NO_TRACE


def fields_of(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Of a repeated name the last one counts, but for a trace's: two parents are none, two states are one (RFC 9110, 5.3)."""
    if len(fields := dict(pairs)) < len(pairs):
        for name in (TRACEPARENT, TRACESTATE):
            if name in fields:
                fields[name] = ",".join(value for other, value in pairs if other == name)
    return fields


def _first(own: float | None, header: float | None) -> float | None:
    return header if own is None else own


def _number(headers: Mapping[str, str], key: str) -> float | None:
    text = headers.get(key)
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{key} is not a number of milliseconds", field=key) from None
