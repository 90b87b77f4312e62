"""`baton model fetch NAME` brings a known model here; `baton model show` says what a model is."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from baton.config import ModelConfig
from baton.model_files import fetch_model, load_model_files
from baton.model_store import KNOWN_MODELS
from cli.terminal import step, table

if TYPE_CHECKING:
    from cli.parsers import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("model", help="fetch or describe a model")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    fetch = verbs.add_parser("fetch", help=f"bring a known model here: {', '.join(KNOWN_MODELS)}")
    fetch.add_argument("name")
    fetch.set_defaults(run=run_fetch)
    show = verbs.add_parser("show", help="describe a model")
    show.add_argument(
        "model", nargs="?", default=ModelConfig().path, help="a name, a Hugging Face directory or a .gguf file"
    )
    show.set_defaults(run=run_show)


def run_fetch(args: argparse.Namespace) -> int:
    with step(f"Model {args.name}") as shown:
        fetch_model(args.name, shown.note)
    return 0


def run_show(args: argparse.Namespace) -> int:
    files = load_model_files(args.model)
    rows = [[name, str(value)] for name, value in dataclasses.asdict(files.spec).items()]
    rows += [["fingerprint", files.spec.fingerprint], ["files", ", ".join(str(path) for path in files.weights)]]
    table(files.spec.name, ["field", "value"], rows)
    return 0
