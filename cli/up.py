"""`baton up`: start a cluster here, say where it is, keep it until Ctrl-C, leave nothing."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from baton.config import ClusterConfig
from baton.errors import BatonError
from cli.checks import check_all
from cli.cluster import Cluster
from cli.emulation import as_emulated, describe
from cli.options import add_config_flags, load_config
from cli.signals import INTERRUPTED, Interrupted, Signals
from cli.supervisor import ClusterFailed
from cli.terminal import fail, output, say

if TYPE_CHECKING:
    from cli.parsers import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("up", help="start a cluster on this machine and keep it running")
    parser.add_argument("--print-config", action="store_true", help="print every setting with its origin and exit")
    add_config_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    loaded = load_config(args)
    if args.print_config:
        for line in loaded.describe():
            output.print(line, markup=False, soft_wrap=True)
        return 0
    config = as_emulated(loaded.config, time.monotonic())
    spec = check_all(config)
    if emulated := describe(config):
        say(emulated)
    nameless = config.controller.admin_port == 0  # nobody comes back to a folder named after a port the system picked
    with Signals() as signals:
        cluster = Cluster(config, signals)
        status = _serve(cluster, config.model.served_name or spec.name)
        return report_left(cluster.stop(remove_folder=nameless and status == 0)) or status


def _serve(cluster: Cluster, model: str) -> int:
    """Start and wait for the user. Returns the exit status; what failed was said."""
    try:
        cluster.start()
        _say_where(cluster.config, model)
        cluster.wait()
    except Interrupted:
        say("interrupted while starting")
        return INTERRUPTED
    except (ClusterFailed, BatonError) as error:
        explain(error, cluster)
        return 1
    return 0


def explain(error: ClusterFailed | BatonError, cluster: Cluster) -> None:
    """Print what failed and, where it helps, what the process said last and where the rest of it is."""
    fail(str(error))
    if isinstance(error, ClusterFailed):
        say(f"{error.log}\nLogs: {cluster.folder.logs}".lstrip())


def report_left(left: list[str]) -> int:
    """Exit status of a stop."""
    for line in left:
        fail(f"could not clean up: {line}")
    if not left:
        say("Stopped; no process, port or shared-memory file is left.")
    return 1 if left else 0


def _say_where(config: ClusterConfig, model: str) -> None:
    http, grpc, admin = config.router.http_port, config.router.grpc_port, config.controller.admin_port
    which = "" if admin == ClusterConfig().controller.admin_port else f" --admin-port {admin}"
    say(
        f"""
Ready. OpenAI HTTP  http://127.0.0.1:{http}/v1
       gRPC         127.0.0.1:{grpc}  (baton.v1.Serving; reflection is on)
       admin        http://127.0.0.1:{admin}/admin/v1

  baton chat{which} "Why is the sky blue?"
  baton status{which}
  curl http://127.0.0.1:{http}/v1/chat/completions -H 'content-type: application/json' \\
       -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'

Ctrl-C drains and stops."""
    )
