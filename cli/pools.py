"""`baton pools`: how large each pool is and should be, who is in it, and what the autoscaler may do."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from cli.running import RunningCluster, add_cluster_flag
from cli.terminal import output, table

if TYPE_CHECKING:
    from cli.parsers import Commands

_COUNTS = ("desired", "num_ready", "num_starting", "num_flipping", "num_draining", "num_standby", "num_failed")
_COLUMNS = ("pool", *(name.removeprefix("num_") for name in _COUNTS), "running", "waiting", "workers")


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("pools", help="size and state of each pool, and what the autoscaler may do")
    parser.add_argument("--json", action="store_true", help="print the admin endpoint's answer")
    add_cluster_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    answer: dict[str, Any] = RunningCluster.find(args.admin_port).get("/admin/v1/pools")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [_row(role, pool) for role, pool in answer["pools"].items() if pool["workers"]]
    table("Pools", list(_COLUMNS), rows)
    for line in _autoscaler_lines(answer["autoscaler"]):
        output.print(line, markup=False, soft_wrap=True)
    return 0


def _row(role: str, pool: dict[str, Any]) -> list[str]:
    counts = [str(pool[name]) for name in (*_COUNTS, "num_running", "num_waiting")]
    return [role, *counts, ", ".join(pool["workers"])]


def _autoscaler_lines(autoscaler: dict[str, Any]) -> list[str]:
    gpus, spare, times = autoscaler["budget"]["max_gpus"], autoscaler["spare_workers"], autoscaler["times"]
    bound = "no bound on GPUs" if gpus is None else f"at most {gpus} GPUs"
    room = "nobody knows how many more workers fit" if spare is None else f"{spare} more workers fit on this machine"
    lines = [
        f"autoscaler: {autoscaler['mode']}, {bound}; {room}",
        f"a start takes {times['start_up_s']:.3g} s, a flip {times['flip_s']:.3g} s once idle; it last looked"
        f" {autoscaler['last_tick_s']:.1f} s ago, and does so each {times['tick_s']:g} s",
    ]
    return lines if autoscaler["leads"] else [*lines, "another controller acts on this database, this one only looks"]
