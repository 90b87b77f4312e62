"""What two workers say of the weights of their model before any byte moves, and the first thing in which they differ. Pure.

A Hello like a link's, but of pages instead of KV, and without numerics: those are of the machine, not of the weights. The
borrower's manifest follows from its own configuration of the model; a lender's that differs in a name, a shape, a size or the
dtype is refused. So nothing that a peer says ever sizes or names anything here.
"""

from __future__ import annotations

from dataclasses import replace

from baton.config import WorkerConfig
from baton.model_spec import ModelSpec
from baton.v1 import kv_pb2
from baton.wire import PROTOCOL_VERSION, layout_to_pb
from engine.loading.weight_manifest import WeightManifest
from kv_transfer.pages import page_layout
from worker.hello import Refusal, check_hello


def model_fingerprint(spec: ModelSpec) -> str:
    """Equal where the weights, and what is made of them, are the same."""
    return replace(spec, numerics="").fingerprint


def weight_hello(
    config: WorkerConfig, spec: ModelSpec, manifest: WeightManifest, epoch: int, address: bytes
) -> kv_pb2.Hello:
    kv = config.kv
    return kv_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=config.worker_id,
        epoch=epoch,
        ucx_address=address,
        weights_hash=spec.weights_hash,
        tokenizer_hash=spec.tokenizer_hash,
        rope=spec.rope,
        quantization=spec.quantization,
        fingerprint=model_fingerprint(spec),
        layout=layout_to_pb(page_layout(kv.frame_bytes)),
        tp_size=1,
        frame_bytes=kv.frame_bytes,
        num_slots=kv.num_slots,
        require_rdma=kv.require_rdma,
        transport_kind=kv.transport,
        weights=kv_pb2.Weights(
            dtype=manifest.dtype,
            nbytes=manifest.nbytes,
            tensors=[
                kv_pb2.WeightTensor(name=place.name, shape=place.shape, nbytes=place.nbytes)
                for place in manifest.places
            ],
        ),
    )


def check_weight_hello(mine: kv_pb2.Hello, theirs: kv_pb2.Hello, *, opener: bool) -> Refusal | None:
    """None when both mean the same bytes. `opener`: whether we asked."""
    return check_hello(mine, theirs, opener=opener) or _check_weights(mine.weights, theirs.weights)


def _check_weights(mine: kv_pb2.Weights, theirs: kv_pb2.Weights) -> Refusal | None:
    if mine.dtype != theirs.dtype:
        return Refusal("weights.dtype", mine.dtype, theirs.dtype)
    if len(mine.tensors) != len(theirs.tensors):
        return Refusal("weights.tensors", str(len(mine.tensors)), str(len(theirs.tensors)))
    for own, other in zip(mine.tensors, theirs.tensors, strict=True):
        if own != other:
            return Refusal(f"weights.{own.name}", _shown(own), _shown(other))
    if mine.nbytes != theirs.nbytes:
        return Refusal("weights.nbytes", str(mine.nbytes), str(theirs.nbytes))
    return None


def _shown(tensor: kv_pb2.WeightTensor) -> str:
    return f"{tensor.name} {list(tensor.shape)} of {tensor.nbytes} bytes"
