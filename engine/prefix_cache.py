"""Which published block holds which prefix. Owns the map hash -> block; the BlockPool owns the blocks.

- A hash names a whole block and all tokens before it, under this model, KV dtype and tenant (baton/hashing.py).
- A block is published once, when it is full and its computation is over; the last partial block never is.
- Where two sequences computed the same prefix, the first block stays published and the twin remains private.
- At least one token of a sequence is always computed: a hit is capped at (len - 1) // block_size blocks.

Switched off, nothing is ever published or found. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton.hashing import BlockHash, block_hashes, max_prefix_hit_blocks, root_hash
from baton.request import Request
from engine.block_pool import BlockPool
from engine.sequence import Sequence

HashBlocks = Callable[[BlockHash, Seq[int], int], list[BlockHash]]  # parent, tokens, block size


class PrefixCache:
    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        fingerprint: str,
        kv_dtype: str,
        enabled: bool,
        hash_blocks: HashBlocks = block_hashes,
    ) -> None:
        """`hash_blocks`: another one that gives the same, for who remembers what it hashed."""
        self._pool = pool
        self._hash_blocks = hash_blocks
        self._block_size = block_size
        self._fingerprint = fingerprint
        self._kv_dtype = kv_dtype
        self._enabled = enabled
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        self._added: dict[BlockHash, None] = {}  # since the last take_delta, in order
        self._removed: dict[BlockHash, None] = {}
        pool.on_evict = self._forget

    def lookup(self, sequence: Sequence) -> list[int]:
        """Find the blocks that hold the longest known prefix of its tokens. The caller acquires them before it allocates."""
        if not self._enabled:
            return []
        max_blocks = max_prefix_hit_blocks(len(sequence.token_ids), self._block_size)
        self._hash(sequence, max_blocks)
        return self.find(sequence.hashes[:max_blocks])

    def find(self, hashes: Seq[BlockHash]) -> list[int]:
        """The blocks of the leading hashes that are known, up to the first that is not."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hashes_of(self, request: Request, num_blocks: int) -> list[BlockHash]:
        """Of the first `num_blocks` blocks of a prompt; none where nothing is ever cached."""
        if not self._enabled:
            return []
        tokens = request.token_ids[: num_blocks * self._block_size]
        return self._hash_blocks(self._root(request), tokens, self._block_size)

    def publish(self, sequence: Sequence) -> None:
        """Make every block that is full and computed findable."""
        num_full = sequence.num_computed // self._block_size
        if not self._enabled or num_full <= sequence.num_published:
            return
        self._hash(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.remember(sequence.hashes[index], sequence.blocks[index])
        sequence.num_published = num_full

    def has_delta(self) -> bool:
        return bool(self._added or self._removed)

    def take_delta(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """The net change since the last call: (added, removed), never the same hash in both."""
        delta = list(self._added), list(self._removed)
        self._added.clear()
        self._removed.clear()
        return delta

    def check_integrity(self) -> None:
        assert {block: block_hash for block_hash, block in self._block_of.items()} == self._hash_of, "maps disagree"

    def remember(self, block_hash: BlockHash, block: int) -> None:
        """Make one held block findable; nothing happens where a twin of it is."""
        if block_hash in self._block_of:
            return
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._pool.publish(block)
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._added[block_hash] = None

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        if block_hash in self._added:
            del self._added[block_hash]
        else:
            self._removed[block_hash] = None

    def _hash(self, sequence: Sequence, num_blocks: int) -> None:
        """Extend the sequence's own chain to `num_blocks`; tokens are only appended, so what is hashed stays."""
        known = len(sequence.hashes)
        if known >= num_blocks:
            return
        parent = sequence.hashes[-1] if known else self._root(sequence.request)
        tokens = sequence.token_ids[known * self._block_size : num_blocks * self._block_size]
        sequence.hashes += self._hash_blocks(parent, tokens, self._block_size)

    def _root(self, request: Request) -> BlockHash:
        return root_hash(self._fingerprint, self._kv_dtype, request.tenant_salt)
