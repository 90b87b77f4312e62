"""DeepSeek's published day against the roofline: how many tokens a node should do, and what is between that and what it did.

Source: DeepSeek-V3/R1 Inference System Overview (1 March 2025): 73.7k tok/s in per prefill node, cache hits included, and 14.8k
out per decode node, of 8 H800 each. Prefill: 4 nodes, 32 ways. Decode: 18 nodes, 144 ways, streams at 20 to 22 tok/s. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.timing.coefficients import efficiency
from engine.timing.hardware import gpu
from engine.timing.shapes import model_shape
from engine.timing.step_time import Batch, Roofline

INPUT_PER_NODE_S, OUTPUT_PER_NODE_S = 73_700.0, 14_800.0
CACHED_SHARE = 342 / 608
MEAN_CONTEXT_TOKENS = 4_989  # of an output token: published
STREAM_PER_S = 21.0
GPUS_PER_NODE = 8
PREFILL_GPUS, DECODE_GPUS = 32, 144
PROMPT_TOKENS = 5_000  # about the context of an output token, less half an answer; the overview has no figure
PROMPTS_PER_STEP = 4  # of each GPU, 8,740 tokens that are not cached: well into the compute-bound range
NODES_PER_TOKEN = 4  # that a token's experts are on, at most: DeepSeek-V3 technical report, section 2.1.2
DISPATCH_BYTES, COMBINE_BYTES = 1, 2  # of an activation: fp8 there, bf16 back; the same report, section 3.4


@dataclass(frozen=True, slots=True)
class Bound:
    """Tokens per second of a node, as published and as far as the roofline allows."""

    name: str
    published: float
    hidden: float  # communication behind computation, as their two-batch overlap intends
    exposed: float  # none of it hidden

    @property
    def reached(self) -> float:
        return self.published / self.hidden

    @property
    def reached_exposed(self) -> float:
        return self.published / self.exposed


def bounds() -> tuple[Bound, Bound]:
    return _prefill(), _decode()


def _prefill() -> Bound:
    """All tokens of a prompt count, cached ones too; only the others are computed and sent."""
    new = round(PROMPT_TOKENS * (1 - CACHED_SHARE))
    num_prompts = PREFILL_GPUS * PROMPTS_PER_STEP
    step_s = _roofline(PREFILL_GPUS).step_s(Batch(((new, PROMPT_TOKENS - new),) * num_prompts))
    exchange_s = _exchange_s(PROMPTS_PER_STEP * new, NODES_PER_TOKEN - 1)
    nodes = PREFILL_GPUS / GPUS_PER_NODE
    tokens = num_prompts * PROMPT_TOKENS / nodes
    return Bound("prefill, tok/s in", INPUT_PER_NODE_S, tokens / step_s, tokens / (step_s + exchange_s))


def _decode() -> Bound:
    """A GPU has as many streams as make the published rate at the published pace."""
    per_gpu = round(OUTPUT_PER_NODE_S / GPUS_PER_NODE / STREAM_PER_S)
    streams = DECODE_GPUS * per_gpu
    step_s = _roofline(DECODE_GPUS).step_s(Batch((), streams, streams * MEAN_CONTEXT_TOKENS))
    # Experts are chosen one by one over 18 nodes and sent to directly (DeepEP's low-latency kernels): nearly all on other nodes
    exchange_s = _exchange_s(per_gpu, model_shape("deepseek-v3").num_active_experts)
    tokens = per_gpu * GPUS_PER_NODE
    return Bound("decode, tok/s out", OUTPUT_PER_NODE_S, tokens / step_s, tokens / (step_s + exchange_s))


def _roofline(num_gpus: int) -> Roofline:
    shape = model_shape("deepseek-v3")
    silent = replace(efficiency(shape, "fp8"), link=float("inf"), allreduce_s=0.0)
    return Roofline(gpu("h800"), shape, num_gpus, "fp8", "bf16", silent, attention_replicas=num_gpus)


def _exchange_s(num_tokens: int, num_copies: int) -> float:
    """What a GPU's network card needs for the experts of `num_tokens`, on all layers; cards are one per GPU."""
    shape = model_shape("deepseek-v3")
    token_bytes = shape.mixture_layers * num_copies * shape.hidden * (DISPATCH_BYTES + COMBINE_BYTES)
    return num_tokens * token_bytes / gpu("h800").nic_bytes_per_s
