"""Attention whose numbers depend on a token's own text alone: one kernel for decodes and prefill chunks, cut at fixed places.

    query rows   the H / K heads of a token that share a KV head, tokens one after another, padded to one of `query_sizes`
    keys         whole splits of KEY_SPLIT, and a rest padded to one of `key_sizes`; what is padded or later is masked

A masked key adds an exact zero wherever it stands, so only where the kernel cuts its sums matters: by position, as fixed_sizes.py
says. K and V are read from the cache in a prefill too, and scores are fp32 whatever the model's dtype. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.errors import ConfigError
from engine.models.fixed_sizes import agreeing, size_for
from engine.ports import BatchEntry

# torch's CPU flash attention takes keys in splits of 512 (kvSplitSize, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp); within
# one, MKL cuts a sum of more than 192 again, evenly, so only some lengths are cut at the same places.
KEY_SPLIT = 512
KEY_SIZES = (64, 128, 192, 256, 320, 384, 448, KEY_SPLIT)
QUERY_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # fewer than 4 take other kernels of MKL
GROUP_TOKENS = 2_048  # padded slots that one group of decodes gathers: GROUP_TOKENS of attention.py


@dataclass(frozen=True, slots=True)
class Tile:
    """Query tokens [first, last) of every sequence of a group, against its leading `num_keys` slots."""

    first: int
    last: int
    num_keys: int
    mask: Tensor  # [B, 1, rows, num_keys], 0 = attend, -inf = not; rows = tokens x (H / K), padded


@dataclass(frozen=True, slots=True)
class FixedGroup:
    """B sequences of n tokens each at rows [first, last) of the flat batch: a prefill chunk, B = 1, or decodes, n = 1."""

    first: int
    last: int
    num_sequences: int  # B
    block_ids: Tensor  # [B * M]
    padding: Tensor  # [P], those of the B * M * S slots that hold nothing
    tiles: list[Tile]


@dataclass(frozen=True, slots=True)
class FixedAttention:
    """How attention is cut: what `lay_out` needs to know."""

    num_heads: int  # H
    num_kv_heads: int  # K
    block_size: int
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]

    def num_keys(self, num_tokens: int) -> int:
        """How many slots stand for `num_tokens`: whole splits, and one of a size that sums as a whole one does."""
        whole, rest = divmod(num_tokens, KEY_SPLIT)
        return whole * KEY_SPLIT + (size_for(self.key_sizes, rest) if rest else 0)

    def decode_groups(self, entries: Sequence[BatchEntry]) -> list[FixedGroup]:
        """Cut decodes, sorted by length, into groups of at most GROUP_TOKENS padded slots (one sequence at least)."""
        groups: list[FixedGroup] = []
        first = 0
        while first < len(entries):
            last = first + 1
            while last < len(entries) and (last + 1 - first) * self.num_keys(entries[last].start + 1) <= GROUP_TOKENS:
                last += 1
            groups.append(self.group(entries[first:last], first))
            first = last
        return groups

    def group(self, entries: Sequence[BatchEntry], first: int) -> FixedGroup:
        """Lay out sequences with equally many new tokens at rows from `first` on; the longest is last."""
        num_new = len(entries[0].token_ids)
        num_blocks = -(-self.num_keys(entries[-1].start + num_new) // self.block_size)
        table: list[int] = []
        for entry in entries:
            used = list(entry.block_table[: -(-(entry.start + num_new) // self.block_size)])
            table += used + used[-1:] * (num_blocks - len(used))  # masked, so any valid block will do
        starts = torch.tensor([entry.start for entry in entries])  # [B]
        padding = torch.arange(num_blocks * self.block_size) >= starts[:, None] + num_new  # [B, M * S]
        tokens_per_tile = max(1, self.query_sizes[-1] * self.num_kv_heads // self.num_heads)
        return FixedGroup(
            first=first,
            last=first + len(entries) * num_new,
            num_sequences=len(entries),
            block_ids=torch.tensor(table),
            padding=padding.flatten().nonzero()[:, 0],
            tiles=[
                self._tile(starts, token, min(token + tokens_per_tile, num_new))
                for token in range(0, num_new, tokens_per_tile)
            ],
        )

    def _tile(self, starts: Tensor, first: int, last: int) -> Tile:
        per_token = self.num_heads // self.num_kv_heads
        num_keys = self.num_keys(int(starts[-1]) + last)
        ends = starts[:, None] + torch.arange(first, last) + 1  # [B, tokens]: keys that each may see
        ends = ends.repeat_interleave(per_token, 1)  # [B, tokens * H / K]
        rows = size_for(self.query_sizes, ends.shape[1])
        ends = F.pad(ends, (0, rows - ends.shape[1]), value=1)  # rows that nobody reads see one key: no row is empty
        hidden = torch.arange(num_keys) >= ends[:, None, :, None]  # [B, 1, rows, num_keys]
        return Tile(first, last, num_keys, torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf))


def attend_fixed(q: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> Tensor:
    """Attend from q [B, n, H, D] of one tile to keys and values [B, M * S, K, D], all fp32. Returns [B, n, H, D]."""
    batch, num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[2]
    shape = (batch, num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    rows = q.view(shape).transpose(1, 2).flatten(2, 3)  # [B, K, n * H / K, D]
    lacking = tile.mask.shape[2] - rows.shape[2]
    out = F.scaled_dot_product_attention(
        F.pad(rows, (0, 0, 0, lacking)),
        keys[:, : tile.num_keys].transpose(1, 2),
        values[:, : tile.num_keys].transpose(1, 2),
        attn_mask=tile.mask,
    )[:, :, : rows.shape[2]]
    return out.view(batch, num_kv_heads, num_tokens, -1, head_dim).transpose(1, 2).reshape(q.shape)


def fixed_attention(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> FixedAttention:
    """Find the sizes at which attention with these heads gives what it gives at the largest ones.

    Raises: ConfigError where keys are not summed in splits of KEY_SPLIT, or rows depend on more than their number.
    """
    generator = torch.Generator().manual_seed(0)
    num_slots = 3 * KEY_SPLIT  # so that a second split, which adds to the first, is tried too
    keys, values = (torch.randn(1, num_slots, num_kv_heads, head_dim, generator=generator) for _ in range(2))
    q = torch.randn(1, QUERY_SIZES[-1], num_kv_heads, head_dim, generator=generator)

    def at(num_rows: int, num_keys: int, num_tokens: int) -> Tensor:
        mask = torch.zeros(1, 1, num_rows, num_keys)
        mask[..., num_tokens:] = -torch.inf
        return attend_fixed(q[:, :num_rows], keys, values, Tile(0, num_rows, num_keys, mask))[0]

    whole = QUERY_SIZES[-1]
    query_sizes = agreeing(QUERY_SIZES, lambda size: at(size, 2 * KEY_SPLIT, 2 * KEY_SPLIT), "attention")

    def sums_alike(size: int) -> bool:
        for before in (0, KEY_SPLIT):
            for num_rows in (query_sizes[0], whole):
                full = at(whole, before + KEY_SPLIT, before + size)[:num_rows]
                if not torch.equal(at(num_rows, before + size, before + size), full):
                    return False
        return True

    key_sizes = tuple(size for size in KEY_SIZES if sums_alike(size))
    if KEY_SPLIT not in key_sizes or not torch.equal(
        at(whole, num_slots, KEY_SPLIT - 1), at(whole, KEY_SPLIT, KEY_SPLIT - 1)
    ):
        raise ConfigError("engine.deterministic: attention's splits are not known here", field="deterministic")
    return FixedAttention(num_heads, num_kv_heads, block_size, query_sizes, key_sizes)
