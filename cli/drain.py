"""`baton drain WORKER`: let a worker take no new calls, or, with --undo, take them again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cli.running import RunningCluster, add_cluster_flag
from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("drain", help="let a worker take no new calls")
    parser.add_argument("worker", help="as `baton status` names it, such as decode-0")
    parser.add_argument("--undo", action="store_true", help="let it take calls again")
    add_cluster_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    verb = "undrain" if args.undo else "drain"
    member = RunningCluster.find(args.admin_port).post(f"/admin/v1/workers/{args.worker}:{verb}")
    output.print(f"{member['worker_id']} is {member['state']}", markup=False)
    return 0
