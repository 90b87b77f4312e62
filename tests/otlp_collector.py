"""A collector of traces for tests: a gRPC server of OpenTelemetry's TraceService that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from baton.config import TracingConfig

Tree = dict[str, Any]  # names below names
PATIENCE_S = 20.0  # of a test for what must come; never asserted


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    links: tuple[str, ...]  # trace ids
    state: str


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    spans: list[Seen] = field(default_factory=list)
    resources: list[Mapping[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)  # all that came, to be searched for what must not be in it
    port: int = 0
    gate: threading.Event = field(default_factory=threading.Event)  # exports wait for it

    def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        assert self.gate.wait(PATIENCE_S)
        self.headers.append({str(key): str(value) for key, value in context.invocation_metadata()})
        self.text.append(str(request))
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            self.resources.append(resource)
            for scope in of_resource.scope_spans:
                self.spans += [_seen(span, resource) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def config(self, **settings: Any) -> TracingConfig:
        return TracingConfig(endpoint=f"http://127.0.0.1:{self.port}", **settings)

    def wait(self, *names: str, trace_id: str = "") -> list[Seen]:
        """All spans of the trace, once there is one of each name among them."""
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            found = [span for span in list(self.spans) if trace_id in ("", span.trace_id)]
            if {span.name for span in found} >= set(names):
                return found
            assert time.monotonic() < give_up_s, f"of {names} came {sorted(span.name for span in found)}"
            time.sleep(0.02)


@contextmanager
def collecting(port: int = 0, credentials: grpc.ServerCredentials | None = None) -> Iterator[Collector]:
    collector = Collector()
    collector.gate.set()
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{port}"
    collector.port = (
        server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    )
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def one(spans: list[Seen], name: str) -> Seen:
    """The only span of this name."""
    [found] = [span for span in spans if span.name == name]
    return found


def tree(spans: list[Seen], above: str = "") -> Tree:
    """Names below names; who has two children of one name has a list there."""
    shown: Tree = {}
    for span in sorted((s for s in spans if s.parent_id == above), key=lambda s: s.start_ns):
        below = tree(spans, span.span_id)
        if span.name in shown:
            before = shown[span.name]
            shown[span.name] = [*before, below] if isinstance(before, list) else [before, below]
        else:
            shown[span.name] = below
    return shown


def threads_of_the_sdk() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("Otel")]


def _seen(span: trace_pb2.Span, resource: Mapping[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        events=tuple((event.name, _values(event.attributes)) for event in span.events),
        links=tuple(link.trace_id.hex() for link in span.links),
        state=span.trace_state,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))
