"""`baton slo`: read and change the SLO classes of a running cluster, see who changed what and why, go back.

A change is made to the version that was read a moment before: where somebody else was faster it is refused, and nothing is done.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import InvalidRequest
from cli.running import RunningCluster, add_cluster_flag, add_token_flag
from cli.terminal import output, table

if TYPE_CHECKING:
    from cli.parsers import Commands

_TARGETS = ("ttft_ms", "tpot_ms", "itl_p99_ms", "e2e_ms", "percentile", "weight", "priority")
_PATH = "/admin/v1/slo"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("slo", help="SLO classes of a running cluster: read, change, history, roll back")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    get = actions.add_parser("get", help="the classes in force")
    get.add_argument("name", nargs="?", help="of one class")
    get.add_argument("--json", action="store_true", help="print the admin endpoint's answer")
    _finish(get, _get)

    change = actions.add_parser("set", help="change targets of a class, or make a new one")
    change.add_argument("name", help="of the class")
    change.add_argument(
        "targets", nargs="+", metavar="FIELD=VALUE", help=f"of {', '.join(_TARGETS)}; 'none' lifts an optional target"
    )
    _changes(change, _set)

    remove = actions.add_parser("remove", help="remove a class")
    remove.add_argument("name", help="of the class")
    _changes(remove, _remove)

    history = actions.add_parser("history", help="who changed what, when and why, newest first")
    history.add_argument("--limit", type=int, default=20, metavar="N", help="how many versions (default 20)")
    history.add_argument("--json", action="store_true", help="print the admin endpoint's answer")
    _finish(history, _history)

    rollback = actions.add_parser("rollback", help="put an old version in force again, as a new one")
    rollback.add_argument("version", type=int, help="as the history has it")
    rollback.add_argument("--reason", default="", help="for the history (default 'back to version N')")
    _finish(rollback, _rollback)

    export = actions.add_parser("export", help="print the classes as JSON, for `import`")
    _finish(export, _export)

    imported = actions.add_parser("import", help="put exported classes in force, all of them")
    imported.add_argument("file", type=Path, help="what `export` printed")
    imported.add_argument("--reason", required=True, help="for the history")
    _finish(imported, _import)


def _changes(parser: argparse.ArgumentParser, run: Any) -> None:
    parser.add_argument("--reason", default="", help="for the history; required unless --dry-run")
    parser.add_argument("--dry-run", action="store_true", help="say what would change, and change nothing")
    parser.add_argument("--version", type=int, metavar="N", help="refuse unless this version is in force")
    _finish(parser, run)


def _finish(parser: argparse.ArgumentParser, run: Any) -> None:
    add_cluster_flag(parser)
    add_token_flag(parser)
    parser.set_defaults(run=lambda args: run(RunningCluster.find(args.admin_port, args.token_file), args))


def _get(cluster: RunningCluster, args: argparse.Namespace) -> int:
    answer: dict[str, Any] = cluster.get(_PATH)
    classes: dict[str, dict[str, Any]] = answer["classes"]
    if args.name is not None:
        targets = cluster.get(f"{_PATH}/{args.name}")  # which names the nearest of an unknown one
        classes = {str(targets.pop("name")): targets}
    if args.json:
        print(json.dumps({**answer, "classes": classes}, indent=2))
        return 0
    rows = [[name, *(_shown(targets[field]) for field in _TARGETS)] for name, targets in classes.items()]
    table(f"SLO classes, version {answer['version']}", ["class", *_TARGETS], rows)
    _say(f"set by {answer['who']} at {_time(answer['at_unix_s'])}: {answer['reason'] or 'no reason given'}")
    return 0


def _set(cluster: RunningCluster, args: argparse.Namespace) -> int:
    return _patch(cluster, args, dict(_assignment(text) for text in args.targets))


def _remove(cluster: RunningCluster, args: argparse.Namespace) -> int:
    return _patch(cluster, args, None)


def _patch(cluster: RunningCluster, args: argparse.Namespace, fields: dict[str, object] | None) -> int:
    body: dict[str, object] = {"classes": {args.name: fields}}
    planned: dict[str, Any] = cluster.ask(f"{_PATH}:dryRun", body)
    version: int = planned["version"] if args.version is None else args.version
    if args.dry_run:
        _say_changes(planned["changes"])
        _say(_prediction(planned["prediction"]))
        _say(f"Nothing was changed; version {planned['version']} is in force.")
        return 0
    if not args.reason.strip():
        raise InvalidRequest("--reason: say why, for the history", field="reason")
    answer = cluster.change("PATCH", _PATH, {**body, "reason": args.reason}, version)
    if answer["version"] == planned["version"] + 1:
        _say_changes(planned["changes"])
    _say(f"Version {answer['version']} is in force.")
    return 0


def _history(cluster: RunningCluster, args: argparse.Namespace) -> int:
    answer: dict[str, Any] = cluster.get(f"{_PATH}/history?limit={args.limit}")
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    rows = [
        [
            str(revision["version"]),
            _time(revision["at_unix_s"]),
            revision["who"],
            revision["reason"],
            "\n".join(_change(change) for change in revision["changes"]),
        ]
        for revision in answer["revisions"]
    ]
    table("SLO classes, newest first", ["version", "when", "who", "why", "changes"], rows)
    return 0


def _rollback(cluster: RunningCluster, args: argparse.Namespace) -> int:
    version = _version_of(cluster)
    answer = cluster.change("POST", f"{_PATH}:rollback", {"version": args.version, "reason": args.reason}, version)
    _say(f"Version {answer['version']} is in force, with the classes of version {args.version}.")
    return 0


def _export(cluster: RunningCluster, args: argparse.Namespace) -> int:
    print(json.dumps(cluster.get(f"{_PATH}/export"), indent=2))
    return 0


def _import(cluster: RunningCluster, args: argparse.Namespace) -> int:
    try:
        body = json.loads(args.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{args.file}: {error}", field="file") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"{args.file} is not what `baton slo export` prints", field="file")
    answer = cluster.change("POST", f"{_PATH}:import", {**body, "reason": args.reason}, _version_of(cluster))
    _say(f"Version {answer['version']} is in force.")
    return 0


def _version_of(cluster: RunningCluster) -> int:
    answer: dict[str, Any] = cluster.get(_PATH)
    return int(answer["version"])


def _assignment(text: str) -> tuple[str, object]:
    """ "ttft_ms=500" -> ("ttft_ms", 500). Raises: InvalidRequest."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise InvalidRequest(f"{text!r} is not FIELD=VALUE", field=name)
    if value == "none":
        return name, None
    try:
        number = float(value)
    except ValueError:
        raise InvalidRequest(f"{name} = {value!r} is not a number, nor none", field=name) from None
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} = {value!r} is not a finite number", field=name)
    return name, int(number) if number.is_integer() else number


def _say_changes(changes: list[dict[str, Any]]) -> None:
    for change in changes:
        _say(_change(change))
    if not changes:
        _say("These targets are in force already.")


def _change(change: dict[str, Any]) -> str:
    if not change["field"]:
        return f"{change['class']}: {change['new'] or change['old']}"
    return f"{change['class']}.{change['field']}: {_shown(change['old'])} -> {_shown(change['new'])}"


def _prediction(prediction: dict[str, Any]) -> str:
    if not prediction["available"]:
        return str(prediction["reason"])
    return "\n".join(
        f"{name}: attainment {value['attainment']:.1%}, between {value['low']:.1%} and {value['high']:.1%}"
        for name, value in prediction["classes"].items()
    )


def _shown(value: float | int | None) -> str:
    return "-" if value is None else f"{value:g}"


def _time(at_unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _say(line: str) -> None:
    output.print(line, markup=False, soft_wrap=True)
