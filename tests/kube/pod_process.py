"""`python -m tests.kube.pod_process [--drain SECONDS] [--deaf]`: what a pod runs where no model is needed.

It listens on $POD_IP:8080: `/ready` says yes from the start, `/env` shows the environment, `/drain` makes it unready, as a
preStop hook does. SIGTERM ends it after so many seconds, with status 0; deaf it ignores it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8080
DRAINING = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/drain":
            DRAINING.set()
        body = json.dumps(dict(os.environ)).encode() if self.path == "/env" else b""
        self.send_response(503 if self.path == "/ready" and DRAINING.is_set() else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads it."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--drain", type=float, default=0.0)
    parser.add_argument("--deaf", action="store_true")
    options = parser.parse_args()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else lambda *_: ended.set())
    server = ThreadingHTTPServer((os.environ["POD_IP"], PORT), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ended.wait()
    threading.Event().wait(options.drain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
