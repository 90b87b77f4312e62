"""Entry of a router process: `python -m router.main --config router.json`.

Prints one JSON line {"http_port", "grpc_port", "pid"} on stdout once both ports answer, then serves until SIGTERM or SIGINT:
it takes no new call from then on and lets running ones end (at most `drain_s`); a second signal ends them at once with
UNAVAILABLE. A start that cannot succeed prints one line on stderr and exits with 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from baton import clock, grpc_wakeups, tracing
from baton.config import RouterConfig
from baton.config_load import from_json
from baton.errors import BatonError
from baton.log import configure
from baton.model_files import describe_model
from router.front_end import FrontEnd


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        config = _config(options)
        configure("router", config.log_level)
        _open_files()
        clock.slow_down(config.time_scale)
        workers = [address for address in options.workers.split(",") if address]
        clock.run(_serve(config, workers), uvloop.new_event_loop)
    except (BatonError, OSError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: RouterConfig, workers: Sequence[str]) -> None:
    grpc_wakeups.never_block()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal)
    front_end = FrontEnd(config, describe_model(config.model.path), workers)
    await front_end.start()
    _collect_rarely()
    ready = {"http_port": front_end.http_port, "grpc_port": front_end.grpc_port, "pid": os.getpid()}
    print(json.dumps(ready), flush=True)
    try:
        await stop.wait()
        await front_end.drain(hurry)
    finally:
        await front_end.stop()


def _collect_rarely() -> None:
    """A full collection holds every stream: 50 ms for what was made until now, which stays and is left out from here on.

    Calls leave next to no cycles, so collecting everything less often costs no memory that one would notice. The young are
    collected in portions of 20,000: 100,000 took 35 ms where many streams began at once.
    """
    gc.freeze()
    gc.set_threshold(2_000, 10, 500)  # a full one after ten million objects instead of 70,000


def _open_files() -> None:
    """Connections are bounded by what the system allows, not by a shell's default of 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="router", description="Serve Baton's public APIs.")
    parser.add_argument("--config", type=Path, help="a RouterConfig as JSON")
    parser.add_argument("--workers", default="", help="host:port,... of a fixed fleet, instead of a controller's")
    parser.add_argument("--http-port", type=int)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--model", help="a name, a Hugging Face directory or a .gguf file")
    tracing.add_flags(parser)
    return parser


def _config(options: argparse.Namespace) -> RouterConfig:
    """The file, overridden by flags."""
    config = from_json(RouterConfig, options.config.read_text()) if options.config else RouterConfig()
    if options.http_port is not None:
        config = dataclasses.replace(config, http_port=options.http_port)
    if options.grpc_port is not None:
        config = dataclasses.replace(config, grpc_port=options.grpc_port)
    config = dataclasses.replace(config, tracing=tracing.from_flags(config.tracing, options))
    if options.model:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=options.model))
    return config


if __name__ == "__main__":
    sys.exit(main())
