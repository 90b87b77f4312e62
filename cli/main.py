"""The `baton` command. Each sub-command registers a parser and a `run(args) -> exit status`; only the one that is called is
loaded beyond that. Loads neither torch nor ray. A BatonError is one line on stderr and exit status 1; usage errors are 2.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from baton.errors import BatonError
from cli import chat, decisions, demo, drain, keys, mode, model, pd, pool_orders, pools, slo, status, up
from cli.signals import INTERRUPTED
from cli.terminal import fail


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    args = _parser(words).parse_args(words)
    try:
        return int(args.run(args))
    except BatonError as error:
        fail(error.message)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader left; nothing more can be said
        return 0


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a large language model with prefill and decode apart."
    )
    version = importlib.metadata.version("baton")
    parser.add_argument("--version", action="version", version=f"baton {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (up, chat, status, pools, pool_orders, drain, slo, mode, decisions, pd, demo, model, keys):
        command.add_parser(commands)
    if words[:1] == ["sim"]:
        from bench.sim.cli import add_parser as add_sim_parser  # numpy, as for bench

        add_sim_parser(commands)
    else:
        commands.add_parser("sim", help="simulate a deployment under a trace or synthetic load")
    if words[:1] == ["plan"]:
        from bench.plan.cli import add_parser as add_plan_parser

        add_plan_parser(commands)
    else:
        commands.add_parser("plan", help="find the layout that serves a traffic within its targets for the least money")
    if words[:1] == ["bench"]:
        from bench.cli import add_bench_parser  # numpy and clients: only for those who measure

        add_bench_parser(commands)
    else:
        commands.add_parser("bench", help="measure a cluster from its clients' side")
    return parser


if __name__ == "__main__":
    sys.exit(main())
