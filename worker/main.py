"""`python -m worker.main --config FILE`: one worker without Ray. Prints one JSON line when it answers; ends on SIGTERM.

The first signal drains: no new work, what runs goes on, for at most `drain_s`. A second one ends it at once. Sequences that are
open at the end are their routers' to continue elsewhere; they hear UNAVAILABLE.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
from pathlib import Path

from baton import clock, tracing
from baton.config import WorkerConfig
from baton.config_load import from_json
from baton.errors import ConfigError
from baton.log import configure
from worker.engine_thread import favour_the_loop
from worker.loading import LoadModel
from worker.server import WorkerServer


def main(load: LoadModel | None = None) -> int:
    """Run one worker to its end. Returns the exit status. `load`: tests bring a runner of their own."""
    parser = argparse.ArgumentParser(description="Run one Baton worker.")
    parser.add_argument("--config", type=Path, required=True, help="WorkerConfig as JSON")
    tracing.add_flags(parser)
    options = parser.parse_args()
    config = from_json(WorkerConfig, options.config.read_text())
    config = dataclasses.replace(config, tracing=tracing.from_flags(config.tracing, options))
    clock.slow_down(config.emulation.time_scale)
    configure(config.worker_id, config.log_level)
    favour_the_loop()
    ended, hurry = threading.Event(), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: hurry.set() if ended.is_set() else ended.set())
    failed: list[BaseException] = []

    def on_fatal(error: BaseException) -> None:
        failed.append(error)
        ended.set()
        hurry.set()

    server = WorkerServer(config, on_fatal, load)
    try:
        port = server.start()
    except ConfigError as error:
        print(f"worker: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"port": port, "epoch": server.epoch, "pid": os.getpid()}), flush=True)
    ended.wait()
    if not failed:
        server.drain(hurry, config.drain_s)
    server.stop()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
