"""`baton keys new NAME`: an API key, and the lines for the file that `router.api_keys_file` names; `baton keys admin NAME`: an
admin token, and the lines for `controller.admin_tokens_file`.

The key is printed once and kept nowhere; the file has its SHA-256 only.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from cli.terminal import output

if TYPE_CHECKING:
    from cli.parsers import Commands


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("keys", help="make API keys")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    new = actions.add_parser("new", help="make a key and the lines for the key file")
    new.add_argument("name", help="the tenant's; the same name again is a second key of that tenant")
    new.add_argument("--weight", type=float, help="of the tenant between tenants that wait")
    new.add_argument("--max-concurrent", type=int, help="answers at once")
    new.add_argument("--requests-per-min", type=int)
    new.add_argument("--tokens-per-min", type=int, help="prompt and output")
    new.add_argument("--max-priority", type=int, help="that its calls may ask for")
    new.set_defaults(run=run_new)
    admin = actions.add_parser("admin", help="make an admin token and the lines for controller.admin_tokens_file")
    admin.add_argument("name", help="whose, as the history of SLO changes shows it")
    admin.add_argument("--role", choices=("viewer", "operator"), default="viewer", help="default viewer")
    admin.set_defaults(run=run_admin)


def run_new(args: argparse.Namespace) -> int:
    from router.tenants import digest_of, new_key, parse_keys  # yaml: only here

    names = ("weight", "max_concurrent", "requests_per_min", "tokens_per_min", "max_priority")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    key = new_key()
    entry = {"name": args.name, "sha256": digest_of(key).hex(), **settings}
    parse_keys([json.dumps({"keys": [entry]})])  # what a router would refuse is refused here
    output.print(f"key, shown this once:  {key}", markup=False, highlight=False, soft_wrap=True)
    output.print("under `keys:` in the file of router.api_keys_file:", markup=False)
    output.print(f"- {json.dumps(entry)}", markup=False, highlight=False, soft_wrap=True)
    return 0


def run_admin(args: argparse.Namespace) -> int:
    from router.controller.admin_tokens import digest_of, new_token, parse_tokens  # yaml: only here

    token = new_token()
    entry = {"name": args.name, "role": args.role, "sha256": digest_of(token).hex()}
    parse_tokens([json.dumps({"tokens": [entry]})])  # what the controller would refuse is refused here
    output.print(f"token, shown this once:  {token}", markup=False, highlight=False, soft_wrap=True)
    output.print("under `tokens:` in the file of controller.admin_tokens_file:", markup=False)
    output.print(f"- {json.dumps(entry)}", markup=False, highlight=False, soft_wrap=True)
    return 0
