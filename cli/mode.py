"""`baton mode`: how far the autoscaler may go; alone it says what is in force."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from baton.errors import InvalidRequest
from cli.running import RunningCluster, add_cluster_flag, add_token_flag
from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands

_MODES = {
    "auto": "it decides and acts",
    "advisory": "it decides, and only says what it would do",
    "frozen": "it does nothing; lost workers are still replaced",
}
_PATH = "/admin/v1/mode"


def add_parser(commands: Commands) -> None:
    meanings = "; ".join(f"{mode}: {meaning}" for mode, meaning in _MODES.items())
    parser = commands.add_parser("mode", help="how far the autoscaler may go: auto, advisory, frozen", epilog=meanings)
    parser.add_argument("mode", nargs="?", choices=tuple(_MODES), help="put it in force; none = say which one is")
    parser.add_argument("--reason", default="", help="for the history; required with a mode")
    add_cluster_flag(parser)
    add_token_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cluster = RunningCluster.find(args.admin_port, args.token_file)
    answer: dict[str, Any] = cluster.get(_PATH)
    if args.mode is not None:
        if not args.reason.strip():
            raise InvalidRequest("--reason: say why, for the history", field="reason")
        answer = cluster.change("PUT", _PATH, {"mode": args.mode, "reason": args.reason}, answer["version"])
    mode = str(answer["mode"])
    output.print(f"{mode}: {_MODES[mode]}", markup=False)
    output.print(f"set by {answer['who']}: {answer['reason']}", markup=False, soft_wrap=True)
    return 0
