"""What `baton status --kv` shows of the KV plane: per worker its transport and totals, per pair what flowed and why not.

Reads JSON of our own admin endpoint, of the same version as this command. A pair is shown once, by the worker that sends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cli.terminal import output, table

_MIB = 1 << 20


def show_kv(answer: Mapping[str, Any]) -> None:
    workers = answer["workers"]
    columns = ["worker", "transport", "in flight: out + in", "ring", "quarantined", "expired", "failed by reason"]
    table("KV planes", columns, [_worker_row(worker) for worker in workers])
    pairs = [[worker["worker_id"], *_pair_cells(pair)] for worker in workers for pair in _pairs(worker)]
    if pairs:
        columns = ["from", "to", "state", "transport", "mode", "sent MiB", "transfers", "GB/s", "why"]
        table("KV pairs; GB/s is that of the time spent sending", columns, pairs)
    for line in (*_option_lines(workers), *refused_pairs(answer)):
        output.print(line, markup=False, soft_wrap=True)


def refused_pairs(answer: Mapping[str, Any]) -> list[str]:
    """One line per reason that keeps pairs apart, naming all of them: two cohorts of workers are two lines."""
    pairs: dict[tuple[str, str], list[str]] = {}
    for worker in answer["workers"]:
        for link in worker["links"]:
            if link["state"] == "refused":
                pairs.setdefault((link["field"], link["reason"]), []).append(f"{worker['worker_id']} to {link['peer']}")
    return [f"refused: {', '.join(names)}: {reason}" for (_, reason), names in pairs.items()]


def _pairs(worker: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(worker["kv"]["pairs"]) if worker["kv"] else []


def _worker_row(worker: Mapping[str, Any]) -> list[str]:
    load, kv = worker["load"], worker["kv"]
    if load is None or kv is None:
        return [worker["worker_id"], worker["state"], *["-"] * 5]
    failures = ", ".join(f"{reason} {number}" for reason, number in sorted(load["kv_failures"].items()))
    return [
        worker["worker_id"],
        f"{kv['transport']} {kv['version']}".strip(),
        f"{load['num_leases']} + {load['num_tickets']}",
        f"{load['slots_in_use']} of {load['num_slots']} slots",
        f"{load['quarantined_slots']} slots",
        str(load["kv_transfers_expired"]),
        failures or "none",
    ]


def _pair_cells(pair: Mapping[str, Any]) -> list[str]:
    speed = f"{pair['bytes_sent'] / pair['sending_s'] / 1e9:.3g}" if pair["sending_s"] else "-"
    return [
        pair["peer"],
        pair["state"],
        pair["transport"] or "-",
        pair["mode"] or "-",
        f"{pair['bytes_sent'] / _MIB:,.1f}",
        str(pair["num_sent"]),
        speed,
        f"{pair['field']}: mine {pair['mine']}, yours {pair['yours']}" if pair["field"] else pair["reason"],
    ]


def _option_lines(workers: list[dict[str, Any]]) -> Iterator[str]:
    """UCX's options, once for all workers that have the same."""
    sharing: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for worker in workers:
        if worker["kv"] and worker["kv"]["options"]:
            sharing.setdefault(tuple(sorted(worker["kv"]["options"].items())), []).append(worker["worker_id"])
    for options, names in sharing.items():
        yield f"UCX options of {', '.join(names)}: {' '.join(f'{name}={value}' for name, value in options)}"
