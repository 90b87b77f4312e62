"""A model on GPUs that are not here: what fits into their memory, and what its KV weighs here and there. Pure.

    memory of one GPU x memory_ratio = its share of the weights + KV blocks
A GPU of a TP group holds its part of the KV heads; where there are more GPUs than heads, or one latent for all heads
(DeepSeek-V2, section 2.1), copies.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.config import EmulationConfig
from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from engine.timing.hardware import Gpu, gpu
from engine.timing.shapes import ModelShape, model_shape
from engine.timing.step_time import StepTime, step_time

TAG_BYTES = 8  # of a slot: u32 token, u32 position; see engine/emulated_runner.py
_DTYPE, _DTYPE_BYTES = "bfloat16", 2  # of the layout's bytes, which nobody reads as numbers
_NUM_COMPONENTS = 2


@dataclass(frozen=True, slots=True)
class EmulatedModel:
    gpu: Gpu
    shape: ModelShape
    config: EmulationConfig

    @property
    def kv_bytes_per_token(self) -> float:
        """Of the whole model, once."""
        return self.shape.kv_bytes_per_token(self.config.kv_dtype)

    @property
    def num_kv_shares(self) -> int:
        """GPUs of a worker that hold different KV."""
        return 1 if self.shape.latent is not None else min(self.config.tp, self.shape.num_kv_heads)

    @property
    def free_bytes(self) -> float:
        """Of one GPU, for KV."""
        weight_bytes = self.shape.weight_bytes(self.config.weight_dtype) / self.config.tp
        return self.gpu.memory_bytes * self.config.memory_ratio - weight_bytes

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks that fit. Raises: ConfigError: none does."""
        block_bytes = block_size * self.kv_bytes_per_token / self.num_kv_shares
        num_blocks = int(self.free_bytes // block_bytes)
        if num_blocks < 1:
            config = self.config
            raise ConfigError(
                f"{self.shape.name} does not fit: {self.shape.weight_bytes(config.weight_dtype):,.0f} bytes of"
                f" {config.weight_dtype} weights and at least {block_bytes * self.num_kv_shares:,.0f} of KV;"
                f" {config.tp} x {self.gpu.name} at a memory_ratio of {config.memory_ratio:g} hold"
                f" {config.tp * config.memory_ratio * self.gpu.memory_bytes:,.0f} bytes;"
                " raise --tp, or choose a smaller --emulate-dtype",
                field="emulation.tp",
            )
        return num_blocks

    def layout(self, block_size: int) -> KVLayout:
        """What is really kept: 1/kv_scale of each token's bytes, all in one layer, in whole tags per component."""
        wanted_bytes = self.kv_bytes_per_token / self.config.kv_scale / _NUM_COMPONENTS
        slot_bytes = TAG_BYTES * max(1, round(wanted_bytes / TAG_BYTES))
        return KVLayout(1, 1, slot_bytes // _DTYPE_BYTES, _DTYPE, block_size, _NUM_COMPONENTS)

    def block_wire_s(self, block_size: int) -> float:
        """What a block takes on the network: each GPU sends its share on its own card."""
        nbytes = block_size * self.kv_bytes_per_token / self.num_kv_shares
        return nbytes / self.gpu.nic_bytes_per_s

    def step_time(self) -> StepTime:
        config = self.config
        return step_time(
            config.gpu, config.model, config.tp, weight_dtype=config.weight_dtype, kv_dtype=config.kv_dtype
        )


def emulated_model(config: EmulationConfig) -> EmulatedModel:
    """Look GPU and model up.

    Raises:
        ConfigError: unknown, with the known ones.
    """
    try:
        found_gpu = gpu(config.gpu)
    except ValueError as error:
        raise ConfigError(f"emulation.gpu (--emulate): {error}", field="emulation.gpu") from None
    try:
        shape = model_shape(config.model)
    except ValueError as error:
        raise ConfigError(f"emulation.model (--emulate-model): {error}", field="emulation.model") from None
    return EmulatedModel(found_gpu, shape, config)
