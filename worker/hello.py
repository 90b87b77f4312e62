"""Whether two workers fit: the first field that differs, by name. Pure.

Only what cannot be converted is compared. Today nothing is converted (`staged` frames of equal layouts), so every field of
the layout counts.
"""

from __future__ import annotations

from baton.errors import PeerRefused
from baton.v1 import kv_pb2

_COMPARED = (
    "protocol_version",
    "transport_kind",
    "weights_hash",
    "tokenizer_hash",
    "rope",
    "quantization",
    "speculation",
    "tp_rank",
    "tp_size",
)
_COMPARED_LAYOUT = ("num_layers", "num_components", "num_kv_heads", "head_dim", "block_size", "dtype")
# Sanity of what a peer asks us to allocate: 64 slots of 64 MiB are far above any measured gain (8 x 4 MiB saturate shm).
MAX_FRAME_BYTES = 64 << 20
MAX_SLOTS = 64
MIN_FRAME_BYTES = 4 << 10


def check_hello(mine: kv_pb2.Hello, theirs: kv_pb2.Hello) -> PeerRefused | None:
    """None when the pair fits; else an error whose `field` is the first that differs."""
    pairs = [(name, str(getattr(mine, name)), str(getattr(theirs, name))) for name in _COMPARED]
    pairs += [
        (f"layout.{name}", str(getattr(mine.layout, name)), str(getattr(theirs.layout, name)))
        for name in _COMPARED_LAYOUT
    ]
    for name, my_value, their_value in pairs:
        if my_value != their_value:
            return PeerRefused(f"{name} differs: mine {my_value}, yours {their_value}", field=name)
    if not MIN_FRAME_BYTES <= theirs.frame_bytes <= MAX_FRAME_BYTES:
        return PeerRefused(
            f"frame_bytes is {theirs.frame_bytes}; the limits are {MIN_FRAME_BYTES} and {MAX_FRAME_BYTES}",
            field="frame_bytes",
        )
    if not 1 <= theirs.num_slots <= MAX_SLOTS:
        return PeerRefused(f"num_slots is {theirs.num_slots}; the limits are 1 and {MAX_SLOTS}", field="num_slots")
    missing = next((name for name in ("worker_id", "epoch", "ucx_address") if not getattr(theirs, name)), None)
    return PeerRefused(f"{missing} must be set", field=missing) if missing else None
