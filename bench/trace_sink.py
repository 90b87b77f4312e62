"""A collector of traces that takes all and keeps nothing: `python -m bench.trace_sink FD`, a bench's child.

Its first word is its port (an int); it ends with the pipe. It parses nothing, so that a router's figures are the router's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import grpc

EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"  # of opentelemetry-proto


def _take(request: bytes, context: grpc.ServicerContext) -> bytes:
    return b""  # an ExportTraceServiceResponse in which nothing was rejected


def main() -> None:
    parent = Connection(int(sys.argv[1]))
    server = grpc.server(ThreadPoolExecutor(2))
    method = grpc.unary_unary_rpc_method_handler(_take)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(EXPORT, {"Export": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    parent.send(port)
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os._exit(0)


if __name__ == "__main__":
    main()
