"""`baton pd`: whether prefill and decode apart pay on the traffic of the last minutes, as the controller found by simulation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cli.running import RunningCluster, add_cluster_flag, add_token_flag
from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands

# JSON of our own endpoint /admin/v1/pd, of the same version as this command.


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("pd", help="does disaggregation pay on this traffic: apart, local prefill, colocated")
    parser.add_argument("--json", action="store_true", help="print the admin endpoint's answer")
    add_cluster_flag(parser)
    add_token_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    answer: dict[str, Any] = RunningCluster.find(args.admin_port, args.token_file).get("/admin/v1/pd")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    for line in lines(answer):
        output.print(line, markup=False, soft_wrap=True)
    return 0


def lines(answer: dict[str, Any]) -> list[str]:
    if not answer["available"]:
        return [str(answer["reason"])]
    return [
        str(answer["said"]),
        f"in force: {answer['present']}; {answer['num_calls']} calls simulated per layout {answer['age_s']:.0f} s ago, at"
        f" {answer['arrived_per_s']:.3g}/s",
        *_layouts(answer["layouts"]),
        *(f"{name} was not compared: {why}" for name, why in answer["unknown"].items()),
        *(f"assumed: {assumption}" for assumption in answer["assumptions"]),
    ]


def _layouts(layouts: dict[str, Any]) -> Iterator[str]:
    for name, layout in layouts.items():
        workers = " + ".join(f"{size} {role}" for role, size in layout["workers"].items())
        yield (
            f"{name}: {layout['goodput']:.3g} calls/s in their targets ({layout['low']:.3g} to {layout['high']:.3g}),"
            f" {100 * layout['attainment']:.1f} %; {workers}"
        )
