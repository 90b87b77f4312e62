"""What `baton status` says of attainment: one line per SLO class."""

from __future__ import annotations

from typing import Any

# JSON of our own endpoint /admin/v1/goodput, of the same version as this command.


def goodput_lines(answer: dict[str, Any]) -> list[str]:
    """One per class that had a call in the last five minutes."""
    return [f"{name}: {_line(windows)}" for name, windows in answer["classes"].items()]


def _line(windows: dict[str, Any]) -> str:
    short, long = windows.get("30s"), windows["300s"]
    parts = [f"{_met(long)} in 5 min"]
    if short is not None and short["attainment"] is not None:
        parts.insert(0, f"{_met(short)} in 30 s")
    if missed := ", ".join(f"{kind} {count:g}" for kind, count in long["missed"].items() if count):
        parts.append(f"missed by {missed}")
    if long["ttft_ms"] is not None:
        parts.append(f"TTFT {long['ttft_ms']:.0f} ms{_parts(long['ttft_parts_ms'])}")
    if long["handoff_gap_ms"] is not None:
        parts.append(f"handoff gap {long['handoff_gap_ms']:.0f} ms")
    return "; ".join(parts)


def _met(window: dict[str, Any]) -> str:
    if window["attainment"] is None:
        return "no call judged"
    return f"{window['attainment']:.1%} of {window['num_judged']:g} met, {window['met_per_s']:.3g}/s"


def _parts(parts_ms: dict[str, float | None]) -> str:
    known = [f"{name} {value:.0f}" for name, value in parts_ms.items() if value is not None]
    return f" ({', '.join(known)})" if known else ""
