"""The only randomness of sampling: numbers that depend on what is drawn, never on when, where or beside what.

Each token id of the vocabulary has an exponential number of its own at each position of each answer. The smallest ratio
number / probability wins: that is a draw from the distribution (exponential race, the same as Gumbel-max). A difference of
1e-5 in the logits, as another batch shape makes it, changes the winner only where two ratios are that close; a walk along the
cumulative distribution carries such differences from token to token and was seen to change one token in 800 at temperature 0.8.

Pure: the same on every worker and in every batch, so a stream that continues elsewhere draws what it would have drawn.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), here indexed by the token id
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def exponentials(seed: int, sample_index: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return Exp(1) numbers, one per token id, for the token at absolute `position`. seed is a u64, the others are u32."""
    key = hashlib.blake2b(struct.pack("<QII", seed, sample_index, position), digest_size=8, person=b"baton-draw")
    words = np.uint64(int.from_bytes(key.digest(), "little")) + (token_ids.astype(np.uint64) + np.uint64(1)) * _GAMMA
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    words ^= words >> np.uint64(31)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1), 53 bits
    return -np.log(uniform)
