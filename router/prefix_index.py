"""Which leading blocks of a prompt each worker caches, as the workers themselves say (CacheDelta). Pure.

A chain of hashes depends on model, precision and block size (its root) and on the tenant: workers of one root can exchange
blocks. The index may lag by a step and forgets after a gap, so it is a hint: the worker that is asked decides, by exact hash.
Memory is bounded by the worker's pool: about 100 bytes a block (a 16-byte hash and its place in a set).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.hashing import BlockHash, block_hashes, max_prefix_hit_blocks, root_hash


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """What block hashes depend on, besides tokens and tenant."""

    fingerprint: str
    kv_dtype: str
    block_size: int  # tokens


Hashes = Mapping[PrefixRoot, Sequence[BlockHash]]  # of one prompt, first block first


def hash_prompt(token_ids: Sequence[int], tenant_salt: bytes, roots: Iterable[PrefixRoot]) -> Hashes:
    """Hash what can be taken from a cache: all whole blocks that do not hold the last token. 1.0 us per block."""
    hashes = {}
    for root in roots:
        num_blocks = max_prefix_hit_blocks(len(token_ids), root.block_size)
        parent = root_hash(root.fingerprint, root.kv_dtype, tenant_salt)
        hashes[root] = block_hashes(parent, token_ids[: num_blocks * root.block_size], root.block_size)
    return hashes


class PrefixIndex:
    """The blocks that one worker caches."""

    def __init__(self, root: PrefixRoot, max_blocks: int) -> None:
        """`max_blocks`: the worker's whole pool."""
        self.root = root
        self._max_blocks = max_blocks
        self._cached: set[BlockHash] = set()
        self._generation = 0

    def __len__(self) -> int:
        return len(self._cached)

    def apply(self, generation: int, added: Iterable[BlockHash], removed: Iterable[BlockHash], *, reset: bool) -> None:
        """Take one message. After a gap, or more blocks than there are, only what this message adds is known to be true."""
        if reset or generation - self._generation not in (0, 1):  # 0: another page of the same change
            self._cached.clear()
        self._generation = generation
        self._cached.difference_update(removed)
        self._cached.update(added)
        if len(self._cached) > self._max_blocks:
            self._cached.clear()

    def num_leading(self, hashes: Hashes) -> int:
        """Blocks of a prompt that are cached, up to the first that is not; 0 where it was not hashed under this root."""
        num_blocks = 0
        for block_hash in hashes.get(self.root, ()):
            if block_hash not in self._cached:
                break
            num_blocks += 1
        return num_blocks
