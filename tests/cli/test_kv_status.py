"""What `baton status --kv` prints of answers that the admin endpoint gives."""

from __future__ import annotations

from typing import Any

import pytest

from cli.kv_status import refused_pairs, show_kv

LOAD = {
    "num_leases": 2, "num_tickets": 1, "slots_in_use": 3, "num_slots": 16, "quarantined_slots": 4,
    "kv_transfers_expired": 5, "kv_failures": {"peer_lost": 2, "damaged": 1},
}  # fmt: skip


def link(peer: str, state: str = "ready", **more: object) -> dict[str, Any]:
    plain = {"transport": "tcp/lo", "reason": "", "field": "", "mine": "", "yours": ""}
    return {"peer": peer, "state": state, **plain, **more}


def pair(peer: str, **more: object) -> dict[str, Any]:
    plain = {"mode": "staged", "bytes_sent": 3 << 30, "num_sent": 7, "sending_s": 2.0}
    return {**link(peer), **plain, **more}


def worker(worker_id: str, *links: dict[str, Any], pairs: object = (), **options: str) -> dict[str, Any]:
    kv = {"transport": "ucx", "version": "1.21.0", "options": options, "pairs": list(pairs)}  # type: ignore[call-overload]
    return {"worker_id": worker_id, "state": "ready", "links": list(links), "load": LOAD, "kv": kv}


def refused(peer: str, reason: str) -> dict[str, Any]:
    return link(peer, "refused", field=reason.split()[0], reason=reason)


def test_pairs_that_are_kept_apart_by_one_reason_share_a_line() -> None:
    one, other = "weights_hash does not fit: mine a, yours b", "weights_hash does not fit: mine b, yours a"
    answer = {
        "workers": [
            worker("p0", refused("d1", one), link("d0")),
            worker("p2", refused("d1", one)),
            worker("p1", refused("d0", other), link("d1")),
        ]
    }
    assert refused_pairs(answer) == [f"refused: p0 to d1, p2 to d1: {one}", f"refused: p1 to d0: {other}"]


def test_planes_pairs_and_options_are_shown_and_a_worker_that_is_away_has_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away: dict[str, Any] = {"worker_id": "d1", "state": "failed", "links": [], "load": None, "kv": None}
    differs = pair("d2", state="refused", field="rope", mine="a", yours="b", sending_s=0.0, bytes_sent=0, num_sent=0)
    p0 = worker("p0", pairs=[pair("d0"), differs], TLS="tcp", RNDV_THRESH="inf")
    show_kv({"workers": [p0, worker("d0", TLS="tcp", RNDV_THRESH="inf"), worker("d2", TLS="all"), away]})
    text = capsys.readouterr().out
    for part in ("2 + 1", "3 of 16 slots", "4 slots", "damaged 1, peer_lost 2", "3,072.0", "1.61", "ucx 1.21.0"):
        assert part in text, part
    assert "rope: mine a, yours b" in text
    assert "UCX options of p0, d0: RNDV_THRESH=inf TLS=tcp\n" in text
    assert "UCX options of d2: TLS=all\n" in text
    assert any(line.count("-") >= 5 for line in text.splitlines() if "failed" in line and "d1" in line)
