"""`baton scale`, `flip` and `standby`: orders to pools and workers, carried out as the autoscaler's are: no call is lost."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cli.running import RunningCluster, add_cluster_flag, add_token_flag
from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands

_ROLES = ("prefill", "decode", "both")
_THEN = (
    "Workers that leave or flip let their calls end first; 'baton pools' shows how far they are. In mode auto the autoscaler may"
    " decide otherwise soon: 'baton mode frozen' keeps what you chose."
)


def add_parser(commands: Commands) -> None:
    scale = commands.add_parser("scale", help="bring a pool to a size", epilog=_THEN)
    scale.add_argument("role", choices=_ROLES)
    scale.add_argument("workers", type=int, metavar="N", help="how many workers; those that stand by do not count")
    scale.set_defaults(run=lambda args: _order(args, f"pools/{args.role}:scale", workers=args.workers))

    flip = commands.add_parser("flip", help="let a worker change its role, with its weights loaded", epilog=_THEN)
    flip.add_argument("worker", help="as 'baton pools' names it, such as decode-0")
    flip.add_argument("role", choices=_ROLES)
    flip.set_defaults(run=lambda args: _order(args, f"workers/{args.worker}:flip", role=args.role))

    standby = commands.add_parser("standby", help="let a worker wait with its weights loaded, or wake it", epilog=_THEN)
    standby.add_argument("worker", help="as 'baton pools' names it, such as decode-0")
    standby.add_argument("--wake", choices=_ROLES, help="let it serve again, in this role")
    standby.set_defaults(run=_standby)

    for parser in (scale, flip, standby):
        parser.add_argument("--reason", default="", help="for the log of decisions")
        add_cluster_flag(parser)
        add_token_flag(parser)


def _standby(args: argparse.Namespace) -> int:
    if args.wake:
        return _order(args, f"workers/{args.worker}:wake", role=args.wake)
    return _order(args, f"workers/{args.worker}:standby")


def _order(args: argparse.Namespace, path: str, **what: object) -> int:
    answer = RunningCluster.find(args.admin_port, args.token_file).post(
        f"/admin/v1/{path}", {**what, "reason": args.reason}
    )
    done = answer["done"]
    assert isinstance(done, list)
    for line in done or ["nothing to do"]:
        output.print(line, markup=False, soft_wrap=True)
    return 0
