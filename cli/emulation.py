"""What `--emulate` makes of a configuration: names looked up, routers told of the clock, frames as small as the payload. Pure."""

from __future__ import annotations

from dataclasses import replace

from baton.config import ClusterConfig, CostConfig, KVTransferConfig
from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from engine.emulated_model import EmulatedModel, emulated_model
from kv_transfer.frame import HEADER_BYTES

_LEAST_FRAME_BYTES = (
    64 << 10
)  # of kv.frame_bytes (baton/config_load.py): 12 blocks of the 70B at 1/1024, 63 MB on its network


def as_emulated(config: ClusterConfig, now_s: float) -> ClusterConfig:
    """Return the settings that the cluster's processes get; the same where nothing is emulated.

    Args:
        now_s: on this machine's monotonic clock; deaths are counted from here.

    Raises:
        ConfigError: an unknown GPU or model, one that does not fit, or settings that mean nothing without tensors.
    """
    emulation = config.emulation
    if not emulation.gpu:
        return config
    _check(config)
    model = emulated_model(emulation)
    num_blocks = model.num_blocks(config.engine.block_size)
    if config.engine.num_blocks > num_blocks:
        raise ConfigError(
            f"engine.num_blocks = {config.engine.num_blocks:,}: {emulation.tp} x {model.gpu.name} hold {num_blocks:,} blocks"
            f" of {model.shape.name} beside its weights; leave out --num-blocks to use them all",
            field="engine.num_blocks",
        )
    named = replace(config.model, served_name=config.model.served_name or model.shape.name)
    scale = emulation.time_scale
    return replace(
        config,
        model=named,
        router=replace(config.router, model=named, cost=_cost(config.router.cost, model), time_scale=scale),
        kv=_small_frames(config.kv, model.layout(config.engine.block_size), emulation.kv_scale),
        engine=replace(config.engine, num_blocks=config.engine.num_blocks or num_blocks),
        emulation=replace(emulation, origin=now_s / scale),
    )


def describe(config: ClusterConfig) -> str:
    """One line of what is emulated, "" = nothing; raises what `emulated_model` does."""
    emulation = config.emulation
    if not emulation.gpu:
        return ""
    model: EmulatedModel = emulated_model(emulation)
    clock = "at their own speed" if emulation.time_scale == 1 else f"{emulation.time_scale:g} times slower than real"
    return (
        f"Emulated: {model.shape.name} in {emulation.weight_dtype} on {emulation.tp} x {model.gpu.name} per worker, {clock};"
        f" {config.engine.num_blocks:,} KV blocks each, 1/{emulation.kv_scale} of their bytes moved"
    )


def _cost(cost: CostConfig, model: EmulatedModel) -> CostConfig:
    """A price that an operator has set stays."""
    return replace(
        cost,
        usd_per_gpu_hour=cost.usd_per_gpu_hour or model.gpu.usd_per_hour,
        gpus_per_worker=model.config.tp,
    )


def _check(config: ClusterConfig) -> None:
    if config.decode_kv_cache_dtype != "auto" or config.engine.kv_cache_dtype != "auto":
        raise ConfigError(
            "emulated KV is never converted: set emulation.kv_dtype (--emulate-kv-dtype) instead of a KV cache dtype",
            field="engine.kv_cache_dtype",
        )
    if config.model.quantization != "auto":
        raise ConfigError(
            "emulated weights are never loaded: set emulation.weight_dtype (--emulate-dtype) instead of model.quantization",
            field="model.quantization",
        )
    if config.kv.require_rdma:
        raise ConfigError("kv.require_rdma is set, but an emulated network has no RDMA", field="kv.require_rdma")
    if config.kv.mode == "direct":
        raise ConfigError("kv.mode is direct: emulated KV goes staged, in frames whose time is known", field="kv.mode")


def _small_frames(kv: KVTransferConfig, layout: KVLayout, kv_scale: int) -> KVTransferConfig:
    """Staged, and cut as the real payload would be: a network card takes turns between frames, so they must not be huge."""
    least = max(_LEAST_FRAME_BYTES, HEADER_BYTES + layout.block_bytes)
    return replace(kv, mode="staged", frame_bytes=max(least, min(kv.frame_bytes, kv.frame_bytes // kv_scale)))
