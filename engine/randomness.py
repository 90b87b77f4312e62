"""The only randomness of sampling: a number that depends on what is drawn, never on when, where or beside what.

Pure: the same on every worker and in every batch, so a stream that continues elsewhere draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
import struct


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1) for the token at absolute `position`. seed is a u64, the others are u32."""
    key = struct.pack("<QII", seed, sample_index, position)
    digest = hashlib.blake2b(key, digest_size=8, person=b"baton-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53  # 53 bits: every double of this spacing
