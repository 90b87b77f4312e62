"""What `baton bench kv` moves, and what it makes of the times: pure, no process, clock or terminal.

A case is a prompt's worth of tokens in one layout, moved as 1, 4 or 16 transfers at once that share the tokens evenly, so that
all counts move the same bytes. A GB is 1e9 bytes of payload.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from baton.kv_layout import KVLayout

LAYOUTS = {
    "default": KVLayout(
        num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"
    ),  # 128 KiB a token: an 8B model with GQA
    "demo": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32"),  # 45 KiB a token: SmolLM2-135M
}
DEFAULT_TOKENS = {"default": (4_096,), "demo": (32, 128, 512, 2_048, 8_192)}
DEFAULT_TRANSFERS = {"default": (1, 4, 16), "demo": (1,)}
TRANSPORT_TLS = {"shm": "posix,sysv,self", "tcp": "tcp"}  # UCX_TLS
TRANSPORT_MODES = {"shm": ("direct", "staged"), "tcp": ("staged",)}  # direct needs memory that a peer can map
SPARE_BLOCKS = 4  # a pool has a quarter more blocks than a case uses, so that tables have holes


@dataclass(frozen=True, slots=True)
class Case:
    layout_name: str
    tokens: int  # of all transfers together
    transfers: int  # at once
    warm: bool  # False: the first transfer of a fresh pair

    @property
    def layout(self) -> KVLayout:
        return LAYOUTS[self.layout_name]

    @property
    def blocks_each(self) -> int:
        return max(1, self.layout.num_blocks_for(self.tokens) // self.transfers)

    @property
    def nbytes(self) -> int:
        return self.transfers * self.blocks_each * self.layout.block_bytes

    @property
    def pool_blocks(self) -> int:
        return pool_blocks(self.transfers * self.blocks_each)

    @property
    def name(self) -> str:
        return f"{self.layout_name} {self.tokens} tokens x{self.transfers} {'warm' if self.warm else 'cold'}"


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of a case."""

    wall_s: float  # first ship -> last Ack, at the sender
    commit_s: tuple[float, ...]  # ship -> Ack of each transfer
    sender_cpu_s: float
    receiver_cpu_s: float


@dataclass(frozen=True, slots=True)
class Spread:
    n: int
    median: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    gb_per_s: Spread
    commit_ms: Spread  # over every transfer of every round
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float

    @property
    def cpu_s_per_gb(self) -> float:
        return self.sender_cpu_s_per_gb + self.receiver_cpu_s_per_gb


def pool_blocks(used_blocks: int) -> int:
    return used_blocks + -(-used_blocks // SPARE_BLOCKS)


def block_tables(case: Case, num_blocks: int, seed: int) -> list[tuple[int, ...]]:
    """One permuted block table for each transfer; no block is in two."""
    ids = random.Random(seed).sample(range(num_blocks), case.transfers * case.blocks_each)
    return [tuple(ids[i : i + case.blocks_each]) for i in range(0, len(ids), case.blocks_each)]


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    return Spread(len(values), statistics.median(values), min(values), max(values))


def figures(nbytes: int, samples: Sequence[Sample]) -> Figures:
    """Fold the rounds of one case, each of `nbytes`."""
    gigabytes = nbytes / 1e9
    total = gigabytes * len(samples)
    return Figures(
        gb_per_s=spread([gigabytes / sample.wall_s for sample in samples]),
        commit_ms=spread([1e3 * commit_s for sample in samples for commit_s in sample.commit_s]),
        sender_cpu_s_per_gb=sum(sample.sender_cpu_s for sample in samples) / total,
        receiver_cpu_s_per_gb=sum(sample.receiver_cpu_s for sample in samples) / total,
    )
