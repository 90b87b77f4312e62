"""The shape of one block of KV, the same words on both ends of a transfer.

Wire order inside a frame: [layer][component][block][S][K][head_bytes], little-endian, no padding. The [S][K][head_bytes] of one
(layer, component, block) are a run, contiguous in a pool too.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}  # of one element
SCALE_BYTES = 4  # float32; follows each fp8 head vector, so that a new token never rescales others
DEFAULT_BLOCK_SIZE = 16  # tokens; DESIGN section 5


def wire_dtype(sender: str, receiver: str) -> str | None:
    """What goes from one pool into another: the receiver's dtype, or None where it cannot be made of the sender's.

    KV is only ever rounded to 8 bits on the way; nothing else pays for a second rounding, and lost bits do not come back.
    """
    return receiver if receiver in (sender, "float8_e4m3") else None


@dataclass(frozen=True, slots=True)
class KVLayout:
    num_layers: int  # L
    num_kv_heads: int  # K, of this rank
    head_dim: int  # D
    dtype: str
    block_size: int = DEFAULT_BLOCK_SIZE  # S, tokens
    num_components: int = 2  # K and V

    @property
    def head_bytes(self) -> int:
        """Bytes of one head vector of one token, with its scale where the dtype has one."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + (SCALE_BYTES if self.dtype == "float8_e4m3" else 0)

    @property
    def run_bytes(self) -> int:
        """Bytes of one block in one layer and component."""
        return self.block_size * self.num_kv_heads * self.head_bytes

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block in one layer, all components."""
        return self.num_components * self.run_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.num_layers * self.layer_block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)
