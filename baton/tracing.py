"""Traces of calls as OpenTelemetry has them: the words in which routers and workers tell what becomes of a call.

    tracer = open_tracer(config.tracing, "router", router_id)      once per process, from its entry
    span = tracer.begin("chat tiny", trace, arrival_s)             `trace`: what the caller sent
    with span.part("admission", arrival_s): ...
    span.past("compute", start_s, end_s, {"baton.num_chunks": 3})  told when it is over: nothing is held meanwhile
    span.end()

Off by default: then a tracer is `Tracer` and every span `NO_SPAN`, which do nothing, and no package of OpenTelemetry is
imported. So is each call that is not sampled. Where it is on, baton/otlp.py is the only module that knows the SDK.

Spans are of calls, their attempts and their phases, never of a token or a step. They carry ids, counts and times: no prompt, no
output, no key, no message of an error. Times are `clock.now_s()`. Event loop only; what is said costs no wait.
"""

from __future__ import annotations

import argparse
import asyncio
import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from urllib.parse import SplitResult, urlsplit

from baton.config import TracingConfig
from baton.errors import BatonError, ConfigError

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
NOTHING: Attributes = {}
CALLERS = ("join", "link")
MAX_HEADERS_BYTES = 16 << 10  # of headers_file: what gRPC servers take of metadata at most, by default (grpc_types.h)
# As gRPC's HTTP/2 mapping has metadata; of names in -bin values are bytes, and the SDK knows none.
_HEADER = re.compile(r"(?P<name>[a-z0-9_.-]+)(?<!-bin)\s*[=:]\s*(?P<value>[\x20-\x7e]+)")


class Kind(enum.Enum):
    """OpenTelemetry's span kinds."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a trace goes on, as W3C Trace Context writes it: two headers, which may be whatever a client sent."""

    parent: str = ""  # traceparent; "" = nobody records
    state: str = ""  # tracestate

    def __bool__(self) -> bool:
        return bool(self.parent)


NO_TRACE = Trace()


class Span:
    """One that nobody records; baton/otlp.py has the other kind. True where it is recorded."""

    __slots__ = ()
    trace: Trace = NO_TRACE  # for who goes on below it elsewhere
    trace_id: str = ""

    def __bool__(self) -> bool:
        return False

    def part(self, name: str, start_s: float | None = None, kind: Kind = Kind.INTERNAL) -> Span:
        """One below it, which its `with` ends; None = it begins now."""
        return self

    def past(self, name: str, start_s: float, end_s: float, attributes: Attributes = NOTHING) -> None:
        """Tell of a part that is over."""

    def set(self, attributes: Attributes) -> None: ...

    def event(self, name: str, attributes: Attributes = NOTHING, at_s: float | None = None) -> None: ...

    def fail(self, code: str) -> None:
        """It ended in an error of that code (baton/errors.py); where the caller alone is to blame, no part has failed."""

    def end(self, at_s: float | None = None) -> None:
        """Once. Nothing is recorded after it."""

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self:
            if error is not None:
                self.fail(_code(error))
            self.end()


NO_SPAN = Span()


def _code(error: BaseException) -> str:
    if isinstance(error, BatonError):
        return error.code
    return "cancelled" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "internal"


class Tracer:
    """One that records nothing."""

    def begin(self, name: str, trace: Trace, start_s: float, came_from: Trace = NO_TRACE) -> Span:
        """The first span of a call in this process, below `trace`; `came_from`: another trace, which it only names."""
        return NO_SPAN

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""


NO_TRACER = Tracer()


def open_tracer(config: TracingConfig, part: str, instance: str) -> Tracer:
    """What a process records with; `part`: router or worker, of which routers alone begin traces.

    Raises:
        ConfigError: it cannot be as configured.
    """
    if not config.endpoint:
        return NO_TRACER
    target = check(config)
    try:
        from baton.otlp import OtlpTracer  # its packages are an extra
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint is set, but OpenTelemetry is missing ({error}); pip install 'baton[tracing]'",
            field="tracing.endpoint",
        ) from None
    return OtlpTracer(config, target, headers_of(config.headers_file), part, instance)


# -- what is configured --------------------------------------------------------------------------------------------------


def check(config: TracingConfig) -> SplitResult:
    """The endpoint, taken apart. Raises: ConfigError."""
    target = _endpoint(config.endpoint)
    if config.endpoint and not 0.0 <= config.sample_ratio <= 1.0:
        raise _wrong("sample_ratio", f"{config.sample_ratio:g} is not between 0 and 1")
    if config.callers not in CALLERS:
        raise _wrong("callers", f"{config.callers!r} is neither join nor link")
    attributes_of(config.resource_attributes)
    if bool(config.certificate_file) is not bool(config.key_file):
        raise _wrong("certificate_file", "a certificate and its key go together: set tracing.key_file, too, or neither")
    if target.scheme == "http" and (config.ca_file or config.certificate_file):
        raise _wrong("endpoint", "certificates are set, but the scheme is http: set https, or no certificates")
    return target


def add_flags(parser: argparse.ArgumentParser) -> None:
    """For processes that are started by hand; `baton up` has them among all others (cli/options.py)."""
    parser.add_argument("--otlp-traces-endpoint", metavar="URL", help="http://host:4317 of a collector of traces")
    parser.add_argument("--trace-sample-ratio", metavar="RATIO", type=float, help="of calls that come without a trace")


def from_flags(config: TracingConfig, options: argparse.Namespace) -> TracingConfig:
    """`config` where no flag was given."""
    endpoint, ratio = options.otlp_traces_endpoint, options.trace_sample_ratio
    return replace(
        config,
        endpoint=config.endpoint if endpoint is None else endpoint,
        sample_ratio=config.sample_ratio if ratio is None else ratio,
    )


def _endpoint(endpoint: str) -> SplitResult:
    try:
        target = urlsplit(endpoint)
        port = target.port
    except ValueError:
        raise _wrong("endpoint", "is no URL, such as http://collector:4317") from None
    if not endpoint:
        return target
    if target.scheme not in ("http", "https"):
        raise _wrong("endpoint", f"the scheme {target.scheme!r} is neither http (no TLS) nor https")
    if target.username is not None:
        raise _wrong("endpoint", "names a user: secrets go into tracing.headers_file")
    if not target.hostname or port is None:
        raise _wrong("endpoint", "host and port are needed, such as http://collector:4317")
    if target.path.strip("/") or target.query or target.fragment:
        raise _wrong("endpoint", "OTLP over gRPC has no path: leave out what follows the port")
    return target


def attributes_of(text: str) -> dict[str, str]:
    """a=b,c=d, as OTEL_RESOURCE_ATTRIBUTES has it. Raises: ConfigError."""
    pairs = [item.partition("=") for item in text.split(",") if item.strip()]
    if any(not (key.strip() and equals) for key, equals, _ in pairs):
        raise _wrong("resource_attributes", "is not name=value, ...")
    return {key.strip(): value.strip() for key, _, value in pairs}


def headers_of(file: str) -> tuple[tuple[str, str], ...]:
    """Of each export: `name=value` or `name: value`, one a line. Says no value. Raises: ConfigError."""
    if not file:
        return ()
    lines = read_file("headers_file", file, MAX_HEADERS_BYTES).decode("latin-1").splitlines()
    found: list[tuple[str, str]] = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line:
            continue
        header = _HEADER.fullmatch(line)
        if header is None:
            raise _wrong(
                "headers_file", f"line {number} of {file} is not name=value, the name in lower case and not in -bin"
            )
        found.append((header["name"], header["value"]))
    return tuple(found)


def read_file(setting: str, file: str, max_bytes: int) -> bytes:
    """Raises: ConfigError."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise _wrong(setting, f"cannot read {file}: {error.strerror}") from None
    if len(content) > max_bytes:
        raise _wrong(setting, f"{file} has {len(content)} bytes; the limit is {max_bytes}")
    return content


def _wrong(setting: str, why: str) -> ConfigError:
    return ConfigError(f"tracing.{setting}: {why}", field=f"tracing.{setting}")
