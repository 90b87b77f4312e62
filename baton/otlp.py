"""Records spans with OpenTelemetry's SDK and sends them to a collector, as OTLP over gRPC. The only module that imports the SDK.

    event loop      makes and ends spans: some microseconds each (docs/tracing.md); an ended one goes into a queue of MAX_SPANS
    SDK's thread    takes them out, batch by batch, and sends them

Nobody waits for the collector. While it is away the queue keeps the newest spans; one line in the log says so, and one that it
is back. `close` gives what is left CLOSE_S. Two things are the whole process's: the SDK's own log is silenced, as it writes a
line per batch, and a router's threads change over sooner.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import threading
import time
from collections.abc import Sequence
from urllib.parse import SplitResult

import grpc
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton import clock
from baton.config import TracingConfig
from baton.errors import CALLERS_OWN
from baton.log import get_log
from baton.tracing import NO_SPAN, NO_TRACE, NOTHING, Attributes, Kind, Span, Trace, Tracer, attributes_of, read_file

log = get_log("tracing")

MAX_SPANS = 4_096  # that wait to be sent, some 2 KB each: 8 MB; SDK's default is 2,048, of smaller ones
BATCH_SPANS = 128  # 5 ms of the SDK's thread, measured: docs/tracing.md
PAUSE_MS = 1_000  # between two looks at a queue that is not full: what a killed process loses
EXPORT_S = 5.0  # that a batch is tried for; the SDK's default of 10 s would lose more of what comes meanwhile
CLOSE_S = 2.0  # below the 3 s that the controller gives a worker to stop (router/controller/pools.py)
# For which the SDK's thread may keep a router's loop waiting; Python's default is 0.005. Workers have one of their own
SWITCH_INTERVAL_S = 0.0005
MAX_PEM_BYTES = 1 << 20  # the system's own bundle of authorities has 0.2 MB

_W3C = TraceContextTextMapPropagator()  # ignores what is malformed or over-long, as the standard asks; knows no baggage
_KINDS = {Kind.INTERNAL: SpanKind.INTERNAL, Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT}
_LAST_LEVEL = logging.CRITICAL + 1


class OtlpTracer(Tracer):
    """One process's."""

    def __init__(
        self,
        config: TracingConfig,
        target: SplitResult,
        headers: Sequence[tuple[str, str]],
        part: str,
        instance: str,
    ) -> None:
        """`target`: config.endpoint, checked. Raises: ConfigError: a certificate cannot be read."""
        logging.getLogger("opentelemetry").setLevel(_LAST_LEVEL)
        self._exporter = _NotingExporter(_exporter(config, target, headers), target.netloc)
        is_router = part == "router"  # a worker records what its router records: ratio 0 begins no trace
        if is_router:
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._joins = not is_router or config.callers == "join"
        sampler = ParentBased(TraceIdRatioBased(config.sample_ratio if is_router else 0.0))
        self._provider = TracerProvider(
            sampler, _resource(config, part, instance), shutdown_on_exit=False
        )  # fmt: skip
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, MAX_SPANS, PAUSE_MS, BATCH_SPANS, 1e3 * EXPORT_S)
        )
        self._tracer = self._provider.get_tracer("baton")

    def begin(self, name: str, trace: Trace, start_s: float, came_from: Trace = NO_TRACE) -> Span:
        moment = _Moment()
        above, named = (trace, (came_from,)) if self._joins else (NO_TRACE, (trace, came_from))
        links = [Link(remote) for one in named if (remote := _remote(one)).is_valid]
        begun = self._tracer.start_span(
            name, _context(above), SpanKind.SERVER, links=links, start_time=moment.unix_ns(start_s)
        )  # fmt: skip
        return _Recorded(self._tracer, begun, moment) if begun.is_recording() else NO_SPAN

    def close(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, name="traces end", daemon=True)
        ending.start()
        ending.join(CLOSE_S)
        self._exporter.shutdown()  # breaks off what is still being sent, so that the thread ends, too


class _Moment:
    """One moment on both clocks, by which all spans of a trace are dated: their order is that of the monotonic one."""

    __slots__ = ("_now_s", "_unix_ns")

    def __init__(self) -> None:
        self._unix_ns = time.time_ns()
        self._now_s = clock.now_s()

    def unix_ns(self, at_s: float) -> int:
        return self._unix_ns + int(1e9 * clock.real_s(at_s - self._now_s))


class _Recorded(Span):
    __slots__ = ("_context", "_moment", "_span", "_tracer", "trace", "trace_id")

    def __init__(self, tracer: SdkTracer, span: SdkSpan, moment: _Moment) -> None:
        self._tracer = tracer
        self._span = span
        self._moment = moment
        self._context = set_span_in_context(span, Context())
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        parent = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"
        self.trace = Trace(parent, context.trace_state.to_header())

    def __bool__(self) -> bool:
        return True

    def part(self, name: str, start_s: float | None = None, kind: Kind = Kind.INTERNAL) -> Span:
        return _Recorded(self._tracer, self._begin(name, start_s, kind), self._moment)

    def past(self, name: str, start_s: float, end_s: float, attributes: Attributes = NOTHING) -> None:
        self._begin(name, start_s, Kind.INTERNAL, attributes).end(self._moment.unix_ns(max(start_s, end_s)))

    def _begin(self, name: str, start_s: float | None, kind: Kind, attributes: Attributes = NOTHING) -> SdkSpan:
        return self._tracer.start_span(
            name, self._context, _KINDS[kind], attributes, start_time=self._unix_ns(start_s)
        )  # fmt: skip

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes = NOTHING, at_s: float | None = None) -> None:
        self._span.add_event(name, attributes, self._unix_ns(at_s))

    def fail(self, code: str) -> None:
        self._span.set_attribute("error.type", code)
        if code not in CALLERS_OWN:
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self, at_s: float | None = None) -> None:
        self._span.end(self._unix_ns(at_s))

    def _unix_ns(self, at_s: float | None) -> int:
        return self._moment.unix_ns(clock.now_s() if at_s is None else at_s)


class _NotingExporter(SpanExporter):
    """Says once that the collector is away, and once that it is back. On the SDK's thread."""

    def __init__(self, exporter: SpanExporter, collector: str) -> None:
        self._exporter = exporter
        self._collector = collector
        self._num_lost = 0  # since it went away, those aside that the queue had no room for

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:  # it cannot be sent at all, for a header of the environment's; the SDK's own log is silenced
            if not self._num_lost:
                log.exception("trace_export_failed")
            result = SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            if not self._num_lost:
                log.warning("trace_collector_away", collector=self._collector)
            self._num_lost += len(spans)
        elif self._num_lost:
            log.info("trace_collector_back", collector=self._collector, num_lost_spans=self._num_lost)
            self._num_lost = 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _context(trace: Trace) -> Context:
    """What `trace` says, as far as it is well-formed."""
    return _W3C.extract({"traceparent": trace.parent, "tracestate": trace.state}, Context()) if trace else Context()


def _remote(trace: Trace) -> SpanContext:
    return get_current_span(_context(trace)).get_span_context()


def _exporter(config: TracingConfig, target: SplitResult, headers: Sequence[tuple[str, str]]) -> OTLPSpanExporter:
    return OTLPSpanExporter(
        endpoint=f"{target.scheme}://{target.netloc}",
        insecure=target.scheme == "http",
        credentials=_credentials(config) if target.scheme == "https" else None,
        headers=headers,
        timeout=EXPORT_S,
    )


def _credentials(config: TracingConfig) -> grpc.ChannelCredentials:
    def pem(setting: str, file: str) -> bytes | None:
        return read_file(setting, file, MAX_PEM_BYTES) if file else None

    return grpc.ssl_channel_credentials(
        pem("ca_file", config.ca_file),
        pem("key_file", config.key_file),
        pem("certificate_file", config.certificate_file),
    )


def _resource(config: TracingConfig, part: str, instance: str) -> Resource:
    """OTEL_RESOURCE_ATTRIBUTES of the environment are among them, ours win."""
    return Resource.create(
        {
            "service.name": f"{config.service_name}-{part}",
            "service.instance.id": instance,
            "service.version": importlib.metadata.version("baton"),
            **attributes_of(config.resource_attributes),
        }
    )
