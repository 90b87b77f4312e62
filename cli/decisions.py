"""`baton decisions`: what the autoscaler and operators decided about pools, newest last, and why."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from cli.running import RunningCluster, add_cluster_flag
from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("decisions", help="what was decided about pools, by whom and why")
    parser.add_argument("-n", type=int, default=20, dest="limit", metavar="N", help="how many (default 20)")
    parser.add_argument("--json", action="store_true", help="print the admin endpoint's answer, with all inputs")
    add_cluster_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    answer: dict[str, Any] = RunningCluster.find(args.admin_port).get(f"/admin/v1/decisions?limit={args.limit}")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    for decision in reversed(answer["decisions"]):
        output.print(_line(decision), markup=False, soft_wrap=True)
    return 0


def _line(decision: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision["at_unix_s"]))
    why_not = "" if decision["applied"] else f" NOT DONE ({decision['inputs'].get('not_done', '')})"
    return f"{at}  {decision['action']}{why_not}: {decision['reason']}"
