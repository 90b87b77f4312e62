"""Where one call's time went, as the router says it and clients read it: serving.proto Timings as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timings:
    """Of choice 0, except ttft_ms (first of all choices) and kv_bytes (their sum). What is not known stays 0 or ""."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    handoff_gap_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    kv_bytes: int = 0
    kv_transfer_ms: float = 0.0
    transport: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
