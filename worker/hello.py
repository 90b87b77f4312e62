"""Whether two workers fit: the first field that differs, by name, with its value on either side. Pure.

Only what cannot be converted is compared: the opener of a link sends KV to its peer, which may keep it in 8 bits where the
opener does not. Fields are judged in the order in which they explain most: the fingerprint, which covers all of a model, comes
after what it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import MAX_FRAME_BYTES, MAX_NUM_SLOTS
from baton.errors import PeerRefused
from baton.kv_layout import wire_dtype
from baton.v1 import kv_pb2
from kv_transfer.rdma import is_rdma

_COMPARED = (
    "protocol_version",
    "transport_kind",
    "weights_hash",
    "tokenizer_hash",
    "rope",
    "quantization",
    "speculation",
    "numerics",
    "tp_rank",
    "tp_size",
)
_COMPARED_LAYOUT = ("num_layers", "num_components", "num_kv_heads", "head_dim", "block_size")
MIN_FRAME_BYTES = 4 << 10  # sanity: a probe fits in
MAX_SHOWN = 32  # characters of a value in a message; hashes are longer, and their beginning tells them apart


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why two workers do not fit, as one of them sees it."""

    field: str
    mine: str
    yours: str
    advice: str = ""  # what to do, where that is not plain from the field

    @property
    def error(self) -> PeerRefused:
        advice = f"; {self.advice}" if self.advice else ""
        values = f"mine {_shown(self.mine)}, yours {_shown(self.yours)}"
        return PeerRefused(f"{self.field} does not fit: {values}{advice}", field=self.field)

    def to_pb(self) -> kv_pb2.HelloRefused:
        return kv_pb2.HelloRefused(field=self.field, mine=self.mine, yours=self.yours)


def refusal_by_peer(message: kv_pb2.HelloRefused) -> Refusal:
    """A peer's refusal as we see it: what it calls mine is ours to call yours."""
    return Refusal(message.field, mine=message.yours, yours=message.mine)


def check_hello(mine: kv_pb2.Hello, theirs: kv_pb2.Hello, *, opener: bool) -> Refusal | None:
    """None when the pair fits. `opener`: whether the link is ours, so that KV goes from us to them."""
    for name in _COMPARED:
        if getattr(mine, name) != getattr(theirs, name):
            return Refusal(name, str(getattr(mine, name)), str(getattr(theirs, name)))
    for name in _COMPARED_LAYOUT:
        if getattr(mine.layout, name) != getattr(theirs.layout, name):
            return Refusal(f"layout.{name}", str(getattr(mine.layout, name)), str(getattr(theirs.layout, name)))
    if not _dtype_fits(mine.layout.dtype, theirs.layout.dtype, opener):
        return Refusal("layout.dtype", mine.layout.dtype, theirs.layout.dtype)
    if mine.fingerprint != theirs.fingerprint:
        return Refusal("fingerprint", mine.fingerprint, theirs.fingerprint)
    return _check_sanity(theirs)


def _dtype_fits(mine: str, theirs: str, opener: bool) -> bool:
    return (wire_dtype(mine, theirs) if opener else wire_dtype(theirs, mine)) is not None


def _check_sanity(theirs: kv_pb2.Hello) -> Refusal | None:
    """What a peer asks for must be within limits, and what it says of itself must be there."""
    if not MIN_FRAME_BYTES <= theirs.frame_bytes <= MAX_FRAME_BYTES:
        return Refusal("frame_bytes", f"{MIN_FRAME_BYTES} to {MAX_FRAME_BYTES}", str(theirs.frame_bytes))
    if not 1 <= theirs.num_slots <= MAX_NUM_SLOTS:
        return Refusal("num_slots", f"1 to {MAX_NUM_SLOTS}", str(theirs.num_slots))
    missing = next((name for name in ("worker_id", "epoch", "ucx_address") if not getattr(theirs, name)), None)
    return Refusal(missing, "set", "not set") if missing else None


def check_transport(mine: kv_pb2.Hello, theirs_require_rdma: bool, transport: str) -> Refusal | None:
    """None when the live transport is what both ends want; RDMA is required where one end requires it."""
    if not (mine.require_rdma or theirs_require_rdma) or is_rdma(transport):
        return None
    return Refusal(
        "require_rdma",
        mine=_requirement(mine.require_rdma),
        yours=_requirement(theirs_require_rdma),
        advice=(
            f"the pair's live transport is {transport or 'unknown'}; bring RDMA up on both hosts (a UCX with verbs,"
            " kv.ucx_tls and kv.ucx_net_devices that leave it in), or unset kv.require_rdma"
        ),
    )


def _requirement(required: bool) -> str:
    return "required" if required else "not required"


def _shown(value: str) -> str:
    return value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}..."
