"""What serving costs and why batches pay: the formulas behind DESIGN section 1, once. Pure.

These are bounds at datasheet rates. Time of real steps is engine/timing/step_time.py's, and prices are its callers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Node:
    """GPUs that serve one copy of a model."""

    memory_bytes: float
    memory_bytes_per_s: float
    usd_per_hour: float
    weight_bytes: float


def decode_step_s(node: Node, batch: int, kv_bytes_per_sequence: float) -> float:
    """Return the floor of a decode step, which is the TPOT: it reads the weights once and every sequence's KV."""
    return (node.weight_bytes + batch * kv_bytes_per_sequence) / node.memory_bytes_per_s


def decode_tokens_per_s(node: Node, batch: int, kv_bytes_per_sequence: float) -> float:
    return batch / decode_step_s(node, batch, kv_bytes_per_sequence)


def max_sequences(node: Node, kv_bytes_per_sequence: float) -> int:
    """Return how many contexts fit beside the weights."""
    return max(0, int((node.memory_bytes - node.weight_bytes) // kv_bytes_per_sequence))


def usd_per_million_tokens(usd_per_hour: float, tokens_per_s: float) -> float:
    return usd_per_hour / (tokens_per_s * 3600 / 1e6)


def expected_tokens_per_step(acceptance: float, num_drafted: int) -> float:
    """Return 1 + a + ... + a^K: the token that is always right, and each draft that all before it let through.

    Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), equation 1.
    """
    return sum(acceptance**accepted for accepted in range(num_drafted + 1))


def static_batch_slot_use(answer_tokens: Sequence[int]) -> float:
    """Return the share of slot-steps that make a token where a batch ends with its longest answer (Orca, OSDI 2022)."""
    return sum(answer_tokens) / (len(answer_tokens) * max(answer_tokens))


@dataclass(frozen=True, slots=True)
class TokenPrices:
    """Of 1M tokens, USD."""

    cached_input: float
    input: float
    output: float


@dataclass(frozen=True, slots=True)
class Day:
    """What a fleet served in 24 hours."""

    input_tokens: float
    cached_share: float  # of the input tokens
    output_tokens: float
    mean_nodes: float
    gpus_per_node: int

    def cost_usd(self, usd_per_gpu_hour: float) -> float:
        return self.mean_nodes * self.gpus_per_node * 24 * usd_per_gpu_hour

    def revenue_usd(self, prices: TokenPrices) -> float:
        cached = self.input_tokens * self.cached_share
        paid = cached * prices.cached_input + (self.input_tokens - cached) * prices.input
        return (paid + self.output_tokens * prices.output) / 1e6

    def margin(self, usd_per_gpu_hour: float, prices: TokenPrices) -> float:
        """Return profit over cost."""
        cost = self.cost_usd(usd_per_gpu_hour)
        return (self.revenue_usd(prices) - cost) / cost

    def tokens_per_node_s(self, tokens: float, *, share_of_nodes: float = 1.0) -> float:
        """Return the mean rate of a node of the pool that has this share of all nodes."""
        return tokens / (self.mean_nodes * share_of_nodes * SECONDS_PER_DAY)
