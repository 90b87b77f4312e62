"""Attention of one step over paged KV: decodes batched in groups, prefill chunks one sequence at a time.

Query heads that share a KV head ride as rows of one matrix, so grouped-query attention copies no keys. A group's keys are
gathered from their blocks into one padded tensor; groups are cut so that this copy stays in a near cache.

Whatever K and V are attended to were rounded as the cache rounds them, in a prefill too: one pass over a text and step by
step are then the same function. A cache of bytes is float8_e4m3 (baton/kv_fp8.py), its head vectors are E = D + 4 long;
others hold numbers, E = D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from baton.kv_fp8 import dequantise, quantise
from engine.models.fixed_attention import FixedAttention, FixedGroup, attend_fixed
from engine.ports import BatchEntry

# Padded tokens that one decode group gathers: 3 MiB of the demo model's K and V per layer. Measured at batch 32 x 500
# tokens, one core, ms per step: 256 -> 285, 1,024 -> 286, 2,048 -> 260, 4,096 -> 269, one group -> 361.
GROUP_TOKENS = 2_048


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, at rows [first, last) of the flat batch; M blocks each, padded."""

    first: int
    last: int
    block_ids: Tensor  # [B * M]
    mask: Tensor  # [B, 1, 1, M * S], 0 = attend, -inf = padding; added to the scores
    padding: Tensor  # [P], the padding among the B * M * S slots


@dataclass(frozen=True, slots=True)
class Chunk:
    """A prefill chunk at rows [first, last) of the flat batch."""

    first: int
    last: int
    block_ids: Tensor | None  # [M], of all tokens before the chunk's end; None = the chunk starts at position 0
    num_tokens: int  # before the chunk's end
    mask: Tensor | None  # [last - first, num_tokens], True = attend; None = plain causal


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A Batch as the model wants it: T tokens in one flat row, decodes first."""

    order: list[int]  # entry indices in row order
    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], block * S + offset: where each token's K and V go
    decodes: list[DecodeGroup]
    chunks: list[Chunk]
    fixed: list[FixedGroup]  # of a deterministic model, which has neither of the two above
    sampled_rows: Tensor  # [R]
    sampled_entries: list[int]  # [R], entry indices


def lay_out(entries: Sequence[BatchEntry], block_size: int, attention: FixedAttention | None = None) -> StepTensors:
    """Order the entries (decodes by length, then chunks) and build every index tensor of the step.

    `attention`: how a deterministic model cuts it.
    """
    singles = sorted((i for i, e in enumerate(entries) if len(e.token_ids) == 1), key=lambda i: entries[i].start)
    order = singles + [i for i, e in enumerate(entries) if len(e.token_ids) > 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    chunks: list[tuple[BatchEntry, int]] = []  # and their first rows
    last_rows: list[int] = []
    for i in order:
        entry = entries[i]
        first, end = len(token_ids), entry.start + len(entry.token_ids)
        token_ids.extend(entry.token_ids)
        positions.extend(range(entry.start, end))
        table = entry.block_table
        slots.extend(table[p // block_size] * block_size + p % block_size for p in range(entry.start, end))
        last_rows.append(len(token_ids) - 1)
        if len(entry.token_ids) > 1:
            chunks.append((entry, first))
    sampled = [(row, i) for row, i in zip(last_rows, order, strict=True) if entries[i].sample]
    decodes = [entries[i] for i in singles]
    fixed: list[FixedGroup] = []
    if attention is not None:
        fixed = attention.decode_groups(decodes) + [attention.group([entry], first) for entry, first in chunks]
    return StepTensors(
        order=order,
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        decodes=[] if fixed else decode_groups(decodes, block_size),
        chunks=[] if fixed else [_chunk(entry, first, block_size) for entry, first in chunks],
        fixed=fixed,
        sampled_rows=torch.tensor([row for row, _ in sampled], dtype=torch.int64),
        sampled_entries=[i for _, i in sampled],
    )


def decode_groups(entries: Sequence[BatchEntry], block_size: int) -> list[DecodeGroup]:
    """Cut decodes, sorted by length, into groups of at most GROUP_TOKENS padded tokens (one sequence at least)."""
    groups: list[DecodeGroup] = []
    first = 0
    while first < len(entries):
        last = first + 1
        while last < len(entries) and (last + 1 - first) * (entries[last].start + block_size) <= GROUP_TOKENS:
            last += 1
        groups.append(_decode_group(entries[first:last], first, block_size))
        first = last
    return groups


def _decode_group(entries: Sequence[BatchEntry], first: int, block_size: int) -> DecodeGroup:
    num_blocks = entries[-1].start // block_size + 1  # the longest is last
    padded: list[int] = []
    for entry in entries:
        used = list(entry.block_table[: entry.start // block_size + 1])
        padded += used + used[-1:] * (num_blocks - len(used))  # masked, so any valid block will do
    lengths = torch.tensor([entry.start + 1 for entry in entries])  # [B]
    padding = torch.arange(num_blocks * block_size) >= lengths[:, None, None, None]
    mask = torch.zeros(padding.shape).masked_fill_(padding, -torch.inf)  # [B, 1, 1, M * S]
    return DecodeGroup(first, first + len(entries), torch.tensor(padded), mask, padding.flatten().nonzero()[:, 0])


def _chunk(entry: BatchEntry, first: int, block_size: int) -> Chunk:
    length = len(entry.token_ids)
    end = entry.start + length
    if entry.start == 0:
        return Chunk(first, first + length, None, end, None)
    blocks = torch.tensor(entry.block_table[: -(-end // block_size)])
    mask = torch.ones(length, end, dtype=torch.bool).tril(entry.start)  # query i sees keys up to start + i
    return Chunk(first, first + length, blocks, end, mask)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, step: StepTensors) -> Tensor:
    """Write this step's K and V to their slots, then attend.

    q [T, H, D]; k, v [T, K, D] of this step; layer [2, N, S, K, E] = one layer of the cache. Returns [T, H * D].
    """
    new = [_to_cache(k, layer.dtype), _to_cache(v, layer.dtype)]  # [T, K, E]
    for component, stored in enumerate(new):
        layer[component].view(-1, *stored.shape[1:]).index_copy_(0, step.slots, stored)
    out = torch.empty_like(q)  # [T, H, D]
    for group in step.decodes:
        out[group.first : group.last] = _attend_decodes(q[group.first : group.last], layer, group)
    for chunk in step.chunks:
        rows = slice(chunk.first, chunk.last)
        out[rows] = _attend_chunk(q[rows], [component[rows] for component in new], layer, chunk)
    for fixed in step.fixed:
        out[fixed.first : fixed.last] = _attend_fixed(q[fixed.first : fixed.last], layer, fixed)
    return out.flatten(1)


def _to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Head vectors x [..., D] as a cache of `dtype` holds them: [..., E]."""
    return quantise(x) if dtype == torch.uint8 else x.to(dtype)


def _from_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of _to_cache, in the compute dtype."""
    return dequantise(x, dtype) if x.dtype == torch.uint8 else x.to(dtype)


def _attend_decodes(q: Tensor, layer: Tensor, group: DecodeGroup) -> Tensor:
    """Attend from q [B, H, D] to each row's own blocks. Returns [B, H, D]."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = layer.shape[3]
    keys, values = (
        _from_cache(layer[component].index_select(0, group.block_ids), q.dtype)
        .flatten(0, 1)
        .index_fill_(0, group.padding, 0)  # what a slot held before may be NaN, which no mask stops
        .view(batch, -1, num_kv_heads, head_dim)
        for component in (0, 1)
    )  # [B, M * S, K, D]
    grouped = q.view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)  # [B, K, H / K, D]
    out = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=group.mask.to(q.dtype)
    )
    return out.reshape(batch, num_heads, head_dim)


def _attend_fixed(q: Tensor, layer: Tensor, group: FixedGroup) -> Tensor:
    """Attend from q [B * n, H, D] of a group to each sequence's own blocks. Returns the same shape."""
    keys, values = (
        _from_cache(layer[component].index_select(0, group.block_ids), torch.float32)
        .flatten(0, 1)
        .index_fill_(0, group.padding, 0)  # as in _attend_decodes
        .view(group.num_sequences, -1, layer.shape[3], q.shape[-1])
        for component in (0, 1)
    )  # [B, M * S, K, D]
    per_sequence = q.float().view(group.num_sequences, -1, *q.shape[1:])  # [B, n, H, D]
    parts = [attend_fixed(per_sequence[:, tile.first : tile.last], keys, values, tile) for tile in group.tiles]
    return torch.cat(parts, 1).flatten(0, 1).to(q.dtype)


def _attend_chunk(q: Tensor, new: Sequence[Tensor], layer: Tensor, chunk: Chunk) -> Tensor:
    """Attend from one sequence's q [n, H, D] to all its tokens so far; `new` [n, K, E] is its own part. Returns [n, H, D]."""
    if chunk.block_ids is None:
        keys, values = (_from_cache(component, q.dtype) for component in new)
    else:
        keys, values = (
            _from_cache(layer[component].index_select(0, chunk.block_ids).flatten(0, 1)[: chunk.num_tokens], q.dtype)
            for component in (0, 1)
        )  # [tokens, K, D]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
        enable_gqa=q.shape[1] != layer.shape[3],
    )  # [1, H, n, D]
    return out[0].transpose(0, 1)
