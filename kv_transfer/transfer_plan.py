"""Which frames carry which blocks and layers: pure arithmetic, no clock, no tensor, no socket.

A frame holds whole blocks, all layers of them, as many as fit. Where one block is larger than a frame it is cut between
layers: one block per frame, as many layers as fit. Every (block, layer) is in exactly one frame.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError
from baton.kv_layout import KVLayout
from kv_transfer.frame import HEADER_BYTES


@dataclass(frozen=True, slots=True)
class FramePlan:
    """One frame of a transfer: layers [layer_start, + num_layers) of blocks [block_start, + num_blocks)."""

    index: int  # counts up from 0 in one transfer, over all its ship calls
    block_start: int  # position in the prompt's block list
    num_blocks: int
    layer_start: int
    num_layers: int

    def nbytes(self, layout: KVLayout) -> int:
        return self.num_blocks * self.num_layers * layout.layer_block_bytes


def check_frame_bytes(layout: KVLayout, frame_bytes: int) -> None:
    """Refuse a slot that cannot hold one layer of one block.

    Raises:
        ConfigError: with the least size that would do.
    """
    least = HEADER_BYTES + layout.layer_block_bytes
    if frame_bytes < least:
        raise ConfigError(
            f"frame_bytes is {frame_bytes}; one layer of one block needs at least {least}", field="kv.frame_bytes"
        )


def plan_frames(
    layout: KVLayout, frame_bytes: int, block_start: int, block_stop: int, first_index: int
) -> list[FramePlan]:
    """Cut blocks [block_start, block_stop) into frames numbered from `first_index`."""
    capacity = frame_bytes - HEADER_BYTES
    blocks_per_frame = max(1, capacity // layout.block_bytes)
    layers_per_frame = min(layout.num_layers, capacity // layout.layer_block_bytes)
    frames: list[FramePlan] = []
    for block in range(block_start, block_stop, blocks_per_frame):
        num_blocks = min(blocks_per_frame, block_stop - block)
        for layer in range(0, layout.num_layers, layers_per_frame):
            num_layers = min(layers_per_frame, layout.num_layers - layer)
            frames.append(FramePlan(first_index + len(frames), block, num_blocks, layer, num_layers))
    return frames
