"""`baton demo`: up on free ports, one chat prompt, one table, down. Exit status 0 only if all worked and nothing is left."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from typing import TYPE_CHECKING

import grpc

from baton.config import LOOPBACK, ClusterConfig
from baton.config_load import DEFAULT, Loaded
from baton.errors import BatonError
from baton.v1 import serving_pb2
from cli.chat import show_stats, stream_chat
from cli.checks import check_all
from cli.cluster import Cluster
from cli.emulation import as_emulated
from cli.options import add_config_flags, load_config
from cli.signals import INTERRUPTED, Interrupted, Signals
from cli.supervisor import ClusterFailed
from cli.terminal import say
from cli.up import explain, report_left

if TYPE_CHECKING:
    from cli.parsers import Commands

PROMPT = "Explain in three sentences why the sky is blue."
_MAX_TOKENS = 96


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("demo", help="start a cluster, ask it one question, show the timings, stop it")
    parser.add_argument("--prompt", default=PROMPT)
    add_config_flags(parser, free_ports=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = as_emulated(_on_free_ports(load_config(args)), time.monotonic())
    check_all(config)
    with Signals() as signals:
        cluster = Cluster(config, signals)
        try:
            cluster.start()
            _ask(cluster, args.prompt)
            status = 0
        except Interrupted:
            status = INTERRUPTED
        except (ClusterFailed, BatonError) as error:
            explain(error, cluster)
            status = 1
        return report_left(cluster.stop(remove_folder=status == 0)) or status


def _ask(cluster: Cluster, prompt: str) -> None:
    say(f"\n> {prompt}")
    messages = [serving_pb2.ChatMessage(role="user", content=prompt)]
    sampling = serving_pb2.Sampling(max_tokens=_MAX_TOKENS, temperature=0.0)
    with grpc.insecure_channel(f"{LOOPBACK}:{cluster.config.router.grpc_port}") as channel:
        answer = stream_chat(channel, messages, sampling, _write)
    print()
    show_stats(answer.done)


def _on_free_ports(loaded: Loaded) -> ClusterConfig:
    """A port that nobody names is picked by the system: a demo must not fail because something else runs here."""
    router, controller = loaded.config.router, loaded.config.controller

    def named(path: str, port: int) -> int:
        return 0 if loaded.origins[path] == DEFAULT else port

    return dataclasses.replace(
        loaded.config,
        router=dataclasses.replace(
            router,
            http_port=named("router.http_port", router.http_port),
            grpc_port=named("router.grpc_port", router.grpc_port),
        ),
        controller=dataclasses.replace(controller, admin_port=named("controller.admin_port", controller.admin_port)),
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
