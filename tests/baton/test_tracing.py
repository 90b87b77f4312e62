"""What a process records: sampled as asked, sent off the loop, whatever callers and collectors do. The collectors are real."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton import clock, otlp
from baton.config import TracingConfig
from baton.config_load import load
from baton.errors import ConfigError, Unavailable
from baton.request import Request, SamplingParams
from baton.tracing import NO_SPAN, NO_TRACE, NO_TRACER, Kind, Trace, Tracer, check, headers_of, open_tracer
from baton.wire import request_from_pb, request_to_pb
from tests.cluster_certificates import needs_openssl
from tests.otlp_collector import PATIENCE_S, Collector, collecting, one, threads_of_the_sdk, tree

ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{ID}-{PARENT}-{flags}" for flags in ("01", "00"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "PAUSE_MS", 20)
    monkeypatch.setattr(otlp, "EXPORT_S", 0.5)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def begun(tracer: Tracer, parent: str = "", state: str = "") -> str:
    """The id of a call's trace, which is over at once; "" = it was not sampled."""
    span = tracer.begin("call", Trace(parent, state), clock.now_s())
    span.end()
    return span.trace_id


# -- off ---------------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_nothing_is_recorded_and_no_package_of_opentelemetry_is_imported() -> None:
    code = (
        "import sys, router.main, worker.main, worker.server, baton.config, baton.tracing as t;"
        "span = t.open_tracer(baton.config.TracingConfig(), 'router', 'r').begin('a', t.Trace('00-x'), 0.0);"
        "print(bool(span), [m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "False []\n"


def test_what_is_off_takes_every_word_and_its_parts_are_itself() -> None:
    with NO_SPAN.part("a", 1.0, Kind.CLIENT) as part:
        part.set({"a": 1})
        part.event("b")
        part.past("c", 1.0, 2.0)
        part.fail("internal")
        assert part is NO_SPAN
    assert not NO_SPAN
    assert NO_SPAN.trace is NO_TRACE
    assert NO_TRACER.begin("a", Trace(SAMPLED), 0.0) is NO_SPAN
    NO_TRACER.close()


def test_without_its_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "baton.otlp", None)
    with pytest.raises(ConfigError, match=r"baton\[tracing\]"):
        open_tracer(TracingConfig("http://127.0.0.1:1"), "router", "r")


# -- on ----------------------------------------------------------------------------------------------------------------


def test_spans_arrive_as_they_were_told_with_what_the_process_is(collector: Collector) -> None:
    tracer = open_tracer(collector.config(service_name="chat", resource_attributes="a=b, c=d"), "router", "router-1")
    began_s = clock.now_s() - 5.0
    call = tracer.begin("call", NO_TRACE, began_s)
    call.set({"n": 1, "ratio": 0.5, "names": ["x", "y"], "is": True})
    call.event("moved", {"to": "w"})
    with call.part("inside"):
        pass
    with pytest.raises(Unavailable), call.part("broken", kind=Kind.CLIENT):
        raise Unavailable("secret words")
    call.past("before", began_s + 1.0, began_s + 3.0, {"k": "v"})
    call.fail("invalid_request")
    call.end()
    tracer.close()
    assert not threads_of_the_sdk()
    spans = collector.wait("call")
    assert tree(spans) == {"call": {"before": {}, "inside": {}, "broken": {}}}
    root, before, broken = one(spans, "call"), one(spans, "before"), one(spans, "broken")
    assert (root.kind, broken.kind, before.kind) == ("SERVER", "CLIENT", "INTERNAL")
    assert root.attributes == {"n": 1, "ratio": 0.5, "names": ["x", "y"], "is": True, "error.type": "invalid_request"}
    assert (root.failed, broken.failed, broken.attributes) == (False, True, {"error.type": "unavailable"})
    assert root.events == (("moved", {"to": "w"}),)
    assert before.end_ns - before.start_ns == pytest.approx(2e9, abs=1e3)
    assert before.start_ns - root.start_ns == pytest.approx(1e9, abs=1e3)
    assert abs(root.end_ns - time.time_ns()) < 60e9  # of the calendar, not of this machine's start
    [resource] = collector.resources
    assert (resource["service.name"], resource["service.instance.id"]) == ("chat-router", "router-1")
    assert (resource["a"], resource["c"]) == ("b", "d")
    assert "secret" not in "".join(collector.text)


def test_a_trace_goes_on_in_another_process_and_a_new_call_may_name_the_one_it_goes_on_with(
    collector: Collector,
) -> None:
    router, worker = (open_tracer(collector.config(), part, part) for part in ("router", "worker"))
    call = router.begin("call", Trace(SAMPLED, "vendor=1"), clock.now_s())
    request = Request(1, (1, 2), SamplingParams(max_tokens=3), trace=call.trace)
    work = worker.begin("work", request_from_pb(request_to_pb(request)).trace, clock.now_s(), came_from=Trace(SAMPLED))
    work.end()
    call.end()
    for tracer in (router, worker):
        tracer.close()
    spans = collector.wait("call", "work")
    assert tree(spans, PARENT) == {"call": {"work": {}}}
    assert {span.trace_id for span in spans} == {ID}
    assert {span.state for span in spans} == {"vendor=1"}
    assert one(spans, "work").links == (ID,)
    assert {span.service for span in spans} == {"baton-router", "baton-worker"}


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        SAMPLED[:-1],
        SAMPLED + "-more",
        SAMPLED.upper(),
        SAMPLED + "0" * 100_000,
        "ff" + SAMPLED[2:],
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{ID}-{'0' * 16}-01",
        f"{SAMPLED},{SAMPLED}",
        "\x00" * 55,
        "00-é" + SAMPLED[4:],
    ],
)
def test_a_malformed_parent_begins_a_trace_of_its_own_and_its_state_is_not_taken(
    collector: Collector, parent: str
) -> None:
    tracer = open_tracer(collector.config(), "router", "r")
    trace_id = begun(tracer, parent, "vendor=1")
    tracer.close()
    [span] = collector.wait("call")
    assert span.trace_id == trace_id != ID
    assert (span.parent_id, span.state) == ("", "")


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        ("a=1,b=2", "a=1,b=2"),
        ("a=1,a=2", ""),
        ("A=1", ""),
        ("a", ""),
        ("a=" + "x" * 600, ""),
        (",".join(f"k{n}=1" for n in range(33)), ""),
    ],
)
def test_a_state_that_is_none_is_dropped_and_its_parent_stays(collector: Collector, state: str, kept: str) -> None:
    tracer = open_tracer(collector.config(), "router", "r")
    assert begun(tracer, SAMPLED, state) == ID
    tracer.close()
    [span] = collector.wait("call")
    assert (span.parent_id, span.state) == (PARENT, kept)


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known(collector: Collector) -> None:
    tracer = open_tracer(collector.config(), "router", "r")
    assert begun(tracer, f"cc{SAMPLED[2:]}-what-the-future-adds") == ID
    tracer.close()


def test_the_ratio_is_of_calls_without_a_trace_and_callers_decide_on_theirs(collector: Collector) -> None:
    tracers = {ratio: open_tracer(collector.config(sample_ratio=ratio), "router", "r") for ratio in (0.0, 0.25, 1.0)}
    num_sampled = {ratio: sum(bool(begun(tracer)) for _ in range(400)) for ratio, tracer in tracers.items()}
    assert (num_sampled[0.0], num_sampled[1.0]) == (0, 400)
    assert 50 < num_sampled[0.25] < 150  # six standard deviations
    for tracer in tracers.values():
        assert begun(tracer, SAMPLED) == ID
        assert begun(tracer, UNSAMPLED) == ""
        tracer.close()


def test_callers_who_are_only_linked_to_neither_choose_the_trace_nor_whether_it_is_sampled(
    collector: Collector,
) -> None:
    tracers = {
        ratio: open_tracer(collector.config(sample_ratio=ratio, callers="link"), "router", "r") for ratio in (0, 1)
    }
    assert begun(tracers[0], SAMPLED) == ""
    assert begun(tracers[1], UNSAMPLED, "vendor=1") not in ("", ID)
    for tracer in tracers.values():
        tracer.close()
    [span] = collector.wait("call")
    assert (span.parent_id, span.state, span.links) == ("", "", (ID,))
    worker = open_tracer(collector.config(callers="link"), "worker", "w")
    assert begun(worker, SAMPLED) == ID  # that is of its router's
    worker.close()


def test_a_worker_begins_no_trace(collector: Collector) -> None:
    tracer = open_tracer(collector.config(), "worker", "w")
    assert begun(tracer) == ""
    assert begun(tracer, SAMPLED) == ID
    tracer.close()


def test_under_a_slow_clock_spans_last_as_long_as_they_did_on_the_wall(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "_scale", 10.0)
    tracer = open_tracer(collector.config(), "router", "r")
    now_s = clock.now_s()
    call = tracer.begin("call", NO_TRACE, now_s - 2.0)
    call.end(now_s)
    monkeypatch.undo()
    tracer.close()
    [span] = collector.wait("call")
    assert span.end_ns - span.start_ns == pytest.approx(20e9, abs=1e4)


# -- the collector -------------------------------------------------------------------------------------------------------


@needs_openssl
def test_headers_and_certificates_go_with_each_export(tmp_path: Path) -> None:
    key, cert = tmp_path / "key", tmp_path / "cert"  # its own authority
    made = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {key} -out {cert} -days 2"
    subprocess.run(
        [*made.split(), "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True,
        capture_output=True,
    )
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], cert.read_bytes(), require_client_auth=True
    )
    (tmp_path / "headers").write_text("api-key=s3cret\nx-scope : a=b\n\n", encoding="utf-8")
    with collecting(credentials=credentials) as collector:
        config = TracingConfig(
            f"https://localhost:{collector.port}",
            headers_file=str(tmp_path / "headers"),
            ca_file=str(cert),
            certificate_file=str(cert),
            key_file=str(key),
        )
        tracer = open_tracer(config, "router", "r")
        begun(tracer)
        tracer.close()
        collector.wait("call")
    assert (collector.headers[0]["api-key"], collector.headers[0]["x-scope"]) == ("s3cret", "a=b")


def away(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "baton.tracing"]


def until_said(caplog: pytest.LogCaptureFixture, event: str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while event not in away(caplog):
        assert time.monotonic() < give_up_s, f"never said: {event}"
        time.sleep(0.01)


def test_a_collector_that_is_away_is_said_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    tracer = open_tracer(TracingConfig(f"http://127.0.0.1:{port}"), "router", "r")
    for _ in range(3 * otlp.BATCH_SPANS):
        begun(tracer)
    until_said(caplog, "trace_collector_away")
    for _ in range(20):
        begun(tracer)
        time.sleep(0.03)
    with collecting(port) as collector:
        give_up_s = time.monotonic() + PATIENCE_S
        while "trace_collector_back" not in away(caplog):
            begun(tracer)
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        assert collector.spans
    tracer.close()
    assert away(caplog) == ["trace_collector_away", "trace_collector_back"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_what_cannot_be_sent_at_all_is_said_once(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "trace-bin=s3cret")  # the SDK reads it, and gRPC wants bytes
    tracer = open_tracer(collector.config(), "router", "r")
    begun(tracer)
    until_said(caplog, "trace_collector_away")
    begun(tracer)
    tracer.close()
    assert away(caplog) == ["trace_export_failed", "trace_collector_away"]
    assert not collector.spans


@pytest.fixture
def black_hole() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def test_of_what_a_slow_collector_has_no_time_for_the_newest_is_kept(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "EXPORT_S", PATIENCE_S)
    monkeypatch.setattr(otlp, "MAX_SPANS", 2 * otlp.BATCH_SPANS)
    collector.gate.clear()
    tracer = open_tracer(collector.config(), "router", "r")
    made = [begun(tracer) for _ in range(10 * otlp.BATCH_SPANS)]
    collector.gate.set()
    tracer.close()
    kept = {span.trace_id for span in collector.spans}
    assert len(kept) <= otlp.MAX_SPANS + otlp.BATCH_SPANS  # what waited, and what was being sent
    assert kept >= set(made[-otlp.MAX_SPANS :])


def test_a_collector_that_never_answers_holds_up_neither_calls_nor_the_end(
    black_hole: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_S", 0.1)
    monkeypatch.setattr(otlp, "EXPORT_S", 3_600.0)
    tracer = open_tracer(TracingConfig(f"http://127.0.0.1:{black_hole}"), "router", "r")
    for _ in range(10 * otlp.BATCH_SPANS):
        assert begun(tracer)
    tracer.close()
    give_up_s = time.monotonic() + PATIENCE_S
    while threads_of_the_sdk():
        assert time.monotonic() < give_up_s, "the SDK's thread goes on"
        time.sleep(0.01)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


# -- what is configured --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({"endpoint": "collector:4317"}, "endpoint", "neither http"),
        ({"endpoint": "grpc://c:4317"}, "endpoint", "neither http"),
        ({"endpoint": "http://collector"}, "endpoint", "host and port"),
        ({"endpoint": "http://:4317"}, "endpoint", "host and port"),
        ({"endpoint": "http://c:99999"}, "endpoint", "is no URL"),
        ({"endpoint": "http://c:4318/v1/traces"}, "endpoint", "has no path"),
        ({"endpoint": "http://me:s3cret@c:4317"}, "endpoint", "headers_file"),
        ({"endpoint": "http://c:4317", "sample_ratio": 1.5}, "sample_ratio", "1.5 is not between 0 and 1"),
        ({"endpoint": "http://c:4317", "sample_ratio": float("nan")}, "sample_ratio", "nan is not between"),
        ({"endpoint": "http://c:4317", "callers": "trust"}, "callers", "neither join nor link"),
        ({"endpoint": "http://c:4317", "ca_file": "x"}, "endpoint", "the scheme is http"),
        ({"endpoint": "https://c:4317", "key_file": "x"}, "certificate_file", "go together"),
        ({"endpoint": "https://c:4317", "ca_file": "/nowhere/ca"}, "ca_file", "cannot read /nowhere/ca"),
        ({"endpoint": "http://c:4317", "headers_file": "/nowhere/h"}, "headers_file", "cannot read /nowhere/h"),
        ({"endpoint": "http://c:4317", "resource_attributes": "a"}, "resource_attributes", "is not name=value"),
    ],
)
def test_what_cannot_be_is_refused_with_its_name_and_no_secret(
    settings: dict[str, object], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        open_tracer(TracingConfig(**settings), "router", "r")  # type: ignore[arg-type]
    assert caught.value.field == f"tracing.{field}"
    assert "s3cret" not in caught.value.message
    assert not threads_of_the_sdk()


def test_a_header_that_is_none_is_named_by_its_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "headers"
    file.write_text("ok=1\nAuthorization s3cret\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2 of") as caught:
        headers_of(str(file))
    assert "s3cret" not in caught.value.message
    file.write_text("trace-bin=abc\n", encoding="utf-8")  # with it no export would leave the process
    with pytest.raises(ConfigError, match=r"line 1 of .* not in -bin"):
        headers_of(str(file))
    file.write_text("a=" + "x" * 20_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="the limit is 16384"):
        headers_of(str(file))


def test_the_cluster_s_settings_are_the_router_s_and_the_standard_s_variable_is_one_of_their_sources() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4317"}
    loaded = load(None, environ, {"tracing.sample_ratio": ("--trace-sample-ratio", 0.5)})
    wanted = TracingConfig("http://a:4317", sample_ratio=0.5)
    assert loaded.config.tracing == loaded.config.router.tracing == wanted
    assert loaded.origins["tracing.endpoint"] == "env OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    environ["BATON__TRACING__ENDPOINT"] = "http://c:4317"
    assert load(None, environ, {}).config.tracing.endpoint == "http://c:4317"


@pytest.mark.parametrize(
    "environ",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        },
    ],
)
def test_what_an_environment_says_to_whoever_runs_in_it_turns_nothing_on(environ: dict[str, str]) -> None:
    assert load(None, environ, {}).config.tracing.endpoint == ""


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"BATON__TRACING__SAMPLE_RATIO": "2"}, "between 0 and 1"),
        ({"BATON__TRACING__ENDPOINT": "c:4317"}, "tracing.endpoint"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "c:4317"}, "tracing.endpoint"),
        ({"BATON__ROUTER__TRACING__ENDPOINT": "http://c:1"}, "follows tracing.endpoint"),
    ],
)
def test_the_loader_refuses_what_cannot_be(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, environ, {})


def test_an_endpoint_may_be_an_address_of_ipv6() -> None:
    assert check(TracingConfig("http://[::1]:4317")).port == 4317
