"""Registers `baton bench serve | compare | ping | shipping | kv | overlap | router | overload | control`.

Each sets `run(args)` -> status.

Imports nothing heavy: no torch, ray or transformers, here or below.
"""

from __future__ import annotations

import argparse

from bench import compare, kv, overlap, overload, ping, router_bench, serve_cli, shipping
from bench.control import cli as control


def add_bench_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure a cluster from its clients' side")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve_cli, compare, ping, shipping, kv, overlap, router_bench, overload, control):
        command.add_parser(commands)
