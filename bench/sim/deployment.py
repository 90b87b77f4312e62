"""What is simulated: GPUs, model, layout, engines. Plain data, and the memory that it leaves for KV."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.request import Role
from bench.sim.decode_times import FastDecodes
from bench.sim.engine import EngineShape
from engine.timing.hardware import DTYPE_BYTES, gpu
from engine.timing.shapes import model_shape
from engine.timing.step_time import StepTime, step_time

# Of a GPU's memory that weights and KV may take: vLLM's --gpu-memory-utilization default. The rest is activations and graphs.
MEMORY_SHARE = 0.9
LINK_SHARE = 0.85  # of a NIC's rate that KV moves at: InfiniBand as in docs/architecture.md
MAX_NUM_SEQS = 256  # vLLM's default on such GPUs; Baton's own 64 suits its CPU demo
STEP_TOKENS = 8_192  # of prompts in a step of a pure prefill worker: far in the compute-bound range


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers by role."""

    num_prefill: int = 0
    num_decode: int = 0
    num_both: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (count := getattr(self, name)) < 0:
                raise ConfigError(f"{name} is {count}; the limit is at least 0")
        if not self.num_both and not (self.num_prefill and self.num_decode):
            raise ConfigError("the layout can serve nothing: give --both, or --prefill and --decode, at least 1 each")

    @property
    def roles(self) -> list[Role]:
        return [Role.PREFILL] * self.num_prefill + [Role.DECODE] * self.num_decode + [Role.BOTH] * self.num_both


@dataclass(frozen=True, slots=True)
class Deployment:
    layout: Layout
    gpu: str = "h100"
    model: str = "llama-3.1-8b"
    tp: int = 1  # GPUs of a worker
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    # Of workers that decode, too, a budget of 2,048 and chunks of 512: baton/config.py
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=MAX_NUM_SEQS))
    prefill_step_tokens: int = STEP_TOKENS
    local_prefill_tokens: int = 0
    max_pool_tokens: int = 0  # 0 = what memory holds

    def __post_init__(self) -> None:
        """Raises: ConfigError: a GPU, model or type of number that nobody knows."""
        for dtype in (self.weight_dtype, self.kv_dtype):
            if dtype not in DTYPE_BYTES:
                raise ConfigError(f"dtype {dtype!r} is not known; known are {', '.join(DTYPE_BYTES)}")
        try:
            gpu(self.gpu).rate(self.weight_dtype)
            model_shape(self.model)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def shape(self, role: Role) -> EngineShape:
        """Raises: ConfigError: the model does not fit."""
        config = self.engine
        if role is Role.PREFILL:
            tokens = self.prefill_step_tokens
            config = replace(config, max_num_batched_tokens=tokens, chunk_tokens=tokens)
        return EngineShape(config, self._num_blocks(), self.step_time())

    def step_time(self) -> StepTime:
        """Of a worker."""
        times = step_time(self.gpu, self.model, self.tp, weight_dtype=self.weight_dtype, kv_dtype=self.kv_dtype)
        return FastDecodes(times)

    @property
    def token_bytes(self) -> float:
        """KV of one token, on all GPUs of a worker together."""
        return model_shape(self.model).kv_bytes_per_token(self.kv_dtype)

    @property
    def nic_bytes_per_s(self) -> float:
        """Of a worker; each GPU has its own NIC."""
        return LINK_SHARE * self.tp * gpu(self.gpu).nic_bytes_per_s

    @property
    def num_gpus(self) -> int:
        return self.tp * len(self.layout.roles)

    def _num_blocks(self) -> int:
        memory = self.tp * gpu(self.gpu).memory_bytes
        room = MEMORY_SHARE * memory - model_shape(self.model).weight_bytes(self.weight_dtype)
        num_tokens = room / self.token_bytes
        if self.max_pool_tokens:
            num_tokens = min(num_tokens, self.max_pool_tokens)
        if num_tokens < self.engine.block_size:
            raise ConfigError(
                f"{self.model} in {self.weight_dtype} leaves {room / 1e9:.1f} of {memory / 1e9:.0f} GB for KV on {self.tp} x "
                f"{self.gpu}: too little; raise --tp"
            )
        return int(num_tokens // self.engine.block_size)
