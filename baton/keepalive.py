"""gRPC channel options for connections on which nothing may be said for hours, and whose other end may vanish without a word
(a host that is gone, a process that is stopped): HTTP/2 pings end them, so that the next one can be made.
"""

from __future__ import annotations

PING_MS = 2_000  # who vanished is noticed within two of them (measured: 3.0 s after a silent cut)
_OPTIONS = (
    ("grpc.keepalive_time_ms", PING_MS),
    (
        "grpc.http2.ping_timeout_ms",
        PING_MS,
    ),  # grpc 1.85 waits for this, 60 s by default; keepalive_timeout_ms alone does nothing
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
)
CLIENT_OPTIONS: tuple[tuple[str, int], ...] = _OPTIONS
SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_MS // 2),  # half: clocks differ
    ("grpc.http2.max_ping_strikes", 0),
)
