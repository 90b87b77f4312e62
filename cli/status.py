"""`baton status`: processes, workers, their load and links, SLO classes and verdicts of a running cluster; --kv for the KV plane
alone; --json for programs.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from cli.goodput_status import goodput_lines
from cli.kv_status import refused_pairs, show_kv
from cli.run_folder import ClusterRecord
from cli.running import RunningCluster, add_cluster_flag
from cli.terminal import output, table
from engine.pace import TOLERANCE

if TYPE_CHECKING:
    from cli.parsers import Commands

_MISSES = ("ttft", "tpot", "itl", "e2e", "failed")  # baton.slo.Verdict but for "met"


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("status", help="workers, links and SLO classes of a running cluster")
    parser.add_argument("--kv", action="store_true", help="what the KV plane does: transports, pairs, bytes, failures")
    parser.add_argument("--json", action="store_true", help="print the admin endpoint's answers")
    add_cluster_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    cluster = RunningCluster.find(args.admin_port)
    if not args.kv and not args.json:
        _show_processes(cluster.record)  # before anybody is asked: the controller may be one that is away
    workers = cluster.get("/admin/v1/workers")
    if args.kv and not args.json:
        show_kv(workers)
        return 0
    slo, goodput = cluster.get("/admin/v1/slo"), cluster.get("/admin/v1/goodput")
    if args.json:
        told = {"cluster": _record_json(cluster), "workers": workers["workers"], "slo": slo, "goodput": goodput}
        print(json.dumps(told, indent=2))
        return 0
    _show_workers(workers)
    _show_links(workers)
    _show_slo(slo)
    for line in goodput_lines(goodput):
        output.print(line, markup=False, soft_wrap=True)
    return 0


def _record_json(cluster: RunningCluster) -> dict[str, object]:
    record = cluster.record
    return {
        "pid": record.pid,
        "http_port": record.http_port,
        "grpc_port": record.grpc_port,
        "admin_port": record.admin_port,
        "pids": record.pids,
        "process_ports": record.process_ports,
        "states": record.states,
        "num_ends": record.num_ends,
    }


def _show_processes(record: ClusterRecord) -> None:
    rows = [
        [
            name,
            str(pid),
            record.states.get(name, ""),
            str(record.num_ends.get(name, 0)),
            str(record.process_ports.get(name, "-")),
        ]
        for name, pid in record.pids.items()
    ]
    table("Processes", ["process", "pid", "state", "ended and started again", "metrics port"], rows)


# The functions below read JSON of our own endpoint, of the same version as this command.


def _show_workers(answer: dict[str, Any]) -> None:
    rows = [_worker_row(worker, worker["load"]) for worker in answer["workers"]]
    blocks = "blocks: active + reserved / cached / free"
    table("Workers", ["worker", "role", "state", "pid", "restarts", "epoch", "running", "waiting", blocks], rows)
    for worker in answer["workers"]:
        if worker["reason"]:
            output.print(f"{worker['worker_id']}: {worker['reason']}", markup=False, soft_wrap=True)
        if worker["load"] and worker["load"]["p99_lateness"] > TOLERANCE:
            output.print(
                f"{worker['worker_id']}: THE EMULATION IS NOT TRUE: its steps end up to"
                f" {worker['load']['p99_lateness']:.0%} of a step too late (p99, allowed {TOLERANCE:.0%}); raise --time-scale,"
                " or use fewer workers",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        for router, reason in worker["ejected"].items():
            output.print(f"{worker['worker_id']} gets no calls from {router}: {reason}", markup=False, soft_wrap=True)


def _worker_row(worker: dict[str, Any], load: dict[str, Any] | None) -> list[str]:
    row = [str(worker[key]) for key in ("worker_id", "role", "state", "pid", "num_restarts")]
    row.append(worker["epoch"][:8])  # enough to see that it changed; --json has it whole
    if load is None:
        return [*row, "-", "-", "-"]
    active, reserved, cached, free = (load[f"{kind}_blocks"] for kind in ("active", "reserved", "cached", "free"))
    return [*row, str(load["num_running"]), str(load["num_waiting"]), f"{active} + {reserved} / {cached} / {free}"]


def _show_links(answer: dict[str, Any]) -> None:
    rows = [
        [worker["worker_id"], link["peer"], link["state"], link["transport"] or "-", link["reason"]]
        for worker in answer["workers"]
        for link in worker["links"]
        if link["state"] != "refused"
    ]
    if rows:
        table("KV links", ["from", "to", "state", "transport", "reason"], rows)
    for line in refused_pairs(answer):
        output.print(line, markup=False, soft_wrap=True)


def _show_slo(answer: dict[str, Any]) -> None:
    rows = []
    for name, targets in answer["classes"].items():
        verdicts = answer["verdicts"].get(name, {})
        share = verdicts.get("attainment")
        met = "-" if share is None else f"{share:.1%} of {sum(verdicts[kind] for kind in ('met', *_MISSES))}"
        missed = ", ".join(f"{kind} {verdicts[kind]}" for kind in _MISSES if verdicts.get(kind))
        rows.append(
            [name, f"{targets['ttft_ms']:g}", f"{targets['tpot_ms']:g}", f"{targets['percentile']:.0%}", met, missed]
        )
    columns = ["class", "TTFT ms", "TPOT ms", "goal", "met", "missed by"]
    table(f"SLO classes, version {answer['version']}", columns, rows)
